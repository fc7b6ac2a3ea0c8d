"""The ops that bring a value from one placement to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distsim.errors import PlanError
from distsim.hardware.rank_axes import joined_axes
from distsim.ir import FunctionMaker, Literal, Mesh, Tensor, Value
from distsim.ir.type import as_tensor
from distsim.ir.value import Attributes
from distsim.transforms.sharding.layout import (
    PARTIAL,
    REPLICATED,
    DividedAxis,
    Placement,
    State,
    exchangeable,
    sharded,
)

TENSOR = "tp"
"""The axis along which parameters are divided, with the work on them."""


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
    """Works out recipes along ``axes``, the batch's first, of ranks of which ``mesh`` may show fewer."""

    def __init__(self, mesh: Mesh, axes: tuple[DividedAxis, ...], microbatches: int) -> None:
        self.mesh, self.axes, self.microbatches = mesh, axes, microbatches
        self.needs_dp = False
        self.refusal = ""
        self._shown = [mesh.axis_size(axis.name) for axis in axes]
        self._pattern = self._shown[0] * microbatches != axes[0].parts
        self._own: Sequence[frozenset[int]] = ()

    def recipe(
        self,
        name: str,
        local: Tensor,
        ends: tuple[Placement, Placement],
        top: bool,
        own: Sequence[frozenset[int]],
    ) -> Recipe:
        """Return the ops that bring a value of type ``local`` from one placement to another.

        ``top``: in the whole function. ``own`` are by axis the dimensions that it divides of itself, those of
        the sequence for a context; none for an axis of which that is not said.
        Raises :class:`PlanError`, naming the value, when it must be whole within a microbatch.
        """
        maker, self._own = FunctionMaker(name), own
        self._move(maker, maker.add_input_value("", local), name, ends, top)
        found: list[Step] = []
        for op in maker.ops:
            (made,), suffix = op.outputs, op.outputs[0].name.removeprefix(op.inputs[0].name)
            found.append(Step(op.op_type, op.attributes, as_tensor(made.type, name), suffix))
        return tuple(found)

    def _move(
        self, maker: FunctionMaker, local: Value, name: str, ends: tuple[Placement, Placement], top: bool
    ) -> None:
        """Sum over microbatches first, so that what crosses the ranks does so once per step.

        Of axes that divide a dimension together the inner one (:meth:`_depth`) is gathered first, and divides
        last. A sum over several axes of which none divides parameters is taken once, over all of them; what
        is a sum over one and to be divided by it is so before it moves along others.
        """
        (source, *inner), target = ends[0].states, ends[1].states
        if target[0] is PARTIAL and source is not PARTIAL:
            local = share(maker, local, self.axes[0].parts)
            source = PARTIAL
        if source != target[0]:
            local = self._in_time(maker, local, name, source, top)
        states, summed = [source, *inner], list[str]()
        places = range(len(states))
        for place in sorted(places, key=lambda place: -self._depth(place, states[place])):
            state, wanted = states[place], target[place]
            if state.sharded and wanted.sharded and self._depth(place, wanted) > self._depth(place, state):
                continue  # it becomes the inner one of another dimension, once others divide that
            scattered = state is PARTIAL and wanted.sharded
            waits = scattered and self._is_divided_by_others(place, states, target)
            if state.sharded and self._is_within_a_move(place, states, target):
                wanted = REPLICATED
            elif state == wanted or state is REPLICATED or waits:
                continue
            if state is PARTIAL and not scattered and self.axes[place].name != TENSOR:
                summed += [self.axes[place].name] if self._shown[place] > 1 else []
            else:
                local = self._step(maker, local, place, states, wanted)
            states[place] = wanted
        if summed:
            local = _add(maker, local, "MPIAllreduce", joined_axes(summed[::-1]))
        for place in sorted(places, key=lambda place: self._depth(place, target[place])):
            if states[place] != target[place]:
                local = self._step(maker, local, place, states, target[place])
                states[place] = target[place]

    def _depth(self, place: int, state: State) -> int:
        """Return how far inside an axis is, of those that divide a dimension as it does.

        That is their order, but where an axis divides another dimension than its own: an exchange brings it
        there, of what the others leave.
        """
        own = self._own[place]
        return place + (len(self.axes) if state.sharded and own and state.dim not in own else 0)

    def _is_divided_by_others(self, place: int, states: Sequence[State], target: Sequence[State]) -> bool:
        """Whether another axis divides the dimension that one axis is to divide, or will."""
        dim = target[place].dim
        ends = zip(self._shown, states, target, strict=True)
        return any(
            ranks > 1 and dim in (now.dim, then.dim)
            for other, (ranks, now, then) in enumerate(ends)
            if other != place
        )

    def _is_within_a_move(self, place: int, states: Sequence[State], target: Sequence[State]) -> bool:
        """Whether an outer axis that divides the same dimension is gathered, or begins to divide it."""
        dim, depth = states[place].dim, self._depth(place, states[place])
        for other, (now, then) in enumerate(zip(states, target, strict=True)):
            exchanged = now.sharded and then.sharded
            outer = self._depth(other, now if now.dim == dim else then) < depth
            if outer and now != then and not exchanged and dim in (now.dim, then.dim):
                return True
        return False

    def _step(
        self, maker: FunctionMaker, local: Value, place: int, states: Sequence[State], wanted: State
    ) -> Value:
        """Bring a value, divided as ``states`` say, to the state that is wanted along one axis."""
        if self._shown[place] == 1:
            return local
        if place == 0 and (states[0].sharded or wanted.sharded):
            self.needs_dp = True
            if self._pattern:
                raise DegreeNeeded
        within = [self._within(state, place, states) for state in (states[place], wanted)]
        return _collective(maker, local, within[0], within[1], self.axes[place])

    def _within(self, state: State, place: int, states: Sequence[State]) -> State:
        """Return the state of what outer axes leave of a merged dimension: fewer pieces, or smaller ones."""
        pieces = state.pieces
        if not isinstance(pieces, tuple):
            return state
        for axis, outer in zip(self.axes[:place], states[:place], strict=True):
            if outer.sharded and outer.dim == state.dim:
                if outer.pieces:
                    pieces = tuple([n // axis.parts for n in pieces])
                else:
                    pieces = pieces[: len(pieces) // axis.parts]
        return sharded(state.dim, pieces)

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


def _add(maker: FunctionMaker, local: Value, op_type: str, axis: str, **attributes: object) -> Value:
    """Add an op over an axis that makes another state of the same value, under its name."""
    given = {key: item for key, item in attributes.items() if item is not None}
    return maker.add(op_type, [local], {"axis": axis, **given}, output_names=[local.name])[0]


def _collective(maker: FunctionMaker, local: Value, source: State, target: State, axis: DividedAxis) -> Value:
    """Add what brings a value from one state to another along an axis of the mesh."""
    if source == target:
        return local
    type_ = as_tensor(local.type, local.name)
    ranks = type_.device.axis_size(axis.name) if isinstance(type_.device, Mesh) else 1

    def divide(op_type: str, value: Value, state: State, size: int) -> Value:
        pieces = axis.pieces(state, size)
        return _add(maker, value, op_type, axis.name, dim=state.dim, pieces=pieces)

    if target is PARTIAL:
        return share(maker, local, ranks)
    if source is PARTIAL:
        if not target.sharded:
            return _add(maker, local, "MPIAllreduce", axis.name)
        return divide("MPIReduceScatter", local, target, type_.shape[target.dim])
    if source.sharded and target.sharded and exchangeable(source, target) and not axis.zigzag:
        ends = {"split": target.dim, "concat": source.dim}
        pieces = {"split_pieces": axis.pieces(target, 0), "concat_pieces": axis.pieces(source, 0)}
        return _add(maker, local, "MPIAlltoall", axis.name, **ends, **pieces)
    if source.sharded:
        local = divide("MPIAllgather", local, source, type_.shape[source.dim] * ranks)
    if target.sharded:
        local = divide("LocalSlice", local, target, as_tensor(local.type, local.name).shape[target.dim])
    return local
