"""The peak that utilisation (MFU, HFU) is a share of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from distsim.cost.efficiency import matrix_type
from distsim.ir import Device, Op
from distsim.schedule.refusals import count


@dataclass(frozen=True)
class PeakRate:
    """FLOP/s of each of some devices, in the element type of most products; None where there are none."""

    dtype: str | None
    each: tuple[float, ...]

    @staticmethod
    def of(ops: Iterable[Op], devices: Sequence[Device]) -> PeakRate:
        """Return that of devices that run these ops."""
        dtype = matrix_type(ops)
        return PeakRate(dtype, tuple([0.0 if dtype is None else device.peak(dtype) for device in devices]))

    @property
    def total(self) -> float:
        """FLOP/s of all devices together."""
        return sum(self.each)

    def share(self, flops: float, seconds: float) -> float:
        """Return the share of it that so many FLOPs in a time are; 0 where there are none."""
        most = self.total * seconds
        return flops / most if most else 0.0

    def __str__(self) -> str:
        """Of a device where all have the same, else of all together.

        >>> print(PeakRate("bfloat16", (989.4e12,) * 2))
        989.4 TFLOP/s each (bfloat16, 2 devices)
        """
        if self.dtype is None:
            return "no products' peak"
        one = len(set(self.each)) == 1
        figure = f"{(self.each[0] if one else self.total) / 1e12:.4g} TFLOP/s"
        way = " each" if one and len(self.each) > 1 else ""
        return f"{figure}{way} ({self.dtype}, {count(len(self.each), 'device')})"
