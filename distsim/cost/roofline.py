"""The rules by which a cost model turns work into seconds, and those that it has by default.

A compute op takes ``launch + max(flops / (peak * flops_efficiency), bytes / (dram_bandwidth *
bytes_efficiency))`` (Williams, Waterman and Patterson, "Roofline", 2009), the shares of peak and bandwidth as
:mod:`distsim.cost.efficiency` has them, what a product needs longer that adds to sums or has groups, and at
least what :mod:`distsim.cost.element_rate` says of elements, which adds what sums over rows wait for. The
peak of matrix work (``Work.matrix``) is that of the device for the element type; all other work runs on the
vector units, at ``Device.throughput``. Communication: :mod:`distsim.hardware.collectives`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from distsim.cost.efficiency import efficiencies, element_type, exposed_bytes
from distsim.cost.element_rate import element_seconds, waiting_seconds
from distsim.errors import CostError
from distsim.hardware import collective_time
from distsim.ir import Device, Topology
from distsim.ir.kernel_rates import NO_RATES
from distsim.ops import Signature, Work

Group = tuple[Device, ...]


class CostRules(Protocol):
    """How a :class:`CostModel` turns work into seconds: the same for the same work, each time.

    Rules that are equal (those of a class without ``__eq__``: the same object) share what is kept of them.
    """

    def compute(self, signature: Signature, demand: Work, device: Device) -> float:
        """Seconds of a compute op that asks for ``demand`` on a device."""
        ...

    def communicate(self, kind: str, nbytes: float, group: Group, topology: Topology) -> float:
        """Seconds of a collective; kind, size and group as in :func:`collective_time`."""
        ...


@dataclass(frozen=True)
class RooflineRules:
    """The rules of this module's docstring."""

    def compute(self, signature: Signature, demand: Work, device: Device) -> float:
        """Seconds by the roofline of the device."""
        dtype = element_type(signature)
        known = dict(device.peaks)
        if demand.matrix and dtype.startswith("float8") and known and dtype not in known:
            raise CostError(
                f"{device} has no rate for {dtype}, in which {signature.op_type} multiplies: it has no units "
                "for 8-bit floats, as H100, L40S and later GPUs have; choose --precision mixed or another "
                "cluster, or give a rate under [device.peaks]"
            )
        peak = device.peak(dtype) if demand.matrix else device.throughput
        flops_share, bytes_share = efficiencies(signature, demand, dtype, device)
        flops = demand.flops / (peak * flops_share) + exposed_bytes(signature) / device.dram_bandwidth
        moved = (demand.bytes_read + demand.bytes_written) / (device.dram_bandwidth * bytes_share)
        if demand.matrix:
            return device.kernel_launch_overhead + max(flops, moved)
        waiting = device.kernel_launch_overhead + waiting_seconds(signature, device)
        return waiting + max(flops, moved, element_seconds(signature, device))

    def communicate(self, kind: str, nbytes: float, group: Group, topology: Topology) -> float:
        """Seconds by the cheapest algorithm for the group."""
        return collective_time(kind, nbytes, group, topology)


@dataclass(frozen=True)
class BestShapeRules(RooflineRules):
    """The same rules where every kernel reaches what its device reaches at best, whatever its shape."""

    def compute(self, signature: Signature, demand: Work, device: Device) -> float:
        """Seconds by the roofline of the device, without what is known of its kernels."""
        return super().compute(signature, demand, replace(device, rates=NO_RATES))


ROOFLINE = RooflineRules()
BEST_SHAPE = BestShapeRules()
