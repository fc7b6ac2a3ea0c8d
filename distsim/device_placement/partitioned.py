"""A partition on the devices of a topology: the function that the simulator runs, and what people read."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distsim.cost import CostModel
from distsim.cost.cost_model import cost_model_of
from distsim.device_placement.optimal import OptimalPartition
from distsim.device_placement.optimal.timetable import Timetable, timetable
from distsim.device_placement.partitioner import MODES, ModeOptions, partition
from distsim.device_placement.parts import Partition
from distsim.device_placement.problem import WHAT_BYTES_ARE, PartitionDevice, Problem, problem_of
from distsim.errors import PartitionError
from distsim.interpret import infer_types
from distsim.ir import Attributes, Device, Function, FunctionMaker, Op, Topology, Value
from distsim.ir.rewrite import flatten
from distsim.ir.type import as_tensor
from distsim.ops import Signature
from distsim.simulation import Simulation
from distsim.simulation.explain.text import seconds_text, table
from distsim.simulation.quantities import bytes_label
from distsim.suggestions import choices_for


@dataclass(frozen=True, eq=False)
class Placed:
    """``function`` with every op on its device; input k is input ``sources[k]`` of the original.

    An input that several devices read is one input of each: it is there from the start, as parameters are. So
    is a constant, which each of these devices has of its own.
    """

    function: Function
    sources: tuple[int, ...]

    def arguments(self, given: Sequence[Any]) -> list[Any]:
        """Return the arguments of the function from those of the original."""
        return [given[source] for source in self.sources]


def partition_devices(topology: Topology) -> tuple[PartitionDevice, ...]:
    """Return the devices of a topology for a partition; one without a limit has ``sys.maxsize`` bytes."""
    return tuple(
        PartitionDevice(str(device), int(min(device.usable, sys.maxsize)), device.id)
        for device in topology.devices
    )


def transfer_seconds(problem: Problem, cost_model: CostModel) -> tuple[float, ...]:
    """Return what sending each item's outputs takes from the first device to the last, by the cost model.

    That is the time between any two where all are alike. Of one device: 0.
    """
    devices = cost_model.topology.devices
    if problem.function is None or len(devices) < 2:
        return (0.0,) * len(problem.items)
    made = dict(zip(problem.ops, problem.function.ops, strict=True))
    return tuple(
        sum(_seconds(value, devices[0], devices[-1], cost_model) for value in made[number].outputs)
        if number in made
        else 0.0
        for number in range(len(problem.items))
    )


def _seconds(value: Value, source: Device, target: Device, cost_model: CostModel) -> float:
    sent = as_tensor(value.type, value.name).on(source)
    signature = Signature("Send", Attributes({"to": target}), (sent,), (sent.on(target),))
    return cost_model.communication_seconds(signature, (source, target))


def place(
    partition: Partition, devices: Sequence[Device], transfers: Sequence[float] | None = None
) -> Placed:
    """Return the partition's function on ``devices``, the first for its first device and so on.

    Each part runs on the first of its devices (replicas do the same elsewhere, for other data). What another
    device reads is sent there once, as soon as it is made; sends between two devices that would overlap (by
    the rate of the partition, or ``transfers`` per item) go on *channels* of their own, so that none waits
    for another. The simulated time of an :class:`OptimalPartition` is then its makespan, if devices and links
    are what its problem says, and at most that where an op has several outputs or is a Call, whose results
    may leave before it ends. Raises :class:`PartitionError` for a partition without function, or for too few
    devices.

    >>> from distsim.hardware import load_cluster
    >>> from distsim.models import mlp
    >>> topology = load_cluster("dgx-a100")
    >>> found = partition_model(mlp(layers=4, width=64, batch=8), topology, "size_based", 40_000)
    >>> type(place(found.partition, topology.devices)).__name__
    'Placed'
    """
    function = partition.problem.function
    if function is None:
        raise PartitionError(
            "the problem was not made from a function (problem_of), so nothing can be placed"
        )
    if len(devices) < len(partition.devices):
        raise PartitionError(f"the partition is on {len(partition.devices)} devices, {len(devices)} given")
    known = transfers is not None or partition.transfer_rate > 0
    times = timetable(partition, transfers if known else [0.0] * len(partition.problem.items))
    return _Placer(partition, function, devices, times).run()


class _Placer:
    """Builds a placed function."""

    def __init__(
        self, partition: Partition, function: Function, devices: Sequence[Device], times: Timetable
    ) -> None:
        self.partition, self.function, self.times = partition, function, times
        on = dict(zip(partition.devices, devices, strict=False))
        numbers = partition.problem.ops
        self.device = {
            op: on[partition.parts[partition.part_of[number]].devices[0]]
            for number, op in zip(numbers, function.ops, strict=True)
        }
        self.end = {op: times.ends[number] for number, op in zip(numbers, function.ops, strict=True)}
        self.travel = {op: times.transfers[number] for number, op in zip(numbers, function.ops, strict=True)}
        self.readers: dict[Value, dict[Device, None]] = {}
        for op in function.ops:
            for value in op.inputs:
                self.readers.setdefault(value, {})[self.device[op]] = None
        self.maker = FunctionMaker(function.name, function.notes)
        self.copies: dict[tuple[Value, Device | None], Value] = {}
        self.channels: dict[tuple[Device, Device], list[float]] = {}
        self.callees: dict[tuple[object, ...], Function] = {}

    def run(self) -> Placed:
        sources: list[int] = []
        first = next(iter(self.device.values()))
        for number, value in enumerate(self.function.inputs):
            for place, device in enumerate(self.readers.get(value, {first: None})):
                name = value.name if place == 0 else f"{value.name}_{device.id}"
                type_ = as_tensor(value.type, value.name).on(device)
                self.copies[value, device] = self.maker.add_input_value(name, type_, value.role)
                if place == 0:
                    self.copies[value, None] = self.copies[value, device]
                sources.append(number)
        ops = dict(zip(self.partition.problem.ops, self.function.ops, strict=True))
        for number in self.times.sequence:
            self._add(ops[number])
        self.maker.set_outputs([self.copies[value, None] for value in self.function.outputs])
        return Placed(self.maker.finalize(), tuple(sources))

    def _add(self, op: Op) -> None:
        if op.op_type == "Constant":
            return self._constant(op)
        device = self.device[op]
        read = {value: self.copies[value, device] for value in op.inputs}
        subfunctions = [self._callee(op, read)] if op.is_call else None
        attributes = op.attributes
        if not op.inputs:  # none says where it runs
            attributes = Attributes({**attributes, "device": device})
        made = self.maker.copy(op, read, attributes, subfunctions)
        for value, copy in zip(op.outputs, made, strict=True):
            self.copies[value, device] = self.copies[value, None] = copy
            for target in self.readers.get(value, {}):
                if target != device:
                    self.copies[value, target] = self._send(op, copy, device, target)

    def _constant(self, op: Op) -> None:
        """Put a constant in the memory of each device that reads it: it is never sent."""
        (value,) = op.outputs
        for device in self.readers.get(value, {self.device[op]: None}):
            attributes = Attributes({**op.attributes, "device": device})
            (self.copies[value, device],) = self.maker.copy(op, {}, attributes)
            self.copies.setdefault((value, None), self.copies[value, device])

    def _callee(self, op: Op, read: dict[Value, Value]) -> Function:
        types = tuple(read[value].type for value in op.inputs)
        key = (op.callee, *types)
        found = self.callees.get(key)
        if found is None:
            found = self.callees[key] = infer_types(op.callee, types)
        return found

    def _send(self, op: Op, value: Value, source: Device, target: Device) -> Value:
        """Send on the first channel that is free when the op ends."""
        busy = self.channels.setdefault((source, target), [])
        begin = self.end[op]
        channel = next((k for k, until in enumerate(busy) if until <= begin), len(busy))
        busy[channel : channel + 1] = [begin + self.travel[op]]
        attributes = {"to": target} | ({"channel": channel} if channel else {})
        return self.maker.add("Send", [value], attributes, (), [value.name])[0]


HOST_MODES = tuple(mode for mode in MODES if mode != "ahead_of_time")
"""The modes that need nothing but a model and devices."""

_MOST_PARTS = 24
_ROUNDING = 1e-6
"""By which share of it a simulated makespan may be longer than that of the search: times are on a grid."""


@dataclass(frozen=True, eq=False)
class Partitioned:
    """A forward function in parts on the devices of a topology, and what the simulator runs of it.

    ``unlike``: where devices or links are not all alike, what they are taken to be in the search for parts.
    """

    partition: Partition
    placed: Placed
    unlike: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the parts, their bytes and devices, as what JSON has."""
        parts = [
            {
                "ops": len(part.ops),
                "bytes": part.bytes,
                "devices": [device.name for device in part.devices],
                "reads_parts": list(part.parents),
                "longest_path_s": latency.overall,
            }
            for part, latency in zip(self.partition.parts, self.partition.latencies, strict=True)
        ]
        return {"mode": self.partition.mode, "parts": parts}

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
        header = ("part", "ops", "bytes", "devices", "reads parts", "longest path")
        lines = list(table(header, rows[:_MOST_PARTS]))
        if len(rows) > _MOST_PARTS:
            lines.append(f"... and {len(rows) - _MOST_PARTS} more parts")
        lines.append(f"bytes         {WHAT_BYTES_ARE}; memory is what is in use at once")
        lines.append("longest path  of ops of a part that read each other; one device runs all, one by one")
        lines.append(f"makespan      {seconds_text(simulation.step_time)}{self._proof(simulation)}")
        replicas = max(len(part.devices) for part in found.parts)
        if replicas > 1:
            lines.append(f"replicas      up to {replicas} of a part; the first is simulated, for one batch")
        return "\n".join(lines) + "\n"

    def _proof(self, simulation: Simulation) -> str:
        """Say how near the makespan is to the best, if that is known: of what was searched for it is."""
        found = self.partition
        if not isinstance(found, OptimalPartition):
            return ""
        proof = "proven optimal" if found.proven else f"at most {found.gap:.2%} above the best"
        if self.unlike:
            return f" (not proven; {proof} if {self.unlike}: {seconds_text(found.makespan)} then)"
        if (
            not found.lower_bound * (1 - _ROUNDING)
            <= simulation.step_time
            <= found.makespan * (1 + _ROUNDING)
        ):
            return f" (not proven; {proof} as it was searched: {seconds_text(found.makespan)} then)"
        return f" ({proof}: no schedule takes less than {seconds_text(found.lower_bound)})"


