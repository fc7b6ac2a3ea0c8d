"""What lies between devices: the channels that their messages pass, and the links that a group crosses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import permutations

from distsim.cache import Cache
from distsim.errors import CostError
from distsim.ir.device import Device
from distsim.ir.topology import Level, Topology

Group = tuple[Device, ...]
Hop = tuple[Device, Device]


class GroupOfMany(tuple[Device, ...]):
    """A group beside others that do the same at once, ``family``, itself among them: they divide what they
    share. It is as long as one of these, and equal to none that is alone."""

    family: tuple[Group, ...]
    _hash: int

    def __new__(cls, group: Group, family: tuple[Group, ...]) -> GroupOfMany:
        """Return the group with its family."""
        made = super().__new__(cls, group)
        made.family, made._hash = family, hash((tuple(group), family))
        return made

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GroupOfMany):
            return False
        return self._hash == other._hash and tuple(self) == tuple(other) and self.family == other.family

    def __ne__(self, other: object) -> bool:
        return not self == other  # that of tuples compares devices alone

    def __reduce__(self) -> tuple[object, ...]:
        return GroupOfMany, (tuple(self), self.family)


def among(group: Group, family: tuple[Group, ...], topology: Topology) -> Group:
    """Return a group with its family, or as it is where nobody shares anything."""
    return GroupOfMany(group, family) if len(family) > 1 and topology.has_shared_ports else group


def family_of(group: Group) -> tuple[Group, ...]:
    """Return the groups that do the same at once, the given one first."""
    if not isinstance(group, GroupOfMany):
        return (group,)
    own = tuple(group)
    return (own, *[each for each in group.family if each != own])


@dataclass(frozen=True, slots=True)
class Channel:
    """One direction of something that messages share: a port, an uplink, or the link of a pair.

    ``capacity`` is in bytes/s, what large messages achieve.
    """

    name: str
    capacity: float


@dataclass(frozen=True, slots=True)
class Route:
    """The links of equal-sized groups (``family``) that run side by side; the slowest of them counts.

    ``latency`` is the mean over the hops of the slowest ring: a part passes them one after the other.
    ``rails`` is the bandwidth of several rings over all links between uneven parts of a group, ``parts``.
    ``start`` are the seconds that a collective takes to begin, ``segment_time`` those of one of its
    segments, of the level that takes most.
    ``inner`` and ``outer`` are set where each group has several ranks in each of several groups of a level.
    ``between`` says that no two ranks share the smallest level (one rank a node).
    """

    family: tuple[Group, ...]
    bandwidth: float
    latency: float
    inner: Route | None = None
    outer: Route | None = None
    between: bool = False
    rails: float = 0.0
    parts: tuple[tuple[Group, ...], ...] = ()
    start: float = 0.0
    segment_time: float = 0.0

    @property
    def size(self) -> int:
        """The number of ranks of a group."""
        return len(self.family[0])


MESSAGE_POST = 2e-6
"""Seconds until the next of several messages is under way, where a link's latency is longer: what a post to a
network costs in NCCL's tuning model (``getNetOverhead``: 2 us on hosts of AMD, 1 us on Intel's)."""


def latency_of_messages(count: int, latency: float) -> float:
    """Seconds in which nothing is moved of so many messages of a rank, posted one after the other."""
    return latency + (count - 1) * min(latency, MESSAGE_POST)


Way = tuple[float, float]
"""What a rank sends over one level: its latency, and the seconds of a byte to each of its peers there."""


@dataclass(frozen=True, slots=True)
class PeerCosts:
    """What ranks have between them and all their peers, level by level: any rank's, and the first one's."""

    any_rank: tuple[Way, ...]
    first_rank: tuple[Way, ...]


_ROUTES = Cache[Topology, Route]("the links that a group crosses, by topology, its version and group", 4096)
_EXCHANGES = Cache[Topology, PeerCosts]("sums over peers, by topology, its version and group", 4096)
_CHANNELS = Cache[Topology, tuple[Channel, ...]]("channels of a hop, by topology, its version and hop", 2**18)


def find_route(group: Group, topology: Topology) -> Route:
    """Return the links that a group crosses; :class:`CostError` for a device that occurs twice."""
    return _ROUTES.get(topology, (topology.version, group), lambda: _route_of(group, topology))


def find_exchange(group: Group, topology: Topology) -> PeerCosts:
    """Return what the ranks of a group have between them and all their peers."""
    return _EXCHANGES.get(topology, (topology.version, group), lambda: _exchange(group, topology))


def channels(a: Device, b: Device, topology: Topology) -> tuple[Channel, ...]:
    """Return the channels that a message from ``a`` to ``b`` passes; ``TopologyError`` if there are none.

    >>> from distsim.ir.link import Link
    >>> topology = Topology.hierarchical(Device(0, "gpu"), 4, [Level("nvlink", Link(3e11), 2),
    ...     Level("nic", Link(25e9), devices_per_port=2)])
    >>> for channel in channels(topology.devices[1], topology.devices[2], topology):
    ...     print(channel)
    Channel(name='nic port of gpu:0..gpu:1, out', capacity=25000000000.0)
    Channel(name='nic port of gpu:2..gpu:3, in', capacity=25000000000.0)
    """
    return _CHANNELS.get(topology, (topology.version, a, b), lambda: _channels(a, b, topology))


def port(device: Device, level: Level) -> tuple[Channel, Channel]:
    """Return the two directions, out and in, of the port that a device has at a level."""
    name = f"{level.name} port of {_neighbours(device, level.devices_per_port)}"
    return Channel(f"{name}, out", level.link.achieved), Channel(f"{name}, in", level.link.achieved)


def _channels(a: Device, b: Device, topology: Topology) -> tuple[Channel, ...]:
    level = topology.level(a, b)
    if level is None:
        return (Channel(f"link {a} to {b}", topology.link(a, b).achieved),)
    out, into = port(a, level)[0], port(b, level)[1]
    if not level.oversubscription > 1:
        return out, into
    place = next(i for i, each in enumerate(topology.levels) if each.name == level.name)
    below = topology.levels[place - 1].group_size or 1
    capacity = level.link.achieved * below / level.devices_per_port / level.oversubscription
    uplinks = [f"{level.name} uplink of {_neighbours(device, below)}" for device in (a, b)]
    return out, Channel(f"{uplinks[0]}, out", capacity), Channel(f"{uplinks[1]}, in", capacity), into


def _neighbours(device: Device, count: int) -> str:
    if count == 1:
        return str(device)
    first = device.id - device.id % count
    return f"{device.kind}:{first}..{device.kind}:{first + count - 1}"


def ring_hops(family: Iterable[Group]) -> tuple[Hop, ...]:
    """Return the hops of the rings over these groups, the last rank to the first included."""
    return tuple(
        [(a, b) for group in family for a, b in zip(group, group[1:] + group[:1], strict=True) if a != b]
    )


def _bandwidth(family: tuple[Group, ...], topology: Topology) -> float:
    """Return the bytes/s of the slowest hop when all rings run side by side."""
    hops = ring_hops(family)
    if not topology.has_shared_ports:
        return min((topology.link(a, b).achieved for a, b in hops), default=math.inf)
    users = Counter(channel for a, b in hops for channel in channels(a, b, topology))
    return min((channel.capacity / count for channel, count in users.items()), default=math.inf)


def _route_of(group: Group, topology: Topology) -> Route:
    if len(dict.fromkeys(group)) != len(group):
        raise CostError(f"a device occurs twice in a group of {len(group)} ranks")
    route = _route(family_of(group), topology)
    if not any(level.start or level.segment_time for level in topology.levels):
        return route
    levels = {topology.level(a, b) for a, b in ring_hops((group,))}
    crossed = [level for level in levels if level is not None]
    start = max([level.start for level in crossed], default=0.0)
    return replace(
        route, start=start, segment_time=max([level.segment_time for level in crossed], default=0.0)
    )


def _route(family: tuple[Group, ...], topology: Topology) -> Route:
    size = len(family[0])
    bandwidth, latency = _bandwidth(family, topology), 0.0
    for group in family:
        hops = ring_hops((group,))
        passed = math.fsum(topology.link(a, b).latency for a, b in hops)
        latency = max(latency, passed / max(len(hops), 1))
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
            return Route(family, bandwidth, latency, inner, _route(across, topology), between)
        if many > 1:
            fewest = min(len(part) for cut in parts for part in cut)
            rail = bandwidth
            if topology.has_shared_ports:  # one ring leaves by one port, several may meet at one
                rail = min(bandwidth, _bandwidth(rails_of(parts, fewest), topology))
            inside = [topology.level_of(level, part[0]).link.achieved for cut in parts for part in cut]
            rails = min(*inside, fewest * rail)
            return Route(family, bandwidth, latency, between=between, rails=rails, parts=tuple(parts))
        break
    return Route(family, bandwidth, latency, between=between)


def rails_of(parts: Iterable[tuple[Group, ...]], count: int) -> tuple[Group, ...]:
    """Return ``count`` rails across the parts of each group: the first ranks of all parts, the second, ..."""
    return tuple([tuple(part[i] for part in cut) for cut in parts for i in range(count)])


def _exchange(group: Group, topology: Topology) -> PeerCosts:
    family = family_of(group)
    group = family[0]
    if topology.has_pair_links:  # nothing says which of them leave a rank at once: one after the other
        ways: list[Way] = []
        for a in group:
            links = [topology.link(a, b) for b in group if b is not a]
            latency = math.fsum(link.latency for link in links)
            ways.append((latency, math.fsum(1 / link.achieved for link in links)))
        return PeerCosts(tuple(dict.fromkeys(ways)), (ways[0],))
    ranks = [
        _ways(device, peers, topology)
        for device, peers in zip(group, _peers_by_level(group, topology), strict=True)
    ]
    if not topology.has_shared_ports:
        return PeerCosts(tuple(dict.fromkeys([way for own in ranks for way in own])), ranks[0])
    # Where ports are shared a byte to each peer keeps a channel busy for what all its ranks put on it.
    load: Counter[Channel] = Counter()
    for each in family:
        for a, b in permutations(each, 2):
            load.update(channels(a, b, topology))
    slowness = max((count / channel.capacity for channel, count in load.items()), default=0.0)
    latency = max([latency for own in ranks for latency, _ in own])
    first: dict[Level | None, float] = {}
    for b in group[1:]:  # on its own it shares with no one, but passes the narrowest channel
        level = topology.level(group[0], b)
        passed = min(channel.capacity for channel in channels(group[0], b, topology))
        first[level] = first.get(level, 0.0) + 1 / passed
    return PeerCosts(((latency, slowness),), ((max([way[0] for way in ranks[0]]), max(first.values())),))


def _peers_by_level(group: Group, topology: Topology) -> list[tuple[int, ...]]:
    """Return of each rank how many peers each level joins it with; without looking at every pair."""
    place = {device: i for i, device in enumerate(group)}
    reached, found = [1] * len(group), [list[int]() for _ in group]
    levels = topology.groups_by_level(group)
    for level in topology.levels:
        for part in levels[level.name]:
            for i in (place[device] for device in part):
                found[i].append(len(part) - reached[i])
                reached[i] = len(part)
    return [tuple(peers) for peers in found]


def _ways(device: Device, peers: Iterable[int], topology: Topology) -> tuple[Way, ...]:
    """Return what the messages of a rank on a device take at each level that it has peers by."""
    links = [topology.level_of(level, device).link for level in topology.levels]
    return tuple(
        [
            (latency_of_messages(count, link.latency), count / link.achieved)
            for count, link in zip(peers, links, strict=True)
            if count
        ]
    )
