"""What a collective costs, in seconds, by alpha-beta formulas on the links that it crosses.

``nbytes`` (S below) is always the size of the *whole* tensor, n the number of ranks, B the achieved
bytes/s and a the latency of the slowest link between consecutive ranks, the last and the first included:

================== ======================================================= ===========================
kind               S is the bytes of                                       ring (or pairwise) cost
================== ======================================================= ===========================
``all_reduce``     the tensor, full size on every rank                     2(n-1)/n S/B + 2(n-1) a
``all_gather``     the gathered result on every rank (n shards of S/n)     (n-1)/n S/B + (n-1) a
``reduce_scatter`` the full input on every rank (the result is S/n)        (n-1)/n S/B + (n-1) a
``broadcast``      the tensor that the first rank of the group sends       S/B + (n-1) a
``all_to_all``     the local tensor of a rank; S/n of it go to each rank   (n-1)/n S/B + (n-1) a
``scatter``        the full tensor on the first rank; each gets S/n        (n-1)/n S/B + (n-1) a
``gather``         the full result on the first rank                       (n-1)/n S/B + (n-1) a
``send``           the message; the group is (source, destination)         S/B + a
``shift``          the message of each rank to the next, of the last to    S/B + a
                   the first
a `TokenChoice`    the rows of a rank's tokens for all their experts       :mod:`.token_exchange`
================== ======================================================= ===========================

Each takes what the slowest of its levels says that it takes to begin besides (``Level.start``), once: NCCL
runs all steps of one, a message too, in one kernel. Node-limited exchanges of tokens take none: DeepEP's
kernels write to their peers without NCCL. One rank has nothing to send: zero. Where ranks of the group share
a port or an uplink, B is what each gets. In ``all_to_all``, ``scatter``, ``gather`` and ``send`` B and a are
those of the links between the pairs that talk, and a rank serves its peers one after the other.

Where a group has k ranks in each of m groups of a level (k GPUs in each of m nodes, n = k m), more algorithms
are open, and the cheapest is taken:

- ``rails``: k rings at a time, each leaving the node by another rank's port, so that
  B = min(B inside, k B across); a pass has n-m hops inside and m-1 hops across. NCCL's multi-channel ring.
- ``hierarchical``, for an all-reduce: reduce-scatter inside, all-reduce of S/k across (k of them side by
  side), all-gather inside, and recursively for more levels; for an all-to-all: what goes to one rail is
  brought together inside first. NCCL has rings alone for what gathers, scatters or sends to all (tuning.cc;
  NVIDIA/nccl issues 1473 and 1594), so that these start the later the more ranks there are.
- ``tree``, for an all-reduce between nodes: 2 S/B + 2 ceil(log2 m) a.

:func:`collective_transfer` says what a collective puts on the channels that it passes. Its time is a latency,
in which nothing is moved, and a transfer. The bytes on each hop follow from the algorithm:

- ``ring``: S (n-1)/n on each hop around the ring, twice for an all-reduce; S on all hops but the last for
  a broadcast;
- ``rails``: in each of m parts, k rings with 1/k of the bytes each leave by k ranks, so that a hop across
  carries 1/k of a ring's bytes, and a hop inside (k-1)/k (k rings, k-1 hops each, over k ranks);
- ``hierarchical``: those of its steps;
- ``tree``: 2 S leave and reach each rank (two trees with half of the bytes, inner node in one and leaf in
  the other), put on the hops of the ring;
- ``pairwise``, ``direct``: S/n from each rank, or the first only, to each peer; S for a send, and on each hop
  around the ring for a shift.

No channel is asked for more than its capacity during the transfer: the same figures set its time. (One
exception: ``rails`` between uneven parts, whose time does not look at links that were set for pairs.)

Sources: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH"
(2005); Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009);
Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (2009);
NVIDIA's nccl-tests, PERFORMANCE.md, for what the sizes mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise, permutations
from operator import itemgetter

from distsim.errors import CostError
from distsim.hardware.routes import (
    Channel,
    Group,
    Hop,
    PeerCosts,
    Route,
    channels,
    find_exchange,
    find_route,
    rails_of,
    ring_hops,
)
from distsim.hardware.token_exchange import token_exchange
from distsim.ir.topology import Topology
from distsim.token_choice import TokenChoice

_RINGS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
PAIRWISE = ("all_to_all", "scatter", "gather")
COLLECTIVES: tuple[str, ...] = (*_RINGS, *PAIRWISE, "send", "shift")
"""What may be moved between devices: the kinds that :func:`collective_time` knows."""


def collective_time(kind: str, nbytes: float, group: Group, topology: Topology) -> float:
    """Seconds of a collective over a group by the cheapest of :func:`collective_algorithms`.

    ``kind`` is one of :data:`COLLECTIVES`; ``nbytes`` the whole tensor as the module's table says. Raises
    :class:`CostError` for an unknown kind, a bad size or group, and ``TopologyError`` for a missing link.

    >>> topology = Topology()
    >>> gpus = tuple(topology.add_device("gpu") for _ in range(2))
    >>> topology.set_bandwidth(*gpus, gbps=8)
    >>> collective_time("all_reduce", 1e9, gpus, topology)
    1.0
    """
    return fastest(collective_algorithms(kind, nbytes, group, topology))[1]


def fastest(times: Mapping[str, float]) -> tuple[str, float]:
    """Return the algorithm that takes least, of equals the first, and what it takes."""
    return min(times.items(), key=itemgetter(1))


def collective_algorithms(kind: str, nbytes: float, group: Group, topology: Topology) -> dict[str, float]:
    """Seconds of a collective by each algorithm that fits the group: name -> seconds."""
    choice = TokenChoice.of(kind)
    if kind not in COLLECTIVES and choice is None:
        raise CostError(f"unknown collective {kind!r}; choose one of {', '.join(COLLECTIVES)}")
    if not (math.isfinite(nbytes) and nbytes >= 0):
        raise CostError(f"{kind} of {nbytes} bytes: the size must be finite and not negative")
    if not group:
        raise CostError(f"{kind} over an empty group: name at least one device")
    if len(group) == 1:
        return {"ring": 0.0}
    route = find_route(group, topology)
    if kind == "send":
        if len(group) != 2:
            raise CostError(f"send goes from one device to another; the group has {len(group)}")
        return {"direct": nbytes / route.bandwidth + route.latency + route.start}
    if kind == "shift":
        return {"ring": nbytes / route.bandwidth + route.latency + route.start}
    if choice is not None:
        exchange = token_exchange(choice, nbytes, route)
        if exchange is not None:
            return {"node-limited": exchange.seconds}
        kind, nbytes = "all_to_all", choice.bytes_of_ranks(nbytes, route.size)
    if kind in PAIRWISE:
        times = pairwise_algorithms(kind, nbytes, route, find_exchange(group, topology))
    else:
        times = ring_algorithms(kind, nbytes, route)
    return {name: route.start + seconds for name, seconds in times.items()}


# --- the formulas ------------------------------------------------------------------------------------


def ring_algorithms(kind: str, nbytes: float, route: Route) -> dict[str, float]:
    """Seconds of an all-reduce, all-gather, reduce-scatter or broadcast over a route, by algorithm."""
    hops = (route.size - 1) * route.latency
    times = {"ring": _passes(kind, nbytes, route.size, route.bandwidth, hops)}
    if kind == "all_reduce" and route.between:
        depth = math.ceil(math.log2(route.size))
        times["tree"] = 2 * nbytes / route.bandwidth + 2 * depth * route.latency
    if route.rails > route.bandwidth:
        times["rails"] = _passes(kind, nbytes, route.size, route.rails, hops)
    inner, outer = route.inner, route.outer
    if inner is not None and outer is not None:
        bandwidth = min(inner.bandwidth, inner.size * outer.bandwidth)
        hops = (route.size - outer.size) * inner.latency + (outer.size - 1) * outer.latency
        times["rails"] = _passes(kind, nbytes, route.size, bandwidth, hops)
        if kind == "all_reduce":
            times["hierarchical"] = _hierarchical(nbytes, inner, outer)
    return times


def _passes(kind: str, nbytes: float, size: int, bandwidth: float, hops: float) -> float:
    """One pass around a ring (two for an all-reduce), with the latency of a pass given."""
    return (2 if kind == "all_reduce" else 1) * (_pass_bytes(kind, nbytes, size) / bandwidth + hops)


def _pass_bytes(kind: str, nbytes: float, size: int) -> float:
    """Bytes that go over each hop of a ring in one pass around it."""
    return nbytes if kind == "broadcast" else nbytes * (size - 1) / size


def _hierarchical(nbytes: float, inner: Route, outer: Route) -> float:
    """Seconds of an all-reduce in three steps: inside, across, inside."""

    def best(part: str, size: float, route: Route) -> float:
        return fastest(ring_algorithms(part, size, route))[1]

    inside = best("reduce_scatter", nbytes, inner) + best("all_gather", nbytes, inner)
    return inside + best("all_reduce", nbytes / inner.size, outer)


def pairwise_algorithms(kind: str, nbytes: float, route: Route, exchange: PeerCosts) -> dict[str, float]:
    """Seconds of an all-to-all, scatter or gather over a route, by algorithm."""
    shard = nbytes / route.size
    if kind != "all_to_all":
        return {"direct": shard * exchange.first_slowness + exchange.first_latency}
    times = {"pairwise": shard * exchange.worst_slowness + exchange.worst_latency}
    if route.inner is not None and route.outer is not None:
        # First gather inside the node what goes to one rail, then exchange along the rails.
        times["hierarchical"] = sum(
            _passes(kind, nbytes, part.size, part.bandwidth, (part.size - 1) * part.latency)
            for part in (route.inner, route.outer)
        )
    return times


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
    algorithm, seconds = fastest(collective_algorithms(kind, nbytes, group, topology))
    if len(group) == 1:
        return FluidCollective(algorithm, 0.0, 0.0, ())
    route, choice = find_route(group, topology), TokenChoice.of(kind)
    exchange = None if choice is None else token_exchange(choice, nbytes, route)
    if choice is not None:
        kind, nbytes = "all_to_all", choice.bytes_of_ranks(nbytes, route.size)
    if kind == "send":
        latency = route.latency + route.start
        loads: list[Load] = [(((group[0], group[1]),), nbytes)]
    elif kind == "shift":
        latency, loads = route.latency + route.start, [(ring_hops(route.family), nbytes)]
    elif exchange is not None:
        latency, loads = exchange.latency, list(exchange.loads)
    elif kind in PAIRWISE:
        peers = find_exchange(group, topology)
        latency = route.start + pairwise_algorithms(kind, 0.0, route, peers)[algorithm]
        loads = _pairwise_loads(kind, nbytes, route, algorithm)
    else:
        latency, loads = _ring_loads(kind, nbytes, route, algorithm)
        latency += route.start
    on_hops: dict[Hop, float] = {}
    for hops, size in loads:
        for hop in hops if size > 0 else ():
            on_hops[hop] = on_hops.get(hop, 0.0) + size
    return FluidCollective(algorithm, seconds, min(latency, seconds), tuple(on_hops.items()))


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


def _ring_loads(kind: str, nbytes: float, route: Route, algorithm: str) -> tuple[float, list[Load]]:
    """Return the latency and the loads of an algorithm."""
    inner, outer = route.inner, route.outer
    if algorithm == "hierarchical" and inner is not None and outer is not None:
        return _hierarchical_loads(nbytes, inner, outer)
    latency = ring_algorithms(kind, 0.0, route)[algorithm]  # sizes enter in proportion
    if algorithm == "tree":
        return latency, [(ring_hops(route.family), 2 * nbytes)]
    moved = _pass_bytes(kind, nbytes, route.size) * (2 if kind == "all_reduce" else 1)
    if algorithm == "ring":
        return latency, [(_chain(route.family) if kind == "broadcast" else ring_hops(route.family), moved)]
    if inner is not None and outer is not None:
        inside = [(ring_hops(inner.family), moved * (inner.size - 1) / inner.size)]
        return latency, [*inside, (ring_hops(outer.family), moved / inner.size)]
    count = min(len(part) for cut in route.parts for part in cut)
    parts = [part for cut in route.parts for part in cut]
    inside = [(ring_hops((part,)), moved * (len(part) - 1) / len(part)) for part in parts]
    return latency, [*inside, (ring_hops(rails_of(route.parts, count)), moved / count)]


def _hierarchical_loads(nbytes: float, inner: Route, outer: Route) -> tuple[float, list[Load]]:
    def best(part: str, size: float, route: Route) -> tuple[float, list[Load]]:
        return _ring_loads(part, size, route, fastest(ring_algorithms(part, size, route))[0])

    steps = [
        best("all_reduce", nbytes / inner.size, outer),
        *[best(part, nbytes, inner) for part in ("reduce_scatter", "all_gather")],
    ]
    return sum(latency for latency, _ in steps), [load for _, loads in steps for load in loads]


def _chain(family: Iterable[Group]) -> tuple[Hop, ...]:
    return tuple([hop for group in family for hop in pairwise(group)])
