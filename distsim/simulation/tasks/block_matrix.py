"""A block as a max-plus matrix: its tasks on the classes of a rank, and what each result waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from distsim.cache import cached
from distsim.cost.cost_model import CostModel
from distsim.ir import Function, Mesh, Op
from distsim.ops.marks import LAUNCH
from distsim.simulation.maxplus.kernels import precede, summarize
from distsim.simulation.tasks.lower import Lowering
from distsim.simulation.tasks.rank_classes import Classes, ClassExchange, Group, Placement
from distsim.simulation.tasks.streams import Stream
from distsim.simulation.tasks.task_table import TaskTable
from distsim.simulation.tasks.template_builder import template_of
from distsim.simulation.tasks.templates import Floats, Ints, Where, starts, tasks_of_uses

Bools = npt.NDArray[np.bool_]

Place = tuple[int, int]
"""An input, or an output, of a function, and a rank class."""

START = -1
"""What is there from the start, instead of the number of a task; ``-2 - i`` is input i as it came."""


@dataclass(frozen=True, eq=False)
class StageRanks:
    """The rank classes of one pipeline rank, for blocks that are written on a mesh that stands for its own.

    ``classes`` has the class, from 0, of every device of ``mesh`` in order.
    """

    mesh: Mesh
    classes: Ints
    members: tuple[Group, ...] = field(init=False)
    _exchanges: dict[str, tuple[ClassExchange, ...]] = field(
        init=False, default_factory=dict[str, tuple[ClassExchange, ...]]
    )

    def __post_init__(self) -> None:
        devices = self.mesh.devices
        if self.classes.any():
            order = np.argsort(self.classes, kind="stable")
            ends: list[int] = np.flatnonzero(np.diff(self.classes[order])).tolist()
            places: list[int] = order.tolist()
            bounds = [0, *[end + 1 for end in ends], len(places)]
            parts = [places[a:b] for a, b in pairwise(bounds)]
            members = tuple([tuple([devices[i] for i in part]) for part in parts])
        else:
            members = (devices,)
        object.__setattr__(self, "members", members)

    def at(self, placement: Placement) -> Classes:
        """Every value of a block is on all devices of its rank."""
        return tuple(range(len(self.members)))

    def exchanges(self, op: Op) -> tuple[ClassExchange, ...]:
        """Return the exchanges of a collective, on the devices of the rank."""
        return self.along(op.attributes["axis"])

    def along(self, axis: str) -> tuple[ClassExchange, ...]:
        """Return the exchanges of a collective over one axis, one for each distinct set of classes."""
        found = self._exchanges.get(axis)
        if found is None:
            groups = tuple(self.mesh.groups(axis))
            if len(self.members) == 1:
                found = (ClassExchange((0,), (0,), groups[0], groups),)
            else:
                of = dict(zip(self.mesh.devices, self.classes.tolist(), strict=True))
                distinct = {tuple(sorted({of[d] for d in group})): group for group in reversed(groups)}
                found = tuple(ClassExchange(c, c, group, groups) for c, group in reversed(distinct.items()))
            self._exchanges[axis] = found
        return found

    def pairs(self, other: StageRanks) -> tuple[ClassExchange, ...]:
        """Return the exchanges of a Send to another rank, device by device."""
        family = tuple(zip(self.mesh.devices, other.mesh.devices, strict=True))
        if len(self.members) == len(other.members) == 1:
            return (ClassExchange((0,), (0,), family[0], family),)
        distinct: dict[tuple[int, int], Group] = {}
        classes = zip(self.classes.tolist(), other.classes.tolist(), strict=True)
        for pair, devices in zip(classes, family, strict=True):
            distinct.setdefault(pair, devices)
        return tuple([ClassExchange((a,), (b,), group, family) for (a, b), group in distinct.items()])


@dataclass(frozen=True, eq=False)
class Summary:
    """How the ends of a block follow from its entries: its streams, then ``ports``.

    Row s of ``clocks`` [streams, entries] tells when stream s is free after the block: the maximum over
    the entries of entry + matrix element (-inf where an entry never delays it). ``ends`` tells the same of
    the ends of ``tasks``, those that make outputs, by increasing number.
    """

    ports: tuple[int, ...]
    clocks: Floats
    tasks: Ints
    ends: Floats

    def end(self, task: int) -> Floats:
        """Return the row of a task."""
        return self.ends[int(np.searchsorted(self.tasks, task))]


@dataclass(frozen=True, eq=False)
class TaskOrder:
    """What the order of a block's tasks alone tells, whatever they take; all are [.., streams].

    ``hides`` [outputs, classes]: is a stream never free, after the block, before a result is there?
    ``waits`` [ports]: is a stream never free before what comes in at a port is there? ``enters`` [ports]:
    does every task that waits for a port wait for the stream too?
    """

    hides: Bools
    waits: Bools
    enters: Bools


@dataclass(frozen=True, eq=False)
class BlockTasks(TaskTable):
    """The tasks of one block on the rank classes of its rank.

    A dependency d < 0 is port -2 - d, which is (input of the function, rank class) ``ports[-2 - d]``.
    ``makers`` [outputs, classes] tells which task makes each output, or :data:`START`, or ``-2 - input``.
    """

    ports: Ints
    makers: Ints
    _summaries: dict[tuple[int, ...], Summary] = field(default_factory=dict[tuple[int, ...], Summary])
    _products: dict[object, Floats] = field(default_factory=dict[object, Floats])

    @cached_property
    def port_of(self) -> Mapping[Place, int]:
        """The port of each (input, rank class) that some task waits for."""
        return {(place, c): port for port, (place, c) in enumerate(self.ports.tolist())}

    @cached_property
    def order(self) -> TaskOrder:
        """What follows from the order of the tasks."""
        count, width = len(self), len(self.stream_table)
        before, last = neighbours(self.stream_start, self.streams, width)
        after = np.zeros((count + len(self.ports), width), np.bool_)
        after[last[last >= 0], np.flatnonzero(last >= 0)] = True
        entered = np.zeros_like(after)
        entered[count:] = True
        precede(self.dep_start, self.deps, self.stream_start, self.streams, before, after, entered)
        waits, enters = after[count:], entered[count:]
        hides = np.zeros((*self.makers.shape, width), np.bool_)
        made = self.makers >= 0
        hides[made] = after[self.makers[made]]
        hides[self.makers == START] = True
        for index, rank_class in np.argwhere(self.makers < START).tolist():
            port = self.port_of.get((-2 - int(self.makers[index, rank_class]), rank_class))
            if port is not None:
                hides[index, rank_class] = waits[port]
        return TaskOrder(hides, waits, enters)

    def summary(self, ports: Sequence[int]) -> Summary:
        """Return the matrix of the block when only these ports may delay it."""
        key = tuple(ports)
        made = self._summaries.get(key)
        if made is None:
            count = len(self.stream_table)
            width = count + len(key)
            columns = np.full(len(self.ports), -1, np.int64)
            columns[list(key)] = np.arange(count, width)
            clocks = np.full((count, width), -np.inf)
            np.fill_diagonal(clocks, 0.0)
            ends = np.full((len(self), width), -np.inf)
            summarize(
                self.durations,
                self.dep_start,
                self.deps,
                self.stream_start,
                self.streams,
                columns,
                clocks,
                ends,
            )
            kept = np.unique(self.makers[self.makers >= 0])
            made = self._summaries[key] = Summary(key, clocks, kept, ends[kept])
        return made

    def product(self, entries: Sequence[Place], results: Sequence[Place]) -> Floats:
        """Return the matrix [streams + results, streams + entries] of a call.

        ``entries`` are the (input, rank class) that may delay something or are returned as they came,
        ``results`` the (output, rank class) that are wanted. A result that is there from the start has no
        element above -inf.
        """
        key = (tuple(entries), tuple(results))
        found = self._products.get(key)
        if found is None:
            found = self._products[key] = self._product(entries, results)
        return found

    def _product(self, entries: Sequence[Place], results: Sequence[Place]) -> Floats:
        count, known = len(self.stream_table), [self.port_of.get(entry) for entry in entries]
        ports = [port for port in known if port is not None]
        summary = self.summary(ports)
        columns = [*range(count), *[count + i for i, port in enumerate(known) if port is not None]]
        matrix = np.full((count + len(results), count + len(entries)), -np.inf)
        matrix[:count, columns] = summary.clocks
        for row, (index, rank_class) in enumerate(results, count):
            made = int(self.makers[index, rank_class])
            if made >= 0:
                matrix[row, columns] = summary.end(made)
            elif made < START and (-2 - made, rank_class) in entries:
                matrix[row, count + entries.index((-2 - made, rank_class))] = 0.0
        return matrix


def neighbours(stream_start: Ints, streams: Ints, count: int) -> tuple[Ints, Ints]:
    """Return the task before on the stream of each use, and the last task on each stream; -1 for none."""
    task = tasks_of_uses(stream_start)
    order = np.argsort(streams, kind="stable")
    same = streams[order[1:]] == streams[order[:-1]]
    before = np.full(len(streams), -1, np.int64)
    before[order[1:][same]] = task[order[:-1][same]]
    last = np.full(count, -1, np.int64)
    last[streams] = task
    return before, last


def block_tasks(function: Function, ranks: StageRanks, cost_model: CostModel, overlap: bool) -> BlockTasks:
    """Lower the function of a block for the classes of a pipeline rank."""
    lowering = Lowering(ranks, cost_model, overlap)
    template = template_of(lowering, function)
    count = len(template)
    known = template.dep_source != -1
    return BlockTasks(
        template.durations,
        starts(template.dep_task[known], count),
        template.dep_source[known],
        starts(template.stream_task, count),
        template.stream,
        tuple(lowering.streams),
        template.op,
        tuple(lowering.ops),
        template.call,
        template.call_parent,
        tuple(template.call_op),
        np.array(template.ports, np.int64).reshape(len(template.ports), 2),
        _makers(template.outputs, len(ranks.members)),
    )


def single_task(
    op: Op, seconds: float, streams: int, classes: tuple[int, int], launch: float | None = None
) -> BlockTasks:
    """Return the tasks of one op that reads its input on one rank class and makes its output on another.

    The op occupies all streams, but the last one if the host takes ``launch`` seconds on it to issue the op.
    Tasks that take as long have their matrices in common.
    """
    alike = _alone(seconds, streams, classes, launch)
    return replace(alike, op_table=(op,) if launch is None else (LAUNCH, op))


@cached("tasks of single ops, by seconds, streams, classes and launch", 4096)
def _alone(seconds: float, streams: int, classes: tuple[int, int], launch: float | None) -> BlockTasks:
    """Return the tasks of an op, without the op."""
    source, target = classes
    issued = launch is not None
    makers = np.full((1, target + 1), START, np.int64)
    makers[0, target] = int(issued)
    uses = np.arange(streams)
    return BlockTasks(
        durations=np.array([launch, seconds] if issued else [seconds]),
        dep_start=np.array([0, 0, 2] if issued else [0, 1], np.int64),
        deps=np.array([-2, 0] if issued else [-2], np.int64),
        stream_start=np.array([0, 1, streams] if issued else [0, streams], np.int64),
        streams=np.roll(uses, 1) if issued else uses,
        stream_table=tuple([Stream(target, str(use)) for use in range(streams)]),
        op=np.arange(2 if issued else 1),
        op_table=(),
        call=np.zeros(2 if issued else 1, np.int64),
        call_parent=np.array([-1], np.int64),
        call_op=(None,),
        ports=np.array([[0, source]], np.int64),
        makers=makers,
    )


def _makers(outputs: Sequence[Where], classes: int) -> Ints:
    found = np.full((len(outputs), classes), START, np.int64)
    for index, where in enumerate(outputs):
        if isinstance(where, int):
            found[index] = -2 - where
        else:
            for rank_class, task in where.items():
                found[index, rank_class] = task
    return found
