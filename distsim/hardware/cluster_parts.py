"""The devices and levels that a cluster's tables say, with their figures in SI units."""

from __future__ import annotations

from collections.abc import Mapping

from distsim.errors import TopologyError
from distsim.hardware.cluster_table import MAX_DEVICES, DeviceTable, LevelTable
from distsim.hardware.power import speed_under_limit
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


def _rates(table: DeviceTable, si: Mapping[str, float]) -> KernelRates:
    processors, queries = si.get("device.processors", 0.0), si.get("device.query_block", 128.0)
    for name, count in (("processors", processors), ("query_block", queries)):
        if not (count.is_integer() and 0 <= count <= MAX_DEVICES):
            raise TopologyError(f"device.{name}={count} is no count")
    return KernelRates(
        tuple([(kind, si[f"device.kernels.{kind}"]) for kind in table.kernels]),
        tuple([(name, si[f"device.launches.{name}"]) for name in table.launches if name != "tensor"]),
        si.get("device.launches.tensor", 0.0),
        int(processors),
        si.get("device.spread", 0.0),
        si.get("device.slowdown", 0.0),
        tuple([(kernel, si[f"device.attention.{kernel}"]) for kernel in table.attention]),
        tuple([(kind, si[f"device.uncertainty.{kind}"]) for kind in table.uncertainty]),
        si.get("device.clock", 0.0),
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
