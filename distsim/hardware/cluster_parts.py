"""The devices and levels that a cluster's tables say, with their figures in SI units.

What a limit of its power does to a device.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from distsim.errors import TopologyError
from distsim.hardware.cluster_table import MAX_DEVICES, DeviceTable, LevelTable
from distsim.hardware.variation import as_slowest
from distsim.ir.device import Device
from distsim.ir.kernel_rates import KernelRates
from distsim.ir.link import Link
from distsim.ir.topology import Level


def device_of(table: DeviceTable, si: Mapping[str, float], count: int) -> Device:
    """Return a device of so many, as fast as the slowest of them."""
    device = Device(
        0,
        table.kind,
        si["device.throughput"],
        si["device.dram_bandwidth"],
        si["device.kernel_launch_overhead"],
        si["device.memory"],
        tuple((dtype, si[f"device.peaks.{dtype}"]) for dtype in table.peaks),
        si["device.flops_efficiency"]
        * speed_under_limit(si.get("device.power"), si.get("device.power_limit")),
        si["device.bytes_efficiency"],
        si.get("device.context", 0.0),
        si.get("device.fragmentation", 0.0),
        _whole_bytes("block", si),
        _whole_bytes("segment", si),
        _link(si, "device.host_link") if table.host_link else None,
        _rates(table, si),
        si.get("device.variation", 0.0),
    )
    return as_slowest(device, count)


CLOCKS = (1e8, 1e10)
"""Between which cycles a second a device has: one beyond has another unit than was meant."""


def _rates(table: DeviceTable, si: Mapping[str, float]) -> KernelRates:
    processors, queries = si.get("device.processors", 0.0), si.get("device.query_block", 128.0)
    for name, count in (("processors", processors), ("query_block", queries)):
        if not (count.is_integer() and 0 <= count <= MAX_DEVICES):
            raise TopologyError(f"device.{name}={count} is no count")
    clock = si.get("device.clock", 0.0)
    if clock and not CLOCKS[0] <= clock <= CLOCKS[1]:
        raise TopologyError(
            f"device.clock={clock:g} Hz is none of multiprocessors, which have {CLOCKS[0] / 1e6:g} MHz to "
            f"{CLOCKS[1] / 1e9:g} GHz: look at its unit"
        )
    return KernelRates(
        tuple([(kind, si[f"device.kernels.{kind}"]) for kind in table.kernels]),
        tuple([(name, si[f"device.launches.{name}"]) for name in table.launches if name != "tensor"]),
        si.get("device.launches.tensor", 0.0),
        int(processors),
        si.get("device.spread", 0.0),
        si.get("device.slowdown", 0.0),
        tuple([(kernel, si[f"device.attention.{kernel}"]) for kernel in table.attention]),
        tuple([(kind, si[f"device.uncertainty.{kind}"]) for kind in table.uncertainty]),
        clock,
        int(queries),
    )


def level_of(level: LevelTable, si: Mapping[str, float]) -> Level:
    """Return a level of a table."""
    name = f"levels.{level.name}"
    return Level(
        level.name,
        _link(si, name),
        level.group_size,
        _whole(level, si.get(f"{name}.devices_per_port", 1.0)),
        si.get(f"{name}.oversubscription", 1.0),
        *(si.get(f"{name}.{part}", 0.0) for part in ("start", "segment_time")),
    )


def _link(si: Mapping[str, float], name: str) -> Link:
    return Link(*(si[f"{name}.{part}"] for part in ("bandwidth", "latency", "efficiency")))


def _whole(level: LevelTable, value: float) -> int:
    if not (value.is_integer() and 1 <= value <= MAX_DEVICES):
        raise TopologyError(f"levels.{level.name}.devices_per_port={value} is no count of devices")
    return int(value)


def _whole_bytes(name: str, si: Mapping[str, float]) -> int:
    value = si.get(f"device.{name}", 1.0)
    if not (value.is_integer() and 1 <= value <= si["device.memory"]):
        raise TopologyError(f"device.{name}={value} must be whole bytes, of those that memory has")
    return int(value)


SPEED_BY_POWER = ((0.5, 0.674), (0.6, 0.794), (0.7, 0.867), (0.8, 0.927), (0.9, 0.967), (1.0, 1.0))
"""Shares of the power that they draw without a limit, and what share of their speed products keep at these.

Of Ampere, stages of GPT-3 175B and BLOOM at clocks of 855 to 1,410 MHz, two on A100 (SXM, 467 and 478 W at
the highest) and two on A40 (293): the fastest clock that draws no more, their mean (of 0.6 one of the A40's,
of 0.5 none), 0.881 at 0.7 (Perseus, Chung et al., SOSP 2024: ml-energy/zeus at 38cb3f90,
sosp24_data/emulation/stage_profile). Below three fifths voltage falls no more, so speed falls with power. Of
Hopper, products of 8,192 x 8,192 x 8,192 alone: on H100 at 500 W 585.2 TFLOP/s in bfloat16 and 1,125.5 in 8
bits (pytorch/FBGEMM pull request 2546 of April 2024, of a library that it does not name), on H200 at 700 W
678.9 and 1,309 (``experiments/measured/h200_kernels.csv``): 0.861, or 0.853 at 0.7, which counts as much
there as Ampere does. On four A100 of 300 W (PCIe; sosp24_data/zeus/csv/A100/zeus_global.csv) whole steps keep
0.75 to 0.80 at 0.71: what GPUs keep differs by a tenth."""


def speed_under_limit(power: float | None, limit: float | None) -> float:
    """Return what share of their speed products keep on a device that may draw ``limit`` of ``power`` watts.

    Interpolated between measurements (:data:`SPEED_BY_POWER`); 1 without a limit. Raises
    :class:`TopologyError` for one that is higher, or lower than half, of which the measurements say
    nothing, and for a device whose usual power is not known.

    >>> round(speed_under_limit(700.0, 500.0), 3)
    0.876
    """
    if limit is None:
        return 1.0
    if power is None or not power / 2 <= limit <= power:
        usual = "give device.power, what it may draw without" if power is None else f"it may draw {power:g} W"
        raise TopologyError(
            f"device.power_limit={limit:g} W must be no more than the device's power, nor below half: {usual}"
        )
    shares, speeds = zip(*SPEED_BY_POWER, strict=True)
    return float(np.interp(limit / power, shares, speeds))
