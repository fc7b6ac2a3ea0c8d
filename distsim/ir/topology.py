"""What joins the devices: links between pairs, and levels of a hierarchy.

A pair table (``set_bandwidth``) describes a few devices. A cluster of thousands is described by levels:
each level cuts the devices, in the order of their ids, into groups of equal size, and two devices are
joined by the link of the smallest level whose group holds both. A pair that was set overrides the levels.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from distsim.errors import TopologyError
from distsim.ir.device import Device
from distsim.ir.link import Link


@dataclass(frozen=True, slots=True)
class Level:
    """A level of the hierarchy, for example ``Level("nvlink", Link(300e9), 8)``.

    ``group_size`` is the number of devices in one group, ``None`` for all devices of the topology. The
    link is that of a port: a switch whose ports all run at this bandwidth. ``devices_per_port``
    neighbours share one port (two GPUs on one NIC); by default each device has its own. A collective that
    crosses the level takes ``start`` seconds to begin, once, whatever its ranks, and each of the segments in
    which it moves its bytes takes ``segment_time`` seconds (:mod:`distsim.hardware.collectives`). The groups
    of the level below (single devices, if there is none) are joined by uplinks that together carry what
    their ports carry, divided by ``oversubscription``.

    Raises :class:`TopologyError` for figures that make no sense.
    """

    name: str
    link: Link
    group_size: int | None = None
    devices_per_port: int = 1
    oversubscription: float = 1.0
    start: float = 0.0
    segment_time: float = 0.0

    def __post_init__(self) -> None:
        if self.group_size is not None and self.group_size < 2:
            raise TopologyError(
                f"level {self.name!r}: groups of {self.group_size} have nothing to join; use 2 or more"
            )
        if self.devices_per_port < 1 or (self.group_size or self.devices_per_port) % self.devices_per_port:
            raise TopologyError(
                f"level {self.name!r}: devices_per_port={self.devices_per_port} must be at least 1 and "
                f"divide the group of {self.group_size or 'all'} devices"
            )
        if not (math.isfinite(self.oversubscription) and self.oversubscription >= 1):
            raise TopologyError(
                f"level {self.name!r}: oversubscription={self.oversubscription} must be finite and at least 1"
            )
        for name, seconds in (("start", self.start), ("segment_time", self.segment_time)):
            if not 0 <= seconds < math.inf:
                raise TopologyError(
                    f"level {self.name!r}: {name}={seconds} must be finite and not negative (seconds)"
                )

    @property
    def shared(self) -> bool:
        """Whether several devices share a port or an uplink that cannot carry all of them at once."""
        return self.devices_per_port > 1 or self.oversubscription > 1


class Topology:
    """Devices and the links between them.

    >>> topology = Topology()
    >>> a, b = topology.add_device("gpu"), topology.add_device("gpu")
    >>> topology.set_bandwidth(a, b, gbps=200)
    >>> topology.link(a, b).bandwidth
    25000000000.0
    """

    def __init__(self) -> None:
        self._devices: list[Device] = []
        self._links: dict[tuple[int, int], Link] = {}
        self._levels: tuple[Level, ...] = ()
        self._own: dict[tuple[str, int], Level] = {}
        self._kinds: tuple[int, ...] = ()
        self._version = 0
        self._views: dict[int, Topology] = {}

    @classmethod
    def hierarchical(cls, device: Device, count: int, levels: Iterable[Level]) -> Topology:
        """``count`` copies of a device (ids from 0), joined by levels from the smallest to the largest.

        >>> Topology.hierarchical(Device(0, "gpu"), 1024, [Level("nvlink", Link(3e11), 8),
        ...     Level("infiniband", Link(25e9))])
        Topology(1024 devices; nvlink of 8, infiniband of all)
        """
        if count < 1:
            raise TopologyError(f"a topology needs at least one device, not {count}")
        return cls.of_devices([device] * count, levels)

    @classmethod
    def of_devices(cls, devices: Sequence[Device], levels: Iterable[Level]) -> Topology:
        """Copies of devices, which need not be alike, with ids in their order, joined by levels.

        >>> slow, fast = Device(0, "gpu", throughput=1e13), Device(0, "gpu", throughput=2e13)
        >>> Topology.of_devices([fast, fast, slow], [Level("nvlink", Link(3e11))]).devices[2].throughput
        10000000000000.0
        """
        topology = cls()
        topology._devices = [dataclasses.replace(device, id=i) for i, device in enumerate(devices)]
        for level in levels:
            topology._add(level)
        return topology

    def add_device(
        self,
        kind: str,
        throughput: float = 1.4e13,
        dram_bandwidth: float = 9e11,
        kernel_launch_overhead: float = 1e-5,
        *,
        memory: float = math.inf,
        peaks: Sequence[tuple[str, float]] = (),
        flops_efficiency: float = 1.0,
        bytes_efficiency: float = 1.0,
    ) -> Device:
        """Add a device, with the next id, and return it. Figures and units as in :class:`Device`."""
        device = Device(
            len(self._devices),
            kind,
            throughput,
            dram_bandwidth,
            kernel_launch_overhead,
            memory,
            tuple(peaks),
            flops_efficiency,
            bytes_efficiency,
        )
        self._devices.append(device)
        self._version += 1
        return device

    @property
    def devices(self) -> list[Device]:
        """All devices in the order of their ids (a fresh list)."""
        return list(self._devices)

    @property
    def levels(self) -> tuple[Level, ...]:
        """The levels of the hierarchy, smallest groups first; empty for a plain pair table."""
        return self._levels

    @property
    def has_pair_links(self) -> bool:
        """Whether some pair was set on its own."""
        return bool(self._links)

    @property
    def has_shared_ports(self) -> bool:
        """Whether some level has ports or uplinks that several devices share."""
        return any(level.shared for level in (*self._levels, *self._own.values()))

    @property
    def kinds_of_links(self) -> tuple[int, ...]:
        """A number for each device, equal where levels of their own are equal; empty if none has any."""
        return self._kinds

    def of_direct_writes(self) -> Topology:
        """Return the links for kernels that write to their peers' memory: within the innermost level nothing
        begins first or goes in segments, as in NCCL.
        """
        found = self._views.get(self._version)
        if found is None:
            found = self._views[self._version] = self.with_devices(self._devices)
            inner = [_direct(level) for level in self._levels[:1]]
            found._levels = (*inner, *self._levels[1:])
            names = [level.name for level in inner]
            found._own = {key: _direct(own) if key[0] in names else own for key, own in self._own.items()}
        return found

    def with_devices(self, devices: Sequence[Device]) -> Topology:
        """Return the same links between other devices, as many, of the same ids."""
        made = Topology()
        made._devices, made._links, made._version = list(devices), dict(self._links), self._version
        made._levels, made._own, made._kinds = self._levels, dict(self._own), self._kinds
        return made

    @property
    def cuts(self) -> tuple[int, ...]:
        """The group sizes of the levels, and of ports that devices share: what divides the ids."""
        sizes = [level.group_size for level in self._levels if level.group_size is not None]
        every = (*self._levels, *self._own.values())
        ports = [level.devices_per_port for level in every if level.devices_per_port > 1]
        return tuple(dict.fromkeys([*sizes, *ports]))

    @property
    def version(self) -> int:
        """A number that grows with each change, so that what is derived can be cached."""
        return self._version

    def set_bandwidth(self, a: Device, b: Device, gbps: float, latency: float = 0.0) -> None:
        """Join two devices, both ways, at ``gbps`` Gbit/s (1e9 bits/s) and ``latency`` seconds."""
        self.set_link(a, b, Link(gbps * 1e9 / 8, latency))

    def set_link(self, a: Device, b: Device, link: Link) -> None:
        """Join two devices, both ways, by this link; it overrides the levels."""
        self._check(a)
        self._check(b)
        if a.id == b.id:
            raise TopologyError(f"{a} needs no link to itself")
        self._links[a.id, b.id] = self._links[b.id, a.id] = link
        self._version += 1

    def add_level(
        self,
        name: str,
        link: Link,
        group_size: int | None = None,
        *,
        devices_per_port: int = 1,
        oversubscription: float = 1.0,
    ) -> Level:
        """Add a level above those there are; ``group_size`` is a multiple of theirs, ``None`` for all.

        ``devices_per_port`` and ``oversubscription`` as in :class:`Level`; ports lie inside a group of
        the level below, or hold whole ones.
        """
        return self._add(Level(name, link, group_size, devices_per_port, oversubscription))

    def _add(self, level: Level) -> Level:
        name, group_size, ports = level.name, level.group_size, level.devices_per_port
        below = self._levels[-1] if self._levels else None
        if any(other.name == name for other in self._levels):
            raise TopologyError(f"there is a level {name!r} already; give each level its own name")
        if below is None and level.oversubscription > 1:
            raise TopologyError(
                f"level {name!r}: oversubscription={level.oversubscription} needs a level below it"
            )
        if below is not None:
            if below.group_size is None:
                raise TopologyError(f"level {below.name!r} holds all devices: add {name!r} before it")
            if group_size is not None and (group_size <= below.group_size or group_size % below.group_size):
                raise TopologyError(
                    f"level {name!r}: groups of {group_size} must be a multiple of, and larger than, "
                    f"the {below.group_size} of {below.name!r}"
                )
            if below.group_size % ports and ports % below.group_size:
                raise TopologyError(
                    f"level {name!r}: ports of {ports} devices would straddle the groups of "
                    f"{below.group_size} of {below.name!r}; one of the two must be a multiple of the other"
                )
        self._levels = (*self._levels, level)
        self._version += 1
        return level

    def set_levels_of(self, first: int, count: int, levels: Sequence[Level]) -> None:
        """Give so many devices from one on, whole groups of these levels, levels of their own.

        Each stands in the place of the one of its name, as that of groups of another kind of node. Raises
        :class:`TopologyError` for a level that has no such place.
        """
        for own in levels:
            here = [level for level in self._levels if level.name == own.name]
            size = own.group_size
            if size is None or not here or here[0].group_size != size or first % size or count % size:
                raise TopologyError(
                    f"level {own.name!r} of groups of {size or 'all'} has no place on {count} devices from "
                    f"{first} on in {self}; it must be of whole groups of the level of its name"
                )
            groups = range(first // size, (first + count) // size)
            self._own.update({(own.name, group): own for group in groups if own != here[0]})
        numbers: dict[tuple[Level, ...], int] = {}
        kinds = [tuple([self.level_of(level, device) for level in self._levels]) for device in self._devices]
        found = tuple([numbers.setdefault(kind, len(numbers)) for kind in kinds])
        self._kinds = found if len(numbers) > 1 else ()
        self._version += 1

    def level_of(self, level: Level, device: Device) -> Level:
        """Return a level as it is where a device stands."""
        if not self._own or level.group_size is None:
            return level
        return self._own.get((level.name, device.id // level.group_size), level)

    def link(self, a: Device, b: Device) -> Link:
        """The link between two devices; :class:`TopologyError` when nothing joins them."""
        self._check(a)
        self._check(b)
        pair = self._links.get((a.id, b.id))
        if pair is not None:
            return pair
        if a.id == b.id:
            raise TopologyError(f"{a} has no link to itself; nothing has to be sent")
        level = self._level(a.id, b.id)
        if level is None:
            raise TopologyError(
                f"no link between {a} and {b}: call set_bandwidth({a}, {b}, gbps) "
                "or add_level(name, link) to join all devices"
            )
        return level.link

    def pair_links(self, devices: Sequence[Device]) -> tuple[tuple[int, int, Link], ...]:
        """The links of pairs that were set among these devices: (place of one, place of the other, link)."""
        if not self._links:
            return ()
        place = {device.id: i for i, device in enumerate(devices)}
        if len(place) ** 2 < len(self._links):
            pairs = [(a, b) for a in place for b in place if (a, b) in self._links]
        else:
            pairs = [(a, b) for a, b in self._links if a in place and b in place]
        return tuple(sorted([(place[a], place[b], self._links[a, b]) for a, b in pairs], key=lambda p: p[:2]))

    def level(self, a: Device, b: Device) -> Level | None:
        """The level that joins two devices, ``None`` for a pair that was set; raises as :meth:`link`."""
        self.link(a, b)
        return None if (a.id, b.id) in self._links else self._level(a.id, b.id)

    def groups_by_level(self, devices: Sequence[Device]) -> dict[str, tuple[tuple[Device, ...], ...]]:
        """These devices as each level cuts them; groups and members in the order given."""
        for device in devices:
            self._check(device)
        return {level.name: _cut(devices, level.group_size) for level in self._levels}

    def _level(self, a: int, b: int) -> Level | None:
        for level in self._levels:
            if level.group_size is None:
                return level
            if a // level.group_size == b // level.group_size:
                return self._own.get((level.name, a // level.group_size), level) if self._own else level
        return None

    def _check(self, device: Device) -> None:
        count = len(self._devices)
        if device.id >= count or (
            self._devices[device.id] is not device and self._devices[device.id] != device
        ):
            raise TopologyError(
                f"{device} is not one of the {count} devices of this topology; use what add_device returned"
            )

    def __repr__(self) -> str:
        levels = ", ".join(f"{level.name} of {level.group_size or 'all'}" for level in self._levels)
        pairs = f"{len(self._links) // 2} links" if self._links or not levels else ""
        return f"Topology({len(self._devices)} devices; {', '.join(filter(None, (levels, pairs)))})"


def _direct(level: Level) -> Level:
    return dataclasses.replace(level, start=0.0, segment_time=0.0)


def _cut(devices: Sequence[Device], group_size: int | None) -> tuple[tuple[Device, ...], ...]:
    if group_size is None:
        return (tuple(devices),)
    groups: dict[int, list[Device]] = {}
    for device in devices:
        groups.setdefault(device.id // group_size, []).append(device)
    return tuple(map(tuple, groups.values()))
