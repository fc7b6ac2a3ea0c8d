"""Parts in the making: what a set of items needs, how pieces hang together, and which devices hold them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from distsim.device_placement.problem import PartitionDevice, Problem

Placement = list[list[int]]
"""For each piece the numbers of the devices that it is on."""


@dataclass(frozen=True, eq=False, slots=True)
class DraftPart:
    """A part in the making.

    ``own`` are the bytes of its items, ``outside`` the ops of others that it reads (each as often as it
    counts), ``bytes`` the two together, ``latency`` its critical path.
    """

    items: frozenset[int]
    own: int
    outside: tuple[int, ...]
    bytes: int
    latency: float


def piece_of(problem: Problem, items: Collection[int]) -> DraftPart:
    """Return the piece of these items, which contain the outside inputs that their ops read."""
    held, ordered = frozenset(items), sorted(items)
    ends: dict[int, float] = {}
    longest, own = 0.0, 0
    outside: list[int] = []
    for number in ordered:
        item = problem.items[number]
        own += item.total_bytes
        if item.is_op:
            begin = 0.0
            for read in item.inputs:
                if read in ends:
                    begin = max(begin, ends[read])
                elif read not in held:
                    outside.append(read)
            ends[number] = begin + item.latency
            longest = max(longest, ends[number])
    counted = tuple(outside if problem.per_reader else dict.fromkeys(outside))
    return DraftPart(held, own, counted, own + sum([problem.items[i].output_bytes for i in counted]), longest)


class Growing:
    """A piece to which ops are added one by one, each with the outside inputs that it reads."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.items: dict[int, None] = {}
        self._outside: dict[int, None] = {}
        self.bytes = 0

    def extra(self, op: int) -> int:
        """Bytes by which the piece grows with this op."""
        item, items = self._problem.items[op], self._problem.items
        known = {} if self._problem.per_reader else self._outside
        new = [i for i in item.inputs if i not in self.items and i not in known]
        return item.total_bytes + sum([items[i].output_bytes for i in new])

    def add(self, op: int) -> None:
        """Add an op that comes after those in the piece."""
        self.bytes += self.extra(op)
        for read in self._problem.items[op].inputs:
            if not self._problem.items[read].is_op:
                self.items[read] = None
            elif read not in self.items:
                self._outside[read] = None
        self.items[op] = None

    def piece(self) -> DraftPart:
        """Return the piece as it is now."""
        return piece_of(self._problem, self.items)


def parents_of(problem: Problem, pieces: Sequence[DraftPart]) -> list[set[int]]:
    """Return for each piece the pieces that it reads."""
    part_of = {op: k for k, piece in enumerate(pieces) for op in piece.items if problem.items[op].is_op}
    return [{part_of[read] for read in piece.outside} for piece in pieces]


def order_of(parents: Sequence[Collection[int]]) -> list[int]:
    """Return the pieces, each after its parents; fewer than there are when some wait in a circle."""
    waits = [len(above) for above in parents]
    children: list[list[int]] = [[] for _ in parents]
    for child, above in enumerate(parents):
        for parent in above:
            children[parent].append(child)
    ready = [k for k, count in enumerate(waits) if count == 0]
    for k in ready:
        for child in children[k]:
            waits[child] -= 1
            if waits[child] == 0:
                ready.append(child)
    return ready


def levels_of(parents: Sequence[Collection[int]]) -> list[int]:
    """Return for each piece the most edges on a way to it."""
    found = [0] * len(parents)
    for k in order_of(parents):
        for parent in parents[k]:
            found[k] = max(found[k], found[parent] + 1)
    return found


def best_fit(
    problem: Problem,
    pieces: Sequence[DraftPart],
    devices: Sequence[PartitionDevice],
    placed: Iterable[Sequence[int]] | None = None,
) -> tuple[Placement, bool]:
    """Return devices for the pieces, and whether every piece has one.

    Pieces that have devices in ``placed`` keep them. Each other piece, in order, goes to the device with
    the least free memory in which it leaves some free (equals: in the order after the previous piece, which
    begins with that of ``devices``). On a device that holds other pieces, what they make is not counted
    as coming from outside. When a piece fits nowhere, it and those after it stay without a device.
    """
    places: Placement = [list(where) for where in placed] if placed is not None else [[] for _ in pieces]
    free = [device.memory for device in devices]
    held: list[set[int]] = [set() for _ in devices]
    for piece, where in zip(pieces, places, strict=True):
        for number in where:
            free[number] -= piece.bytes
            held[number] |= piece.items
    order = list(range(len(devices)))
    items = problem.items
    for piece, where in zip(pieces, places, strict=True):
        if where:
            continue
        order.sort(key=free.__getitem__)
        for number in order:
            if piece.own >= free[number]:
                continue
            there = held[number]
            extra = piece.bytes
            if there:
                extra = piece.own
                for read in piece.outside:
                    if read not in there:
                        extra += items[read].output_bytes
            if extra < free[number]:
                where.append(number)
                there |= piece.items
                free[number] -= extra
                break
        else:
            return places, False
    return places, True
