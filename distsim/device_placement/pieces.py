"""Parts in the making: what a set of items needs, how pieces hang together, and which devices hold them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
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
    readers: dict[int, int] = {}
    for number in ordered:
        item = problem.items[number]
        own += item.total_bytes
        if item.is_op:
            begin = 0.0
            for read in item.inputs:
                if read in ends:
                    begin = max(begin, ends[read])
                elif read not in held:
                    readers[read] = readers.get(read, 0) + 1
            ends[number] = begin + item.latency
            longest = max(longest, ends[number])
    outside = tuple([read for read, count in readers.items() for _ in range(problem.times(count))])
    return DraftPart(held, own, outside, own + sum([problem.items[i].output_bytes for i in outside]), longest)


class Growing:
    """A piece to which ops are added one by one, each with the outside inputs that it reads."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.items: dict[int, None] = {}
        self._readers: dict[int, int] = {}  # of each item of others, the ops of the piece
        self.bytes = 0

    def extra(self, op: int) -> int:
        """Bytes by which the piece grows with this op."""
        item, items = self._problem.items[op], self._problem.items
        grown = item.total_bytes
        for read in item.inputs:
            if read not in self.items:
                count = self._readers.get(read, 0)
                times = self._problem.times(count + 1) - self._problem.times(count)
                grown += items[read].output_bytes * times
        return grown

    def add(self, op: int) -> None:
        """Add an op that comes after those in the piece."""
        self.bytes += self.extra(op)
        for read in self._problem.items[op].inputs:
            if not self._problem.items[read].is_op:
                self.items[read] = None
            elif read not in self.items:
                self._readers[read] = self._readers.get(read, 0) + 1
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


def longest_way(
    parents: Sequence[Collection[int]], latencies: Sequence[float], delay: Callable[[int, int], float]
) -> float:
    """Return the longest way over the pieces, infinite when some wait in a circle.

    A piece takes its latency, and what it makes is at a child ``delay(piece, child)`` later.
    """
    order = order_of(parents)
    if len(order) < len(parents):
        return math.inf
    ends = [0.0] * len(parents)
    for k in order:
        begin = 0.0
        for parent in parents[k]:
            begin = max(begin, ends[parent] + delay(parent, k))
        ends[k] = begin + latencies[k]
    return max(ends, default=0.0)


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
