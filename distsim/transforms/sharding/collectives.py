"""The ops that bring a value from one placement to another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distsim.errors import PlanError
from distsim.hardware.rank_axes import joined_axes, over_tensor
from distsim.ir import FunctionMaker, Literal, Mesh, Tensor, Value
from distsim.ir.type import as_tensor
from distsim.ir.value import Attributes
from distsim.ops.parts import Groups, Parts, take_part
from distsim.transforms.sharding.layout import (
    PARTIAL,
    REPLICATED,
    DividedAxis,
    Placement,
    State,
    exchangeable,
    expert_axis,
    joint_axes,
    sharded,
)


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
        self.experts = [place for place, axis in enumerate(axes) if axis.experts]
        self._joint: dict[tuple[DividedAxis, ...], Mover] = {}

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
        source, target = (place.states for place in ends)
        joint = joint_axes(self.axes, source, target)
        axes, places = tuple([axis for axis, _ in joint]), [own[0] for _, own in joint]
        mover = self if axes == self.axes else self._joint.get(axes)
        if mover is None:
            mover = self._joint[axes] = Mover(self.mesh, axes, self.microbatches)
        maker, mover._own = FunctionMaker(name), [own[place] for place in places]
        states = [[end[place] for place in places] for end in (source, target)]
        mover._move(maker, maker.add_input_value("", local), name, states, top)
        self.needs_dp, self.refusal = self.needs_dp or mover.needs_dp, mover.refusal or self.refusal
        found: list[Step] = []
        for op in maker.ops:
            (made,), suffix = op.outputs, op.outputs[0].name.removeprefix(op.inputs[0].name)
            found.append(Step(op.op_type, op.attributes, as_tensor(made.type, name), suffix))
        return tuple(found)

    def _move(
        self, maker: FunctionMaker, local: Value, name: str, ends: Sequence[Sequence[State]], top: bool
    ) -> None:
        """Sum over microbatches first, so that what crosses the ranks does so once per step.

        Of axes that divide a dimension together the inner one (:meth:`_depth`) is gathered first, and divides
        last. A sum over several axes of which none divides parameters is taken once, over all of them; what
        is a sum over one and to be divided by it is so before it moves along others.
        """
        (source, *inner), target = ends
        if target[0] is PARTIAL and source is not PARTIAL:
            local = share(maker, local, self.axes[0].parts)
            source = PARTIAL
        if source != target[0]:
            local = self._in_time(maker, local, name, source, top)
        states, summed = [source, *inner], list[str]()
        places = range(len(states))
        rows, then = self._rows(states), self._rows(target)
        back = self.experts if rows is not None and then is None else []
        if then is not None and then != rows:
            local = self._dispatch(maker, local, states, target)
        for place in sorted(places, key=lambda place: -self._depth(place, states[place])):
            state, wanted = states[place], target[place]
            if place in back:
                continue
            if self._is_inside(place, wanted, back, target):
                wanted = REPLICATED if state.sharded else state  # it divides what rows go back to
            if state.sharded and wanted.sharded and self._depth(place, wanted) > self._depth(place, state):
                continue  # it becomes the inner one of another dimension, once others divide that
            scattered = state is PARTIAL and wanted.sharded
            waits = scattered and self._is_divided_by_others(place, states, target)
            waits = waits or (state.sharded and self._goes_within_a_move(place, wanted, states, target))
            if state.sharded and self._is_within_a_move(place, states, target):
                wanted = REPLICATED
            elif state == wanted or state is REPLICATED or waits:
                continue
            if state is PARTIAL and not scattered and not over_tensor(self.axes[place].name):
                summed += [self.axes[place].name] if self._shown[place] > 1 else []
            else:
                local = self._step(maker, local, place, states, wanted)
            states[place] = wanted
        if summed:
            local = _add(maker, local, "MPIAllreduce", joined_axes(summed[::-1]))
        if back:
            local = self._combine(maker, local, states, target)
        for place in sorted(places, key=lambda place: self._depth(place, target[place])):
            if states[place] != target[place]:
                local = self._step(maker, local, place, states, target[place])
                states[place] = target[place]

    def _rows(self, states: Sequence[State]) -> State | None:
        """Return how a value is divided by experts, over all axes that have some; None: it is not."""
        found = [states[place] for place in self.experts if isinstance(states[place].pieces, Groups)]
        return found[0] if found else None

    def _dispatch(
        self, maker: FunctionMaker, local: Value, states: list[State], target: Sequence[State]
    ) -> Value:
        """Divide a value by experts, over all axes that have some: one all-to-all, of what these divide.

        What another axis divides within is exchanged by parts, and gathered after, if it is to be whole.
        """
        rows = target[self.experts[0]]
        if self._rows(states) is not None:
            local = self._combine(maker, local, states, [REPLICATED] * len(states))
        ends, now = [states[place] for place in self.experts], tuple(states)
        moved = all(each.sharded and exchangeable(each, rows) for each in ends)
        whole = [place for place in range(len(now)) if self._is_inside(place, now[place], self.experts, now)]
        after = whole if moved and self._by_parts(whole, now, target) else []
        whole += [] if moved else self.experts
        for place in sorted(whole, key=lambda place: -self._depth(place, now[place])):
            local = local if place in after else self._step(maker, local, place, states, REPLICATED)
            states[place] = REPLICATED
        if moved:
            local = self._exchange(maker, local, ends, rows, back=False, zigzag=not after)
        else:
            local = _collective(maker, local, REPLICATED, rows, expert_axis(self.axes))
        for place in after:
            (dim, axis), blocks = (now[place].dim, self.axes[place]), self._blocks(now[place].dim, ends)
            size = as_tensor(local.type, local.name).shape[dim] * axis.parts
            state = sharded(dim, (size // blocks,) * blocks)
            local = self._reordered(
                maker, _collective(maker, local, state, REPLICATED, axis), dim, ends, False
            )
        for place in self.experts:
            states[place] = rows
        return local

    def _combine(
        self, maker: FunctionMaker, local: Value, states: list[State], target: Sequence[State]
    ) -> Value:
        """Bring rows of experts back to what divides them else: one all-to-all, or all get all.

        What another axis is to divide within, by parts: summed or taken before.
        """
        rows, ends = states[self.experts[0]], [target[place] for place in self.experts]
        moved = all(each.sharded and exchangeable(each, rows) for each in ends)
        every = range(len(states))
        inside = [place for place in every if self._is_inside(place, target[place], self.experts, target)]
        before = inside if moved and self._by_parts(inside, target, states) else []
        for place in before:
            (dim, axis), blocks = (target[place].dim, self.axes[place]), self._blocks(target[place].dim, ends)
            local = self._reordered(maker, local, dim, ends, True)
            state = sharded(dim, (as_tensor(local.type, local.name).shape[dim] // blocks,) * blocks)
            local = _collective(maker, local, states[place], state, axis)
            states[place] = target[place]
        if moved:
            local = self._exchange(maker, local, ends, rows, back=True, zigzag=not before)
        else:
            local = _collective(maker, local, rows, REPLICATED, expert_axis(self.axes))
        for place, end in zip(self.experts, ends, strict=True):
            states[place] = end if moved else REPLICATED
        return local

    def _by_parts(self, inside: Sequence[int], parts: Sequence[State], other: Sequence[State]) -> bool:
        """Whether what axes divide ``inside`` can be exchanged by parts: one does, of what is whole."""
        return all(
            len(inside) == 1
            and not parts[place].pieces
            and not self.axes[place].zigzag
            and not other[place].sharded
            for place in inside
        )

    def _blocks(self, dim: int, ends: Sequence[State]) -> int:
        """Return of how many ranks with experts a dimension has parts."""
        axes = [self.axes[place] for place in self.experts]
        return math.prod([axis.parts for axis, end in zip(axes, ends, strict=True) if end.dim == dim])

    def _reordered(
        self, maker: FunctionMaker, local: Value, dim: int, ends: Sequence[State], by_rank: bool
    ) -> Value:
        """Put a whole dimension of parts that lie rank by rank in order, or in the order ``by_rank``."""
        axes = [(self.axes[place], end) for place, end in zip(self.experts, ends, strict=True)]
        zigzag = [axis for axis, end in axes if end.dim == dim]
        if not any(axis.zigzag for axis in zigzag):
            return local
        parts = [np.arange(as_tensor(local.type, local.name).shape[dim])]
        for axis in zigzag:
            pieces = axis.pieces(sharded(0), len(parts[0]))
            parts = [take_part(part, 0, i, axis.parts, pieces) for part in parts for i in range(axis.parts)]
        order = np.concatenate(parts)
        indices = Literal(order if by_rank else np.argsort(order))
        return maker.add("Gather", [local], {"axis": dim, "indices": indices}, output_names=[local.name])[0]

    def _exchange(
        self,
        maker: FunctionMaker,
        local: Value,
        ends: Sequence[State],
        rows: State,
        back: bool,
        zigzag: bool,
    ) -> Value:
        """Exchange what axes with experts divide as ``ends`` say for rows of experts, or ``back``.

        Without ``zigzag`` parts lie rank by rank, whatever their axes say.
        """
        shape = [*as_tensor(local.type, local.name).shape]
        axes, divided = [self.axes[place] for place in self.experts], list[tuple[int, int, Parts]]()
        axes = axes if zigzag else [axis._replace(zigzag=False) for axis in axes]
        along = [*zip(axes, ends, strict=True)]
        for axis, end in along if back else reversed(along):
            shape[end.dim] *= 1 if back else axis.parts
            divided.append((end.dim, axis.parts, axis.pieces(end, shape[end.dim])))
            shape[end.dim] //= axis.parts if back else 1
        joint, other = expert_axis(axes), "split" if back else "concat"
        ways = {"split": rows.dim, "concat": rows.dim} | {other: tuple(divided if back else divided[::-1])}
        pieces = {"concat_pieces" if back else "split_pieces": joint.pieces(rows, 0)}
        return _add(maker, local, "MPIAlltoall", joint.name, **ways, **pieces)

    def _is_inside(self, place: int, state: State, axes: Sequence[int], states: Sequence[State]) -> bool:
        """Whether an axis divides, in this state, what one of some ``axes`` divides as ``states`` say."""
        return (
            place not in axes
            and state.sharded
            and any(
                states[other].dim == state.dim
                and self._depth(other, states[other]) < self._depth(place, state)
                for other in axes
            )
        )

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

    def _goes_within_a_move(
        self, place: int, wanted: State, states: Sequence[State], target: Sequence[State]
    ) -> bool:
        """Whether an axis is to divide what an outer one has yet to begin, or to cease, to divide."""
        return wanted.sharded and any(
            now != then and wanted.dim in (now.dim, then.dim) and ranks > 1
            for other, (ranks, now, then) in enumerate(zip(self._shown, states, target, strict=True))
            if self._depth(other, then) < self._depth(place, wanted)
        )

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
