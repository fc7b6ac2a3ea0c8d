"""Actions as boxes over time: a schedule's picture, a row for each rank; a step is drawn with the same boxes.

Colours are of Okabe and Ito's palette ("Color universal design", 2008), told apart by all kinds of eyes; the
further stages of a rank have lighter shades.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from distsim.program.table import UPDATE
from distsim.report.output import check_format, replacing
from distsim.schedule import Cell, Kind, Schedule
from distsim.simulation.schedule_times import ScheduleTimes

COMMUNICATION, LAUNCHES = "communication", "launches by the host"

COLOURS = {
    **{kind.phase: kind.colour for kind in Kind},
    "update": "#cc79a7",
    "other computation": "#999999",
    COMMUNICATION: "#333333",
    LAUNCHES: "#8c564b",
}
"""What is drawn, and its colour."""

KIND_NAMES = {
    **{kind.value: kind.phase for kind in Kind},
    UPDATE: "update",
    "": "other computation",
}
"""What the letter of an action stands for."""

_LIGHTEST = 0.6
"""How much white there is in the colour of a rank's last stage."""

_SIZES = (4.5, 9.0)
"""The smallest number that can be read and the largest that looks well, in points."""

_DIGIT = 0.64
"""Width of a digit, of its height; DejaVu Sans."""

_MOST_NUMBERS = 6000
"""Numbers in a picture, beyond which it takes long to draw: it has none then."""

_FINEST = 1 / 4000
"""Boxes narrower than this share of the picture are drawn as one with their neighbours of that colour."""


_EDGED = 12
"""Boxes wider than this many of the finest have an edge."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What a box stands for: the letter of its action, its microbatch, and which of its rank's stages."""

    kind: str
    microbatch: int = -1
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class Box:
    """A call in a row, from ``start`` to ``end``; a pair that runs together has two marks."""

    row: int
    start: float
    end: float
    marks: tuple[Mark, ...]


def chunk_of(schedule: Schedule) -> list[int]:
    """Return which of its rank's stages each stage is, from 0."""
    held = [0] * schedule.num_ranks
    chunks: list[int] = []
    for rank in schedule.rank_of:
        chunks.append(held[rank])
        held[rank] += 1
    return chunks


def colour_of(mark: Mark, chunks: int) -> tuple[float, float, float]:
    """Return the colour of a mark, red, green and blue from 0 to 1, where ranks have so many stages."""
    text = COLOURS[KIND_NAMES[mark.kind]]
    white = _LIGHTEST * mark.chunk / max(chunks - 1, 1)
    red, green, blue = (int(text[at : at + 2], 16) / 255 * (1 - white) + white for at in (1, 3, 5))
    return red, green, blue


def draw_boxes(axes: Any, boxes: Iterable[Box], chunks: int, bottom: float, top: float) -> None:
    """Draw boxes into axes whose limits are set, each from ``bottom`` to ``top`` of its row, with numbers.

    Rows are numbered downwards; a number is written where there is room for it.
    """
    from matplotlib.collections import PolyCollection

    boxes = list(boxes)
    left, right = axes.get_xlim()
    finest = (right - left) * _FINEST
    corners: list[list[tuple[float, float]]] = []
    colours: list[tuple[float, float, float]] = []
    edges: list[str] = []
    for box in merged(boxes, finest):
        # An edge would be all that is seen of a narrow box.
        edge = "black" if box.end - box.start > _EDGED * finest else "none"
        for (low, high), mark in zip(_shares(box, bottom, top), box.marks, strict=True):
            corners.append([(box.start, low), (box.start, high), (box.end, high), (box.end, low)])
            colours.append(colour_of(mark, chunks))
            edges.append(edge)
    axes.add_collection(PolyCollection(corners, facecolors=colours, edgecolors=edges, linewidths=0.3))
    _write_numbers(axes, boxes, chunks, bottom, top)


def _shares(box: Box, bottom: float, top: float) -> list[tuple[float, float]]:
    """Return from where to where each mark of a box goes: side by side in height."""
    height = (top - bottom) / len(box.marks)
    return [
        (box.row + bottom + n * height, box.row + bottom + (n + 1) * height) for n in range(len(box.marks))
    ]


