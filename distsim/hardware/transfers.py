"""What a collective puts on the channels that it passes: the bytes beside the seconds.

The algorithm is the one that :func:`collective_time` chooses. Its time is a latency, in which nothing is
moved, and a transfer. The bytes on each hop follow from the algorithm (S bytes, n ranks, all ranks alike):

- ``ring``: S (n-1)/n on each hop around the ring, twice for an all-reduce; S on all hops but the last for
  a broadcast;
- ``rails``: in each of m parts, k rings with 1/k of the bytes each leave by k ranks, so that a hop across
  carries 1/k of a ring's bytes, and a hop inside (k-1)/k (k rings, k-1 hops each, over k ranks);
- ``hierarchical``: those of its steps;
- ``tree``: 2 S leave and reach each rank (two trees with half of the bytes, inner node in one and leaf in
  the other), put on the hops of the ring;
- ``pairwise``, ``direct``: S/n from each rank, or the first only, to each peer; S for a send.

No channel is asked for more than its capacity during the transfer: the same figures set its time. (One
exception: ``rails`` between uneven parts, whose time does not look at links that were set for pairs.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise, permutations

from distsim.hardware.collectives import (
    PAIRWISE,
    collective_algorithms,
    pairwise_algorithms,
    ring_algorithms,
)
from distsim.hardware.routes import (
    Channel,
    Group,
    Hop,
    Route,
    channels,
    find_exchange,
    find_route,
    rails_of,
    ring_hops,
)
from distsim.ir.topology import Topology

Load = tuple[tuple[Hop, ...], float]
"""Hops, and the bytes on each of them."""


@dataclass(frozen=True, eq=False, slots=True)
class FluidCollective:
    """A collective as one fluid process: ``seconds`` by ``algorithm``, of which ``latency`` move nothing.

    ``hops`` are the bytes that go from one rank to another in the rest of the time.
    """

    algorithm: str
    seconds: float
    latency: float
    hops: tuple[tuple[Hop, float], ...]

    def loads(self, topology: Topology) -> dict[Channel, float]:
        """Return the bytes that pass each channel."""
        found: dict[Channel, float] = {}
        for (a, b), size in self.hops:
            for channel in channels(a, b, topology):
                found[channel] = found.get(channel, 0.0) + size
        return found


def collective_transfer(kind: str, nbytes: float, group: Group, topology: Topology) -> FluidCollective:
    """Return how a collective goes over a topology; arguments and errors as in ``collective_time``.

    >>> topology = Topology()
    >>> gpus = tuple(topology.add_device("gpu") for _ in range(2))
    >>> topology.set_bandwidth(*gpus, gbps=8)
    >>> collective_transfer("all_reduce", 1e9, gpus, topology).hops
    (((gpu:0, gpu:1), 1000000000.0), ((gpu:1, gpu:0), 1000000000.0))
    """
    times = collective_algorithms(kind, nbytes, group, topology)
    algorithm = min(times, key=times.__getitem__)
    if len(group) == 1:
        return FluidCollective(algorithm, 0.0, 0.0, ())
    route = find_route(group, topology)
    if kind == "send":
        latency = route.latency
        loads: list[Load] = [(((group[0], group[1]),), nbytes)]
    elif kind in PAIRWISE:
        exchange = find_exchange(group, topology)
        latency = pairwise_algorithms(kind, 0.0, route, exchange)[algorithm]
        loads = _pairwise_loads(kind, nbytes, route, algorithm)
    else:
        latency, loads = _ring_loads(kind, nbytes, route)
    on_hops: dict[Hop, float] = {}
    for hops, size in loads:
        for hop in hops if size > 0 else ():
            on_hops[hop] = on_hops.get(hop, 0.0) + size
    return FluidCollective(
        algorithm, times[algorithm], min(latency, times[algorithm]), tuple(on_hops.items())
    )


def _pairwise_loads(kind: str, nbytes: float, route: Route, algorithm: str) -> list[Load]:
    group = route.family[0]
    if algorithm == "pairwise":
        return [(tuple(permutations(group, 2)), nbytes / route.size)]
    if kind == "scatter":
        return [(tuple([(group[0], b) for b in group[1:]]), nbytes / route.size)]
    if kind == "gather":
        return [(tuple([(b, group[0]) for b in group[1:]]), nbytes / route.size)]
    steps = [part for part in (route.inner, route.outer) if part is not None]
    return [(ring_hops(part.family), nbytes * (part.size - 1) / part.size) for part in steps]


def _ring_loads(kind: str, nbytes: float, route: Route) -> tuple[float, list[Load]]:
    """Return the latency, and the loads of the algorithm that is fastest for this size."""
    times = ring_algorithms(kind, nbytes, route)
    algorithm = min(times, key=times.__getitem__)
    inner, outer = route.inner, route.outer
    if algorithm == "hierarchical" and inner is not None and outer is not None:
        return _hierarchical_loads(kind, nbytes, inner, outer)
    latency = ring_algorithms(kind, 0.0, route)[algorithm]  # sizes enter in proportion
    if algorithm == "tree":
        return latency, [(ring_hops(route.family), 2 * nbytes)]
    moved = nbytes if kind == "broadcast" else nbytes * (route.size - 1) / route.size
    moved *= 2 if kind == "all_reduce" else 1
    if algorithm == "ring":
        return latency, [(_chain(route.family) if kind == "broadcast" else ring_hops(route.family), moved)]
    if inner is not None and outer is not None:
        inside = [(ring_hops(inner.family), moved * (inner.size - 1) / inner.size)]
        return latency, [*inside, (ring_hops(outer.family), moved / inner.size)]
    count = min(len(part) for cut in route.parts for part in cut)
    parts = [part for cut in route.parts for part in cut]
    inside = [(ring_hops((part,)), moved * (len(part) - 1) / len(part)) for part in parts]
    return latency, [*inside, (ring_hops(rails_of(route.parts, count)), moved / count)]


def _hierarchical_loads(kind: str, nbytes: float, inner: Route, outer: Route) -> tuple[float, list[Load]]:
    if kind == "broadcast":
        inside, across = _ring_loads(kind, nbytes, inner), _ring_loads(kind, nbytes, outer)
        first = {part[0] for part in inner.family}  # one rank of each part takes it from outside
        leading = [(tuple([hop for hop in hops if hop[0] in first]), size) for hops, size in across[1]]
        return inside[0] + across[0], [*leading, *inside[1]]
    steps = [_ring_loads(kind, nbytes / inner.size, outer)]
    for part in ("reduce_scatter", "all_gather") if kind == "all_reduce" else (kind,):
        steps.append(_ring_loads(part, nbytes, inner))
    return sum(latency for latency, _ in steps), [load for _, loads in steps for load in loads]


def _chain(family: Iterable[Group]) -> tuple[Hop, ...]:
    return tuple([hop for group in family for hop in pairwise(group)])
