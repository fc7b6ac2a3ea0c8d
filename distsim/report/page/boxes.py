"""The timeline of a step as boxes over time, as many as a page can show."""

from __future__ import annotations

from typing import Any

from distsim.program.program import Program
from distsim.report.labels import ranks_label
from distsim.report.schedule_picture import COLOURS, KIND_NAMES, Box, chunk_of, merged
from distsim.report.timeline import marks_of
from distsim.simulate import Simulation
from distsim.simulate.calls import call_times, communication_times

MOST_ROWS, MOST_BOXES = 64, 20_000
"""What a page has of a timeline at most: rows, and boxes and strips in all of them."""

_COARSEST = 2.0**-10
_FINEST = 2.0**-18
"""Shares of a step: what is shorter may be drawn as one with its neighbours."""


def timeline_part(simulation: Simulation) -> dict[str, Any]:
    """Return the rows of ranks: what their calls compute, and when they communicate, in nanoseconds.

    ``marks`` are what a box stands for, one list for a call, two for a pair: the number of its kind, its
    microbatch (-1: none) and which of its rank's stages. Where there is too much to show, what is short is
    drawn as one with its neighbours of that kind; ``left_out`` says so.
    """
    program = simulation.simulated if isinstance(simulation.simulated, Program) else None
    chunks = [0] if program is None else chunk_of(program.schedule)
    members = simulation.classes.members[:MOST_ROWS]
    boxes = [
        Box(call.rank_class, start, end, marks_of(call.name, chunks))
        for call in call_times(simulation)
        if call.rank_class < MOST_ROWS
        for start, end in call.parts
    ]
    share, shown, strips = 0.0, boxes, communication_times(simulation)
    every = len(boxes) + sum(len(strips.get(row, ())) for row in range(len(members)))
    while len(shown) + sum(len(strips.get(row, ())) for row in range(len(members))) > MOST_BOXES:
        share = max(2 * share, _FINEST)
        shown = merged(shown, share * simulation.step_time)
        strips = communication_times(simulation, share * simulation.step_time)
        if share >= _COARSEST:
            break
    said = [f"{len(simulation.classes.members) - MOST_ROWS} more rows"] if len(members) == MOST_ROWS else []
    if share:
        short = f"{share * simulation.step_time * 1e6:.3g} us"
        said.append(f"of {every:,} boxes and strips, those shorter than {short} are joined with neighbours")
    return _packed(simulation, shown, strips, said)


def _packed(
    simulation: Simulation,
    boxes: list[Box],
    strips: dict[int, tuple[tuple[float, float], ...]],
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
