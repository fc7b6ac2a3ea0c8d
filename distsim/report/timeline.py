"""A picture of a step: time to the right, and a row for each rank class, or for each of its streams."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from distsim.errors import SimulationError
from distsim.ops import operator
from distsim.program.program import Program
from distsim.program.table import UPDATE
from distsim.report.labels import ranks_label, stream_label
from distsim.report.output import check_format, replacing
from distsim.report.schedule_picture import (
    COLOURS,
    COMMUNICATION,
    LAUNCHES,
    Box,
    Mark,
    chunk_of,
    draw_boxes,
    legend,
)
from distsim.schedule import LETTERS, Kind
from distsim.simulation import Simulation
from distsim.simulation.calls import CallTime, call_times, moving_times
from distsim.simulation.quantities import time_scale
from distsim.simulation.tasks.rank_classes import communicates

_STREAM_COLOURS = {
    "compute": "#0072b2",
    "collective": "#e69f00",
    "send and receive": "#009e73",
    "to and from the host": "#cc79a7",
    "launch": "#999999",
}
_MOST_ROWS = 64
_FINEST = 1 / 4000
"""Gaps and bars narrower than this share of the step are not told apart: a page has fewer dots."""

_ACTION = re.compile(rf"([{LETTERS}{UPDATE}])(\d*)@(\d+)")
"""An action in the name of a call: its letter, its microbatch and its stage."""

_BESIDE = {kind.value: kind.phase for kind in Kind if kind.runs.stream}
"""The phases, by letter, of the kinds that copy to or from the host beside computation."""

_CALL, _STRIP = (-0.42, 0.24), (0.27, 0.42)
"""Where in a row calls are drawn, and communication: a strip below them, as it may run beside."""

Row = tuple[int, str]
"""A rank class and one of its streams; empty: all of them."""

Intervals = list[tuple[float, float]]


def plot_timeline(
    simulation: Simulation, path: str | os.PathLike[str], rows: int = _MOST_ROWS, streams: bool = False
) -> None:
    """Draw the timeline into a PNG, SVG or PDF file, as the suffix of ``path`` says.

    The step of a program has a row for each rank, with what its calls compute as boxes, coloured by action
    and numbered by microbatch where there is room, and below them a strip where it communicates, or runs an
    action that only copies, in the colour of that; with ``streams``, a row for each stream. A function has
    its streams. Ranks in lock step share their rows. At most ``rows`` rows are drawn; a note says how many
    are left out. Raises :class:`SimulationError` for another suffix, or a path that cannot be written to.
    """
    suffix = check_format(path, "a timeline")
    if rows < 1:
        raise SimulationError(f"rows={rows}: draw at least one row")
    figure = timeline_figure(simulation, rows, streams)
    with replacing(path) as file:
        figure.savefig(file, format=suffix, dpi=120)


def timeline_figure(simulation: Simulation, rows: int = _MOST_ROWS, streams: bool = False) -> Any:
    """Return the picture as a matplotlib Figure: see :func:`plot_timeline`."""
    from matplotlib.figure import Figure

    program = simulation.simulated if isinstance(simulation.simulated, Program) else None
    streams = streams or program is None
    bars = _bars(simulation) if streams else _bars_of_ranks(simulation)
    every = sorted(bars, key=lambda row: (row[0], row[1] != "compute", row[1]))
    shown = {row: number for number, row in enumerate(every[:rows])}
    height = 0.28 if streams else 0.34
    figure: Any = Figure(figsize=(12, 1.6 + height * max(len(shown), 1)), layout="constrained")
    axes: Any = figure.add_subplot()
    scale, unit = time_scale(simulation.step_time)
    axes.set_yticks(range(len(shown)), [_label(simulation, *row) for row in shown], fontsize=8)
    axes.set_ylim(max(len(shown), 1) - 0.5, -0.5)
    axes.set_xlim(0, simulation.step_time / scale or 1)
    axes.set_xlabel(f"time ({unit})")
    axes.spines[["top", "right"]].set_visible(False)
    left_out = len(every) - len(shown)
    note = f"; {left_out} more rows not shown" if left_out else ""
    axes.set_title(f"{simulation.name}: {simulation.step_time / scale:.4g} {unit}{note}", fontsize=10)
    if program is None:
        _draw_streams(axes, bars, shown, scale)
        _legend_of_streams(figure, {kind for key in shown for kind in bars[key]})
    else:
        _draw_program(axes, simulation, program, bars, shown, scale)
    return figure


# --- the step of a program -----------------------------------------------------------------------------


def _draw_program(
    axes: Any,
    simulation: Simulation,
    program: Program,
    bars: dict[Row, dict[str, Intervals]],
    shown: dict[Row, int],
    scale: float,
) -> None:
    """Draw calls on the rows of ranks, or of their compute streams, and communication on its own."""
    chunks = chunk_of(program.schedule)
    boxes: list[Box] = []
    by_rank = any(not stream for _, stream in shown)
    for call in call_times(simulation):
        names = ("",) if by_rank else ("compute", "all")
        row = next((shown[call.rank_class, name] for name in names if (call.rank_class, name) in shown), None)
        if row is not None:
            boxes += _boxes(row, call, chunks, scale)
    low, high = _STRIP if by_rank else _CALL
    drawn: list[str] = []
    for what in (COMMUNICATION, LAUNCHES, *_BESIDE.values()):
        strips = {
            row: [piece for kind, own in bars[key].items() if _shown_as(kind) == what for piece in own]
            for key, row in shown.items()
        }
        _draw_bars(axes, strips, (low, high - low), scale, COLOURS[what])
        drawn += [what] if any(strips.values()) else []
    marks = [mark for box in boxes for mark in box.marks]
    legend(axes.figure, marks, program.schedule.chunks, drawn)
    draw_boxes(axes, boxes, program.schedule.chunks, *_CALL)


def _shown_as(kind: str) -> str:
    """Return what the bars of a kind are called beside calls; "" for computation, which these are."""
    known = {"compute": "", "launch": LAUNCHES, **{phase: phase for phase in _BESIDE.values()}}
    return known.get(kind, COMMUNICATION)


def _moved_in(name: str, other: str = COMMUNICATION) -> str:
    """Return the phase of a call of this name if its kind copies beside computation, else ``other``."""
    found = _ACTION.match(name)
    return _BESIDE.get(found[1], other) if found else other


def _boxes(row: int, call: CallTime, chunks: Sequence[int], scale: float) -> Iterator[Box]:
    """Yield the boxes of a call, numbered on its longest part."""
    marks = marks_of(call.name, chunks)
    longest = max(call.parts, key=lambda part: part[1] - part[0])
    for part in call.parts:
        shown = marks if part == longest else tuple([replace(mark, microbatch=-1) for mark in marks])
        yield Box(row, part[0] / scale, part[1] / scale, shown)


def _draw_bars(
    axes: Any, strips: dict[int, Intervals], place: tuple[float, float], scale: float, colour: str
) -> None:
    """Draw the pieces of each row; ``place`` is where in it, and how high."""
    finest = axes.get_xlim()[1] * _FINEST
    for row, pieces in strips.items():
        widths = [(start / scale, max((end - start) / scale, finest)) for start, end in pieces]
        # Not moved to whole dots, of which the shortest would have none: many of them make it grey.
        axes.broken_barh(widths, (row + place[0], place[1]), facecolors=colour, snap=False)


def marks_of(name: str, chunks: Sequence[int]) -> tuple[Mark, ...]:
    """Return what the box of a call of this name stands for; ``chunks`` of its stages (:func:`chunk_of`)."""
    found = [
        Mark(kind, int(microbatch or -1), chunks[int(stage)])
        for kind, microbatch, stage in _ACTION.findall(name)
    ]
    return tuple(found) or (Mark(""),)


# --- streams -------------------------------------------------------------------------------------------


def _draw_streams(
    axes: Any, bars: dict[Row, dict[str, Intervals]], shown: dict[Row, int], scale: float
) -> None:
    for key, row in shown.items():
        for kind, pieces in bars[key].items():
            widths = [(start / scale, (end - start) / scale) for start, end in pieces]
            axes.broken_barh(widths, (row - 0.4, 0.8), facecolors=_STREAM_COLOURS[kind])


def _legend_of_streams(figure: Any, drawn: Collection[str]) -> None:
    from matplotlib.patches import Patch

    colours = {kind: colour for kind, colour in _STREAM_COLOURS.items() if kind in drawn}
    patches: list[Any] = [Patch(color=colour, label=kind) for kind, colour in colours.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8, frameon=False)


def _bars(simulation: Simulation) -> dict[Row, dict[str, Intervals]]:
    """Return per (rank class, stream) and kind what to draw, in seconds; near neighbours are merged."""
    finest, program = simulation.step_time * _FINEST, isinstance(simulation.simulated, Program)
    bars: dict[Row, dict[str, Intervals]] = {}
    for span in simulation.spans():
        if operator(span.op.op_type).issues and span.end == span.start:
            continue  # it issues nothing, and only waits
        kind = "compute"
        if communicates(span.op):
            kind = "send and receive" if span.op.op_type == "Send" else "collective"
        elif operator(span.op.op_type).issues:
            kind = "launch"
        elif operator(span.op.op_type).stalls:
            kind = "collective"
        elif not operator(span.op.op_type).computes:
            kind = _moved_in(span.path if program else "", "to and from the host")
        pieces = bars.setdefault((span.stream.rank_class, span.stream.name), {}).setdefault(kind, [])
        if pieces and span.start - pieces[-1][1] < finest and span.end - span.start < finest:
            pieces[-1] = (pieces[-1][0], span.end)
        else:
            pieces.append((span.start, span.end))
    return bars


def _bars_of_ranks(simulation: Simulation) -> dict[Row, dict[str, Intervals]]:
    """Return per rank class when it communicates, and when it does what else, in seconds."""
    bars: dict[Row, dict[str, Intervals]] = {
        (number, ""): {COMMUNICATION: []} for number in range(len(simulation.classes.members))
    }
    times = moving_times(simulation, _moved_in, simulation.step_time * _FINEST / 4)
    for (number, what), parts in times.items():
        bars[number, ""][what] = list(parts)
    return bars


def _label(simulation: Simulation, rank_class: int, stream: str) -> str:
    ranks = ranks_label(simulation.classes.members[rank_class])
    return f"{ranks}  {stream_label(simulation, stream)}" if stream else ranks
