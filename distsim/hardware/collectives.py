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

One rank has nothing to send: zero. In the last four kinds B and a are those of the links between the
pairs that talk, and a rank serves its peers one after the other.

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
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from distsim.errors import CostError
from distsim.ir.device import Device
from distsim.ir.topology import Topology

Group = tuple[Device, ...]

_RINGS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
_PAIRWISE = ("all_to_all", "scatter", "gather")
COLLECTIVES: tuple[str, ...] = (*_RINGS, *_PAIRWISE, "send")

_CACHED_GROUPS = 4096


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
    cache = _cache(topology)
    route = cache.routes.get(group)
    if route is None:
        if len(dict.fromkeys(group)) != len(group):
            raise CostError(f"{kind}: a device occurs twice in a group of {len(group)} ranks")
        route = cache.routes[group] = _route((group,), topology)
    if kind == "send":
        if len(group) != 2:
            raise CostError(f"send goes from one device to another; the group has {len(group)}")
        return {"direct": nbytes / route.bandwidth + route.latency}
    if kind in _PAIRWISE:
        return _pairwise_algorithms(kind, nbytes, route, cache.exchange(group, topology))
    return _ring_algorithms(kind, nbytes, route)


# --- the links that a group crosses ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Route:
    """The links of equal-sized groups that run side by side; the slowest of them counts.

    ``latency`` is the mean over the hops of the slowest ring: a part passes them one after the other.
    ``rails`` is the bandwidth of several rings over all links between uneven parts of a group.
    ``inner`` and ``outer`` are set where each group has several ranks in each of several groups of a level.
    ``between`` says that no two ranks share the smallest level (one rank a node).
    """

    size: int
    bandwidth: float
    latency: float
    inner: _Route | None = None
    outer: _Route | None = None
    between: bool = False
    rails: float = 0.0


@dataclass(frozen=True, slots=True)
class _Exchange:
    """Sums over the peers of a rank: seconds per byte, and latencies; the worst rank's and the first's."""

    worst_slowness: float
    worst_latency: float
    first_slowness: float
    first_latency: float


@dataclass(slots=True)
class _Cache:
    version: int
    routes: dict[Group, _Route] = field(default_factory=dict[Group, _Route])
    exchanges: dict[Group, _Exchange] = field(default_factory=dict[Group, _Exchange])

    def exchange(self, group: Group, topology: Topology) -> _Exchange:
        found = self.exchanges.get(group)
        if found is None:
            found = self.exchanges[group] = _exchange(group, topology)
        return found


_caches: WeakKeyDictionary[Topology, _Cache] = WeakKeyDictionary()


def _cache(topology: Topology) -> _Cache:
    cache = _caches.get(topology)
    if cache is None or cache.version != topology.version or len(cache.routes) > _CACHED_GROUPS:
        cache = _caches[topology] = _Cache(topology.version)
    return cache


def _route(family: tuple[Group, ...], topology: Topology) -> _Route:
    size = len(family[0])
    bandwidth, latency = math.inf, 0.0
    for group in family:
        links = [topology.link(a, b) for a, b in zip(group, group[1:] + group[:1], strict=True) if a is not b]
        bandwidth = min([bandwidth, *(link.achieved for link in links)])
        latency = max(latency, math.fsum(link.latency for link in links) / max(len(links), 1))
    between = False
    cuts = [topology.groups_by_level(group) for group in family]
    for position, level in enumerate(topology.levels):
        parts = [cut[level.name] for cut in cuts]
        many, per = len(parts[0]), len(parts[0][0])
        if many == size:
            between = between or position == 0
            continue
        uniform = all(len(cut) == many and all(len(p) == per for p in cut) for cut in parts)
        if many > 1 and uniform:
            inner = _route(tuple(part for cut in parts for part in cut), topology)
            across = tuple(rail for cut in parts for rail in zip(*cut, strict=True))
            return _Route(size, bandwidth, latency, inner, _route(across, topology), between)
        if many > 1:
            fewest = min(len(part) for cut in parts for part in cut)
            rails = min(level.link.achieved, fewest * bandwidth)
            return _Route(size, bandwidth, latency, between=between, rails=rails)
        break
    return _Route(size, bandwidth, latency, between=between)


def _exchange(group: Group, topology: Topology) -> _Exchange:
    slowness, latency = [0.0] * len(group), [0.0] * len(group)
    if topology.has_pair_links:
        for i, a in enumerate(group):
            links = [topology.link(a, b) for b in group if b is not a]
            slowness[i] = math.fsum(1 / link.achieved for link in links)
            latency[i] = math.fsum(link.latency for link in links)
    else:
        # Levels only: counting the peers that each level adds avoids looking at every pair.
        place = {device: i for i, device in enumerate(group)}
        reached = [1] * len(group)
        levels = topology.groups_by_level(group)
        for level in topology.levels:
            for part in levels[level.name]:
                for i in (place[device] for device in part):
                    peers = len(part) - reached[i]
                    slowness[i] += peers / level.link.achieved
                    latency[i] += peers * level.link.latency
                    reached[i] = len(part)
    return _Exchange(max(slowness), max(latency), slowness[0], latency[0])


# --- the formulas ------------------------------------------------------------------------------------


def _ring_algorithms(kind: str, nbytes: float, route: _Route) -> dict[str, float]:
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


def _hierarchical(kind: str, nbytes: float, inner: _Route, outer: _Route) -> float:
    def best(part: str, size: float, route: _Route) -> float:
        return min(_ring_algorithms(part, size, route).values())

    if kind == "broadcast":
        return best(kind, nbytes, outer) + best(kind, nbytes, inner)
    across = best(kind, nbytes / inner.size, outer)
    if kind == "all_reduce":
        inside = best("reduce_scatter", nbytes, inner) + best("all_gather", nbytes, inner)
    else:
        inside = best(kind, nbytes, inner)
    return inside + across


def _pairwise_algorithms(kind: str, nbytes: float, route: _Route, exchange: _Exchange) -> dict[str, float]:
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
