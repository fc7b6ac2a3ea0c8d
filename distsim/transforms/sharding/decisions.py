"""What is decided along every axis of a mesh: of the batch first, of experts, of contexts, of tp.

What is decided of an axis holds along all parts into which experts cut it, but for what those that have ranks
of experts divide by these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from distsim.hardware.rank_axes import PARTS
from distsim.ir import Device, Function, Mesh, Role, Value
from distsim.transforms.sharding.axes import (
    batch_options,
    context_options,
    data_marks,
    decide_batch,
    decide_context,
    decide_tensor,
    tensor_options,
)
from distsim.transforms.sharding.experts import ByExperts, check_experts, expert_options
from distsim.transforms.sharding.layout import REPLICATED, DividedAxis
from distsim.transforms.sharding.problem_graph import Structure
from distsim.transforms.sharding.roles import Marks
from distsim.transforms.sharding.strategies import EXPERTS, Decision, Options


class BatchParts(NamedTuple):
    """Over what a batch is divided: ranks of dp with the same experts, with others, and microbatches."""

    replicas: int
    experts: int
    microbatches: int


class OverTensor(NamedTuple):
    """How tp ranks divide: also what is between the products; experts not, that lie whole on each."""

    sequence: bool
    experts_apart: bool


Way = OverTensor | str | None
"""How an axis divides: the batch; as a kind of context parallelism, or experts, say; or as tp does."""


def axis_parts(axis: DividedAxis, mesh: Mesh, experts: tuple[str, ...]) -> tuple[DividedAxis, ...]:
    """Return the axes into which a mesh cuts one, each with whether it is among those of ``experts``."""
    names = mesh.axes_of(axis.name) if axis.name in PARTS.values() else (axis.name,)
    if len(names) == 1:
        return (axis._replace(experts=axis.name in experts),)
    sizes = [(name, mesh.axis_size(name)) for name in names]
    return tuple([DividedAxis(name, size, axis.zigzag, name in experts, axis.name) for name, size in sizes])


class Dimensions(NamedTuple):
    """What the inputs of a function are, along the batch and otherwise, and which of their dimensions carry
    the batch and a sequence; and of all values those that carry the batch."""

    known: Mapping[Value, Role]
    roles: Mapping[Value, Role]
    batch: Mapping[Value, int]
    sequences: Mapping[Value, int]
    marks: Marks


class _Task(NamedTuple):
    """What is asked along one axis; ``ranks`` of experts there are in all."""

    axis: DividedAxis
    way: Way
    ranks: int
    parts: BatchParts
    device: Device

    @property
    def key(self) -> tuple[object, ...]:
        """What the answer depends on: along the batch, ranks and microbatches are all the same."""
        balance = (self.device.throughput, self.device.peaks, self.device.dram_bandwidth)
        own = () if self.way is None else (self.ranks, self.parts, self.way)
        return (self.axis.parts, balance, *own)


class Decisions:
    """What is decided of one function, for all that was asked so far."""

    def __init__(self, function: Function, structure: Structure, dimensions: Dimensions) -> None:
        self.structure, self.dimensions = structure, dimensions
        self.batch_options = batch_options(function, structure, dimensions.batch, dimensions.marks)
        self._options: dict[OverTensor | str, Options] = {}
        self._by_experts: dict[tuple[object, ...], ByExperts] = {}
        self._decided: dict[tuple[object, ...], Decision] = {}
        self._data: frozenset[tuple[int, int]] | None = None

    def forget(self) -> None:
        """Forget what was decided, but not what may be chosen."""
        self._decided.clear()
        self._by_experts.clear()

    def decide(
        self,
        function: Function,
        ways: Mapping[DividedAxis, Way],
        cut: Mapping[DividedAxis, tuple[DividedAxis, ...]],
        parts: BatchParts,
        device: Device,
    ) -> dict[DividedAxis, Decision]:
        """Return what is decided of ``function`` along each part of each axis.

        The batch's is the first, for the others depend on it. What is decided of experts holds along all
        parts that have ranks of them.
        """
        ranks = math.prod([part.parts for axis in ways for part in cut[axis] if part.experts])
        found, outer, experts = dict[DividedAxis, Decision](), list[Decision](), None
        for axis, way in ways.items():
            task, batch = _Task(axis, way, ranks, parts, device), next(iter(found.values()), None)
            decision = self._along(function, task, batch, experts)
            if batch is None and ranks > 1:
                experts = self._experts(function, task, decision)
            for part in cut[axis]:
                found[part] = decision
                if experts and part.experts:
                    found[part] = experts.along(decision)
                    outer += [] if way == EXPERTS else [self._of_data(function, decision)]
                elif experts:
                    found[part] = experts.beside(decision, outer)
        return found

    def _along(
        self, function: Function, task: _Task, batch: Decision | None, experts: ByExperts | None
    ) -> Decision:
        """Return what is decided along one axis, given what is of the batch and of experts."""
        if experts and task.way == EXPERTS:
            return experts.choice
        found = self._decided.get(task.key)
        if found is None:
            axis, way, _, parts, device = task
            degrees = (axis.parts, parts.replicas * parts.experts, parts.microbatches)
            if way is None or batch is None:
                found = decide_batch(self.structure, self.batch_options, axis.parts, device)
            elif isinstance(way, str):
                divisor = axis.parts * (2 if axis.zigzag else 1)
                options = self._options_of(function, way)
                found = decide_context(self.structure, options, degrees, batch, device, divisor)
            else:
                sent = experts.choice.sent.items() if experts else ()
                held = experts.choice.groups if experts else ()
                # Rows, not the sums of gradients, which no tensor-parallel ranks divide for ranks of data.
                beside = {number: task.ranks * nbytes for number, nbytes in sent if held[number].sharded}
                options = self._options_of(function, way)
                found = decide_tensor(self.structure, options, degrees, batch, device, beside)
            self._decided[task.key] = found
        return found

    def _of_data(self, function: Function, decision: Decision) -> Decision:
        """Return what a decision divides in dimensions that follow from data: the rest is whole."""
        if self._data is None:
            marks = data_marks(function, self.structure, self.dimensions.roles)
            self._data = frozenset(
                [(self.structure.number[v], dim) for v, own in marks.items() for dim, _ in own]
            )
        states = enumerate(decision.groups)
        kept = [state if (number, state.dim) in self._data else REPLICATED for number, state in states]
        return replace(decision, groups=tuple(kept))

    def _experts(self, function: Function, task: _Task, batch: Decision) -> ByExperts:
        """Return what all ranks of experts divide by these; some are along dp, which divide the batch."""
        key = task._replace(way=EXPERTS).key
        found = self._by_experts.get(key)
        if found is None:
            ranks, parts, device = task.ranks, task.parts, task.device
            options = self._options_of(function, EXPERTS)
            degrees = (ranks, parts.replicas, parts.microbatches)
            choice = decide_context(self.structure, options, degrees, batch, device, parts.experts)
            check_experts(self.structure, choice, ranks, ranks * parts.replicas)
            found = self._by_experts[key] = ByExperts(self.structure, choice, self.dimensions.marks)
        return found

    def _options_of(self, function: Function, way: OverTensor | str) -> Options:
        """Return what may be chosen over experts, a context, or tp."""
        found = self._options.get(way)
        if found is None:
            known, roles, divided, sequences, marks = self.dimensions
            if way == EXPERTS:
                found = expert_options(function, self.structure, known, divided, marks)
            elif isinstance(way, str):
                found = context_options(function, self.structure, sequences, marks, way)
            else:
                found = tensor_options(function, self.structure, roles, marks, *way)
            self._options[way] = found
        return found
