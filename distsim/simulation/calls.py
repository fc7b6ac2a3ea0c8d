"""When each call of a step computes on each rank class, and when a class communicates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from distsim.ops import operator
from distsim.simulation.simulation import Simulation
from distsim.simulation.tasks.templates import Floats, Ints
from distsim.simulation.tasks.timeline import Piece

_LONGEST_WAIT = 0.25
"""A call is in parts where it waits longer than this share of what it computes in all."""


@dataclass(frozen=True, slots=True)
class CallTime:
    """The compute of a call on a rank class: the (start, end) of its parts in seconds, one if it never waits.

    Waits that are short beside what it computes, as for the collectives of a layer, are taken with it.
    ``name`` is that of the call in the step, such as ``F3@1``, ``(F3@2;B4@1)`` or ``U@1``; empty for what
    stands in no call.
    """

    name: str
    rank_class: int
    parts: tuple[tuple[float, float], ...]


def call_times(simulation: Simulation) -> Iterator[CallTime]:
    """Yield the calls of a step in the order of issue; a call that takes no time is left out."""
    classes = len(simulation.classes.members)
    for piece in simulation.timeline.pieces():
        yield from _of_piece(piece, classes)


def communication_times(
    simulation: Simulation, near: float = 0.0
) -> dict[int, tuple[tuple[float, float], ...]]:
    """Return per rank class the (start, end) in seconds of when it communicates or copies to or
    from its host, on whichever streams.

    What overlaps, or begins at most ``near`` after the end of what came before, is one.
    """
    found: dict[int, list[tuple[Floats, Floats]]] = {}
    for piece in simulation.timeline.pieces():
        tasks, rank_class = _uses(piece, communication=True)
        for own in np.unique(rank_class).tolist():
            chosen = tasks[rank_class == own]
            found.setdefault(own, []).append((piece.start[chosen], piece.end[chosen]))
    return {
        own: _union(np.concatenate([s for s, _ in parts]), np.concatenate([e for _, e in parts]), near)
        for own, parts in found.items()
    }


def _union(start: Floats, end: Floats, near: float) -> tuple[tuple[float, float], ...]:
    """Return the intervals that these make together."""
    order = np.argsort(start, kind="stable")
    start, reached = start[order], np.maximum.accumulate(end[order])
    apart = start[1:] > reached[:-1] + near
    begins: list[float] = start[np.concatenate([[True], apart])].tolist()
    ends: list[float] = reached[np.concatenate([apart, [True]])].tolist()
    return tuple(zip(begins, ends, strict=True))


def _uses(piece: Piece, communication: bool) -> tuple[Ints, Ints]:
    """Return the tasks of a piece that take time, as often as they are on a stream, and the class of each."""
    known = [operator(op.op_type) for op in piece.op_table]
    chosen = np.array([each.computes != communication and not each.issues for each in known], np.bool_)
    uses = np.repeat(np.arange(len(piece)), np.diff(piece.stream_start))
    now = (chosen[piece.op] & (piece.end > piece.start))[uses]
    rank_class = np.array([stream.rank_class for stream in piece.stream_table], np.int64)
    return uses[now], rank_class[piece.streams[now]]


def _of_piece(piece: Piece, classes: int) -> Iterator[CallTime]:
    """Yield the calls of a piece: itself, or if it is a whole function those in it."""
    names = [piece.path, *piece.call_names[1:]] if not piece.path else [piece.path]
    outermost = _outermost(piece) if not piece.path else np.zeros(len(piece.call_names), np.int64)
    tasks, rank_class = _uses(piece, communication=False)
    group = outermost[piece.call[tasks]] * classes + rank_class
    # Tasks of a class are in the order in which it runs them: by a stable sort, so are those of a call.
    order = np.argsort(group, kind="stable")
    start, end = piece.start[tasks][order], piece.end[tasks][order]
    own, first = np.unique(group[order], return_index=True)
    for n in np.argsort(tasks[order[first]], kind="stable").tolist():
        call, on = divmod(int(own[n]), classes)
        after = first[n + 1] if n + 1 < len(first) else len(order)
        yield CallTime(names[call], on, _parts(start[first[n] : after], end[first[n] : after]))


def _parts(start: Floats, end: Floats) -> tuple[tuple[float, float], ...]:
    """Return the parts of a call of tasks that run one after the other."""
    long = start[1:] - end[:-1] > _LONGEST_WAIT * (end - start).sum()
    begins: list[float] = start[np.concatenate([[True], long])].tolist()
    ends: list[float] = end[np.concatenate([long, [True]])].tolist()
    return tuple(zip(begins, ends, strict=True))


def _outermost(piece: Piece) -> Ints:
    """Return for each call of a function the call that leads to it from there; 0 for the function."""
    parents: list[int] = piece.call_parent.tolist()
    found = [0] * len(parents)
    for call, parent in enumerate(parents):
        if call:
            found[call] = found[parent] or call
    return np.array(found, np.int64)
