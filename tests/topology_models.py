"""Random topologies for the tests of the engines."""

from __future__ import annotations

from random import Random

from distsim.ir import Link, Topology


def invent_topology(rng: Random, count: int) -> Topology:
    """Return devices that are joined by levels or pair by pair; one may be slow, one link thin."""
    topology = Topology()
    figures = {"throughput": 1.0, "dram_bandwidth": rng.choice([500.0, 1e4]), "kernel_launch_overhead": 0.0}
    figures["kernel_launch_overhead"] = rng.choice([0.0, 0.0, 0.01])
    slow = rng.randrange(count) if rng.random() < 0.15 else None
    for number in range(count):
        topology.add_device("gpu", **(figures | ({"throughput": 0.5} if number == slow else {})))
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
    return Link(10 ** rng.uniform(1.5, 5), rng.choice([0.0, 0.0, 0.05, 1.0]))