def _unlike(topology: Topology) -> str:
    """Say what devices and links are taken to be, "" where they are that."""
    first, *others = topology.devices
    figures = dataclasses.replace(first, id=0)
    links = [topology.link(a, b) for a, b in itertools.combinations(topology.devices, 2)]
    taken: list[str] = []
    if any(dataclasses.replace(other, id=0) != figures for other in others):
        taken.append(f"all devices were as {first}")
    if len({(each.achieved, each.latency) for each in links}) > 1:
        taken.append(f"all links as from {first} to {others[-1]}")
    return " and ".join(taken)


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

    >>> from distsim.hardware import load_cluster
    >>> from distsim.models import mlp
    >>> model, topology = mlp(layers=4, width=64, batch=8), load_cluster("dgx-a100")
    >>> found = partition_model(model, topology, "size_based", 40_000)
    >>> found.partition.mode, len(found.partition.parts) > 1
    ('size_based', True)
    """
    if mode not in HOST_MODES:
        raise PartitionError(f"there is no mode {mode!r}; choose one of {choices_for(mode, HOST_MODES)}")
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
    options: ModeOptions = {"time_limit": time_limit, "transfers": transfers} if mode == "optimal" else {}
    found = partition(problem, devices, mode, rate, saturate_host, **options)
    unlike = _unlike(topology) if mode == "optimal" else ""
    return Partitioned(found, place(found, topology.devices, transfers), unlike)
