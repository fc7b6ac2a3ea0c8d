"""The ops that bring a value from one placement to another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distsim.errors import PlanError
from distsim.ir import FunctionMaker, Literal, Mesh, Tensor, Value
from distsim.ir.type import as_tensor
from distsim.ir.value import Attributes
from distsim.transforms.sharding.layout import PARTIAL, Placement, State, exchangeable, sharded


@dataclass(frozen=True, slots=True)
class Step:
    """One op of a recipe: what it makes of the one before, of which type, and what its name adds."""

    op_type: str
    attributes: Attributes
    type: Tensor
    suffix: str


Recipe = tuple[Step, ...]


class DegreeNeeded(Exception):
    """A shape depends on the number of data-parallel ranks, of which the mesh shows but two."""


class Mover:
    """Works out recipes for ``dp`` replicas, of which ``mesh`` may show fewer, and ``microbatches``."""

    def __init__(self, mesh: Mesh, dp: int, microbatches: int) -> None:
        self.mesh, self.microbatches = mesh, microbatches
        self.parts = dp * microbatches
        self.needs_dp = False
        self.refusal = ""
        self._shown = mesh.axis_size("dp")
        self._pattern = self._shown != dp

    def recipe(self, name: str, local: Tensor, source: Placement, target: Placement, top: bool) -> Recipe:
        """Return the ops that bring a value of type ``local``; ``top``: in the whole function.

        Raises :class:`PlanError`, naming the value, when it must be whole within a microbatch.
        """
        maker = FunctionMaker(name)
        self._move(maker, maker.add_input_value("", local), name, (source, target), top)
        found: list[Step] = []
        for op in maker.ops:
            (made,), suffix = op.outputs, op.outputs[0].name.removeprefix(op.inputs[0].name)
            found.append(Step(op.op_type, op.attributes, as_tensor(made.type, name), suffix))
        return tuple(found)

    def _move(
        self, maker: FunctionMaker, local: Value, name: str, ends: tuple[Placement, Placement], top: bool
    ) -> None:
        """Sum over microbatches first, so that what crosses the ranks does so once per step."""
        source, target = ends
        if target.batch is PARTIAL and source.batch is not PARTIAL:
            local = share(maker, local, self.parts)
            source = Placement(PARTIAL, source.tp)
        if source.batch != target.batch:
            local = self._in_time(maker, local, name, source.batch, top)
        within = [_within(state, source.batch, self.parts) for state in (source.tp, target.tp)]
        local = _collective(maker, local, within[0], within[1], "tp")
        if self._shown > 1 and source.batch != target.batch:
            if source.batch.sharded or target.batch.sharded:
                self.needs_dp = True
                if self._pattern:
                    raise DegreeNeeded
            _collective(maker, local, source.batch, target.batch, "dp")

    def _in_time(self, maker: FunctionMaker, local: Value, name: str, source: State, top: bool) -> Value:
        """Bring a value together over microbatches: mark the sum of what is partial, refuse the rest."""
        if source is PARTIAL and top:
            return maker.add("Accumulate", [local], output_names=[local.name])[0]
        self.refusal = _WHOLE[source.kind]
        if self.microbatches > 1:
            raise PlanError(
                f"{name}: {self.refusal}, so the batch cannot be divided into {self.microbatches} "
                "microbatches; use microbatches=1"
            )
        return local


_WHOLE = {
    "S": "an op needs the whole batch at once",
    "R": "an op reads a part of the batch of a value that is made once for all of it",
    "P": "an op inside a layer needs a sum over the whole batch",
}


def share(maker: FunctionMaker, local: Value, ranks: int) -> Value:
    """Divide a value by the number of ranks, so that over them it sums to what it was."""
    if ranks == 1:
        return local
    type_ = as_tensor(local.type, local.name)
    scale = Literal(np.asarray(1.0 / ranks, type_.dtype.np))
    return maker.add("Mul", [local], {"B": scale}, output_names=[f"{local.name}.share"])[0]


def _within(state: State, batch: State, parts: int) -> State:
    """Return the state of one rank's part of the batch: of a merged dimension it has fewer pieces."""
    if not (state.pieces and batch.sharded and batch.dim == state.dim):
        return state
    return sharded(state.dim, state.pieces[: len(state.pieces) // parts])


def _collective(maker: FunctionMaker, local: Value, source: State, target: State, axis: str) -> Value:
    """Add what brings a value from one state to another along a mesh axis."""
    if source == target:
        return local

    def add(op_type: str, value: Value, **attributes: object) -> Value:
        attributes = {key: item for key, item in attributes.items() if item is not None}
        return maker.add(op_type, [value], {"axis": axis, **attributes}, output_names=[local.name])[0]

    if target is PARTIAL:
        ranks = as_tensor(local.type, local.name).device
        return share(maker, local, ranks.axis_size(axis) if isinstance(ranks, Mesh) else 1)
    if source is PARTIAL:
        if not target.sharded:
            return add("MPIAllreduce", local)
        return add("MPIReduceScatter", local, dim=target.dim, pieces=target.pieces)
    if source.sharded and target.sharded and exchangeable(source, target):
        return add("MPIAlltoall", local, split=target.dim, concat=source.dim)
    if source.sharded:
        local = add("MPIAllgather", local, dim=source.dim, pieces=source.pieces)
    if target.sharded:
        local = add("LocalSlice", local, dim=target.dim, pieces=target.pieces)
    return local
