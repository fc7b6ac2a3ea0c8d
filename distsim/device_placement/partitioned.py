"""A model partitioned over the devices of a topology: inference of one batch, as accelerator hosts run it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from distsim.cost import CostModel
from distsim.cost.cost_model import cost_model_of
from distsim.device_placement.optimal import OptimalPartition, optimal_partition
from distsim.device_placement.partitioner import MODES, partition
from distsim.device_placement.parts import Partition
from distsim.device_placement.place import Placed, partition_devices, place, transfer_seconds
from distsim.device_placement.problem import PartitionDevice, Problem, problem_of
from distsim.errors import PartitionError
from distsim.ir import Function, Topology
from distsim.ir.rewrite import flatten
from distsim.simulate import Simulation
from distsim.simulate.explain.explanation import seconds_text, table
from distsim.simulate.quantities import bytes_label

HOST_MODES = tuple(mode for mode in MODES if mode != "ahead_of_time")
"""The modes that need nothing but a model and devices."""

_MOST_PARTS = 24


@dataclass(frozen=True, eq=False)
class Partitioned:
    """A forward function in parts on the devices of a topology, and what the simulator runs of it."""

    partition: Partition
    placed: Placed

    def describe(self, simulation: Simulation) -> str:
        """Return the parts, the makespan, and how near it is to the best, as text for people."""
        found = self.partition
        rows = [
            (
                f"part_{part.index}",
                str(len(part.ops)),
                bytes_label(part.bytes),
                ", ".join(device.name for device in part.devices),
                ", ".join(map(str, part.parents)) or "-",
                seconds_text(latency.overall),
            )
            for part, latency in zip(found.parts, found.latencies, strict=True)
        ]
        header = ("part", "ops", "bytes", "devices", "reads parts", "latency")
        lines = list(table(header, rows[:_MOST_PARTS]))
        if len(rows) > _MOST_PARTS:
            lines.append(f"... and {len(rows) - _MOST_PARTS} more parts")
        lines.append(f"makespan      {seconds_text(simulation.step_time)}")
        if isinstance(found, OptimalPartition):
            proof = "proven optimal" if found.proven else f"at most {found.gap:.2%} above the best"
            lines[-1] += f" ({proof}: no schedule takes less than {seconds_text(found.lower_bound)})"
        replicas = max(len(part.devices) for part in found.parts)
        if replicas > 1:
            lines.append(f"replicas      up to {replicas} of a part; the first is simulated, for one batch")
        return "\n".join(lines) + "\n"


def partition_model(
    function: Function,
    topology: Topology,
    mode: str,
    memory: float = math.inf,
    saturate_host: bool = False,
    time_limit: float = 10.0,
    cost_model: CostModel | None = None,
) -> Partitioned:
    """Return a forward function partitioned over all devices of a topology.

    Its Calls are written out, so that every op can go anywhere. ``memory`` limits the bytes of each device;
    ``time_limit`` is for the optimal mode, in seconds. Latencies and transfers are those of
    ``cost_model``, by default ``CostModel(topology)``; modes that know a rate only take that of the link
    from the first device to the last. Raises a :class:`PartitionError` as :func:`partition` does, and for an
    unknown mode, a :class:`CostError` for a cost model of another topology.
    """
    if mode not in HOST_MODES:
        raise PartitionError(f"there is no mode {mode!r}; choose one of {', '.join(HOST_MODES)}")
    if not memory > 0:
        raise PartitionError(f"memory={memory} bytes: a device has some")
    cost_model = cost_model_of(topology, cost_model)
    function = flatten(function)
    problem = problem_of(function, cost_model)
    devices = tuple(
        dataclasses.replace(device, memory=int(min(device.memory, memory)))
        for device in partition_devices(topology)
    )
    transfers = transfer_seconds(problem, cost_model)
    first, last = topology.devices[0], topology.devices[-1]
    rate = topology.link(first, last).achieved if len(topology.devices) > 1 else 0.0
    found = _partition(problem, devices, mode, rate, transfers, saturate_host, time_limit)
    return Partitioned(found, place(found, topology.devices, transfers))


def _partition(
    problem: Problem,
    devices: Sequence[PartitionDevice],
    mode: str,
    rate: float,
    transfers: Sequence[float],
    saturate_host: bool,
    time_limit: float,
) -> Partition:
    if mode != "optimal":
        return partition(problem, devices, mode, rate, saturate_host)
    if saturate_host:
        return partition(problem, devices, mode, rate, saturate_host, time_limit=time_limit)
    return optimal_partition(problem, devices, rate, time_limit, transfers=transfers)
