"""Figures of devices, by device or by the name that tables have for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from distsim.errors import UnknownDeviceError, shortened
from distsim.ir import Device

Figure = TypeVar("Figure")


class ByDevice(dict[Device, Figure]):
    """A figure for each device; ``[...]`` takes the name of one too, as tables print it.

    Raises :class:`UnknownDeviceError`, a KeyError, for a device that is not among them.

    >>> figures = ByDevice({Device(0, "gpu"): 3})
    >>> figures["gpu:0"], figures[Device(0, "gpu")]
    (3, 3)
    """

    def __missing__(self, key: Device | str) -> Figure:
        return super().__getitem__(device_named(key, self))


def device_named(device: Device | str, devices: Iterable[Device]) -> Device:
    """Return the one of devices that is meant, by itself or by its name.

    Raises :class:`UnknownDeviceError`, with the first and the last of them, where none is.
    """
    there = list(devices)
    for each in there:
        if device == (str(each) if isinstance(device, str) else each):
            return each
    ends = " to ".join(dict.fromkeys(map(str, (there[0], there[-1])))) if there else "none"
    raise UnknownDeviceError(f"{shortened(device)} does not occur; there are {ends}")
