"""Templates of functions: what a call of each adds, by one lowering.

A template has tasks with durations, what each waits for and the streams that it occupies. Its references are
relative to the call, to its own tasks or to its *ports*: what an op of the function waits for that was made
outside. A host issues the kernels of a function one by one, or launches them at once, as a CUDA graph: then
they wait for each other and for that launch alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from distsim.cache import Cache
from distsim.ir import Function, Op, Value
from distsim.ops import operator
from distsim.ops.coalescing import moved_values
from distsim.ops.kernel import op_label
from distsim.ops.marks import HOST, LAUNCH
from distsim.ops.optimizers import OPTIMIZER_OPS
from distsim.program.write_out import BLOCK_NAME
from distsim.simulation.tasks.grid import task_seconds
from distsim.simulation.tasks.lower import LAUNCHED, SLOWED, IssuedKind, Lowering
from distsim.simulation.tasks.rank_classes import place_of_compute
from distsim.simulation.tasks.templates import (
    FROM_START,
    Calls,
    Ints,
    Template,
    TemplateColumns,
    Where,
)

Made = dict[int, int] | int
"""Who makes a value: rank class -> task, a task on its only class, or ~ the input that it is."""


@dataclass(slots=True)
class _Rows:
    """The tasks of a function's own ops: how each runs, its op, and what they wait for (task, source)."""

    run: list[int] = field(default_factory=list[int])
    op: list[int] = field(default_factory=list[int])
    dep_task: list[int] = field(default_factory=list[int])
    dep_source: list[int] = field(default_factory=list[int])


def template_of(
    lowering: Lowering, function: Function, whole: bool = False, captured: bool | None = None
) -> Template:
    """Return the template of a function, made once; ``whole``: its inputs are there from the start.

    ``captured``: it is a CUDA graph, or a part of one, and no host issues its kernels; by default if those of
    all passes are one, which is launched once, ahead of them.
    """
    if captured is None:
        captured = lowering.graphs == "step" and can_be_captured(function)
    found = lowering.templates.get((function, captured))
    if found is None:
        builder = _TemplateBuilder(lowering, function, captured)
        if whole:
            start: Made = {}
            builder.where = dict.fromkeys(function.inputs, start)
        for op in function.ops:
            builder.add(op)
        found = lowering.templates[function, captured] = builder.finish()
    return found


def can_be_captured(function: Function) -> bool:
    """Return whether a function may be a CUDA graph: it neither clips nor updates anything, which is no part
    of a pass, and has no products of experts, for whose rows the host gives their number."""

    def found() -> bool:
        return all(can_be_captured(op.callee) if op.is_call else _captured(op) for op in function.ops)

    return _CAPTURED.get(function, None, found)


def _captured(op: Op) -> bool:
    label = op_label(op)
    return not any(each in label for each in _APART)


_APART = (
    *("RowCounts", "GroupedMatMul"),
    *("SquareSum", "GradientFactor", "ScaleGradient", *OPTIMIZER_OPS),
)


_CAPTURED = Cache[Function, bool]("which functions may be CUDA graphs", 1)


class _TemplateBuilder:
    """Makes one template."""

    def __init__(self, lowering: Lowering, function: Function, captured: bool) -> None:
        self.lowering = lowering
        self.function = function
        self.captured = captured
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

    def _compute(self, op: Op, kind: IssuedKind) -> None:
        rows, where, number = self.open, self.where, self.count
        dep_task, dep_source = rows.dep_task, rows.dep_source
        ops = self.lowering.ops
        made: dict[int, int] = {}
        for rank_class, run, issues, follows in kind:
            before = follows if self.captured else issues + follows
            first, number = number, number + len(before)
            for place, each in enumerate(before, first):
                rows.run.append(each)
                rows.op.append(LAUNCHED)
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

        One that waits for all computation is on the stream of that, too; one of the device on that alone, and
        so is any in a graph, in which no host waits.
        """
        lowering, rows = self.lowering, self.open
        everything = op.attributes.get("all", 0) and not self.captured
        for rank_class in lowering.classes.at(place_of_compute(self.function, op)):
            for value in () if everything else op.inputs:
                source = self._source(value, rank_class)
                if source != FROM_START:
                    rows.dep_task.append(self.count)
                    rows.dep_source.append(source)
            waits = ("compute",) if self.captured or op.attributes.get("device", 0) else (HOST,)
            names = (HOST, "compute") if everything else waits
            rows.run.append(lowering.run(0.0, tuple([lowering.stream(rank_class, name) for name in names])))
            rows.op.append(LAUNCHED)
            self.count += 1

    def _launch(self, graph: Template) -> None:
        """Add the tasks of hosts that launch a layer's graph, and of no time on the streams of its kernels,
        none of which begins before."""
        lowering, rows = self.lowering, self.open
        streams: dict[int, list[int]] = {}
        of_graph: list[int] = np.unique(graph.stream).tolist()
        for stream in of_graph:
            streams.setdefault(lowering.class_of[stream], []).append(stream)
        for rank_class, used in streams.items():
            device = lowering.classes.members[rank_class][0]
            seconds = task_seconds(LAUNCH, lowering.cost_model.graph_seconds(device))
            if not seconds:
                continue
            launch = self.count
            rows.run.append(lowering.run(seconds, (lowering.stream(rank_class, HOST),)))
            for stream in used:
                self.count += 1
                rows.run.append(lowering.run(0.0, (stream,)))
                rows.dep_task.append(self.count)
                rows.dep_source.append(launch)
            rows.op += [LAUNCHED] * (1 + len(used))
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
        for sources, targets, run, issued, slows in self.lowering.exchanges(op):
            issues = () if self.captured else issued
            rows.run += slows
            rows.op += [SLOWED] * len(slows)
            first = self.count + len(slows)
            number = first + len(issues)
            for place, issue in enumerate(issues, first):
                rows.run.append(issue)
                rows.op.append(LAUNCHED)
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
        # Where passes are no graphs, or cannot be one, layers are; the blocks of a step are passes.
        inner = bool(self.lowering.graphs) and not self.captured and BLOCK_NAME not in op.attributes
        alone = inner and can_be_captured(op.callee)
        callee = template_of(self.lowering, op.callee, captured=self.captured or alone or None)
        if alone:
            self._launch(callee)
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
