"""Chakra execution traces, one a rank, as ASTRA-sim reads them (518bd513, astra-sim/workload/Workload.cc).

What a rank does are nodes: kernels with the time that they take here, collectives and messages with their
bytes, whose time the reader simulates. What a node needs are its data dependencies; the node before it on
its stream is a control dependency. Times are whole microseconds, the finest that the format has; the
attribute ``runtime_ns`` has them in nanoseconds.

The messages of a Chakra execution trace, as bytes: the wire format of protocol buffers.

Numbers of fields are those of ``et_def.proto`` (https://github.com/mlcommons/chakra at 21585d8f), which no
package of the Python index brings. https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from distsim.errors import SimulationError
from distsim.ir import Device, Mesh, Op, place_of
from distsim.ir.device import devices_of
from distsim.ops import op_label, operator
from distsim.ops.coalescing import moved_values
from distsim.report.exports.folders import chosen_devices, made_folder
from distsim.report.output import replacing
from distsim.simulation import Simulation
from distsim.simulation.tasks.rank_classes import communicates
from distsim.simulation.tasks.timeline import FlatTimeline

PREFIX, GROUPS = "step", "comm_groups.json"

MOST_NODES = 5_000_000
"""Of all files together; each is some 100 bytes."""

MOST_TAGS = 2**31 - 1


def write_chakra(
    simulation: Simulation, folder: str | os.PathLike[str], ranks: Iterable[int] | None = None
) -> list[Path]:
    """Write ``step.N.et`` for each of these ranks (default: all) into a new or empty folder, beside
    ``comm_groups.json``, the ranks of each group by the name that nodes give.

    N counts the devices of the simulation by their number, from 0. Returns the files. Raises
    :class:`SimulationError` for a folder that holds something, a rank that does not occur, and for
    more than ``MOST_NODES`` nodes.
    """
    devices = chosen_devices(simulation, ranks)
    flat = simulation.flat()
    writer = _ChakraRanks(simulation, flat)
    count = sum(writer.count(device) for device in devices)
    if count > MOST_NODES:
        raise SimulationError(
            f"{len(devices)} ranks do {count} things, more than {MOST_NODES}; choose ranks, or fewer "
            "microbatches"
        )
    place = made_folder(folder)
    files = [place / f"{PREFIX}.{writer.numbers[device]}.et" for device in devices]
    for device, path in zip(devices, files, strict=True):
        with replacing(path) as file:
            file.write(delimited(metadata()))
            for node in writer.nodes(device):
                file.write(delimited(node.encoded()))
    with replacing(place / GROUPS) as file:
        file.write(json.dumps({name: list(group) for group, name in writer.groups.items()}).encode())
    return [*files, place / GROUPS]


class _ChakraRanks:
    """Makes the nodes of ranks; ``numbers`` counts the devices, ``groups`` names groups of collectives."""

    def __init__(self, simulation: Simulation, flat: FlatTimeline) -> None:
        self._flat, tasks = flat, flat.tasks
        self._of = flat.classes.of
        ordered = sorted(self._of, key=lambda device: device.id)
        self.numbers = {device: number for number, device in enumerate(ordered)}
        self.groups: dict[tuple[int, ...], str] = {tuple(range(len(ordered))): "0"}
        self._deps: list[int] = tasks.deps.tolist()
        self._dep_start: list[int] = tasks.dep_start.tolist()
        classes = [stream.rank_class for stream in tasks.stream_table]
        uses: list[int] = tasks.streams.tolist()
        slots: list[int] = tasks.stream_start.tolist()
        self._streams = [uses[first:after] for first, after in pairwise(slots)]
        self._tasks: dict[int, list[int]] = {}
        for task, streams in enumerate(self._streams):
            for rank_class in dict.fromkeys(classes[stream] for stream in streams):
                self._tasks.setdefault(rank_class, []).append(task)
        self._classes = classes

    def count(self, device: Device) -> int:
        """Return how many tasks a rank has."""
        return len(self._tasks.get(self._of[device], ()))

    def nodes(self, device: Device) -> Iterator[ChakraNode]:
        """Yield the nodes of a rank in the order of issue; a message that goes to itself in turn is two."""
        rank_class = self._of[device]
        made: dict[int, list[int]] = {}  # the nodes of a task
        last: dict[int, int] = {}  # of a stream, its last node
        number = 0
        for task in self._tasks.get(rank_class, ()):
            op = self._flat.tasks.op_of(task)
            own = [stream for stream in self._streams[task] if self._classes[stream] == rank_class]
            first, after = self._dep_start[task], self._dep_start[task + 1]
            needs = [node for dep in self._deps[first:after] for node in made.get(dep, ())]
            start = float(self._flat.start[task])
            duration = float(self._flat.end[task]) - start
            for kind, attributes in self._kinds(op, device, task):
                before = sorted({last[stream] for stream in own if stream in last} - set(needs))
                runtime: dict[str, Attribute] = {"runtime_ns": UInt64(round(duration * 1e9))}
                yield ChakraNode(
                    *(number, op_label(op), kind, before, dict.fromkeys(needs), start, duration),
                    {**attributes, **runtime},
                )
                made.setdefault(task, []).append(number)
                number += 1
            for stream in own:
                last[stream] = number - 1

    def _kinds(self, op: Op, device: Device, task: int) -> list[tuple[ChakraKind, dict[str, Attribute]]]:
        """Return what nodes a task is on a rank, with their attributes."""
        kind = operator(op.op_type)
        if not communicates(op):
            about: dict[str, Attribute] = {"is_cpu_op": kind.issues}
            if not kind.host_stream:
                return [(ChakraKind.COMP, about)]
            direction = ChakraKind.MEM_STORE if op.op_type == "Offload" else ChakraKind.MEM_LOAD
            return [(direction, {**about, "tensor_size": UInt64(_bytes_of(op))})]
        meaning = kind.communication
        name = "send" if meaning is None else meaning.kind
        if name in ("send", "shift"):
            return self._messages(op, device, task)
        return [(ChakraKind.COMM_COLL, self._collective(op, name, device))]

    def _collective(self, op: Op, kind: str, device: Device) -> dict[str, Attribute]:
        if kind not in COLLECTIVES:
            raise SimulationError(f"{op.op_type}: Chakra has no collective that is a {kind}")
        source, target = place_of(op.inputs[0]), place_of(op.outputs[0])
        if isinstance(source, Mesh) and "axis" in op.attributes:
            members = next(group for group in source.groups(op.attributes["axis"]) if device in group)
        else:
            members = tuple(dict.fromkeys([*devices_of(source), *devices_of(target)]))
        group = tuple(sorted(self.numbers[each] for each in members))
        name = self.groups.setdefault(group, str(len(self.groups)))
        return {
            "is_cpu_op": False,
            "comm_type": Int64(COLLECTIVES[kind]),
            "comm_size": Int64(_bytes_of(op)),
            "pg_name": name,
        }

    def _messages(self, op: Op, device: Device, task: int) -> list[tuple[ChakraKind, dict[str, Attribute]]]:
        """Return the ends of a message that a rank has; of ranks that pass something round, both."""
        found: list[tuple[ChakraKind, dict[str, Attribute]]] = []
        rank = self.numbers[device]
        about: dict[str, Attribute] = {"is_cpu_op": False, "comm_size": Int64(_bytes_of(op))}
        about["comm_tag"] = Int32(task % MOST_TAGS)
        for source, target in _pairs(op):
            both = {"comm_src": Int32(self.numbers[source]), "comm_dst": Int32(self.numbers[target])}
            if source == target:
                continue
            if self.numbers[source] == rank:
                found.append((ChakraKind.COMM_SEND, {**about, **both}))
            if self.numbers[target] == rank:
                found.append((ChakraKind.COMM_RECV, {**about, **both}))
        return found or [(ChakraKind.COMP, {"is_cpu_op": False})]


def _pairs(op: Op) -> list[tuple[Device, Device]]:
    """Return which device sends to which."""
    source, target = place_of(op.inputs[0]), place_of(op.outputs[0])
    if isinstance(source, Mesh) and "axis" in op.attributes:
        rings = source.groups(op.attributes["axis"])
        return [(ring[at], ring[(at + 1) % len(ring)]) for ring in rings for at in range(len(ring))]
    return list(zip(devices_of(source), devices_of(target), strict=True))


def _bytes_of(op: Op) -> int:
    """Return the bytes that a rank gives: of an all-gather its part, of a reduce-scatter the whole."""
    if operator(op.op_type).host_stream:  # what is on the host has none
        return max(sum(value.type.nbytes for value in side) for side in (op.inputs, op.outputs))
    return sum(value.type.nbytes for value in moved_values(op))


VERSION = "0.0.4"


class ChakraKind(IntEnum):
    """``NodeType``."""

    METADATA = 1
    MEM_LOAD = 2
    MEM_STORE = 3
    COMP = 4
    COMM_SEND = 5
    COMM_RECV = 6
    COMM_COLL = 7


COLLECTIVES = {
    **{"all_reduce": 0, "reduce": 1, "all_gather": 2, "gather": 3, "scatter": 4, "broadcast": 5},
    **{"all_to_all": 6, "reduce_scatter": 7, "barrier": 9},
}
"""``CollectiveCommType``, by what the kinds of collectives are called here."""


class Int64(NamedTuple):
    """A number that a reader expects as int64."""

    value: int


class Int32(NamedTuple):
    """A number that a reader expects as int32."""

    value: int


class UInt64(NamedTuple):
    """A number that a reader expects as uint64."""

    value: int


Attribute = bool | str | Int32 | Int64 | UInt64


def _varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    made = bytearray()
    while number > 127:
        made.append(number & 127 | 128)
        number >>= 7
    made.append(number)
    return bytes(made)


def _number(field: int, number: int) -> bytes:
    return _varint(field << 3) + _varint(number)


def _bytes(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _packed(field: int, numbers: Iterable[int]) -> bytes:
    content = b"".join(map(_varint, numbers))
    return _bytes(field, content) if content else b""


_FIELDS: dict[type, int] = {Int32: 7, Int64: 9, UInt64: 13}


def attribute(name: str, value: Attribute) -> bytes:
    """Return an ``AttributeProto``."""
    head = _bytes(1, name.encode())
    if isinstance(value, bool):
        return head + _number(27, value)
    if isinstance(value, str):
        return head + _bytes(29, value.encode())
    return head + _number(_FIELDS[type(value)], value.value)


class ChakraNode(NamedTuple):
    """A ``Node``: times in seconds, dependencies by number."""

    number: int
    name: str
    kind: ChakraKind
    before: Iterable[int]
    needs: Iterable[int]
    start: float
    duration: float
    attributes: Mapping[str, Attribute]

    def encoded(self) -> bytes:
        """Return the message."""
        parts = [
            _number(1, self.number),
            _bytes(2, self.name.encode()),
            _number(3, self.kind),
            _packed(4, self.before),
            _packed(5, self.needs),
            _number(6, round(self.start * 1e6)),
            _number(7, round(self.duration * 1e6)),
        ]
        parts += [_bytes(10, attribute(name, value)) for name, value in self.attributes.items()]
        return b"".join(parts)


def metadata() -> bytes:
    """Return the ``GlobalMetadata`` that begins a file."""
    return _bytes(1, VERSION.encode())


def delimited(message: bytes) -> bytes:
    """Return a message as it stands in a file of several: its length first."""
    return _varint(len(message)) + message
