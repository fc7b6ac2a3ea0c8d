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
================== ======================================================= ===========================

One rank has nothing to send: zero. Where ranks of the group share a port or an uplink, B is what each
gets. In the last four kinds B and a are those of the links between the pairs that talk, and a rank serves
its peers one after the other.

Where a group has k ranks in each of m groups of a level (k GPUs in each of m nodes, n = k m), three more
algorithms are open, and the cheapest is taken:

- ``rails``: k rings at a time, each leaving the node by another rank's port, so that
  B = min(B inside, k B across); a pass has n-m hops inside and m-1 hops across. NCCL's multi-channel ring.
- ``hierarchical``: reduce-scatter inside, all-reduce of S/k across (k of them side by side), all-gather
  inside; likewise for the others, and recursively for more levels.
- ``tree``, for an all-reduce between nodes: 2 S/B + 2 ceil(log2 m) a.

Sources: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH"
(2005); Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009);
Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (2009);
NVIDIA's nccl-tests, PERFORMANCE.md, for what the sizes mean.
"""

from __future__ import annotations

import math

from distsim.errors import CostError
from distsim.hardware.routes import PeerCosts, Route, find_exchange, find_route
from distsim.ir.device import Device
from distsim.ir.topology import Topology

Group = tuple[Device, ...]

_RINGS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
PAIRWISE = ("all_to_all", "scatter", "gather")
COLLECTIVES: tuple[str, ...] = (*_RINGS, *PAIRWISE, "send")


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
    return min(collective_algorithms(kind, nbytes, group, topology).values())


def collective_algorithms(kind: str, nbytes: float, group: Group, topology: Topology) -> dict[str, float]:
    """Seconds of a collective by each algorithm that fits the group: name -> seconds."""
    if kind not in COLLECTIVES:
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
        return {"direct": nbytes / route.bandwidth + route.latency}
    if kind in PAIRWISE:
        return pairwise_algorithms(kind, nbytes, route, find_exchange(group, topology))
    return ring_algorithms(kind, nbytes, route)


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
        times["hierarchical"] = _hierarchical(kind, nbytes, inner, outer)
    return times


def _passes(kind: str, nbytes: float, size: int, bandwidth: float, hops: float) -> float:
    """One pass around a ring (two for an all-reduce), with the latency of a pass given."""
    moved = nbytes if kind == "broadcast" else nbytes * (size - 1) / size
    return (2 if kind == "all_reduce" else 1) * (moved / bandwidth + hops)


def _hierarchical(kind: str, nbytes: float, inner: Route, outer: Route) -> float:
    def best(part: str, size: float, route: Route) -> float:
        return min(ring_algorithms(part, size, route).values())

    if kind == "broadcast":
        return best(kind, nbytes, outer) + best(kind, nbytes, inner)
    across = best(kind, nbytes / inner.size, outer)
    if kind == "all_reduce":
        inside = best("reduce_scatter", nbytes, inner) + best("all_gather", nbytes, inner)
    else:
        inside = best(kind, nbytes, inner)
    return inside + across


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
