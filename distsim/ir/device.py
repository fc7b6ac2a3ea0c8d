"""Devices, and the named grids that ranks are laid out on.

A :class:`Device` is physical (what a kernel runs on); a :class:`Mesh` is logical (which devices play
which rank along the axes ``dp``, ``pp``, ``tp``, ...). Both are values: equal content is equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from distsim.errors import TopologyError
from distsim.ir.kernel_rates import NO_RATES, KernelRates
from distsim.ir.link import Link


@dataclass(frozen=True, slots=True, repr=False)
class Device:
    """One accelerator (or host), with the figures a roofline needs.

    ``throughput`` is in FLOP/s and holds for every dtype that ``peaks`` does not name; ``peaks`` gives the
    FLOP/s of matrix operations by dtype name. ``dram_bandwidth`` is in bytes/s, ``kernel_launch_overhead``
    in seconds, ``memory`` in bytes (infinite: never full), of which ``context`` is what the driver and the
    communication library take, and ``fragmentation`` the share of the bytes in use that the allocator of a
    framework takes on top; it gives a tensor whole blocks of ``block`` bytes, and has memory in segments of
    ``segment`` bytes. The efficiencies, in (0, 1], are the achieved share of the peak FLOP/s and of
    the DRAM bandwidth, at best: ``rates`` say what kernels reach of it. ``host_link`` is what joins it to the
    memory of its host, each way: None if that is not known. ``flops_efficiency`` is that of the slowest of
    ``slowest_of`` devices whose times differ by a standard deviation of ``variation`` of the usual one. Of a
    device that takes ``slow_factor`` times as long as its kind the figures are what it reaches; shares of a
    peak (MFU) are of that of its kind. The defaults are those of the DistIR notebooks.

    Raises :class:`TopologyError` for a figure that is not positive and finite.

    >>> gpu = Device(3, "gpu", throughput=19.5e12, peaks=(("bfloat16", 312e12),))
    >>> gpu, gpu.peak("bfloat16"), gpu.peak("float32")
    (gpu:3, 312000000000000.0, 19500000000000.0)
    """

    id: int
    kind: str
    throughput: float = 1.4e13
    dram_bandwidth: float = 9e11
    kernel_launch_overhead: float = 1e-5
    memory: float = math.inf
    peaks: tuple[tuple[str, float], ...] = ()
    flops_efficiency: float = 1.0
    bytes_efficiency: float = 1.0
    context: float = 0.0
    fragmentation: float = 0.0
    block: int = 1
    segment: int = 1
    host_link: Link | None = None
    rates: KernelRates = NO_RATES
    variation: float = 0.0
    slowest_of: int = 1
    slow_factor: float = 1.0
    _hash: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if self.id < 0:
            raise TopologyError(f"a device's id counts up from 0, not {self.id}")
        for name in ("throughput", "dram_bandwidth"):
            self._check(name, getattr(self, name))
        for dtype, flops in self.peaks:
            self._check(f"peaks[{dtype}]", flops)
        for name in ("flops_efficiency", "bytes_efficiency"):
            self._check(name, getattr(self, name), at_most=1.0)
        # A launch may be free, as in a machine that is all roofline; nothing else may be zero.
        if self.kernel_launch_overhead != 0:
            self._check("kernel_launch_overhead", self.kernel_launch_overhead)
        if self.memory != math.inf:
            self._check("memory", self.memory)
        if not 0 <= self.context < self.memory:
            raise TopologyError(
                f"device {self}: context={self.context} must be at least 0 and less than memory"
            )
        if not 0 <= self.fragmentation < math.inf:
            raise TopologyError(
                f"device {self}: fragmentation={self.fragmentation} must be at least 0 and finite"
            )
        for name, size in (("block", self.block), ("segment", self.segment)):
            if size < 1:
                raise TopologyError(f"device {self}: {name}={size} must be at least a byte")
        # Numbers only: the hash of a string differs between processes, and a pickled device keeps this one.
        object.__setattr__(self, "_hash", hash((self.id, self.throughput, self.dram_bandwidth, self.memory)))

    def _check(self, name: str, value: float, at_most: float = math.inf) -> None:
        if not (math.isfinite(value) and 0 < value <= at_most):
            bound = "" if at_most == math.inf else f", at most {at_most:g}"
            raise TopologyError(f"device {self}: {name}={value} must be positive and finite{bound}")

    def peak(self, dtype_name: str) -> float:
        """FLOP/s of matrix operations in a dtype: its entry in ``peaks``, or else ``throughput``."""
        for name, flops in self.peaks:
            if name == dtype_name:
                return flops
        return self.throughput

    @property
    def usable(self) -> float:
        """Bytes that tensors can take: whole segments of the memory without the context, and with room for
        fragmentation."""
        size = (self.memory - self.context) / (1.0 + self.fragmentation)
        return size if self.segment == 1 or size == math.inf else size // self.segment * self.segment

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"{self.kind}:{self.id}"


NO_VIEWS: Mapping[str, tuple[str, ...]] = MappingProxyType({})


class Mesh:
    """Devices with named axes, in row-major order: the last axis varies fastest.

    A *view* is a name for several axes together, the last fastest: groups of experts, say, are some of the
    data-parallel ranks (``views={"dp": ("edp", "ep")}``). Views are named where axes are.

    Immutable, compared and hashed by value. Raises :class:`TopologyError` when the axis sizes do not
    multiply to the number of devices, when a device occurs twice, or for a view of no axes of the mesh.

    >>> mesh = Mesh([Device(i, "gpu") for i in range(8)], dp=2, tp=4)
    >>> mesh
    Mesh(dp=2, tp=4)[gpu:0..gpu:7]
    >>> mesh.at(tp=1)
    Mesh(dp=2)[gpu:1, gpu:5]
    >>> mesh.groups("dp")[0]
    (gpu:0, gpu:4)
    >>> experts = Mesh(mesh.devices, {"dp": ("edp", "ep")}, edp=2, ep=2, tp=2)
    >>> experts.axis_size("dp"), experts.groups("ep")[0], experts.groups("dp")[0]
    (4, (gpu:0, gpu:2), (gpu:0, gpu:2, gpu:4, gpu:6))
    """

    __slots__ = ("_along", "_axes", "_devices", "_groups", "_hash", "_index", "_slices", "_strides", "_views")

    def __init__(
        self, devices: Sequence[Device], views: Mapping[str, tuple[str, ...]] = NO_VIEWS, /, **axes: int
    ) -> None:
        self._devices = tuple(devices)
        self._axes = tuple(axes.items())
        self._views = dict(views)
        self._index = {device: position for position, device in enumerate(self._devices)}
        self._groups: dict[tuple[str, ...], tuple[tuple[Device, ...], ...]] = {}
        self._slices: dict[tuple[tuple[str, int], ...], Mesh] = {}
        self._along: dict[str, tuple[Mesh, ...]] = {}
        self._strides: dict[str, int] = {}
        stride = 1
        for name, size in reversed(self._axes):
            if size < 1:
                raise TopologyError(f"mesh axis {name}={size} must be at least 1")
            self._strides[name] = stride
            stride *= size
        if stride != len(self._devices):
            shape = ", ".join(f"{name}={size}" for name, size in self._axes) or "no axes"
            raise TopologyError(f"a mesh of {shape} needs {stride} devices, not {len(self._devices)}")
        if len(self._index) != len(self._devices):
            twice = next(d for i, d in enumerate(self._devices) if self._index[d] != i)
            raise TopologyError(f"{twice} occurs twice in a mesh; each device has one place in it")
        for name, members in self._views.items():
            if not members or name in axes or len({*members} & {*axes}) != len(members):
                raise TopologyError(f"view {name} of axes {list(members)}: the axes are {', '.join(axes)}")
        # Numbers only, for the reason given in Device.
        self._hash = hash((self._devices, tuple(size for _, size in self._axes)))

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices in row-major order of the axes."""
        return self._devices

    @property
    def block(self) -> int:
        """Bytes of a block of memory on the first device: a mesh is of devices of one kind."""
        return self._devices[0].block

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the axes, slowest first."""
        return self._axes

    @property
    def views(self) -> Mapping[str, tuple[str, ...]]:
        """The axes that each view stands for."""
        return self._views

    def axes_of(self, name: str) -> tuple[str, ...]:
        """The axes that a name stands for: one, or those of a view."""
        return self._views.get(name, (name,))

    def axis_size(self, name: str) -> int:
        """The size of an axis or a view; :class:`TopologyError` if the mesh has none of this name."""
        if name in self._views:
            return math.prod([self.axis_size(axis) for axis in self._views[name]])
        for axis, size in self._axes:
            if axis == name:
                return size
        raise self._no_axis(name)

    def at(self, **coordinates: int) -> Mesh:
        """The slice at these coordinates: a mesh without those axes, and views of them."""
        key = tuple(sorted(coordinates.items()))
        found = self._slices.get(key)
        if found is not None:
            return found
        base = 0
        for name, coordinate in coordinates.items():
            size = self.axis_size(name)
            if not 0 <= coordinate < size:
                raise TopologyError(f"{name}={coordinate} lies outside of the mesh axis {name}={size}")
            for axis, own in self.split(name, coordinate).items():
                base += own * self._strides[axis]
        gone = {axis for name in coordinates for axis in self.axes_of(name)}
        rest = {name: size for name, size in self._axes if name not in gone}
        views = {name: members for name, members in self._views.items() if gone.isdisjoint(members)}
        made = Mesh([self._devices[base + offset] for offset in self._offsets(tuple(rest))], views, **rest)
        self._slices[key] = made
        return made

    def resized(self, device: Device, sizes: Mapping[str, int]) -> Mesh:
        """The mesh with these sizes in place of its own, of devices like ``device``, numbered from 0."""
        axes = {**dict(self._axes), **sizes}
        devices = [replace(device, id=i) for i in range(math.prod(axes.values()))]
        return Mesh(devices, self._views, **axes)

    def slices(self, axis: str) -> tuple[Mesh, ...]:
        """The slices along an axis: what :meth:`at` gives for each of its coordinates."""
        found = self._along.get(axis)
        if found is None:
            found = tuple([self.at(**{axis: i}) for i in range(self.axis_size(axis))])
            self._along[axis] = found
        return found

    def groups(self, *axis_names: str) -> tuple[tuple[Device, ...], ...]:
        """The groups of devices that a collective along these axes runs over.

        Devices in a group are in rank order along the axes as named (the last fastest); the groups are in
        row-major order of the other axes. Without a name, every device is a group of its own.
        """
        found = self._groups.get(axis_names)
        if found is not None:
            return found
        names = tuple([axis for name in axis_names for axis in self.axes_of(name)])
        if len(dict.fromkeys(names)) != len(names):
            raise TopologyError(f"mesh axes {list(axis_names)} name an axis twice")
        along = self._offsets(names)
        rest = self._offsets(tuple(name for name, _ in self._axes if name not in names))
        made = tuple(tuple(self._devices[base + offset] for offset in along) for base in rest)
        self._groups[axis_names] = made
        return made

    def coordinates(self, device: Device) -> dict[str, int]:
        """Where a device stands on each axis; :class:`TopologyError` if it is not in the mesh."""
        position = self._index.get(device)
        if position is None:
            raise TopologyError(f"{device} is not in {self}")
        return {name: position // self._strides[name] % size for name, size in self._axes}

    def split(self, name: str, coordinate: int) -> dict[str, int]:
        """The coordinates on the axes of a view that are one coordinate on it.

        >>> Mesh([Device(i, "gpu") for i in range(6)], {"dp": ("outer", "ep")}, outer=3, ep=2).split("dp", 3)
        {'outer': 1, 'ep': 1}
        """
        found: dict[str, int] = {}
        for axis in reversed(self.axes_of(name)):
            coordinate, found[axis] = divmod(coordinate, self.axis_size(axis))
        return dict(reversed(found.items()))

    def coordinate(self, device: Device, name: str) -> int:
        """Where a device stands on an axis or a view (see :meth:`coordinates`)."""
        place, found = self.coordinates(device), 0
        for axis in self.axes_of(name):
            found = found * self.axis_size(axis) + place[axis]
        return found

    def _offsets(self, names: tuple[str, ...]) -> list[int]:
        offsets = [0]
        for name in names:
            size, stride = self.axis_size(name), self._strides[name]
            offsets = [offset + i * stride for offset in offsets for i in range(size)]
        return offsets

    def _no_axis(self, name: str) -> TopologyError:
        names = ", ".join([*(axis for axis, _ in self._axes), *self._views]) or "none"
        return TopologyError(f"{self} has no axis {name!r}; its axes: {names}")

    def __len__(self) -> int:
        return len(self._devices)

    def __iter__(self) -> Iterator[Device]:
        return iter(self._devices)

    def __contains__(self, device: object) -> bool:
        return device in self._index

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Mesh):
            return NotImplemented
        return (
            self._hash == other._hash
            and self._axes == other._axes
            and self._views == other._views
            and self._devices == other._devices
        )

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        return _mesh, (self._devices, self._views, self._axes)

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self._axes)
        return f"Mesh({axes})[{_span(self._devices)}]"


def devices_of(device: Device | Mesh | None) -> tuple[Device, ...]:
    """The devices that a tensor placed here lies on: none, one, or all of a mesh."""
    if device is None:
        return ()
    return device.devices if isinstance(device, Mesh) else (device,)


def _mesh(
    devices: tuple[Device, ...], views: Mapping[str, tuple[str, ...]], axes: tuple[tuple[str, int], ...]
) -> Mesh:
    return Mesh(devices, views, **dict(axes))


def _span(devices: tuple[Device, ...]) -> str:
    first, last = devices[0], devices[-1]
    if len(devices) > 2 and all(d.id == first.id + i for i, d in enumerate(devices)):
        return f"{first}..{last}"
    if len(devices) <= 4:
        return ", ".join(map(str, devices))
    return f"{first}, {devices[1]}, ..., {last}"