def merged(boxes: Sequence[Box], finest: float) -> list[Box]:
    """Return the boxes with those that are too narrow to be told apart as one."""
    found: list[Box] = []
    last: dict[int, int] = {}
    for box in sorted(boxes, key=lambda box: box.start):
        before = found[last[box.row]] if box.row in last else None
        near = before and box.end - box.start < finest and box.start - before.end < finest
        if before and near and _looks(before) == _looks(box):
            found[last[box.row]] = Box(box.row, before.start, box.end, box.marks)
            continue
        last[box.row] = len(found)
        found.append(box)
    return found


def _looks(box: Box) -> list[tuple[str, int]]:
    return [(mark.kind, mark.chunk) for mark in box.marks]


def _write_numbers(axes: Any, boxes: Sequence[Box], chunks: int, bottom: float, top: float) -> None:
    """Write the microbatch of each mark into its box, all of one size, where there is room."""
    written = [(box, n, mark) for box in boxes for n, mark in enumerate(box.marks) if mark.microbatch >= 0]
    if not written or len(written) > _MOST_NUMBERS:
        return
    figure = axes.figure
    figure.draw_without_rendering()  # only then is it known how large the axes are
    frame = axes.get_window_extent()
    left, right = axes.get_xlim()
    rows = abs(axes.get_ylim()[1] - axes.get_ylim()[0])
    wide = frame.width * 72 / figure.dpi / (right - left)
    high = frame.height * 72 / figure.dpi / rows * (top - bottom)

    def fits(box: Box, mark: Mark) -> float:
        digits = len(str(mark.microbatch))
        return min((box.end - box.start) * wide / (_DIGIT * digits + 0.2), high / len(box.marks) / 1.15)

    # The size that three boxes of four have room for: a few narrow ones make not all of them small.
    sizes = sorted(fits(box, mark) for box, _, mark in written)
    size = min(max(sizes[len(sizes) // 4], _SIZES[0]), _SIZES[1])
    for box, n, mark in written:
        own = min(size, fits(box, mark))
        if own < _SIZES[0]:
            continue
        low, high_edge = _shares(box, bottom, top)[n]
        red, green, blue = colour_of(mark, chunks)
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5  # luma, ITU-R BT.601
        axes.text(
            (box.start + box.end) / 2,
            (low + high_edge) / 2,
            str(mark.microbatch),
            fontsize=own,
            color="white" if dark else "black",
            ha="center",
            va="center_baseline",
            clip_on=True,
        )


def legend(figure: Any, marks: Iterable[Mark], chunks: int, besides: Iterable[str] = ()) -> None:
    """Draw the legend of the kinds that occur, with a patch for each stage of a rank, and what is besides."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    shown = {(mark.kind, mark.chunk) for mark in marks}
    handles: list[Any] = []
    labels: list[str] = []
    for kind, name in KIND_NAMES.items():
        own = sorted(chunk for known, chunk in shown if known == kind)
        if own:
            colours = [colour_of(Mark(kind, -1, chunk), chunks) for chunk in own]
            handles.append(tuple([Patch(facecolor=c, edgecolor="black", linewidth=0.3) for c in colours]))
            labels.append(name)
    for name in besides:
        handles.append((Patch(color=COLOURS[name]),))
        labels.append(name)
    if any(chunk for _, chunk in shown):
        handles.append((Patch(alpha=0),))
        labels.append("(lighter: later stages of a rank)")
    most = max([len(patches) for patches in handles], default=1)
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=max(len(labels), 1),
        fontsize=8,
        frameon=False,
        handlelength=max(1.4, 0.9 * most),
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
    )


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
    streams = sorted({stream for beside in found.beside for stream in beside})
    lanes = [found.ranks, *[[beside.get(stream, ()) for beside in found.beside] for stream in streams]]
    boxes = [
        [
            Box(rank, box.start, box.end, _marks(box.cell, chunks))
            for rank, cells in enumerate(lane)
            for box in cells
        ]
        for lane in lanes
    ]
    legend(figure, [mark for lane in boxes for box in lane for mark in box.marks], schedule.chunks)
    # What runs beside computation is a strip below it for each stream.
    edges = [-0.42, *[0.42 - 0.18 * n for n in range(len(streams), -1, -1)]]
    for (bottom, top), lane in zip(pairwise(edges), boxes, strict=True):
        draw_boxes(axes, lane, schedule.chunks, bottom, top)
    return figure


def _marks(cell: Cell, chunks: list[int]) -> tuple[Mark, ...]:
    return tuple([Mark(a.kind.value, a.microbatch, chunks[a.stage]) for a in cell])
