"""The graph of the parts: which reads which, how many bytes go along each edge, how long a way takes.

All in time linear in items and edges: every longest way is a sum over a topological order. (The partitioner
of torch.fx follows every way one by one, which doubles with each residual block.)
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import NamedTuple

from distsim.device_placement.pieces import levels_of, longest_way, order_of
from distsim.device_placement.problem import Problem
from distsim.errors import PartitionError


class PartLatency(NamedTuple):
    """The critical path of a part: its length, and the memory and compute latencies summed along it."""

    memory: float
    compute: float
    overall: float


class Quotient:
    """The parts as nodes: ``items[k]`` are the ops and outside inputs of part k, in order.

    An op in two parts counts as being in the last; verify the partition to refuse that.
    """

    def __init__(self, problem: Problem, items: Sequence[Sequence[int]]) -> None:
        self.problem = problem
        self.items = items
        self.part_of = [-1] * len(problem.items)
        for index, held in enumerate(items):
            for item in held:
                if problem.items[item].is_op:
                    self.part_of[item] = index
        edges: dict[tuple[int, int], dict[int, None]] = {}
        for op in problem.ops:
            child = self.part_of[op]
            for read in problem.items[op].inputs:
                parent = self.part_of[read]
                if problem.items[read].is_op and parent != child and parent >= 0 <= child:
                    edges.setdefault((parent, child), {})[read] = None
        self._edges = dict(sorted(edges.items()))
        children: list[list[int]] = [[] for _ in items]
        parents: list[list[int]] = [[] for _ in items]
        for parent, child in self._edges:
            children[parent].append(child)
            parents[child].append(parent)
        self.children = tuple(map(tuple, children))
        self.parents = tuple(map(tuple, parents))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The parts, each after its parents; those in or behind a circle are left out."""
        return tuple(order_of(self.parents))

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """For each part the most edges on a way to it; 0 for what is in or behind a circle."""
        return tuple(levels_of(self.parents))

    @cached_property
    def moved(self) -> dict[tuple[int, int], int]:
        """Bytes along each edge (parent, child): the outputs of the parent's items that the child reads.

        Each counts once. An outside input that both parts hold counts as well, as in the original: the
        child has it from the parent.
        """
        outside = [{i for i in held if not self.problem.items[i].is_op} for held in self.items]
        sizes = self.problem.items
        return {
            (parent, child): sum([sizes[i].output_bytes for i in read])
            + sum([sizes[i].output_bytes for i in outside[parent] & outside[child]])
            for (parent, child), read in self._edges.items()
        }

    @cached_property
    def latencies(self) -> tuple[PartLatency, ...]:
        """The critical path of every part; of equally long ones, that through the earliest ops."""
        items = self.problem.items
        best: dict[int, PartLatency] = {}
        found = [PartLatency(0.0, 0.0, 0.0)] * len(self.items)
        for op in self.problem.ops:
            part = self.part_of[op]
            before = PartLatency(0.0, 0.0, 0.0)
            for read in items[op].inputs:
                if items[read].is_op and self.part_of[read] == part and best[read].overall > before.overall:
                    before = best[read]
            item = items[op]
            best[op] = PartLatency(
                before.memory + item.memory, before.compute + item.compute, before.overall + item.latency
            )
            if part >= 0 and best[op].overall > found[part].overall:
                found[part] = best[op]
        return tuple(found)

    def latency(self, places: Sequence[Hashable], transfer_rate: float) -> float:
        """Return the longest way over the parts: latencies, and bytes / rate where places differ."""

        def delay(parent: int, child: int) -> float:
            moved = 0 if places[parent] == places[child] else self.moved[parent, child]
            if moved and not transfer_rate > 0:
                raise PartitionError(
                    f"{moved} bytes go from part {parent} to part {child} at a transfer rate of "
                    f"{transfer_rate}; give one above 0 bytes per second"
                )
            return moved / transfer_rate if moved else 0.0

        return longest_way(self.parents, [latency.overall for latency in self.latencies], delay)
