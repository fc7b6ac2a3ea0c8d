"""What ran when: the spans of ops on streams, and how a device spends the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from distsim.ir import Op
from distsim.ops import operator
from distsim.ops.marks import HOST
from distsim.simulation.tasks.streams import Stream
from distsim.simulation.tasks.templates import Floats, tasks_of_uses
from distsim.simulation.tasks.timeline import Piece, Timeline

_MOST_TASKS = 4096
"""Tasks of a piece whose spans are made at a time."""


@dataclass(frozen=True, slots=True)
class Span:
    """One op on one stream of a rank class, from ``start`` to ``end`` seconds.

    ``path`` is where the op stands: the names of the calls that lead to it, joined by ``/``. The op is on
    ``streams`` streams at once, of which this is number ``place``: a Send is first on its sender's.
    """

    task: int
    op: Op
    path: str
    stream: Stream
    start: float
    end: float
    place: int = 0
    streams: int = 1


@dataclass(frozen=True, slots=True)
class Shares:
    """How a device spends the step, in seconds that sum to the step time.

    ``busy``: compute runs. ``exposed_communication``: communication, or a copy to or from the host, runs and
    no compute. ``bubble``: neither.
    """

    busy: float
    exposed_communication: float
    bubble: float


def spans_of(timeline: Timeline) -> Iterator[Span]:
    """Yield the spans of every rank class in the order of issue; a Send is one on each end."""
    for piece in timeline.pieces():
        paths = piece.paths()
        for first in range(0, len(piece), _MOST_TASKS):
            yield from _spans(piece, paths, slice(first, first + _MOST_TASKS))


def shares_of(timeline: Timeline, rank_class: int) -> Shares:
    """Return how each device of a rank class spends the step."""
    moving: dict[Op, bool] = {}
    found = [(np.empty(0),) * 3]  # it may do nothing
    found += [_intervals(piece, rank_class, moving) for piece in timeline.pieces(rank_class)]
    start, end, moves = (np.concatenate(parts) for parts in zip(*found, strict=True))
    compute = moves == 0
    busy = _measure(start[compute], end[compute])
    active = _measure(start, end)
    # The sums behind `active` may pass the step by rounding; a share of time is not negative.
    return Shares(busy, max(active - busy, 0.0), max(timeline.step_time - active, 0.0))


def _spans(piece: Piece, paths: Sequence[str], part: slice) -> Iterator[Span]:
    """Yield the spans of some tasks of a piece."""
    starts: list[float] = piece.start[part].tolist()
    ends: list[float] = piece.end[part].tolist()
    ops: list[int] = piece.op[part].tolist()
    calls: list[int] = piece.call[part].tolist()
    first: list[int] = piece.stream_start[part.start : part.stop + 1].tolist()
    streams: list[int] = piece.streams[first[0] : first[-1]].tolist()
    for task, start in enumerate(starts):
        uses = first[task + 1] - first[task]
        for place in range(uses):
            yield Span(
                piece.first + part.start + task,
                piece.op_table[ops[task]],
                paths[calls[task]],
                piece.stream_table[streams[first[task] - first[0] + place]],
                start,
                ends[task],
                place,
                uses,
            )


def _intervals(piece: Piece, rank_class: int, moving: dict[Op, bool]) -> tuple[Floats, Floats, Floats]:
    """Return start and end of what a class does in a piece, and 1.0 where it moves something.

    What its host does is not among it.

    ``moving`` keeps which ops do, between devices or to and from the host.
    """
    own = [stream.rank_class == rank_class and stream.name != HOST for stream in piece.stream_table]
    table = np.array(own, np.bool_)
    tasks = tasks_of_uses(piece.stream_start)[table[piece.streams]] if len(piece) else np.empty(0, np.int64)
    for op in piece.op_table:
        if op not in moving:
            moving[op] = not operator(op.op_type).computes
    moves = np.array([moving[op] for op in piece.op_table], np.float64)
    return piece.start[tasks], piece.end[tasks], moves[piece.op[tasks]]


def _measure(start: Floats, end: Floats) -> float:
    """Seconds covered by at least one of these intervals."""
    if not len(start):
        return 0.0
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    reached = np.maximum.accumulate(np.concatenate([start[:1], end[:-1]]))
    return float(np.maximum(end - np.maximum(start, reached), 0.0).sum())
