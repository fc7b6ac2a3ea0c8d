"""Random topologies for the tests of the engines."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from distsim.hardware import load_cluster
from distsim.ir import Link, Topology
from distsim.ir.kernel_rates import NO_RATES

SPEED = 2.0**12


def bare_cluster(name: str) -> Topology:
    """Return a preset on which every kernel reaches what is reached at best, and no message takes to begin.

    Costs of parts sum up to those of the whole there.
    """
    found = load_cluster(name)
    devices = [replace(device, rates=NO_RATES, kernel_launch_overhead=4e-6) for device in found.devices]
    return Topology.of_devices(
        devices, [replace(level, start=0.0, segment_time=0.0) for level in found.levels]
    )


def invent_topology(rng: Random, count: int) -> Topology:
    """Return devices that are joined by levels or pair by pair; one may be slow, one link thin.

    They do SPEED operations per second, so that no step takes the 8,192 s from which sums are rounded.
    """
    topology = Topology()
    figures = {
        "throughput": SPEED,
        "dram_bandwidth": SPEED * rng.choice([500.0, 1e4]),
        "kernel_launch_overhead": 0.0,
    }
    figures["kernel_launch_overhead"] = rng.choice([0.0, 0.0, 0.01 / SPEED])
    slow = rng.randrange(count) if rng.random() < 0.15 else None
    for number in range(count):
        topology.add_device("gpu", **(figures | ({"throughput": SPEED / 2} if number == slow else {})))
    devices = topology.devices
    if rng.random() < 0.5:
        topology.add_level("node", _link(rng), rng.choice([2, 3, 4, 6]))
        topology.add_level("all", _link(rng))
    else:
        link = _link(rng)
        for i, a in enumerate(devices):
            for b in devices[i + 1 :]:
                topology.set_link(a, b, link)
    if count > 1 and rng.random() < 0.15:
        topology.set_link(*rng.sample(devices, 2), _link(rng))
    return topology


def _link(rng: Random) -> Link:
    return Link(SPEED * 10 ** rng.uniform(1.5, 5), rng.choice([0.0, 0.0, 0.05, 1.0]) / SPEED)
