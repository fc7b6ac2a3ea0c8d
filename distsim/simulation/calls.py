"""When each call of a step computes on each rank class, when a class communicates, how long in all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np

from distsim.ir import Op
from distsim.ops import operator
from distsim.simulation.explain.breakdown import PARTS
from distsim.simulation.explain.critical_path import sums
from distsim.simulation.simulation import Simulation
from distsim.simulation.tasks.templates import Floats, Ints, tasks_of_uses
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
    found = moving_times(simulation, lambda name: "", near)
    return {rank_class: parts for (rank_class, _), parts in found.items()}


def moving_times(
    simulation: Simulation, label: Callable[[str], str], near: float = 0.0
) -> dict[tuple[int, str], tuple[tuple[float, float], ...]]:
    """Return the same of each rank class by what ``label`` says of the name of the call in which it is."""
    found: dict[tuple[int, str], list[tuple[Floats, Floats]]] = {}
    for piece in simulation.timeline.pieces():
        tasks, rank_class = _uses(piece, communication=True)
        names, outermost = _calls_of(piece)
        labels = list(map(label, names))
        every = list(dict.fromkeys(labels))
        number = np.array(list(map(every.index, labels)), np.int64)[outermost[piece.call[tasks]]]
        owners: list[int] = np.unique(rank_class).tolist()
        for own, (place, name) in product(owners, enumerate(every)):
            chosen = tasks[(rank_class == own) & (number == place)]
            if len(chosen):
                found.setdefault((own, name), []).append((piece.start[chosen], piece.end[chosen]))
    together: dict[tuple[int, str], tuple[tuple[float, float], ...]] = {}
    for key, parts in found.items():
        starts, ends = zip(*parts, strict=True)
        start, end = _union(np.concatenate(starts), np.concatenate(ends), near)
        together[key] = tuple(zip(start.tolist(), end.tolist(), strict=True))
    return together


def _union(start: Floats, end: Floats, near: float) -> tuple[Floats, Floats]:
    """Return the starts and ends of the intervals that these make together."""
    order = np.argsort(start, kind="stable")
    start, reached = start[order], np.maximum.accumulate(end[order])
    apart = start[1:] > reached[:-1] + near
    return start[np.concatenate([[True], apart])], reached[np.concatenate([apart, [True]])]


BUBBLE, LAUNCHING = "bubble", "bubble, host launching"
"""The parts of a device's time in which it neither computes nor communicates."""

_COMPUTES, _MOVES, _LAUNCHES = range(3)


def device_parts(simulation: Simulation) -> Mapping[str, float]:
    """Return what the seconds of a step are of the mean device, most first; they sum to the step time.

    Compute by its kind, communication beside which nothing computes by its mesh axis (``exposed tp``), and
    the bubble, apart where the host is launching meanwhile. What runs at one time counts to one of them:
    computation goes before communication, and that before launches.
    """
    members = simulation.classes.members
    devices = sum(map(len, members)) or 1
    labels: dict[Op, tuple[int, str]] = {}
    total: list[tuple[str, float]] = []
    for number, own in enumerate(members):
        taken = _by_label(simulation, number, labels)
        taken.append((BUBBLE, simulation.step_time - sum(seconds for _, seconds in taken)))
        total += [(label, seconds * len(own) / devices) for label, seconds in taken]
    return {label: seconds for label, seconds in sums(total).items() if seconds > 0}


def _by_label(
    simulation: Simulation, rank_class: int, labels: dict[Op, tuple[int, str]]
) -> list[tuple[str, float]]:
    """Return the seconds of a class by what it does; ``labels`` keeps those of ops."""
    found: dict[tuple[int, str], list[tuple[Floats, Floats]]] = {}
    for piece in simulation.timeline.pieces(rank_class):
        streams = np.array([stream.rank_class == rank_class for stream in piece.stream_table], np.bool_)
        uses = tasks_of_uses(piece.stream_start)
        tasks = uses[streams[piece.streams]]
        for op in piece.op_table:
            if op not in labels:
                labels[op] = _label(op)
        own = [labels[op] for op in piece.op_table]
        kinds = list(dict.fromkeys(own))
        number = np.array([kinds.index(each) for each in own], np.int64)[piece.op[tasks]]
        for place, kind in enumerate(kinds):
            chosen = tasks[number == place]
            found.setdefault(kind, []).append((piece.start[chosen], piece.end[chosen]))
    taken: list[tuple[str, float]] = []
    covered, before = (np.empty(0), np.empty(0)), 0.0
    for kind in sorted(found):
        start = np.concatenate([covered[0], *[start for start, _ in found[kind]]])
        end = np.concatenate([covered[1], *[end for _, end in found[kind]]])
        if len(start):
            covered = _union(start, end, 0.0)
        after = float((covered[1] - covered[0]).sum())
        taken.append((kind[1], after - before))
        before = after
    return taken


def _label(op: Op) -> tuple[int, str]:
    """Return what goes before what, and what an op counts to."""
    meaning = operator(op.op_type)
    if meaning.issues:
        return _LAUNCHES, LAUNCHING
    if meaning.computes:
        return _COMPUTES, PARTS["kind"](op)
    return _MOVES, PARTS["axis"](op) if meaning.stalls else f"exposed {PARTS['axis'](op)}"


def _uses(piece: Piece, communication: bool) -> tuple[Ints, Ints]:
    """Return the tasks of a piece that take time, as often as they are on a stream, and the class of each."""
    known = [operator(op.op_type) for op in piece.op_table]
    chosen = np.array([each.computes != communication and not each.issues for each in known], np.bool_)
    uses = tasks_of_uses(piece.stream_start)
    now = (chosen[piece.op] & (piece.end > piece.start))[uses]
    rank_class = np.array([stream.rank_class for stream in piece.stream_table], np.int64)
    return uses[now], rank_class[piece.streams[now]]


def _of_piece(piece: Piece, classes: int) -> Iterator[CallTime]:
    """Yield the calls of a piece: itself, or if it is a whole function those in it."""
    names, outermost = _calls_of(piece)
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


def _calls_of(piece: Piece) -> tuple[list[str], Ints]:
    """Return the names of the calls of a piece, itself or if it is a whole function those in it, and of each
    call which of these it is in."""
    if piece.path:
        return [piece.path], np.zeros(len(piece.call_names), np.int64)
    return [piece.path, *piece.call_names[1:]], _outermost(piece)


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
