"""What a collective costs, in seconds, by alpha-beta formulas on the links that it crosses.

``nbytes`` (S below) is always the size of the *whole* tensor, n the number of ranks, B the achieved
bytes/s of the slowest link between consecutive ranks, and a the mean latency of these links, that from the
last rank to the first included:

================== ======================================================= ===========================
kind               S is the bytes of                                       ring (or pairwise) cost
================== ======================================================= ===========================
``all_reduce``     the tensor, full size on every rank                     2(n-1)/n S/B + 2(n-1) a
``all_gather``     the gathered result on every rank (n shards of S/n)     (n-1)/n S/B + (n-1) a
``reduce_scatter`` the full input on every rank (the result is S/n)        (n-1)/n S/B + (n-1) a
``broadcast``      the tensor that the first rank of the group sends       S/B + (n-1) a
``all_to_all``     the local tensor of a rank; S/n of it go to each rank   (n-1)/n S/B + a + (n-2) o
``scatter``        the full tensor on the first rank; each gets S/n        (n-1)/n S/B + a + (n-2) o
``gather``         the full result on the first rank                       (n-1)/n S/B + a + (n-2) o
``send``           the message; the group is (source, destination)         S/B + a
``shift``          the message of each rank to the next, of the last to    S/B + a
                   the first
a `TokenChoice`    the rows of a rank's tokens for all their experts       :mod:`.token_exchange`
================== ======================================================= ===========================

Each takes what the slowest of its levels says that it takes to begin besides (``Level.start``), once: NCCL
runs all steps of one, a message too, in one kernel. What is moved goes in segments, so that ranks and links
work at once, on different ones: where each takes a time s (``Level.segment_time``) and T is what the bytes
take alone, k of them take T + k s + T/k, at the best k = sqrt(T/s) T + 2 sqrt(s T). Node-limited exchanges of
tokens take neither: DeepEP's kernels write to their peers without NCCL. One rank has nothing to send: zero.
Where ranks of the group share a port or an uplink, B is what each gets.

In ``all_to_all``, ``scatter``, ``gather`` and ``send`` B and a are those of the links between the pairs that
talk. A rank sends over all levels at once, as NCCL's channels do, and the slowest of them counts: to p peers
p S/n/B and a latency a + (p-1) o, as messages are under way together, each posted o after the one before:
:data:`distsim.hardware.routes.MESSAGE_POST`, or a where that is less. Of 35 all-to-alls on 2 to 32 nodes of
p5.48xlarge (crazyguitar/aws-gpu-communication-benchmark, fd167f9) that is 8 % off. Over links that were set
for pairs a rank serves its peers one after the other.

Where a group has k ranks in each of m groups of a level (k GPUs in each of m nodes, n = k m), more algorithms
are open, and the cheapest is taken:

- ``rails``: k rings at a time, each leaving the node by another rank's port, so that
  B = min(B inside, k B across); a pass has n-1 hops, of which m lie across (a broadcast's m-1): what the
  rank in the middle of a node sends goes to all nodes and back to its own. NCCL's multi-channel ring. (Its
  tuning model counts m-1. All-gathers of 32 MiB on 2, 4, 8, 16 and 32 nodes of p5.48xlarge take 67, 70, 76,
  77 and 81 us a hop across beside their bytes, and 134 to 84 if there were one less:
  crazyguitar/aws-gpu-communication-benchmark, fd167f9.)
- ``hierarchical``, for an all-reduce: reduce-scatter inside, all-reduce of S/k across (k of them side by
  side), all-gather inside, and recursively for more levels. NCCL has rings alone for what gathers or scatters
  (tuning.cc; NVIDIA/nccl issues 1473 and 1594), so that these start the later the more ranks there are.
- ``tree``, for an all-reduce between nodes: 2 S/B + 2 ceil(log2 m) a.

:func:`collective_transfer` says what a collective puts on the channels that it passes. Its time is a latency,
in which nothing is moved, and a transfer, segments with it. The bytes on each hop follow from the algorithm:

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

Tokens sent to the ranks of their experts, once to each node: what DeepEP does in place of an all-to-all.

A token whose experts lie on fewer nodes than there are goes once to each of these, to the rank in the
sender's place, which hands it on to each rank of its node that has any of its experts (DeepSeek-V3,
DeepSeek-AI 2024, section 3.2.2; deepseek-ai/DeepEP). Both legs run at once, a chunk behind the other. Where a
token reaches D(m) of m equal parts of the experts (:meth:`distsim.token_choice.TokenChoice.reached`) and S
are the bytes of the rows of its ``top_k`` experts, of all tokens of a rank, one of n ranks on m nodes sends

    (m-1)/m D(m) S/top_k   to other nodes,      (1 - m/n) D(n) S/top_k   within its node,

and the exchange takes the longer of the two, and the latencies of both. The way back, where what the experts
of a node made of a token is added up first, is the same mirrored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise, permutations
from operator import itemgetter
from typing import NamedTuple

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
    latency_of_messages,
    rails_of,
    ring_hops,
)
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
    if kind == "send" and len(group) != 2:
        raise CostError(f"send goes from one device to another; the group has {len(group)}")
    if choice is not None:
        exchange = token_exchange(choice, nbytes, route)
        if exchange is not None:
            return {"node-limited": exchange.seconds}
        kind, nbytes = "all_to_all", choice.bytes_of_ranks(nbytes, route.size)
    return {name: moved.over(route) for name, moved in _algorithms(kind, nbytes, group, topology).items()}


# --- the formulas ------------------------------------------------------------------------------------


class _Seconds(NamedTuple):
    """The seconds of an algorithm: ``latency``, in which nothing is moved, and those of the bytes alone."""

    latency: float
    transfer: float

    @property
    def alone(self) -> float:
        """Both."""
        return self.latency + self.transfer

    def times(self, count: int) -> _Seconds:
        """So many of them, one after the other."""
        return _Seconds(count * self.latency, count * self.transfer)

    def then(self, other: _Seconds) -> _Seconds:
        """This one and then another."""
        return _Seconds(self.latency + other.latency, self.transfer + other.transfer)

    def over(self, route: Route) -> float:
        """The seconds with what a route's levels take for a collective and for each of its segments."""
        segments = 2 * math.sqrt(route.segment_time * self.transfer) if route.segment_time else 0.0
        return route.start + self.alone + segments


