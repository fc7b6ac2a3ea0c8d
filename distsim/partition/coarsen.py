"""Many ops: group them, search on the groups, and take the result back.

The searches that try all pairs take time of the third power, so beyond ``coarse`` ops they get groups of
ops instead: intervals of a topological order that goes depth first (after an op, one that reads it comes
next if it can), of about equal shares of latency and bytes. Intervals of a topological order read each
other in one direction only, so no circle can arise: the coarsening step of multilevel acyclic partitioners
(Herrmann et al., "Multilevel algorithms for acyclic partitioning of directed acyclic graphs", 2019). What a
group needs and how long it takes are never underestimated, so what fits as groups fits as ops.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from distsim.partition.cost_aware import cost_aware
from distsim.partition.kernighan_lin import kernighan_lin
from distsim.partition.pieces import Piece, Placement, piece_of
from distsim.partition.problem import Item, PartitionDevice, Problem
from distsim.partition.quotient import Quotient
from distsim.partition.size_based import size_based

COARSE = 64


def coarse_cost_aware(
    problem: Problem, devices: Sequence[PartitionDevice], transfer_rate: float, coarse: int
) -> tuple[list[Piece], Placement]:
    """Return the cost-aware pieces and where they are; the size-based ones if those find no place."""
    grouped = _Grouped(problem, [problem.ops], coarse)
    pieces, places, found = cost_aware(grouped.problem, devices, transfer_rate)
    return (grouped.back(pieces), places) if found else size_based(problem, devices)


def coarse_kernighan_lin(
    problem: Problem, devices: Sequence[PartitionDevice], transfer_rate: float, coarse: int
) -> tuple[list[Piece], Placement]:
    """Return the size-based pieces, improved by swaps of ops or of groups within a piece."""
    pieces, places = size_based(problem, devices)
    grouped = _Grouped(problem, [ops_in(problem, piece.items) for piece in pieces], coarse)
    start = [piece_of(grouped.problem, grouped.problem.close(ops)) for ops in grouped.parts]
    found, places = kernighan_lin(grouped.problem, devices, transfer_rate, start, places)
    return grouped.back(found), places


def ops_in(problem: Problem, items: Collection[int]) -> list[int]:
    """Return the ops among items, in order."""
    return [number for number in sorted(items) if problem.items[number].is_op]


class _Grouped:
    """A problem whose ops are groups of the ops of another, none of which is in two of ``parts``.

    ``parts[k]`` become the numbers of the groups that part k of the original consists of.
    """

    def __init__(self, problem: Problem, parts: Sequence[Sequence[int]], coarse: int) -> None:
        self._original = problem
        if len(problem.ops) <= coarse:
            self.problem, self.parts = problem, [list(ops) for ops in parts]
            self._groups: dict[int, Sequence[int]] | None = None
            return
        part_of = {op: k for k, ops in enumerate(parts) for op in ops}
        groups = _intervals(problem, part_of, coarse)
        self._build(problem, groups)
        first = len(problem.items) - len(problem.ops)
        self.parts = [[] for _ in parts]
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
        self.problem = Problem(tuple(items), per_reader=problem.per_reader)
        self._groups = dict(enumerate(groups, len(outside)))

    def back(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the pieces of the original problem."""
        if self._groups is None:
            return list(pieces)
        groups = self._groups
        found = [[op for item in sorted(p.items) for op in groups.get(item, ())] for p in pieces]
        return [piece_of(self._original, self._original.close(ops)) for ops in found]


def _intervals(problem: Problem, part_of: dict[int, int], count: int) -> list[list[int]]:
    """Cut the ops, part by part, into about ``count`` intervals of even weight, none over two parts."""
    items = problem.items
    latency = sum(items[op].latency for op in problem.ops) or 1.0
    size = sum(items[op].total_bytes for op in problem.ops) or 1
    order = _depth_first(problem, part_of)
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
