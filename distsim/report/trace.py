"""Traces in Chrome's JSON format, as Perfetto and Holistic Trace Analysis read them.

One process per device, one thread per stream. Collectives have the names and arguments that PyTorch's
profiler gives NCCL kernels. A counter shows the memory in use, by kind. Times are rounded to nanoseconds,
so that what ends when the next begins does not overlap it. Format: "Trace Event Format" (Google, 2016);
https://perfetto.dev.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from distsim.errors import SimulationError
from distsim.ir import Device, Mesh, Op, Tensor, place_of
from distsim.ir.device import devices_of
from distsim.ops import op_label, operator
from distsim.ops.coalescing import moved_values
from distsim.ops.marks import HOST, LAUNCH
from distsim.report.labels import stream_label
from distsim.report.output import packed, replacing
from distsim.simulation import Simulation
from distsim.simulation.memory.timeline import memory_timeline
from distsim.simulation.memory.walk import KINDS
from distsim.simulation.tasks.rank_classes import communicates
from distsim.simulation.tasks.streams import Stream
from distsim.simulation.tasks.templates import Ints, tasks_of_uses
from distsim.simulation.tasks.timeline import Piece

MOST_COUNTED = 100_000
"""Tasks of a simulation beyond which its trace has no memory counter: that is made of all of them at once."""

_encode = msgspec.json.Encoder().encode
_KERNELS = {
    "all_reduce": ("AllReduce_Sum", "allreduce"),
    "all_gather": ("AllGather", "allgather"),
    "reduce_scatter": ("ReduceScatter_Sum", "reduce_scatter"),
    "all_to_all": ("SendRecv", "all_to_all"),
    "broadcast": ("Broadcast", "broadcast"),
    "scatter": ("SendRecv", "scatter"),
    "gather": ("SendRecv", "gather"),
    "send": ("SendRecv", "send"),
    "shift": ("SendRecv", "send"),
}
# The names that PyTorch's profiler gives element types.
_DTYPES = {
    "float32": "Float",
    "float64": "Double",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int32": "Int",
    "int64": "Long",
}


def write_trace(
    simulation: Simulation,
    path: str | os.PathLike[str],
    devices: Iterable[Device] | None = None,
    marked: bool = False,
) -> None:
    """Write the trace of these devices (default: all) as JSON, replacing ``path`` when it is complete.

    The file of a single device is what Holistic Trace Analysis takes as the file of one rank. A path that
    ends in .gz is compressed with gzip, as Perfetto opens it too. Events are written piece by piece; beyond
    ``MOST_COUNTED`` tasks without the memory in use. ``marked``: events without length stand where the step
    begins and ends, so that a reader counts a device as idle before its first kernel and after its last.
    Raises :class:`SimulationError` for a path that cannot be written to, or a device that does not occur.
    """
    of = simulation.classes.of
    chosen = list(dict.fromkeys(devices)) if devices is not None else sorted(of, key=lambda d: d.id)
    for device in chosen:
        if device not in of:
            raise SimulationError(f"{device} does not occur in {simulation.name}; it has no trace")
    with replacing(path) as draft, packed(draft, path) as file:
        file.write(b'{"schemaVersion":1,')
        if len(chosen) == 1:
            # Holistic Trace Analysis looks for the space after the colon.
            file.write(b'"distributedInfo": {"rank": %d, "world_size": %d},' % (chosen[0].id, len(of)))
        file.write(b'"traceEvents":[')
        separator = b"\n"
        marks = map(_encode, _marks(simulation, chosen)) if marked else ()
        for event in chain(marks, _events(simulation, chosen)):
            file.write(separator)
            file.write(event)
            separator = b",\n"
        file.write(b"\n]}\n")


def _marks(simulation: Simulation, devices: Iterable[Device]) -> Iterator[dict[str, Any]]:
    for device in devices:
        for name, seconds in (("begins", 0.0), ("ends", simulation.step_time)):
            about = {"stream": 0, "correlation": -1, "device": device.id}
            yield {
                **{"ph": "X", "cat": "gpu_memset", "name": f"Memset (step {name})", "pid": device.id},
                **{"tid": 0, "ts": round(seconds * 1e9) / 1000, "dur": 0, "args": about},
            }


def _events(simulation: Simulation, devices: list[Device]) -> Iterator[bytes]:
    """Yield the events as text, several at a time, joined by commas."""
    of = simulation.classes.of
    lanes = _lanes(simulation)
    members: dict[int, list[Device]] = {}
    for device in devices:
        members.setdefault(of[device], []).append(device)
        yield _encode(_metadata("process_name", device.id, None, f"rank {device.id} ({device})"))
        yield _encode(_metadata("process_sort_index", device.id, None, device.id))
        for (rank_class, name), lane in lanes.items():
            if rank_class == of[device]:
                yield _encode(_metadata("thread_name", device.id, lane, stream_label(simulation, name)))
    if len(simulation.timeline) <= MOST_COUNTED:
        yield from map(_encode, _memory(simulation, members))
    slices = SliceWriter(lanes, _describe)
    arrows = _Arrows(lanes, members, len(of))
    for piece in simulation.timeline.pieces():
        yield from slices.write(piece, members)
        yield from map(_encode, arrows.of(piece))


def _lanes(simulation: Simulation) -> Lanes:
    """Number the streams of each rank class from 0, compute first."""
    lanes: Lanes = {}
    counts: dict[int, int] = {}
    for stream in sorted(simulation.timeline.stream_table, key=lambda s: s.name != "compute"):
        lane = counts.get(stream.rank_class, 0)
        counts[stream.rank_class] = lane + 1
        lanes[stream.rank_class, stream.name] = lane
    return lanes


def _metadata(name: str, pid: int, tid: int | None, value: str | int) -> dict[str, Any]:
    key = "sort_index" if name.endswith("sort_index") else "name"
    event: dict[str, Any] = {"name": name, "ph": "M", "pid": pid, "args": {key: value}}
    return event if tid is None else event | {"tid": tid}


def _describe(op: Op) -> tuple[str, dict[str, Any]]:
    """Return the name of an op's slices, and the arguments that say what it works on.

    Names are such that Holistic Trace Analysis counts them as the shares of a device do: what computation
    loses to a collective as communication, copies to and from the host as memory.
    """
    if op.op_type == LAUNCH.op_type:
        return "cudaLaunchKernel", {"op": op_label(op)}
    outputs = ", ".join([f"{value.name}: {value.type}" for value in op.outputs])
    about: dict[str, Any] = {"op": op_label(op), "outputs": outputs}
    meaning = operator(op.op_type).communication
    if meaning is None or not communicates(op):
        kind = operator(op.op_type)
        before = "ncclDevKernel_" if kind.stalls else "Memcpy " if kind.host_stream else ""
        return before + op_label(op), about
    kernel, name = _KERNELS.get(meaning.kind, (meaning.kind, meaning.kind))
    about["Collective name"] = name
    given, made = [
        [v.type for v in side if isinstance(v.type, Tensor)] for side in (moved_values(op), op.outputs)
    ]
    if given and made:
        about["In msg nelems"], about["Out msg nelems"] = [
            sum(t.size for t in side) for side in (given, made)
        ]
        about["dtype"] = _DTYPES.get(given[0].dtype.name, given[0].dtype.name)
    about["Group size"] = _group_size(op)
    return f"ncclDevKernel_{kernel}_{op.op_type}", about


def _group_size(op: Op) -> int:
    meaning = operator(op.op_type).communication
    place = place_of(op.inputs[0])
    if meaning is not None and meaning.kind == "send":
        return 2
    if isinstance(place, Mesh) and "axis" in op.attributes:
        return place.axis_size(op.attributes["axis"])
    both = (*devices_of(place), *devices_of(place_of(op.outputs[0])))
    return len(dict.fromkeys(both))


def _memory(simulation: Simulation, members: Mapping[int, list[Device]]) -> Iterator[dict[str, Any]]:
    """Yield the counters of the memory in use, by kind."""
    for rank_class, timeline in enumerate(memory_timeline(simulation)):
        used = [number for number in range(len(KINDS)) if timeline.by_kind[:, number].any()]
        names = [KINDS[number] for number in used]
        columns = timeline.by_kind[:, used]
        for device in members.get(rank_class, ()):
            for seconds, amounts in zip(timeline.times.tolist(), columns.tolist(), strict=True):
                event: dict[str, Any] = {"ph": "C", "name": "memory (bytes)", "pid": device.id}
                yield event | {
                    "ts": round(seconds * 1e9) / 1000,
                    "args": dict(zip(names, amounts, strict=True)),
                }


# --- arrows from a send to its receive ---------------------------------------------------------------


_Pairs = dict[str, dict[Device, tuple[int, Device]]]
"""For each end, "s" and "f": device -> the number of its pair, and the device at the other end."""


def _pairs(op: Op) -> _Pairs:
    pairs = zip(devices_of(place_of(op.inputs[0])), devices_of(place_of(op.outputs[0])), strict=True)
    found: _Pairs = {"s": {}, "f": {}}
    for number, (source, target) in enumerate(pairs):
        found["s"][source] = (number, target)
        found["f"][target] = (number, source)
    return found


class _Arrows:
    """Makes the arrows of the Sends of pieces, between devices that are both in the trace."""

    def __init__(self, lanes: Lanes, members: dict[int, list[Device]], devices: int) -> None:
        self._lanes, self._members, self._devices = lanes, members, devices
        self._chosen = {device for group in members.values() for device in group}
        self._pairs: dict[Op, _Pairs] = {}

    def of(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """Yield the arrows of a piece."""
        sends = [number for number, op in enumerate(piece.op_table) if op.op_type == "Send"]
        if not sends:
            return
        for task in np.flatnonzero(np.isin(piece.op, sends)).tolist():
            first, after = piece.stream_start[task : task + 2].tolist()
            for use in range(first, after):
                # Of two streams the first is the sender's; on one, ranks of a class pass something round.
                ends = "sf" if after - first == 1 else "sf"[use - first]
                yield from self._on(piece, task, piece.stream_table[int(piece.streams[use])], ends)

    def _on(self, piece: Piece, task: int, stream: Stream, ends: str) -> Iterator[dict[str, Any]]:
        op = piece.op_table[int(piece.op[task])]
        if op not in self._pairs:
            self._pairs[op] = _pairs(op)
        lane = self._lanes[stream.rank_class, stream.name]
        at = round(piece.start[task] * 1e9) / 1000
        for device in self._members.get(stream.rank_class, ()):
            for end in ends:
                number, peer = self._pairs[op][end][device]
                if peer in self._chosen and peer != device:
                    label = (piece.first + task) * self._devices + number
                    event: dict[str, Any] = {"ph": end, "cat": "send", "name": "Send", "id": label}
                    event |= {"pid": device.id, "tid": lane, "ts": at}
                    yield event | {"bp": "e"} if end == "f" else event


Lanes = dict[tuple[int, str], int]
"""(rank class, name of the stream) -> its number among those of its class."""

MOST_SLICES = 4096
"""So many slices are made at a time."""

MOST_KEPT = 32768
"""Longer pieces (a whole function) come once: what is the same in them is not kept."""

_FIELDS = 8


@dataclass(frozen=True, eq=False, slots=True)
class _Sheet:
    """The slices of some tasks of a piece on one rank class, with a gap for whatever differs.

    ``kernels``: of each the task, or of a launch that which it is the launch of.
    """

    tasks: Ints
    kernels: Ints
    text: bytes


class SliceWriter:
    """Encodes the slices of pieces; ``describe`` gives the name and the arguments of an op.

    Times are whole nanoseconds, written in microseconds with three decimals.
    """

    def __init__(self, lanes: Lanes, describe: Callable[[Op], tuple[str, dict[str, Any]]]) -> None:
        self._lanes = lanes
        self._describe = describe
        self._heads: dict[tuple[Op, int], tuple[bytes, bytes]] = {}
        self._sheets: dict[object, tuple[tuple[object, ...], list[tuple[int, _Sheet]]]] = {}

    def write(self, piece: Piece, members: dict[int, list[Device]]) -> Iterator[bytes]:
        """Yield the slices of a piece on the devices of ``members``, by rank class, joined by commas."""
        path = _encode(piece.path)[1:-1]
        for rank_class, sheet in self._sheets_of(piece, members):
            start = np.rint(piece.start[sheet.tasks] * 1e9).astype(np.int64)
            length = np.rint(piece.end[sheet.tasks] * 1e9).astype(np.int64) - start
            count = len(sheet.tasks)
            values: list[Any] = [path] * (_FIELDS * count)
            values[1::_FIELDS] = (piece.first + sheet.kernels).tolist()
            for place, numbers in ((2, start), (4, length)):
                values[place + 2 :: _FIELDS] = (numbers // 1000).tolist()
                values[place + 3 :: _FIELDS] = (numbers % 1000).tolist()
            for device in members[rank_class]:
                values[2::_FIELDS] = values[3::_FIELDS] = [device.id] * count
                yield sheet.text % tuple(values)

    def _sheets_of(self, piece: Piece, members: dict[int, list[Device]]) -> Iterable[tuple[int, _Sheet]]:
        """Return the sheets of a piece: kept where it may be one of many alike."""
        if len(piece) > MOST_KEPT:
            return self._made(piece, members)
        # A key names its parts by their ids; what is named is kept along, so that the id stays its own.
        named = (piece.call, *piece.op_table, *piece.stream_table)
        key = (id(piece.call), tuple(piece.op_table), tuple(piece.stream_table), tuple(piece.call_names))
        found = self._sheets.get(key)
        if found is None:
            found = self._sheets[key] = (named, list(self._made(piece, members)))
        return found[1]

    def _made(self, piece: Piece, members: dict[int, list[Device]]) -> Iterator[tuple[int, _Sheet]]:
        class_of = np.array([stream.rank_class for stream in piece.stream_table], np.int64)
        tasks = tasks_of_uses(piece.stream_start)
        if not len(tasks):
            return
        classes = class_of[piece.streams]
        inside = [_text(path[len(piece.path) :]) for path in piece.paths()]
        lanes = [self._lanes[stream.rank_class, stream.name] for stream in piece.stream_table]
        kernels = {name: _launched(piece, tasks, classes == name) for name in members}
        drawn = ~_waits(piece, tasks)
        for first in range(0, len(tasks), MOST_SLICES):
            part = slice(first, first + MOST_SLICES)
            for rank_class in members:
                uses = first + np.flatnonzero(drawn[part] & (classes[part] == rank_class))
                if len(uses):
                    own = tasks[uses]
                    calls: Sequence[int] = piece.call[own].tolist()
                    ops: Sequence[int] = piece.op[own].tolist()
                    streams: Sequence[int] = piece.streams[uses].tolist()
                    rows = [
                        self._row(piece.op_table[op], lanes[stream], inside[call])
                        for op, stream, call in zip(ops, streams, calls, strict=True)
                    ]
                    yield rank_class, _Sheet(own, kernels[rank_class][uses], b",\n".join(rows))

    def _row(self, op: Op, lane: int, inside: bytes) -> bytes:
        found = self._heads.get((op, lane))
        if found is None:
            name, about = self._describe(op)
            launch = op.op_type == LAUNCH.op_type
            head = {"ph": "X", "cat": "cuda_runtime" if launch else "kernel", "name": name, "tid": lane}
            if name.startswith("Memcpy "):
                head["cat"] = "gpu_memcpy"
            # What has a stream is taken to run on the device.
            arguments = _encode(about if launch else {"stream": lane, **about})[:-1].replace(b"%", b"%%")
            before = _encode(head)[:-1].replace(b"%", b"%%") + b',"args":' + arguments + b',"path":"%b'
            after = b'","correlation":%d,"device":%d},"pid":%d,"ts":%d.%03d,"dur":%d.%03d}'
            found = self._heads[op, lane] = (before, after)
        return found[0] + inside + found[1]


def _launched(piece: Piece, tasks: Ints, own: NDArray[np.bool_]) -> Ints:
    """Return for each use of a stream its task, for a launch the next of the same class, which it is of."""
    found = tasks.copy()
    launch = _are_launches(piece, tasks)
    kernels, launches = np.flatnonzero(own & ~launch), np.flatnonzero(own & launch)
    after = np.searchsorted(kernels, launches)
    there = after < len(kernels)
    found[launches[there]] = tasks[kernels[after[there]]]
    return found


def _waits(piece: Piece, tasks: Ints) -> NDArray[np.bool_]:
    """Return which uses of a stream are none: a launch on one of the device only waits for what is there."""
    host = np.array([stream.name == HOST for stream in piece.stream_table], np.bool_)
    return _are_launches(piece, tasks) & ~host[piece.streams]


def _are_launches(piece: Piece, tasks: Ints) -> NDArray[np.bool_]:
    return np.array([op.op_type == LAUNCH.op_type for op in piece.op_table], np.bool_)[piece.op[tasks]]


def _text(text: str) -> bytes:
    """Return a text as it stands inside a JSON string that is then filled in with ``%``."""
    return _encode(text)[1:-1].replace(b"%", b"%%")
