"""Many ops: group them, search on the groups, and take the result back.

The searches that try all pairs take time of the third power, so beyond ``coarse`` ops they get groups of
ops instead: intervals of a topological order, of about equal shares of latency and bytes. Intervals of a
topological order read each other in one direction only, so no circle can arise: the coarsening step of
multilevel acyclic partitioners (Herrmann et al., "Multilevel algorithms for acyclic partitioning of
directed acyclic graphs", 2019). Of three orders (as given; by earliest start, which keeps groups short
where the graph is wide; depth first, which keeps branches together) that is taken whose groups have the
least graph latency, all apart. What a group needs and how long it takes are never underestimated, so
what fits as groups fits as ops.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from distsim.device_placement.modes.least_latency import Evaluator, cost_aware, kernighan_lin
from distsim.device_placement.modes.size_based import size_based
from distsim.device_placement.pieces import DraftPart, Placement, parents_of, piece_of
from distsim.device_placement.problem import Item, PartitionDevice, Problem
from distsim.device_placement.quotient import Quotient
from distsim.errors import PartitionError

COARSE = 64


Placed = tuple[list[DraftPart], Placement]


def coarse_cost_aware(
    problem: Problem, devices: Sequence[PartitionDevice], transfer_rate: float, coarse: int = COARSE
) -> Placed:
    """Return the cost-aware pieces and where they are.

    The size-based ones instead if those find no place, or if they are of groups and take longer.
    """
    grouped = _Grouped(problem, [problem.ops], coarse, transfer_rate)
    pieces, places, found = cost_aware(grouped.problem, devices, transfer_rate)
    if not found:
        return size_based(problem, devices)
    placed = grouped.back(pieces), places
    if grouped.problem is problem:
        return placed
    try:
        return _shorter(Evaluator(problem, devices, transfer_rate), placed, size_based(problem, devices))
    except PartitionError:
        return placed


def coarse_kernighan_lin(
    problem: Problem, devices: Sequence[PartitionDevice], transfer_rate: float, coarse: int
) -> Placed:
    """Return the size-based pieces, improved by swaps of ops or of groups within a piece.

    Of groups, at most ``32 * coarse**2`` swaps over the number of pieces are tried: with thousands of
    pieces, which are never in one group, each takes long.
    """
    pieces, places = size_based(problem, devices)
    parts = [problem.ops_in(piece.items) for piece in pieces]
    grouped = _Grouped(problem, parts, coarse, transfer_rate)
    start = [piece_of(grouped.problem, grouped.problem.close(ops)) for ops in grouped.parts]
    trials = math.inf if grouped.problem is problem else 32 * coarse**2 / len(pieces)
    found, elsewhere = kernighan_lin(grouped.problem, devices, transfer_rate, start, places, trials)
    placed = grouped.back(found), elsewhere
    return _shorter(Evaluator(problem, devices, transfer_rate), placed, (pieces, places))


def _shorter(evaluator: Evaluator, first: Placed, second: Placed) -> Placed:
    """Return the one of less latency; the first if they are equal."""

    def latency(placed: Placed) -> float:
        return evaluator.latency(placed[0], parents_of(evaluator.problem, placed[0]), placed[1])

    return first if latency(first) <= latency(second) else second


class _Grouped:
    """A problem whose ops are groups of the ops of another, none of which is in two of ``parts``.

    ``parts[k]`` become the numbers of the groups that part k of the original consists of.
    """

    def __init__(
        self, problem: Problem, parts: Sequence[Sequence[int]], coarse: int, transfer_rate: float
    ) -> None:
        self._original = problem
        if len(problem.ops) <= coarse:
            self.problem, self.parts = problem, [list(ops) for ops in parts]
            self._groups: dict[int, Sequence[int]] | None = None
            return
        part_of = {op: k for k, ops in enumerate(parts) for op in ops}
        groups = _best_groups(problem, part_of, coarse, transfer_rate)
        self._build(problem, groups)
        first = len(problem.items) - len(problem.ops)
        self.parts: list[list[int]] = [[] for _ in parts]
        for number, group in enumerate(groups):
            self.parts[part_of[group[0]]].append(first + number)

    def _build(self, problem: Problem, groups: Sequence[Sequence[int]]) -> None:
        outside = [number for number, item in enumerate(problem.items) if not item.is_op]
        number_of = {item: number for number, item in enumerate(outside)}
        items = [problem.items[number] for number in outside]
        latencies = Quotient(problem, groups).latencies
        for number, group in enumerate(groups, len(outside)):
            number_of.update(dict.fromkeys(group, number))
        returned = set(problem.outputs)
        for number, (group, path) in enumerate(zip(groups, latencies, strict=True), len(outside)):
            inputs = dict.fromkeys(number_of[read] for op in group for read in problem.items[op].inputs)
            inputs.pop(number, None)
            handed = [
                problem.items[op].output_bytes
                for op in group
                if op in returned or any(number_of[by] != number for by in problem.readers[op])
            ]
            total = sum(problem.items[op].total_bytes for op in group)
            name = problem.items[group[-1]].name
            items.append(Item(name, tuple(inputs), sum(handed), total, path.memory, path.overall))
        self.problem = replace(problem, items=tuple(items), outputs=(), function=None)
        self._groups = dict(enumerate(groups, len(outside)))

    def back(self, pieces: Sequence[DraftPart]) -> list[DraftPart]:
        """Return the pieces of the original problem."""
        if self._groups is None:
            return list(pieces)
        groups = self._groups
        found = [[op for item in sorted(p.items) for op in groups.get(item, ())] for p in pieces]
        return [piece_of(self._original, self._original.close(ops)) for ops in found]


def _best_groups(
    problem: Problem, part_of: dict[int, int], count: int, transfer_rate: float
) -> list[list[int]]:
    """Return the groups of the order whose groups have the least latency; of equal ones, the first."""
    orders = [
        sorted(problem.ops, key=part_of.__getitem__),
        _earliest_first(problem, part_of),
        _depth_first(problem, part_of),
    ]
    best, least = list[list[int]](), math.inf
    for order in orders:
        groups = _intervals(problem, order, part_of, count)
        latency = Quotient(problem, groups).latency(range(len(groups)), transfer_rate)
        if latency < least:
            best, least = groups, latency
    return best


def _intervals(
    problem: Problem, order: Sequence[int], part_of: dict[int, int], count: int
) -> list[list[int]]:
    """Cut an order into about ``count`` intervals of even weight, none over two parts."""
    items = problem.items
    latency = sum(items[op].latency for op in order) or 1.0
    size = sum(items[op].total_bytes for op in order) or 1
    groups: list[list[int]] = []
    weight, share = 0.0, 2.0 / count
    for op in order:
        own = items[op].latency / latency + items[op].total_bytes / size
        if not groups or part_of[op] != part_of[groups[-1][-1]] or weight + own / 2 > share:
            groups.append([])
            weight = 0.0
        groups[-1].append(op)
        weight += own
    return groups


def _earliest_first(problem: Problem, part_of: dict[int, int]) -> list[int]:
    """Return the ops part by part, by when each could start if nothing but its inputs held it up."""
    ends = [0.0] * len(problem.items)
    start = [0.0] * len(problem.items)
    for op in problem.ops:
        start[op] = max([ends[read] for read in problem.items[op].inputs], default=0.0)
        ends[op] = start[op] + problem.items[op].latency
    return sorted(problem.ops, key=lambda op: (part_of[op], start[op]))


def _depth_first(problem: Problem, part_of: dict[int, int]) -> list[int]:
    """Return the ops, those of a part together, in a topological order that follows the last op.

    Parts must read each other in the order of their numbers only.
    """
    waits = {op: sum(problem.items[i].is_op for i in problem.items[op].inputs) for op in problem.ops}
    ready: dict[int, list[int]] = {part: [] for part in sorted(set(part_of.values()))}
    for op in reversed(problem.ops):
        if waits[op] == 0:
            ready[part_of[op]].append(op)
    order: list[int] = []
    for stack in ready.values():
        while stack:
            op = stack.pop()
            order.append(op)
            for reader in reversed(problem.readers[op]):
                waits[reader] -= 1
                if waits[reader] == 0:
                    ready[part_of[reader]].append(reader)
    return order
