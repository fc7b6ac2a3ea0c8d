"""A simulated step as what JSON has: figures, breakdowns, critical path, what-ifs, timeline, memory.

The timeline of a step as boxes over time, as many as a page can show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from distsim.ops.marks import LAUNCH
from distsim.program.program import Program
from distsim.report.figures import DEVICE, StepFigures
from distsim.report.labels import ranks_label
from distsim.report.schedule_picture import COLOURS, KIND_NAMES, Box, chunk_of, merged
from distsim.report.timeline import marks_of
from distsim.schedule.refusals import count as count_of
from distsim.simulation import Explanation, Simulation
from distsim.simulation.calls import call_times, communication_times, device_parts
from distsim.simulation.explain.breakdown import PARTS
from distsim.simulation.explain.text import seconds_text
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
    shown = {"makespan_s": simulation.step_time, "rate": figures.rate, "unit": figures.unit}
    return {
        "figures": figures.to_dict() | shown | {"name": simulation.name},
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


MOST_ROWS, MOST_BOXES, MOST_STRIPS = 64, 40_000, 50_000
"""What a page has of a timeline at most: rows, boxes of calls, strips of communication."""

_FINEST, _COARSEST = 2.0**-18, 2.0**-8
"""Shares of a step: what is shorter may be drawn as one with its neighbours."""

Strips = dict[int, tuple[tuple[float, float], ...]]
"""Rank class -> when it communicates."""


def timeline_part(simulation: Simulation) -> dict[str, Any]:
    """Return the rows of ranks: what their calls compute, and when they communicate, in nanoseconds.

    ``marks`` are what a box stands for, one list for a call, two for a pair: the number of its kind, its
    microbatch (-1: none) and which of its rank's stages. Where there is too much to show, what is short is
    drawn as one with its neighbours of that kind; ``left_out`` says so.
    """
    program = simulation.simulated if isinstance(simulation.simulated, Program) else None
    chunks = [0] if program is None else chunk_of(program.schedule)
    boxes = [
        Box(call.rank_class, start, end, marks_of(call.name, chunks))
        for call in call_times(simulation)
        if call.rank_class < MOST_ROWS
        for start, end in call.parts
    ]
    strips = {row: own for row, own in communication_times(simulation).items() if row < MOST_ROWS}
    more = len(simulation.classes.members) - MOST_ROWS
    said = [f"{count_of(more, 'group')} of devices"] if more > 0 else []
    shown_boxes, short = _thinned(boxes, merged, len, MOST_BOXES, simulation.step_time)
    if short:
        said.append(f"of {len(boxes):,} calls, those shorter than {short} are joined with their neighbours")
    shown_strips, short = _thinned(strips, _closed, _count, MOST_STRIPS, simulation.step_time)
    if short:
        said.append(f"of {_count(strips):,} spans of communication, gaps shorter than {short}")
    return _packed(simulation, shown_boxes, shown_strips, said)


T = TypeVar("T")


def _thinned(
    every: T, join: Callable[[T, float], T], count: Callable[[T], int], most: int, seconds: float
) -> tuple[T, str]:
    """Return at most so many, the short ones joined, and what is short: nothing if all are there."""
    shown, share, short = every, _FINEST, ""
    while count(shown) > most and share <= _COARSEST:
        shown, short = join(every, share * seconds), seconds_text(share * seconds)
        share *= 2
    return shown, short


def _closed(strips: Strips, near: float) -> Strips:
    """Return strips without the gaps of at most ``near`` seconds."""
    found: Strips = {}
    for row, own in strips.items():
        kept: list[tuple[float, float]] = []
        for start, end in own:
            if kept and start <= kept[-1][1] + near:
                kept[-1] = (kept[-1][0], end)
            else:
                kept.append((start, end))
        found[row] = tuple(kept)
    return found


def _count(strips: Strips) -> int:
    return sum(map(len, strips.values()))


def _packed(
    simulation: Simulation,
    boxes: list[Box],
    strips: Strips,
    said: list[str],
) -> dict[str, Any]:
    letters = list(KIND_NAMES)
    marks: dict[tuple[tuple[int, int, int], ...], int] = {}
    rows: list[dict[str, Any]] = [
        {
            "label": ranks_label(own),
            "boxes": [],
            "strips": [_ns(t) for s, e in strips.get(row, ()) for t in (s, e - s)],
        }
        for row, own in enumerate(simulation.classes.members[:MOST_ROWS])
    ]
    for box in sorted(boxes, key=lambda own: own.start):
        key = tuple([(letters.index(mark.kind), mark.microbatch, mark.chunk) for mark in box.marks])
        number = marks.setdefault(key, len(marks))
        rows[box.row]["boxes"] += [_ns(box.start), _ns(box.end - box.start), number]
    return {
        "end": _ns(simulation.step_time),
        "kinds": [[name, COLOURS[name]] for name in KIND_NAMES.values()],
        "marks": [list(map(list, key)) for key in marks],
        "rows": rows,
        "left_out": said,
    }


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
