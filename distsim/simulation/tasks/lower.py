"""Lowering of ops to tasks: templates, with references relative to the call, one per function.

A template is what a call of its function adds: tasks with durations, what each waits for and the streams
that it occupies. References of a template are to its own tasks or to its *ports*: what an op of the
function waits for that was made outside.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from distsim.cost.cost_model import CostModel
from distsim.cost.demand import takes_turn
from distsim.hardware.routes import among
from distsim.ir import Function, Op, Value
from distsim.ops import Signature, operator, signature_of
from distsim.ops.coalescing import moved_values
from distsim.ops.marks import HOST, LAUNCH, SLOWDOWN
from distsim.simulation.tasks.grid import task_seconds
from distsim.simulation.tasks.rank_classes import (
    Classes,
    ClassExchange,
    Group,
    communicates,
    place_of_compute,
)
from distsim.simulation.tasks.streams import Ranks, Stream
from distsim.simulation.tasks.templates import (
    FROM_START,
    Calls,
    Floats,
    Ints,
    Template,
    TemplateColumns,
    Where,
)

_TYPE = attrgetter("type")

Kind = tuple[tuple[int, int, tuple[int, ...]], ...] | None
"""(rank class, run, runs that it comes after: of the host that issues it, and of no time on a stream that
it follows) of a compute op on each of its classes; None: it communicates."""

_LAUNCH, _SLOWDOWN = 0, 1
"""The numbers of ``LAUNCH`` and ``SLOWDOWN`` among the ops of a lowering."""


class IssuedExchange(NamedTuple):
    """How one exchange of a communication op runs.

    ``issues`` are the runs of the hosts that issue it, ``slows`` those that computation loses to it.
    """

    sources: Classes
    targets: Classes
    run: int
    issues: tuple[int, ...]
    slows: tuple[int, ...]


class Lowering:
    """Everything that all templates of one lowering share: the tables of streams and of ops."""

    def __init__(
        self, classes: Ranks, cost_model: CostModel, overlap: bool, contention: bool = False
    ) -> None:
        self.contention = contention
        self.classes = classes
        self.cost_model = cost_model
        self.overlap = overlap
        self.streams: dict[Stream, int] = {}
        self.class_of: list[int] = []
        self.runs: dict[tuple[float, tuple[int, ...]], int] = {}
        self.ops: list[Op] = [LAUNCH, SLOWDOWN]
        self.issues = bool(cost_model.kernels)
        self._exchanges: dict[tuple[object, ...], tuple[IssuedExchange, ...]] = {}
        self._kinds: dict[tuple[object, ...], Kind] = {}
        self._known: dict[tuple[object, ...], Kind] = {}
        self._templates: dict[Function, Template] = {}

    def template(self, function: Function, whole: bool = False) -> Template:
        """Return the template of a function, made once; ``whole``: its inputs are there from the start."""
        found = self._templates.get(function)
        if found is None:
            builder = _TemplateBuilder(self, function)
            if whole:
                start: Made = {}
                builder.where = dict.fromkeys(function.inputs, start)
            for op in function.ops:
                builder.add(op)
            found = self._templates[function] = builder.finish()
        return found

    def stream(self, rank_class: int, name: str) -> int:
        """Return the number of a stream."""
        key = Stream(rank_class, name if self.overlap or name == HOST else "all")
        found = self.streams.get(key)
        if found is None:
            found = self.streams[key] = len(self.streams)
            self.class_of.append(rank_class)
        return found

    def run(self, seconds: float, streams: tuple[int, ...]) -> int:
        """Return the number of a way to run: how long, and on which streams."""
        return self.runs.setdefault((seconds, streams), len(self.runs))

    def columns(self, runs: list[int]) -> tuple[Floats, Ints, Ints]:
        """Return durations, and the (task, stream) pairs, of tasks that run so."""
        ways, which = list(self.runs), np.array(runs, np.int64)
        counts = np.array([len(streams) for _, streams in ways], np.int64)
        begins = np.concatenate([[0], np.cumsum(counts)])
        every = np.array([stream for _, streams in ways for stream in streams], np.int64)
        task = np.repeat(np.arange(len(which)), counts[which])
        ahead = np.arange(len(task)) - np.repeat(np.cumsum(counts[which]) - counts[which], counts[which])
        stream = every[begins[which][task] + ahead]
        return np.array([seconds for seconds, _ in ways])[which], task, stream

    def exchanges(self, op: Op) -> tuple[IssuedExchange, ...]:
        """Return how a communication op runs, for each of its exchanges."""
        key = (op.op_type, op.attributes, *map(_TYPE, op.inputs + op.outputs))
        found = self._exchanges.get(key)
        if found is None:
            signature = signature_of(op)
            parts = [(part, self._ends(op, part)) for part in self.classes.exchanges(op)]
            of = self.cost_model.communication_seconds
            asked = [of(signature, self._group(part)) for part, _ in parts]
            seconds = [task_seconds(op, cost) for cost in asked]
            found = self._exchanges[key] = tuple(
                [
                    IssuedExchange(
                        part.sources,
                        part.targets,
                        self.run(s, ends),
                        self._issues(signature, part),
                        self._slows(signature, part),
                    )
                    for (part, ends), s in zip(parts, seconds, strict=True)
                ]
            )
        return found

    def _group(self, part: ClassExchange) -> Group:
        """Return the group of an exchange, with all that divide what it shares, unless the engine does."""
        return part.group if self.contention else among(part.group, part.family, self.cost_model.topology)

    def _issues(self, signature: Signature, part: ClassExchange) -> tuple[int, ...]:
        """Return the runs of the hosts that issue an exchange."""
        classes = dict.fromkeys((*part.sources, *part.targets))
        return tuple([run for c in classes for run in self.issue(signature, c)])

    def _slows(self, signature: Signature, part: ClassExchange) -> tuple[int, ...]:
        """Return the runs that computation loses on each class of an exchange."""
        found: list[int] = []
        for c in dict.fromkeys((*part.sources, *part.targets)) if self.overlap else ():
            device = self.classes.members[c][0]
            seconds = self.cost_model.slowdown_seconds(signature, self._group(part), device)
            if seconds:
                found.append(self.run(task_seconds(signature, seconds), (self.stream(c, "compute"),)))
        return tuple(found)

    def _ends(self, op: Op, part: ClassExchange) -> tuple[int, ...]:
        """Return the streams that an exchange occupies."""
        if op.op_type == "Send":
            (source,), (target,) = part.sources, part.targets
            channel = op.attributes.get("channel", 0)
            lane = f".{channel}" if channel else ""
            names = ((source, f"send {target}{lane}"), (target, f"receive {source}{lane}"))
        else:
            axis = op.attributes.get("axis")
            name = "transfer" if axis is None else f"collective {axis}"
            names = tuple((c, name) for c in dict.fromkeys((*part.sources, *part.targets)))
        return tuple(dict.fromkeys(self.stream(*pair) for pair in names))

    def issue(self, signature: Signature, rank_class: int) -> tuple[int, ...]:
        """Return the run of the host that issues an op on a rank class, if that takes time."""
        seconds = self.cost_model.launch_seconds(signature, self.classes.members[rank_class][0])
        if not seconds:
            return ()
        return (self.run(task_seconds(signature, seconds), (self.stream(rank_class, HOST),)),)

    def _before(self, signature: Signature, rank_class: int) -> tuple[int, ...]:
        """Return the runs that a compute op comes after on a rank class, whatever it reads."""
        issue, follows = self.issue(signature, rank_class), operator(signature.op_type).follows
        return (*issue, self.run(0.0, (self.stream(rank_class, follows),))) if follows else issue

    def kind(self, function: Function, op: Op) -> Kind:
        """Return how a compute op runs on each of its classes.

        Nothing for an op that takes no turn. A communication op has none: it is None.
        """
        # The objects' ids first: attributes and types are mostly shared, and they outlive the lowering.
        key = (op.op_type, id(op.attributes), op.version, len(op.inputs))
        key += tuple(map(id, map(_TYPE, op.inputs + op.outputs)))
        try:
            return self._known[key]
        except KeyError:
            known = (op.op_type, op.attributes, op.version, len(op.inputs))
            found = self._known[key] = self._kind(
                function, op, known + tuple(map(_TYPE, op.inputs + op.outputs))
            )
            return found

    def _kind(self, function: Function, op: Op, key: tuple[object, ...]) -> Kind:
        if key not in self._kinds:
            found: Kind = ()
            if communicates(op):
                found = None
            elif takes_turn(op.op_type):
                signature = signature_of(op)
                at = self.classes.at(place_of_compute(function, op))
                first = [self.classes.members[c][:1] for c in at]
                asked = [self.cost_model.seconds(signature, where) for where in first]
                seconds = [task_seconds(op, cost) for cost in asked]
                name = operator(op.op_type).host_stream or "compute"
                runs = [self.run(s, (self.stream(c, name),)) for c, s in zip(at, seconds, strict=True)]
                found = tuple(zip(at, runs, [self._before(signature, c) for c in at], strict=True))
            self._kinds[key] = found
        return self._kinds[key]


Made = dict[int, int] | int
"""Who makes a value: rank class -> task, a task on its only class, or ~ the input that it is."""


@dataclass(slots=True)
class _Rows:
    """The tasks of a function's own ops: how each runs, its op, and what they wait for (task, source)."""

    run: list[int] = field(default_factory=list[int])
    op: list[int] = field(default_factory=list[int])
    dep_task: list[int] = field(default_factory=list[int])
    dep_source: list[int] = field(default_factory=list[int])


