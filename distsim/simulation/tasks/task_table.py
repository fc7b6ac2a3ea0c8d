"""A function as tasks on streams, the input of every engine.

One task is one op on one rank class (a collective: one task for all classes of a group). A callee is
lowered once and copied with NumPy for each call.
"""

from __future__ import annotations

from dataclasses import dataclass

from distsim.cost.cost_model import CostModel
from distsim.ir import Function, Op
from distsim.simulation.tasks.lower import Lowering
from distsim.simulation.tasks.rank_classes import RankClasses, rank_classes
from distsim.simulation.tasks.streams import Stream
from distsim.simulation.tasks.template_builder import template_of
from distsim.simulation.tasks.templates import Floats, Ints, starts


@dataclass(frozen=True, eq=False)
class TaskTable:
    """Tasks in the order of a function, as plain arrays.

    Task ``i`` takes ``durations[i]`` seconds, occupies the streams
    ``streams[stream_start[i]:stream_start[i + 1]]`` (indices into ``stream_table``) and needs the
    tasks ``deps[dep_start[i]:dep_start[i + 1]]`` to have ended; each stream runs its tasks by
    increasing number. It runs ``op_table[op[i]]``, in the call ``call[i]`` (0: the function itself).
    Call ``c`` is the op ``call_op[c]``, made in the call ``call_parent[c]``.
    """

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


@dataclass(frozen=True, eq=False)
class Tasks(TaskTable):
    """The tasks of a whole function, on its rank classes; ``contention`` as in :func:`lower`."""

    function: Function
    classes: RankClasses
    contention: bool

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


def lower(
    function: Function,
    cost_model: CostModel,
    overlap: bool = True,
    lockstep: bool = True,
    contention: bool = False,
) -> Tasks:
    """Return the tasks of ``function``, which must be placed on devices.

    ``overlap``: each rank class has a compute stream, a stream per mesh axis, and a send and a receive
    stream per peer; without it one stream for everything. ``lockstep``: simulate devices that provably
    do the same as one (:mod:`distsim.simulation.tasks.rank_classes`); without it each on its own.
    ``contention``: who runs the tasks divides ports among them; without it each takes as long as if all ranks
    that do the same did it at once.
    Raises ``SimulationError`` for an op on no device, and what the cost model raises.
    """
    classes = rank_classes(function, cost_model, lockstep)
    lowering = Lowering(classes, cost_model, overlap, contention)
    template = template_of(lowering, function, whole=True)
    count = len(template.durations)
    known = template.dep_source >= 0  # the others are inputs, which are there from the start
    return Tasks(
        function=function,
        classes=classes,
        contention=contention,
        durations=template.durations,
        dep_start=starts(template.dep_task[known], count),
        deps=template.dep_source[known],
        stream_start=starts(template.stream_task, count),
        streams=template.stream,
        stream_table=tuple(lowering.streams),
        op=template.op,
        op_table=tuple(lowering.ops),
        call=template.call,
        call_parent=template.call_parent,
        call_op=tuple(template.call_op),
    )
