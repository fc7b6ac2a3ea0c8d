"""A picture of memory: what is in use on each rank class over the step, by kind."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from distsim.errors import SimulationError
from distsim.report.labels import ranks_label
from distsim.report.output import check_format, replacing
from distsim.simulation import Simulation
from distsim.simulation.memory.timeline import MemoryTimeline, memory_timeline
from distsim.simulation.memory.walk import KINDS
from distsim.simulation.quantities import bytes_label, bytes_scale, time_scale
from distsim.simulation.tasks.task_table import Ints

_COLOURS = ("#4878a8", "#8c6bb1", "#b0b0b0", "#5a9e6f", "#c44e52", "#d9a441", "#7fb8c9", "#d1793b")
_MOST_ROWS = 16
_FINEST = 4000
"""Of more moments than a page has dots, the fullest in each stretch of time is drawn."""


def plot_memory(simulation: Simulation, path: str | os.PathLike[str], rows: int = _MOST_ROWS) -> None:
    """Draw the memory in use over time into a PNG, SVG or PDF file, as the suffix of ``path`` says.

    A row for each rank class, with a line where the memory of its smallest device ends if the step comes
    near it. At most ``rows`` are drawn, those in which most is in use; a note says how many are left out.
    Raises :class:`SimulationError` for another suffix, or a path that cannot be written to.
    """
    from matplotlib.figure import Figure

    suffix = check_format(path, "a plot of memory")
    if rows < 1:
        raise SimulationError(f"rows={rows}: draw at least one row")
    timelines = memory_timeline(simulation)
    fullest = sorted(range(len(timelines)), key=lambda number: -timelines[number].peak)[:rows]
    shown = [timelines[number] for number in sorted(fullest)]
    figure: Any = Figure(figsize=(12, 1.2 + 1.5 * max(len(shown), 1)), layout="constrained")
    grid: Any = figure.subplots(max(len(shown), 1), 1, sharex=True, squeeze=False)
    scale, unit = time_scale(simulation.step_time)
    most = max([timeline.peak for timeline in shown], default=0)
    size, bytes_unit = bytes_scale(most)
    for axes, timeline in zip(grid[:, 0], shown, strict=False):
        _draw(axes, timeline, simulation.step_time / scale, scale, size)
    grid[-1, 0].set_xlabel(f"time ({unit})")
    grid[-1, 0].set_xlim(0, simulation.step_time / scale or 1)
    left_out = len(timelines) - len(shown)
    note = f"; {left_out} more rows not shown" if left_out else ""
    grid[0, 0].set_title(f"{simulation.name}: memory in use ({bytes_unit}){note}", fontsize=10)
    _legend(figure)
    with replacing(path) as file:
        figure.savefig(file, format=suffix, dpi=120)


def _draw(axes: Any, timeline: MemoryTimeline, end: float, scale: float, size: float) -> None:
    shown = _fullest(timeline)
    times = np.append(timeline.times[shown] / scale, end)
    amounts = np.vstack([timeline.by_kind[shown], timeline.by_kind[-1:]]) / size
    axes.stackplot(times, amounts.T, colors=_COLOURS, step="post", linewidth=0)
    capacity = min(device.usable for device in timeline.devices)
    if timeline.peak > capacity / 2:
        axes.axhline(capacity / size, color="black", linewidth=0.8, linestyle="--")
    over = timeline.peak > capacity
    label = f"{ranks_label(timeline.devices)}\nmost {bytes_label(timeline.peak)}"
    axes.set_ylabel(label, fontsize=8, color="red" if over else "black")
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=8)


def _fullest(timeline: MemoryTimeline) -> Ints:
    """Return which moments to draw."""
    count = len(timeline.times)
    if count <= _FINEST:
        return np.arange(count)
    edges = np.linspace(0, count, _FINEST + 1).astype(np.int64)
    stretches = zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    return np.array([a + int(timeline.in_use[a:b].argmax()) for a, b in stretches], np.int64)


def _legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    patches: list[Any] = [
        Patch(color=colour, label=kind) for kind, colour in zip(KINDS, _COLOURS, strict=True)
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8, frameon=False)
