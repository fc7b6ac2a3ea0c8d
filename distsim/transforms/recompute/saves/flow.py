"""Minimum cuts: Dinic's algorithm on integers, compiled, and the cut nearest to the sink."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from distsim.compile import compiled
from distsim.errors import RematerializationError

Integers = npt.NDArray[np.int64]
Edge = tuple[int, int, int | None]
"""Tail, head, and a capacity of at least 0, None for an infinite one."""

LIMIT = 2**62


@dataclass(frozen=True)
class MinCut:
    """A minimum cut: its capacity, and for each node whether it lies on the sink's side."""

    capacity: int
    at_sink: npt.NDArray[np.bool_]


def minimum_cut(edges: Sequence[Edge], nodes: int, source: int, sink: int) -> MinCut | None:
    """Return the minimum cut between ``source`` and ``sink`` whose sink side is the smallest, or None.

    ``edges`` are (tail, head, capacity), the capacity an integer of at least 0 or None for an infinite one;
    None comes back when no finite cut exists. Among cuts of equal capacity the one nearest to the sink is
    unique: the nodes from which the sink can be reached in what a maximum flow leaves over.

    Dinic, Soviet Math. Doklady 11 (1970): blocking flows on layers. Raises
    :class:`~distsim.errors.RematerializationError` when the finite capacities sum to 2^62 or more.

    >>> cut = minimum_cut([(0, 1, 3), (1, 2, None), (2, 3, 3)], nodes=4, source=0, sink=3)
    >>> cut.capacity, cut.at_sink.tolist()
    (3, [False, False, False, True])
    """
    infinite = 1 + sum(capacity for _, _, capacity in edges if capacity is not None)
    if infinite >= LIMIT:
        raise RematerializationError(
            f"the sizes of the values sum to {infinite - 1:.3g} in the cut, more than 2^62; count them in a "
            "larger unit than bytes"
        )
    flat = [(tail, head, infinite if capacity is None else capacity) for tail, head, capacity in edges]
    table: Integers = np.array(flat, dtype=np.int64).reshape(-1, 3)
    starts, heads, rest, back = _arcs(table, nodes)
    value = maximum_flow(starts, heads, rest, back, source, sink)
    return None if value >= infinite else MinCut(int(value), reaches(starts, heads, rest, back, sink))


def _arcs(edges: Integers, nodes: int) -> tuple[Integers, Integers, Integers, Integers]:
    """Return for each node where its arcs start, and for each arc its head, capacity and reverse arc."""
    count = len(edges)
    tails = np.concatenate([edges[:, 0], edges[:, 1]])
    order = np.argsort(tails, kind="stable")
    place = np.empty(2 * count, dtype=np.int64)
    place[order] = np.arange(2 * count)
    heads = np.concatenate([edges[:, 1], edges[:, 0]])[order]
    rest = np.concatenate([edges[:, 2], np.zeros(count, dtype=np.int64)])[order]
    back = np.concatenate([place[count:], place[:count]])[order]
    starts = np.searchsorted(tails[order], np.arange(nodes + 1)).astype(np.int64)
    return starts, heads, rest, back


@compiled
def maximum_flow(
    starts: Integers, heads: Integers, rest: Integers, back: Integers, source: int, sink: int
) -> Any:
    """Push as much as fits from source to sink, ``rest`` being what each arc has left; return how much."""
    nodes = len(starts) - 1
    level = np.empty(nodes, dtype=np.int64)
    queue = np.empty(nodes, dtype=np.int64)
    current = np.empty(nodes, dtype=np.int64)
    path = np.empty(nodes, dtype=np.int64)
    total = 0
    while True:
        # Layers: the distance of each node to the sink, where the sink can be reached at all.
        level[:] = -1
        level[sink] = 0
        queue[0] = sink
        first, last = 0, 1
        while first < last and level[source] < 0:
            node = queue[first]
            first += 1
            for arc in range(starts[node], starts[node + 1]):
                tail = heads[arc]
                if level[tail] < 0 and rest[back[arc]] > 0:
                    level[tail] = level[node] + 1
                    queue[last] = tail
                    last += 1
        if level[source] < 0:
            return total
        for node in range(nodes):
            current[node] = starts[node]
        # A blocking flow: paths that go down one layer per arc, dead ends taken out.
        depth, node = 0, source
        while True:
            if node == sink:
                amount = rest[path[0]]
                for i in range(1, depth):
                    amount = min(amount, rest[path[i]])
                total += amount
                again = depth
                for i in range(depth - 1, -1, -1):
                    rest[path[i]] -= amount
                    rest[back[path[i]]] += amount
                    if rest[path[i]] == 0:
                        again = i
                depth = again
                node = heads[back[path[depth]]]
                continue
            while current[node] < starts[node + 1]:
                arc = current[node]
                if rest[arc] > 0 and level[heads[arc]] == level[node] - 1:
                    break
                current[node] += 1
            if current[node] < starts[node + 1]:
                path[depth] = current[node]
                depth += 1
                node = heads[current[node]]
            elif depth == 0:
                break
            else:
                depth -= 1
                node = heads[back[path[depth]]]
                current[node] += 1


@compiled
def reaches(starts: Integers, heads: Integers, rest: Integers, back: Integers, sink: int) -> Any:
    """Return for each node whether the sink can be reached through arcs with something left."""
    nodes = len(starts) - 1
    found = np.zeros(nodes, dtype=np.bool_)
    queue = np.empty(nodes, dtype=np.int64)
    found[sink] = True
    queue[0] = sink
    first, last = 0, 1
    while first < last:
        node = queue[first]
        first += 1
        for arc in range(starts[node], starts[node + 1]):
            tail = heads[arc]
            if not found[tail] and rest[back[arc]] > 0:
                found[tail] = True
                queue[last] = tail
                last += 1
    return found