class _TemplateBuilder:
    """Makes one template."""

    def __init__(self, lowering: Lowering, function: Function) -> None:
        self.lowering = lowering
        self.function = function
        self.count = 0
        self.open = _Rows()
        self.calls: dict[Function, tuple[Template, Calls]] = {}
        self.where: dict[Value, Made] = {value: ~i for i, value in enumerate(function.inputs)}
        self.ports: dict[tuple[int, int], int] = {}
        self.call_op: list[Op | None] = [None]

    def add(self, op: Op) -> None:
        if op.is_call:
            self._call(op)
            return
        kind = self.lowering.kind(self.function, op)
        if self.lowering.issues and operator(op.op_type).host_waits:
            self._await(op)
        if kind is None:
            self._communicate(op)
        elif not kind:
            made: Made = self.where[op.inputs[0]] if op.inputs else {}
            self.where.update(dict.fromkeys(op.outputs, made))
        else:
            self._compute(op, kind)

    def _compute(self, op: Op, kind: tuple[tuple[int, int, tuple[int, ...]], ...]) -> None:
        rows, where, number = self.open, self.where, self.count
        dep_task, dep_source = rows.dep_task, rows.dep_source
        ops = self.lowering.ops
        made: dict[int, int] = {}
        for rank_class, run, before in kind:
            first, number = number, number + len(before)
            for place, each in enumerate(before, first):
                rows.run.append(each)
                rows.op.append(_LAUNCH)
                dep_task.append(number)
                dep_source.append(place)
            for value in op.inputs:
                source = where[value]
                if type(source) is not int or source < 0:
                    source = self._source(value, rank_class) if source else FROM_START
                    if source == FROM_START:
                        continue
                dep_task.append(number)
                dep_source.append(source)
            rows.run.append(run)
            rows.op.append(len(ops))
            made[rank_class] = number
            number += 1
        ops.append(op)
        self.count = number
        for value in op.outputs:
            where[value] = made if len(kind) > 1 else number - 1

    def _await(self, op: Op) -> None:
        """Add the tasks of hosts that wait for values; what reads the first waits for who makes it.

        One that waits for all computation is on the stream of that, too; one of the device on that alone.
        """
        lowering, rows = self.lowering, self.open
        everything = op.attributes.get("all", 0)
        for rank_class in lowering.classes.at(place_of_compute(self.function, op)):
            for value in () if everything else op.inputs:
                source = self._source(value, rank_class)
                if source != FROM_START:
                    rows.dep_task.append(self.count)
                    rows.dep_source.append(source)
            waits = ("compute",) if op.attributes.get("device", 0) else (HOST,)
            names = (HOST, "compute") if everything else waits
            rows.run.append(lowering.run(0.0, tuple([lowering.stream(rank_class, name) for name in names])))
            rows.op.append(_LAUNCH)
            self.count += 1

    def finish(self) -> Template:
        columns = TemplateColumns(self.count, len(self.call_op))
        for callee, calls in self.calls.values():
            columns.add(callee, calls)
        rows = self.open
        if rows.run:
            columns.own(self.lowering.columns(rows.run), rows.op, rows.dep_task, rows.dep_source)
        task, stream = columns.sorted_streams()
        return Template(
            columns.durations,
            *columns.sorted_deps(),
            task,
            stream,
            columns.op,
            columns.call,
            columns.call_parent,
            self.call_op,
            list(self.ports),
            self._outputs(task, stream),
        )

    def _outputs(self, stream_task: Ints, stream: Ints) -> list[Where]:
        """Return who makes each output, by rank class."""
        found = [self.where[value] for value in self.function.outputs]
        tasks = np.array([made if isinstance(made, int) else -1 for made in found], np.int64)
        first = stream[np.searchsorted(stream_task, np.maximum(tasks, 0))] if self.count else tasks
        classes = np.array(self.lowering.class_of, np.int64)[first].tolist() if self.count else first.tolist()
        return [
            made if not isinstance(made, int) else ~made if made < 0 else {c: made}
            for made, c in zip(found, classes, strict=True)
        ]

    def _communicate(self, op: Op) -> None:
        rows, moved = self.open, moved_values(op)
        made: dict[int, int] = {}
        for sources, targets, run, issues, slows in self.lowering.exchanges(op):
            rows.run += slows
            rows.op += [_SLOWDOWN] * len(slows)
            first = self.count + len(slows)
            number = first + len(issues)
            for place, issue in enumerate(issues, first):
                rows.run.append(issue)
                rows.op.append(_LAUNCH)
                rows.dep_task.append(number)
                rows.dep_source.append(place)
            for source in dict.fromkeys([self._source(value, c) for value in moved for c in sources]):
                if source != FROM_START:
                    rows.dep_task.append(number)
                    rows.dep_source.append(source)
            rows.run.append(run)
            rows.op.append(len(self.lowering.ops))
            made.update(dict.fromkeys(targets, number))
            self.count = number + 1
        self.lowering.ops.append(op)
        self.where.update(dict.fromkeys(op.outputs, made))

    def _source(self, value: Value, rank_class: int) -> int:
        """Return the reference to the task that makes a value on a class."""
        where = self.where[value]
        if not isinstance(where, int):
            return where.get(rank_class, FROM_START)
        return where if where >= 0 else -2 - self.ports.setdefault((~where, rank_class), len(self.ports))

    def _call(self, op: Op) -> None:
        callee = self.lowering.template(op.callee)
        calls = self.calls.setdefault(op.callee, (callee, Calls()))[1]
        base, where, inputs = self.count, self.where, op.inputs
        sources = [FROM_START]
        for place, rank_class in callee.ports:
            made = where[inputs[place]]
            known = type(made) is int and made >= 0
            sources.append(made if known else self._source(inputs[place], rank_class))  # pyright: ignore
        calls.bases.append(base)
        calls.base_calls.append(len(self.call_op))
        calls.sources.append(sources)
        self.call_op.append(op)
        self.call_op.extend(callee.call_op[1:])
        self.count += len(callee)
        for value, made in zip(op.outputs, callee.outputs, strict=True):
            if isinstance(made, int):
                where[value] = where[inputs[made]]
            elif len(made) == 1:
                (task,) = made.values()
                where[value] = base + task
            else:
                where[value] = {c: task + base for c, task in made.items()}
