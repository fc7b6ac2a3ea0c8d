"""A picture of a schedule: a row for each rank, a box for each action, with its microbatch."""

from __future__ import annotations

import os
from typing import Any

from distsim.report.action_boxes import Box, Mark, chunk_of, draw_boxes, legend
from distsim.report.output import check_format, replacing
from distsim.schedule import Cell
from distsim.simulate.schedule_times import ScheduleTimes


def plot_schedule(found: ScheduleTimes, path: str | os.PathLike[str]) -> None:
    """Draw a schedule into a PNG, SVG or PDF file, as the suffix of ``path`` says.

    Raises :class:`SimulationError` for another suffix, or a path that cannot be written to.
    """
    suffix = check_format(path, "a schedule")
    figure = schedule_figure(found)
    with replacing(path) as file:
        figure.savefig(file, format=suffix, dpi=120)


def schedule_figure(found: ScheduleTimes) -> Any:
    """Return the picture as a matplotlib Figure."""
    from matplotlib.figure import Figure

    schedule, ranks = found.schedule, len(found.ranks)
    chunks = chunk_of(schedule)
    # A pair that runs together stands on two floors.
    high = max([len(box.cell) for cells in found.ranks for box in cells])
    figure: Any = Figure(figsize=(12, 1.4 + (0.3 + 0.1 * (high - 1)) * ranks), layout="constrained")
    axes: Any = figure.add_subplot()
    axes.set_xlim(0, found.makespan)
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("time")
    axes.set_title(f"{schedule.name}: makespan {found.makespan:.6g}, bubble {found.bubble:.2%}", fontsize=10)
    boxes = [
        Box(rank, box.start, box.end, _marks(box.cell, chunks))
        for rank, cells in enumerate(found.ranks)
        for box in cells
    ]
    legend(figure, [mark for box in boxes for mark in box.marks], schedule.chunks)
    draw_boxes(axes, boxes, schedule.chunks, -0.42, 0.42)
    return figure


def _marks(cell: Cell, chunks: list[int]) -> tuple[Mark, ...]:
    return tuple([Mark(a.kind.value, a.microbatch, chunks[a.stage]) for a in cell])
