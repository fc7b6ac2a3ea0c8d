"""Devices that are slower than others of their kind: the slowest of many, and those that a file names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist

from distsim.errors import TopologyError
from distsim.hardware.cluster_table import SlowTable
from distsim.ir.device import Device
from distsim.ir.topology import Topology


def speed_of_slowest(variation: float, count: int) -> float:
    """Return what share of the usual speed of products the slowest of so many devices has.

    ``variation``: the standard deviation of their times, of the usual one. A training step takes as long as
    its slowest device: 1 / (1 + variation m), m being how many deviations the largest of ``count`` normal
    variables lies above the mean (Blom 1958: the quantile of (count - 3/8) / (count + 1/4)). Raises
    :class:`TopologyError` for a variation over 1.

    >>> speed_of_slowest(0.015, 1), round(speed_of_slowest(0.015, 1024), 3)
    (1.0, 0.954)
    """
    if not variation <= 1:
        raise TopologyError(f"device.variation={variation:g} is more than the whole time of a product")
    return 1 / (1 + variation * max(NormalDist().inv_cdf((count - 0.375) / (count + 0.25)), 0.0))


def as_slowest(device: Device, count: int) -> Device:
    """Return a device as fast as the slowest of so many of its kind is at products."""
    if not device.variation or device.slowest_of == count:
        return replace(device, slowest_of=count)
    was, now = (speed_of_slowest(device.variation, of) for of in (device.slowest_of, count))
    return replace(device, flops_efficiency=device.flops_efficiency / was * now, slowest_of=count)


def in_use(topology: Topology, count: int) -> Topology:
    """Return a topology of which so many devices are used: the slowest of these is waited for.

    >>> from distsim.hardware import load_cluster
    >>> two, one = load_cluster("dgx-h100:2"), load_cluster("dgx-h100")
    >>> [f"{cluster.devices[0].flops_efficiency:.4f}" for cluster in (two, one, in_use(two, 8))]
    ['0.7822', '0.7861', '0.7861']
    """
    devices = topology.devices
    used = min(count, len(devices))
    if not any(device.variation and device.slowest_of != used for device in devices):
        return topology
    return topology.with_devices([as_slowest(device, used) for device in devices])


def slowed(devices: Sequence[Device], slow: Sequence[SlowTable], per_node: int) -> list[Device]:
    """Return the devices, those that are slow with all of computation as much slower."""
    made, count = list(devices), len(devices)
    seen: set[int] = set()
    for table in slow:
        if not table.nodes and not table.devices:
            raise TopologyError("slow: give nodes or devices, by number from 0, as in nodes = [3]")
        of_nodes = [
            node * per_node + i for node in table.nodes if node * per_node < count for i in range(per_node)
        ]
        beyond = [f"node {node}" for node in table.nodes if node * per_node >= count]
        beyond += [f"device {place}" for place in table.devices if place >= count]
        if beyond:
            raise TopologyError(
                f"slow: there is no {beyond[0]} among {count // per_node} nodes of {per_node} devices, "
                "numbered from 0"
            )
        for place in (*of_nodes, *table.devices):
            if place in seen:
                raise TopologyError(f"slow: device {place} is named twice; give it one factor")
            seen.add(place)
            made[place] = _slower(made[place], table.factor)
    return made


def _slower(device: Device, factor: float) -> Device:
    return replace(
        device,
        throughput=device.throughput / factor,
        peaks=tuple((dtype, peak / factor) for dtype, peak in device.peaks),
        dram_bandwidth=device.dram_bandwidth / factor,
        kernel_launch_overhead=device.kernel_launch_overhead * factor,
        rates=replace(device.rates, clock=device.rates.clock / factor),
        slow_factor=device.slow_factor * factor,
    )