def _algorithms(kind: str, nbytes: float, group: Group, topology: Topology) -> dict[str, _Seconds]:
    """Return what each algorithm that fits the group takes, several ranks at least."""
    route = find_route(group, topology)
    if kind in PAIRWISE:
        return _pairwise(kind, nbytes, route, find_exchange(group, topology))
    if kind in _RINGS:
        return _rings(kind, nbytes, route)
    return {"direct" if kind == "send" else "ring": _Seconds(route.latency, nbytes / route.bandwidth)}


def _rings(kind: str, nbytes: float, route: Route) -> dict[str, _Seconds]:
    """An all-reduce, all-gather, reduce-scatter or broadcast over a route, by algorithm."""
    hops = (route.size - 1) * route.latency
    times = {"ring": _passes(kind, nbytes, route.size, route.bandwidth, hops)}
    if kind == "all_reduce" and route.between:
        depth = math.ceil(math.log2(route.size))
        times["tree"] = _Seconds(depth * route.latency, nbytes / route.bandwidth).times(2)
    if route.rails > route.bandwidth:
        times["rails"] = _passes(kind, nbytes, route.size, route.rails, hops)
    inner, outer = route.inner, route.outer
    if inner is not None and outer is not None:
        bandwidth = min(inner.bandwidth, inner.size * outer.bandwidth)
        across = outer.size - (kind == "broadcast")  # which ends at the last node
        hops = (route.size - 1 - across) * inner.latency + across * outer.latency
        times["rails"] = _passes(kind, nbytes, route.size, bandwidth, hops)
        if kind == "all_reduce":
            steps = [_best_ring(*step)[1] for step in _hierarchical(nbytes, inner, outer)]
            times["hierarchical"] = steps[0].then(steps[1]).then(steps[2])
    return times


def _best_ring(kind: str, nbytes: float, route: Route) -> tuple[str, _Seconds]:
    """Return the ring algorithm that takes least, and what it takes."""
    return min(_rings(kind, nbytes, route).items(), key=lambda item: item[1].alone)


def _passes(kind: str, nbytes: float, size: int, bandwidth: float, hops: float) -> _Seconds:
    """One pass around a ring (two for an all-reduce), with the latency of a pass given."""
    return _Seconds(hops, _pass_bytes(kind, nbytes, size) / bandwidth).times(2 if kind == "all_reduce" else 1)


def _pass_bytes(kind: str, nbytes: float, size: int) -> float:
    """Bytes that go over each hop of a ring in one pass around it."""
    return nbytes if kind == "broadcast" else nbytes * (size - 1) / size


def _hierarchical(nbytes: float, inner: Route, outer: Route) -> list[tuple[str, float, Route]]:
    """The three steps of a hierarchical all-reduce: across, and inside before and after it."""
    inside = [(part, nbytes, inner) for part in ("reduce_scatter", "all_gather")]
    return [("all_reduce", nbytes / inner.size, outer), *inside]


