"""Lowering: a function becomes tasks on streams, the input of every engine.

One task is one op on one rank class (a collective: one task for all classes of a group). A callee is
lowered once, with references relative to its call, and copied with NumPy for each call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from distsim.executor.classes import (
    RankClasses,
    communicates,
    place_of_compute,
    rank_classes,
)
from distsim.executor.cost_model import CostModel, runs_kernel
from distsim.ir import Function, Op, Value
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


@dataclass(frozen=True, eq=False)
class Tasks:
    """Tasks in the order of the function, as plain arrays.

    Task ``i`` takes ``durations[i]`` seconds, occupies the streams
    ``streams[stream_start[i]:stream_start[i + 1]]`` (indices into ``stream_table``) and needs the
    tasks ``deps[dep_start[i]:dep_start[i + 1]]`` to have ended; each stream runs its tasks by
    increasing number. It runs ``op_table[op[i]]``, in the call ``call[i]`` (0: the function itself).
    Call ``c`` is the op ``call_op[c]``, made in the call ``call_parent[c]``.
    """

    function: Function
    classes: RankClasses
    durations: Floats
    dep_start: Ints
    deps: Ints
    stream_start: Ints
    streams: Ints
    stream_table: tuple[Stream, ...]
    op: Ints
    op_table: tuple[Op, ...]
    call: Ints
    call_parent: Ints
    call_op: tuple[Op | None, ...]

    def __len__(self) -> int:
        return len(self.durations)

    def op_of(self, task: int) -> Op:
        """Return the op that a task runs."""
        return self.op_table[int(self.op[task])]

    def path(self, task: int) -> tuple[Op, ...]:
        """Return the calls that lead to a task, outermost first."""
        found: list[Op] = []
        call = int(self.call[task])
        while call > 0:
            op = self.call_op[call]
            if op is not None:
                found.append(op)
            call = int(self.call_parent[call])
        return tuple(reversed(found))

    def streams_of(self, task: int) -> tuple[Stream, ...]:
        """Return the streams that a task occupies."""
        numbers: list[int] = self.streams[self.stream_start[task] : self.stream_start[task + 1]].tolist()
        return tuple([self.stream_table[number] for number in numbers])

    def describe(self, task: int) -> str:
        """Return the name of a task for an error: its calls and its op."""
        return " / ".join([*(op.callee.name for op in self.path(task)), repr(self.op_of(task))])


def lower(function: Function, cost_model: CostModel, overlap: bool = True, lockstep: bool = True) -> Tasks:
    """Return the tasks of ``function``, which must be placed on devices.

    ``overlap``: each rank class has a compute stream, a stream per mesh axis, and a send and a receive
    stream per peer; without it one stream for everything. ``lockstep``: simulate devices that provably
    do the same as one (:mod:`distsim.executor.classes`); without it each on its own.
    Raises ``SimulationError`` for an op on no device, and what the cost model raises.
    """
    lowering = _Lowering(rank_classes(function, cost_model, lockstep), cost_model, overlap)
    template = lowering.template(function)
    count = len(template.durations)
    known = template.dep_source >= 0  # what is left refers to inputs, which are there from the start
    return Tasks(
        function=function,
        classes=lowering.classes,
        durations=template.durations,
        dep_start=_starts(template.dep_task[known], count),
        deps=template.dep_source[known],
        stream_start=_starts(template.stream_task, count),
        streams=template.stream,
        stream_table=tuple(lowering.streams),
        op=template.op,
        op_table=tuple(lowering.ops),
        call=template.call,
        call_parent=template.call_parent,
        call_op=tuple(template.call_op),
    )


def _starts(task: Ints, count: int) -> Ints:
    return np.concatenate([[0], np.cumsum(np.bincount(task, minlength=count))]).astype(np.int64)


# --- templates ---------------------------------------------------------------------------------------

_FROM_START = -1
"""Reference to something that is there from the start; -2 - p refers to port p of the template."""

Where = dict[int, int] | int
"""Who makes a value: rank class -> task of this template; or the number of the input that it is."""


@dataclass(frozen=True, eq=False, slots=True)
class _Template:
    """The tasks of one function: references count from its first task, or name a port.

    ``ports`` lists (input, rank class): a task of the call waits for who made that input there.
    ``outputs`` tells who makes each output.
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


class _Lowering:
    """Everything that all templates of one lowering share."""

    def __init__(self, classes: RankClasses, cost_model: CostModel, overlap: bool) -> None:
        self.classes = classes
        self.cost_model = cost_model
        self.overlap = overlap
        self.streams: dict[Stream, int] = {}
        self.ops: dict[Op, int] = {}
        self._templates: dict[int, _Template] = {}

    def template(self, function: Function) -> _Template:
        found = self._templates.get(id(function))
        if found is None:
            builder = _Builder(self, function)
            for op in function.ops:
                builder.add(op)
            found = self._templates[id(function)] = builder.finish()
        return found

    def stream(self, rank_class: int, name: str) -> int:
        key = Stream(rank_class, name if self.overlap else "all")
        return self.streams.setdefault(key, len(self.streams))


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

    def __init__(self, lowering: _Lowering, function: Function) -> None:
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
            self._compute(op)

    def finish(self) -> _Template:
        self._close()
        chunks = self.chunks
        return _Template(
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

    def _compute(self, op: Op) -> None:
        lowering = self.lowering
        place = place_of_compute(self.function, op)
        signature = signature_of(op)
        seconds: dict[int, float] = {}
        made: dict[int, int] = {}
        for rank_class in lowering.classes.at(place):
            device = lowering.classes.members[rank_class][0]
            spec = lowering.cost_model.spec(device)
            if spec not in seconds:
                seconds[spec] = lowering.cost_model.seconds(signature, (device,))
            deps = [self._source(value, rank_class) for value in op.inputs]
            stream = lowering.stream(rank_class, "compute")
            made[rank_class] = self._task(op, seconds[spec], deps, (stream,))
        self.where.update(dict.fromkeys(op.outputs, made))

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
        rows.call.append(0)
        for source in dict.fromkeys(deps):
            if source != _FROM_START:
                rows.dep_task.append(number)
                rows.dep_source.append(source)
        for stream in streams:
            rows.stream_task.append(number)
            rows.stream.append(stream)
        self.count += 1
        return number

    def _source(self, value: Value, rank_class: int) -> int:
        """Return the reference to the task that makes a value on a class."""
        where = self.where[value]
        if isinstance(where, int):
            return -2 - self.ports.setdefault((where, rank_class), len(self.ports))
        return where.get(rank_class, _FROM_START)

    def _call(self, op: Op) -> None:
        callee = self.lowering.template(op.callee)
        self._close()
        base, base_call = self.count, len(self.call_op)
        chunks = self.chunks
        sources = [_FROM_START, *(self._source(op.inputs[i], c) for i, c in callee.ports)]
        dep_source = callee.dep_source + base
        outside = callee.dep_source < 0
        dep_source[outside] = np.array(sources)[-1 - callee.dep_source[outside]]
        chunks.durations.append(callee.durations)
        chunks.dep_task.append(callee.dep_task + base)
        chunks.dep_source.append(dep_source)
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
            chunks.call.append(np.array(rows.call, np.int64))
            self.open = _Rows()


def _join(chunks: list[Any], dtype: Any = np.int64) -> npt.NDArray[Any]:
    return np.concatenate(chunks).astype(dtype, copy=False) if chunks else np.empty(0, dtype)
