"""A simulated step as what JSON has: figures, breakdowns, critical path, what-ifs, timeline, memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from distsim.ops.launch import LAUNCH
from distsim.program.program import Program
from distsim.report.figures import DEVICE, StepFigures
from distsim.report.labels import ranks_label
from distsim.report.page.boxes import timeline_part
from distsim.simulation import Explanation, Simulation
from distsim.simulation.calls import device_parts
from distsim.simulation.explain.breakdown import PARTS
from distsim.simulation.memory.timeline import MemoryTimeline, memory_timeline
from distsim.simulation.memory.walk import KINDS
from distsim.simulation.quantities import bytes_label
from distsim.simulation.tasks.task_table import Ints

MOST_TASKS = 500_000
"""Tasks of a step, beyond which its memory over time is left out: half a minute goes into them."""

_MOST_DEVICES, _MOST_MOMENTS = 16, 800
_MOST_SEGMENTS = 4000

_COLOURS = ("#4878a8", "#8c6bb1", "#b0b0b0", "#5a9e6f", "#c44e52", "#d9a441", "#7fb8c9", "#d1793b")
"""Of the kinds of memory."""


def step_part(simulation: Simulation, figures: StepFigures) -> dict[str, Any]:
    """Return all that a page shows of a step."""
    found = simulation.explain()
    return {
        "figures": figures.to_dict() | {"step_time": simulation.step_time, "name": simulation.name},
        "breakdowns": {DEVICE: dict(device_parts(simulation)), **_breakdowns(simulation)},
        "path": _path(found),
        "stages": [
            [own.stage, own.devices, own.busy, own.exposed_communication, own.bubble] for own in found.stages
        ],
        "what_ifs": [[own.change, own.step_time, own.gain] for own in found.what_ifs],
        "timeline": timeline_part(simulation),
        "memory": _memory(simulation),
    }


def _breakdowns(simulation: Simulation) -> dict[str, dict[str, float]]:
    ways = [*PARTS, *(["phase"] if isinstance(simulation.simulated, Program) else [])]
    return {by: dict(simulation.breakdown(by)) for by in ways}


def _path(found: Explanation) -> dict[str, Any]:
    """Return the critical path: its shares, its kinds, and its segments in nanoseconds.

    Segments that follow each other on a stage in calls of one name are one; of too many, the shortest are
    left out, and ``left_out`` says how many.
    """
    path = found.critical_path
    names: dict[str, int] = {}
    segments: list[tuple[float, float, int, int]] = []
    for segment in path.segments:
        name = names.setdefault(segment.name, len(names))
        if segments and segments[-1][2:] == (segment.stage, name):
            segments[-1] = (segments[-1][0], segment.end, segment.stage, name)
        else:
            segments.append((segment.start, segment.end, segment.stage, name))
    longest = sorted(segments, key=lambda own: own[0] - own[1])[:_MOST_SEGMENTS]
    return {
        "moving": sum(part.seconds for part in path.parts if part.communicates),
        "launching": path.by_kind.get(LAUNCH.op_type, 0.0),
        "tasks": sum(part.tasks for part in path.parts),
        "names": list(names),
        "segments": [
            number
            for start, end, stage, name in sorted(longest)
            for number in (round(start * 1e9), round((end - start) * 1e9), stage, name)
        ],
        "left_out": len(segments) - len(longest),
    }


def _memory(simulation: Simulation) -> dict[str, Any]:
    """Return peaks by kind of each rank class, the fullest first, and memory over time where it is known."""
    members = simulation.classes.members
    peaks = [simulation.memory[own[0]].by_kind for own in members]
    order = sorted(range(len(members)), key=lambda number: -sum(peaks[number].values()))[:_MOST_DEVICES]
    tasks = len(simulation.timeline)
    over_time = tasks <= MOST_TASKS
    timelines = memory_timeline(simulation) if over_time else ()
    ranks: list[dict[str, Any]] = []
    for number in order:
        usable = min(device.usable for device in members[number])
        rank: dict[str, Any] = {
            "label": ranks_label(members[number]),
            "usable": None if usable == math.inf else usable,
            "peak": [peaks[number][kind] for kind in KINDS],
        }
        if over_time:
            own = timelines[number]
            shown = _fullest_moments(own, _MOST_MOMENTS)
            rank |= {
                "times": [round(time * 1e9) for time in own.times[shown].tolist()],
                "by_kind": [column.tolist() for column in own.by_kind[shown].T],
            }
        ranks.append(rank)
    said = _left_out(simulation, len(members) - len(order), [len(own.times) for own in timelines])
    if not over_time:
        said.append(f"memory over time is left out: the step has {tasks:,} tasks, more than {MOST_TASKS:,}")
    kinds = [list(pair) for pair in zip(KINDS, _COLOURS, strict=True)]
    return {"kinds": kinds, "ranks": ranks, "left_out": said}


def _fullest_moments(timeline: MemoryTimeline, most: int) -> Ints:
    """Return which moments to draw: of more than ``most``, the fullest in each stretch."""
    count = len(timeline.times)
    if count <= most:
        return np.arange(count)
    edges = np.linspace(0, count, most + 1).astype(np.int64)
    stretches = zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    return np.array([a + int(timeline.in_use[a:b].argmax()) for a, b in stretches], np.int64)


def _left_out(simulation: Simulation, groups: int, moments: Sequence[int]) -> list[str]:
    said: list[str] = []
    if groups:
        least = bytes_label(min(use.peak for use in simulation.memory.values()))
        said.append(f"{groups} more groups of devices, which have less in use (the least {least})")
    if max(moments, default=0) > _MOST_MOMENTS:
        said.append(f"of up to {max(moments):,} moments all but the fullest of {_MOST_MOMENTS:,} stretches")
    return said