def _pairwise(kind: str, nbytes: float, route: Route, exchange: PeerCosts) -> dict[str, _Seconds]:
    """An all-to-all, scatter or gather over a route, by algorithm: the levels at once, the slowest counts."""
    ways = exchange.any_rank if kind == "all_to_all" else exchange.first_rank
    times = [_Seconds(latency, nbytes / route.size * slowness) for latency, slowness in ways]
    name = "pairwise" if kind == "all_to_all" else "direct"
    return {name: max(times, key=lambda seconds: seconds.alone)}


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
    if exchange is not None:
        latency, loads = exchange.latency, list(exchange.loads)
    else:
        if choice is not None:
            kind, nbytes = "all_to_all", choice.bytes_of_ranks(nbytes, route.size)
        latency = route.start + _algorithms(kind, nbytes, group, topology)[algorithm].latency
        loads = _loads(kind, nbytes, route, algorithm)
    on_hops: dict[Hop, float] = {}
    for hops, size in loads:
        for hop in hops if size > 0 else ():
            on_hops[hop] = on_hops.get(hop, 0.0) + size
    return FluidCollective(algorithm, seconds, min(latency, seconds), tuple(on_hops.items()))


def _loads(kind: str, nbytes: float, route: Route, algorithm: str) -> list[Load]:
    """Return the bytes that an algorithm puts on hops."""
    group = route.family[0]
    if kind == "send":
        return [(((group[0], group[1]),), nbytes)]
    if kind == "shift":
        return [(ring_hops(route.family), nbytes)]
    if kind in PAIRWISE:
        return _pairwise_loads(kind, nbytes, group)
    return _ring_loads(kind, nbytes, route, algorithm)


def _pairwise_loads(kind: str, nbytes: float, group: Group) -> list[Load]:
    hops = {
        "all_to_all": tuple(permutations(group, 2)),
        "scatter": tuple([(group[0], b) for b in group[1:]]),
        "gather": tuple([(b, group[0]) for b in group[1:]]),
    }
    return [(hops[kind], nbytes / len(group))]


def _ring_loads(kind: str, nbytes: float, route: Route, algorithm: str) -> list[Load]:
    inner, outer = route.inner, route.outer
    if algorithm == "hierarchical" and inner is not None and outer is not None:
        steps = _hierarchical(nbytes, inner, outer)
        return [load for step in steps for load in _ring_loads(*step, _best_ring(*step)[0])]
    if algorithm == "tree":
        return [(ring_hops(route.family), 2 * nbytes)]
    moved = _pass_bytes(kind, nbytes, route.size) * (2 if kind == "all_reduce" else 1)
    if algorithm == "ring":
        return [(_chain(route.family) if kind == "broadcast" else ring_hops(route.family), moved)]
    if inner is not None and outer is not None:
        inside = [(ring_hops(inner.family), moved * (inner.size - 1) / inner.size)]
        return [*inside, (ring_hops(outer.family), moved / inner.size)]
    count = min(len(part) for cut in route.parts for part in cut)
    parts = [part for cut in route.parts for part in cut]
    inside = [(ring_hops((part,)), moved * (len(part) - 1) / len(part)) for part in parts]
    return [*inside, (ring_hops(rails_of(route.parts, count)), moved / count)]


def _chain(family: Iterable[Group]) -> tuple[Hop, ...]:
    return tuple([hop for group in family for hop in pairwise(group)])


class TokenFlow(NamedTuple):
    """An exchange of tokens: its seconds, of which ``latency`` move nothing, and bytes on hops."""

    seconds: float
    latency: float
    loads: tuple[tuple[tuple[Hop, ...], float], ...]


def token_exchange(choice: TokenChoice, nbytes: float, route: Route) -> TokenFlow | None:
    """Return how tokens of ``nbytes``, as rows for all their experts, go over a route with several nodes.

    None where it does not have equally many ranks, and several, in each of several nodes: there a token goes
    to each rank that it reaches, as in an all-to-all.
    """
    inner, outer = route.inner, route.outer
    if inner is None or outer is None:
        return None
    legs = [
        (outer, choice.bytes_of_ranks(nbytes, outer.size)),
        (inner, choice.bytes_of_ranks(nbytes, route.size)),
    ]
    moved = [(part, size * (part.size - 1) / part.size) for part, size in legs]
    latency = sum(latency_of_messages(part.size - 1, part.latency) for part, _ in moved)
    loads = tuple([(ring_hops(part.family), size) for part, size in moved])
    return TokenFlow(latency + max(size / part.bandwidth for part, size in moved), latency, loads)
