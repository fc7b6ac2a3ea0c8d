"""Lowering of ops to tasks: templates, with references relative to the call, one per function.

A template is what a call of its function adds: tasks with durations, what each waits for and the streams
that it occupies. References of a template are to its own tasks or to its *ports*: what an op of the
function waits for that was made outside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from distsim.executor.classes import Classes, ClassExchange, Group, Placement, communicates, place_of_compute
from distsim.executor.cost_model import CostModel, runs_kernel
from distsim.ir import Function, Op, Type, Value
from distsim.ops import signature_of

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Stream:
    """What runs one task after the other, in order: one lane of one rank class.

    ``name`` is ``compute``, ``collective <axis>``, ``transfer`` (between one device and a mesh),
    ``send <class>``, ``receive <class>``, or ``all`` when nothing overlaps.
    """

    rank_class: int
    name: str


class Ranks(Protocol):
    """The rank classes on which ops are placed; :class:`RankClasses` is one."""

    @property
    def members(self) -> Sequence[Group]:
        """The devices of each class."""
        ...

    def at(self, placement: Placement, /) -> Classes:
        """Return the classes that a placement consists of."""
        ...

    def exchanges(self, op: Op, /) -> Sequence[ClassExchange]:
        """Return the exchanges of a communication op."""
        ...


FROM_START = -1
"""Reference to something that is there from the start; ``-2 - p`` refers to port p of the template."""

Where = dict[int, int] | int
"""Who makes a value: rank class -> task of this template; or the number of the input that it is."""


@dataclass(frozen=True, eq=False, slots=True)
class Template:
    """The tasks of one function: references count from its first task, or name a port.

    Dependencies and streams come as (task, what) pairs, by increasing task. ``call`` is 0 for the ops of
    the function itself. ``ports`` lists (input, rank class): a task of the call waits for who made that
    input there. ``outputs`` tells who makes each output.
    """

    durations: Floats
    dep_task: Ints
    dep_source: Ints
    stream_task: Ints
    stream: Ints
    op: Ints
    call: Ints
    call_parent: Ints
    call_op: list[Op | None]
    ports: list[tuple[int, int]]
    outputs: list[Where]

    def __len__(self) -> int:
        return len(self.durations)


class Lowering:
    """Everything that all templates of one lowering share: the tables of streams and of ops."""

    def __init__(self, classes: Ranks, cost_model: CostModel, overlap: bool) -> None:
        self.classes = classes
        self.cost_model = cost_model
        self.overlap = overlap
        self.streams: dict[Stream, int] = {}
        self.ops: dict[Op, int] = {}
        self.kinds: dict[tuple[object, ...], tuple[tuple[int, float, int], ...]] = {}
        self._templates: dict[int, Template] = {}

    def template(self, function: Function) -> Template:
        """Return the template of a function, made once."""
        found = self._templates.get(id(function))
        if found is None:
            builder = _Builder(self, function)
            for op in function.ops:
                builder.add(op)
            found = self._templates[id(function)] = builder.finish()
        return found

    def stream(self, rank_class: int, name: str) -> int:
        """Return the number of a stream."""
        key = Stream(rank_class, name if self.overlap else "all")
        return self.streams.setdefault(key, len(self.streams))

    def compute(self, function: Function, op: Op) -> tuple[tuple[int, float, int], ...]:
        """Return (rank class, seconds, stream) of a compute op on each of its classes."""
        key = (op.op_type, op.attributes, op.version, *_types(op.inputs), None, *_types(op.outputs))
        found = self.kinds.get(key)
        if found is None:
            place = place_of_compute(function, op)
            signature = signature_of(op)
            found = tuple(
                [
                    (c, self.cost_model.seconds(signature, self.classes.members[c][:1]), s)
                    for c, s in [(c, self.stream(c, "compute")) for c in self.classes.at(place)]
                ]
            )
            self.kinds[key] = found
        return found


def _types(values: Sequence[Value]) -> list[Type]:
    return [value.type for value in values]


@dataclass(slots=True)
class _Rows:
    """Columns of a template while it grows; each is a list of chunks."""

    durations: list[Any] = field(default_factory=list[Any])
    dep_task: list[Any] = field(default_factory=list[Any])
    dep_source: list[Any] = field(default_factory=list[Any])
    stream_task: list[Any] = field(default_factory=list[Any])
    stream: list[Any] = field(default_factory=list[Any])
    op: list[Any] = field(default_factory=list[Any])
    call: list[Any] = field(default_factory=list[Any])


class _Builder:
    """Makes one template."""

    def __init__(self, lowering: Lowering, function: Function) -> None:
        self.lowering = lowering
        self.function = function
        self.count = 0
        self.chunks = _Rows()
        self.open = _Rows()  # the rows since the last call, as plain numbers
        self.where: dict[Value, Where] = {value: i for i, value in enumerate(function.inputs)}
        self.ports: dict[tuple[int, int], int] = {}
        self.call_op: list[Op | None] = [None]
        self.call_parent: list[Ints] = [np.array([-1])]

    def add(self, op: Op) -> None:
        if op.op_type == "Call":
            self._call(op)
        elif not runs_kernel(op.op_type):
            made: Where = self.where[op.inputs[0]] if op.inputs else {}
            self.where.update(dict.fromkeys(op.outputs, made))
        elif communicates(op):
            self._communicate(op)
        else:
            made = {}
            for rank_class, seconds, stream in self.lowering.compute(self.function, op):
                deps = [self._source(value, rank_class) for value in op.inputs]
                made[rank_class] = self._task(op, seconds, deps, (stream,))
            for value in op.outputs:
                self.where[value] = made

    def finish(self) -> Template:
        self._close()
        chunks = self.chunks
        return Template(
            _join(chunks.durations, np.float64),
            _join(chunks.dep_task),
            _join(chunks.dep_source),
            _join(chunks.stream_task),
            _join(chunks.stream),
            _join(chunks.op),
            _join(chunks.call),
            _join(self.call_parent),
            self.call_op,
            list(self.ports),
            [self.where[value] for value in self.function.outputs],
        )

    def _communicate(self, op: Op) -> None:
        lowering = self.lowering
        signature = signature_of(op)
        made: dict[int, int] = {}
        for part in lowering.classes.exchanges(op):
            seconds = lowering.cost_model.communication_seconds(signature, part.group)
            deps = [self._source(op.inputs[0], rank_class) for rank_class in part.sources]
            if op.op_type == "Send":
                (source,), (target,) = part.sources, part.targets
                names = ((source, f"send {target}"), (target, f"receive {source}"))
            else:
                axis = op.attributes.get("axis")
                name = "transfer" if axis is None else f"collective {axis}"
                names = tuple((c, name) for c in dict.fromkeys((*part.sources, *part.targets)))
            streams = dict.fromkeys(lowering.stream(*pair) for pair in names)
            task = self._task(op, seconds, deps, streams)
            made.update(dict.fromkeys(part.targets, task))
        self.where[op.outputs[0]] = made

    def _task(self, op: Op, seconds: float, deps: list[int], streams: Iterable[int]) -> int:
        number = self.count
        rows = self.open
        rows.durations.append(seconds)
        rows.op.append(self.lowering.ops.setdefault(op, len(self.lowering.ops)))
        for source in deps if len(deps) < 2 else dict.fromkeys(deps):
            if source != FROM_START:
                rows.dep_task.append(number)
                rows.dep_source.append(source)
        for stream in streams:
            rows.stream_task.append(number)
            rows.stream.append(stream)
        self.count = number + 1
        return number

    def _source(self, value: Value, rank_class: int) -> int:
        """Return the reference to the task that makes a value on a class."""
        where = self.where[value]
        if isinstance(where, int):
            return -2 - self.ports.setdefault((where, rank_class), len(self.ports))
        return where.get(rank_class, FROM_START)

    def _call(self, op: Op) -> None:
        callee = self.lowering.template(op.callee)
        self._close()
        base, base_call = self.count, len(self.call_op)
        chunks = self.chunks
        sources = [FROM_START, *(self._source(op.inputs[i], c) for i, c in callee.ports)]
        dep_source = callee.dep_source + base
        outside = callee.dep_source < 0
        dep_source[outside] = np.array(sources)[-1 - callee.dep_source[outside]]
        there = dep_source != FROM_START
        chunks.durations.append(callee.durations)
        chunks.dep_task.append(callee.dep_task[there] + base)
        chunks.dep_source.append(dep_source[there])
        chunks.stream_task.append(callee.stream_task + base)
        chunks.stream.append(callee.stream)
        chunks.op.append(callee.op)
        chunks.call.append(callee.call + base_call)
        parents = callee.call_parent + base_call
        parents[0] = 0
        self.call_parent.append(parents)
        self.call_op.append(op)
        self.call_op.extend(callee.call_op[1:])
        self.count += len(callee.durations)
        for value, where in zip(op.outputs, callee.outputs, strict=True):
            if isinstance(where, int):
                self.where[value] = self.where[op.inputs[where]]
            else:
                self.where[value] = {c: task + base for c, task in where.items()}

    def _close(self) -> None:
        """Turn the open rows into chunks."""
        rows, chunks = self.open, self.chunks
        if rows.op:
            chunks.durations.append(np.array(rows.durations))
            chunks.dep_task.append(np.array(rows.dep_task, np.int64))
            chunks.dep_source.append(np.array(rows.dep_source, np.int64))
            chunks.stream_task.append(np.array(rows.stream_task, np.int64))
            chunks.stream.append(np.array(rows.stream, np.int64))
            chunks.op.append(np.array(rows.op, np.int64))
            chunks.call.append(np.zeros(len(rows.op), np.int64))
            self.open = _Rows()


def _join(chunks: list[Any], dtype: Any = np.int64) -> npt.NDArray[Any]:
    return np.concatenate(chunks).astype(dtype, copy=False) if chunks else np.empty(0, dtype)


def starts(task: Ints, count: int) -> Ints:
    """Return where the entries of each task begin in arrays that are sorted by task, and the end."""
    return np.concatenate([[0], np.cumsum(np.bincount(task, minlength=count))]).astype(np.int64)
