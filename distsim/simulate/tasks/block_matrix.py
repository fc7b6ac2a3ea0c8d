"""A block as a max-plus matrix: its tasks on the ranks of a stage, and what each result waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from distsim.cost.cost_model import CostModel
from distsim.ir import Function, Mesh, Op
from distsim.simulate.maxplus.kernels import summarize
from distsim.simulate.tasks.lower import Lowering, Stream
from distsim.simulate.tasks.rank_classes import Classes, ClassExchange, Group, Placement
from distsim.simulate.tasks.templates import Floats, Ints, Where, starts

Bools = npt.NDArray[np.bool_]

START = -1
"""What is there from the start, instead of the number of a task; ``-2 - i`` is input i as it came."""


@dataclass(frozen=True, eq=False)
class StageRanks:
    """The rank classes of one stage, for blocks that are written on a mesh that stands for the stage's.

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
        """Every value of a block is on all ranks of its stage."""
        return tuple(range(len(self.members)))

    def exchanges(self, op: Op) -> tuple[ClassExchange, ...]:
        """Return the exchanges of a collective, on the devices of the stage."""
        return self.along(op.attributes["axis"])

    def along(self, axis: str) -> tuple[ClassExchange, ...]:
        """Return the exchanges of a collective over one axis, one for each distinct set of classes."""
        found = self._exchanges.get(axis)
        if found is None:
            groups = self.mesh.groups(axis)
            if len(self.members) == 1:
                found = (ClassExchange((0,), (0,), groups[0]),)
            else:
                of = dict(zip(self.mesh.devices, self.classes.tolist(), strict=True))
                distinct = {tuple(sorted({of[d] for d in group})): group for group in reversed(groups)}
                found = tuple(ClassExchange(c, c, group) for c, group in reversed(distinct.items()))
            self._exchanges[axis] = found
        return found

    def pairs(self, other: StageRanks) -> tuple[ClassExchange, ...]:
        """Return the exchanges of a Send to another stage, rank by rank."""
        if len(self.members) == len(other.members) == 1:
            return (ClassExchange((0,), (0,), (self.mesh.devices[0], other.mesh.devices[0])),)
        distinct: dict[tuple[int, int], Group] = {}
        classes = zip(self.classes.tolist(), other.classes.tolist(), strict=True)
        for pair, devices in zip(
            classes, zip(self.mesh.devices, other.mesh.devices, strict=True), strict=True
        ):
            distinct.setdefault(pair, devices)
        return tuple(ClassExchange((a,), (b,), group) for (a, b), group in distinct.items())


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

    def covering(self, tasks: Ints) -> Bools:
        """Return [tasks, streams]: whether a stream is never free before a task has ended."""
        return np.asarray(
            (self.clocks >= self.ends[np.searchsorted(self.tasks, tasks)][:, None, :]).all(axis=2)
        )

    def waiting(self, port: int) -> Bools:
        """Return whether each stream is never free before what comes in at a port is there."""
        column = len(self.clocks) + self.ports.index(port)
        return self.clocks[:, column] >= 0


@dataclass(frozen=True, eq=False)
class BlockTasks:
    """The tasks of one block on the rank classes of a stage, as arrays; see :class:`Template`.

    A dependency d < 0 is port -2 - d, which is (input of the function, rank class) ``ports[-2 - d]``.
    ``makers`` [outputs, classes] tells which task makes each output, or :data:`START`, or ``-2 - input``.
    """

    function: Function
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
    ports: Ints
    makers: Ints
    _summaries: dict[tuple[int, ...], Summary] = field(default_factory=dict[tuple[int, ...], Summary])

    def __len__(self) -> int:
        return len(self.durations)

    @cached_property
    def readers(self) -> tuple[Ints, Bools]:
        """(port, [.., streams]): for each task that waits for a port, the streams that it occupies."""
        waiting = np.repeat(np.arange(len(self)), np.diff(self.dep_start))
        outside = self.deps < 0
        occupied = np.zeros((len(self), len(self.stream_table)), np.bool_)
        occupied[np.repeat(np.arange(len(self)), np.diff(self.stream_start)), self.streams] = True
        return -2 - self.deps[outside], occupied[waiting[outside]]

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
            ends = np.empty((len(self), width))
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


def block_tasks(function: Function, ranks: StageRanks, cost_model: CostModel, overlap: bool) -> BlockTasks:
    """Lower the function of a block for the ranks of a stage."""
    lowering = Lowering(ranks, cost_model, overlap)
    template = lowering.template(function)
    count = len(template)
    known = template.dep_source != -1
    return BlockTasks(
        function,
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


def _makers(outputs: Sequence[Where], classes: int) -> Ints:
    found = np.full((len(outputs), classes), START, np.int64)
    for index, where in enumerate(outputs):
        if isinstance(where, int):
            found[index] = -2 - where
        else:
            for rank_class, task in where.items():
                found[index, rank_class] = task
    return found
