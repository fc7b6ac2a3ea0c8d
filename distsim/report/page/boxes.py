"""The timeline of a step as boxes over time, as many as a page can show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from distsim.program.program import Program
from distsim.report.labels import ranks_label
from distsim.report.schedule_picture import COLOURS, KIND_NAMES, Box, chunk_of, merged
from distsim.report.timeline import marks_of
from distsim.schedule.refusals import count as count_of
from distsim.simulation import Simulation
from distsim.simulation.calls import call_times, communication_times
from distsim.simulation.explain.text import seconds_text

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
