"""Writing out the local function: what both decisions say, op by op.

A callee is written once, at the placements of its groups. A value that has to be moved is moved by a
*recipe*, the ops that bring any value of one type from one placement to another: it is worked out once,
with the types of all it makes, and then only repeated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from distsim.errors import PlanError
from distsim.hardware.rank_axes import EXPERT
from distsim.ir import Function, FunctionMaker, Mesh, Op, Role, Tensor, Type, Value
from distsim.ir.module_names import added_name
from distsim.ir.type import as_tensor
from distsim.ops import signature_of
from distsim.ops.sharding_rule import Finish, ShardingRule
from distsim.transforms.op_graph import Numbered
from distsim.transforms.sharding.collectives import DegreeNeeded, Mover, Recipe, Step, share
from distsim.transforms.sharding.experts import counted_rows, read_by_experts
from distsim.transforms.sharding.layout import (
    REPLICATED,
    DividedAxis,
    Placement,
    State,
    divisions,
    local_shape,
)
from distsim.transforms.sharding.strategies import Decision, Strategy, rule_of

__all__ = ["DegreeNeeded", "Lowered", "lower"]


@dataclass(frozen=True)
class Lowered:
    """A local function and the placements of its ends.

    ``needs_dp``: shapes depend on the number of data-parallel ranks. ``refusal``: why the batch cannot be
    divided over time, if it cannot. ``begins``: of each callee, None for the whole, which op of the local
    function is the first that stands for each op.
    """

    function: Function
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    needs_dp: bool
    refusal: str
    begins: Mapping[Function | None, tuple[int, ...]]


def lower(
    function: Function,
    known: Mapping[Value, Role],
    mesh: Mesh,
    microbatches: int,
    axes: Mapping[DividedAxis, Decision],
    again: bool = False,
    like: Lowered | None = None,
) -> Lowered:
    """Write out ``function`` for one rank of ``mesh``, as decided along each of ``axes``, the batch's first.

    ``again``: what backward reads of forward is brought where it is needed in backward again, not kept.
    ``like``: what was written out for other numbers of parts, of which ops and values are taken that are the
    same, as most are of weights and their gradients.

    Raises :class:`PlanError` when a sum over microbatches would be needed within one of them, and
    :class:`DegreeNeeded` when the mesh has fewer replicas than there are and a shape depends on it.
    """
    lowering = _ShardLowering(function, known, mesh, microbatches, axes)
    if like is not None:
        lowering.before = like.begins
    if again:
        ahead = Numbered(function).forward
        lowering.ahead = {op for op, forward in zip(function.ops, ahead, strict=True) if forward}
    local = lowering.lower(function, None if like is None else like.function)
    return Lowered(
        local,
        tuple([lowering.placement(value) for value in function.inputs]),
        tuple([lowering.placement(value) for value in function.outputs]),
        lowering.mover.needs_dp,
        lowering.mover.refusal,
        lowering.begins,
    )


class _ShardLowering:
    def __init__(
        self,
        function: Function,
        known: Mapping[Value, Role],
        mesh: Mesh,
        microbatches: int,
        axes: Mapping[DividedAxis, Decision],
    ) -> None:
        self.function, self.known, self.mesh = function, known, mesh
        self.axes, self.decisions = tuple(axes), tuple(axes.values())
        self.mover = Mover(mesh, self.axes, microbatches)
        self.ahead: set[Op] = set()  # the forward pass, where backward is to move what it reads anew
        self._places: dict[tuple[State, ...], Placement] = {}
        batch = self.decisions[0]
        whole = (REPLICATED,) * len(batch.groups)
        every = zip(*[decision.groups or whole for decision in self.decisions], strict=True)
        self._homes = [self.place(states) for states in every]
        self._number = batch.number
        self._types: dict[tuple[Tensor, Placement], Tensor] = {}
        self._recipes: dict[tuple[int, int, int, bool], Recipe] = {}
        self._home_types: dict[int, Tensor] = {}
        self.begins: dict[Function | None, tuple[int, ...]] = {}
        self.before: Mapping[Function | None, tuple[int, ...]] = {}  # those of what this is like
        self._done: dict[Function, Function] = {}
        self._calls: dict[tuple[Function | int, ...], _ShardedCall] = {}

    def place(self, states: tuple[State, ...]) -> Placement:
        """Return the placement of these states, the same object every time."""
        found = self._places.get(states)
        if found is None:
            found = self._places[states] = Placement(self.axes, states)
        return found

    def places(self, along: Sequence[tuple[State, ...]], count: int) -> list[Placement]:
        """Return the placements of ``count`` values; ``along`` each axis their states, none: all whole."""
        whole = (REPLICATED,) * count
        return [self.place(states) for states in zip(*[states or whole for states in along], strict=True)]

    def placement(self, value: Value) -> Placement:
        """Return the placement in which a value is handed on."""
        return self._homes[self._number[value]]

    def local_type(self, value: Value, placement: Placement) -> Tensor:
        whole = as_tensor(value.type, value.name)
        found = self._types.get((whole, placement))
        if found is None:
            shape = whole.shape
            for axis, state in divisions(self.axes, placement.states):
                if not state.pieces and shape[state.dim] % axis.parts:
                    raise PlanError(
                        f"{value.name}, {whole}: {axis.name}={axis.parts} does not divide the "
                        f"{shape[state.dim]} that other axes leave of dimension {state.dim} ({placement}); "
                        "use smaller degrees"
                    )
                shape = local_shape(shape, state, axis.parts)
            found = self._types[whole, placement] = Tensor(whole.dtype, shape, self.mesh)
        return found

    def home_type(self, value: Value) -> Tensor:
        """Return the local type of a value as it is handed on."""
        number = self._number[value]
        found = self._home_types.get(number)
        if found is None:
            found = self._home_types[number] = self.local_type(value, self._homes[number])
        return found

    def recipe(self, value: Value, source: Placement, target: Placement, top: bool) -> Recipe:
        key = (self._number[value], id(source), id(target), top)
        found = self._recipes.get(key)
        if found is None:
            local, expected = self.local_type(value, source), self.local_type(value, target)
            own = [decision.own.get(value, frozenset[int]()) for decision in self.decisions]
            found = self.mover.recipe(value.name, local, (source, target), top, own)
            made = found[-1].type if found else local  # nothing moves over a single rank
            if made != expected:
                raise PlanError(
                    f"sharding {value.name} made {made} where {expected} was expected, moving it "
                    f"from {source} to {target}"
                )
            self._recipes[key] = found
        return found

    def call(self, op: Op, like: Op | None) -> _ShardedCall:
        """Return what is the same for all Calls of one callee with values of the same groups.

        ``like`` is the Call that this one was for other numbers of parts.
        """
        number = self._number
        key = (op.callee, *[number[v] for v in op.inputs], *[number[v] for v in op.outputs])
        found = self._calls.get(key)
        if found is None:
            asked = [self.placement(inner) for inner in op.callee.inputs]
            made = [self.placement(inner) for inner in op.callee.outputs]
            callee = self.lower(op.callee, None if like is None else like.callee)
            types = tuple([value.type for value in callee.outputs])
            old = () if like is None else [value.type for value in like.outputs]
            found = self._calls[key] = _ShardedCall(
                callee,
                types,
                None if like is None else like.callee,
                tuple([i for i, (a, b) in enumerate(zip(types, old, strict=False)) if a != b]),
                tuple([(i, p) for i, p in enumerate(asked) if p is not self.placement(op.inputs[i])]),
                tuple([(i, p) for i, p in enumerate(made) if p is not self.placement(op.outputs[i])]),
            )
        return found

    def lower(self, function: Function, like: Function | None) -> Function:
        if function not in self._done:
            self._done[function] = _FunctionLowering(self, function, like).build()
        return self._done[function]


@dataclass(frozen=True, slots=True)
class _ShardedCall:
    """A lowered callee, the types it makes, and the operands and results that have to be moved.

    ``like`` is the callee for other numbers of parts, which makes other types at the places ``resized``.
    """

    callee: Function
    types: tuple[Type, ...]
    like: Function | None
    resized: tuple[int, ...]
    inputs: tuple[tuple[int, Placement], ...]
    outputs: tuple[tuple[int, Placement], ...]


class _FunctionLowering:
    """Lowers one function.

    The types of what it adds are checked one by one as they are made, so the whole is not checked again.
    What stands for the same op in ``like`` is taken of it, if it is the same.
    """

    def __init__(self, lowering: _ShardLowering, function: Function, like: Function | None) -> None:
        self.lowering, self.function, self.like = lowering, function, like
        self.alike: Sequence[Op] = ()  # what stands in it for the op at hand
        self.begins: list[int] = []
        self.top = function is lowering.function
        self.key = None if self.top else function  # what is kept of a function does not refer to it
        self.before = lowering.before.get(self.key, ())
        self.maker = FunctionMaker(function.name)
        self.home: dict[Value, Value] = {}
        self.elsewhere: dict[tuple[Value, int, bool], Value] = {}
        self.forward = False
        self.counted = counted_rows(function)  # and not sent yet

    def build(self) -> Function:
        lowering, home = self.lowering, self.home
        given = dict(zip(self.function.inputs, self.like.inputs, strict=False)) if self.like else {}
        for value in self.function.inputs:
            type_, same = lowering.home_type(value), given.get(value)
            if same is not None and same.type == type_:
                self.maker.adopt_inputs((same,))
                home[value] = same
                continue
            role = lowering.known.get(value, value.role)
            home[value] = self.maker.add_input_value(value.name, type_, role)
        ends = self.before[1:]
        for number, op in enumerate(self.function.ops):
            self.forward = op in lowering.ahead
            self.begins.append(len(self.maker.ops))
            self.maker.origin = added_name(op)
            if self.like is not None:
                end = ends[number] if number < len(ends) else None
                self.alike = self.like.ops[self.before[number] : end]
            if op.is_call:
                self.call(op)
            else:
                self.op(op)
        lowering.begins[self.key] = tuple(self.begins)
        outputs = tuple([home[value] for value in self.function.outputs])
        return Function(self.maker.name, tuple(self.maker.inputs), tuple(self.maker.ops), outputs)

    def next_alike(self) -> Op | None:
        """Return what stands in ``like`` where the next op will stand."""
        place = len(self.maker.ops) - self.begins[-1]
        return self.alike[place] if place < len(self.alike) else None

    def define(self, value: Value, raw: Placement, local: Value) -> None:
        """Record a new value, and bring it at once to the placement in which it is handed on."""
        wanted = self.lowering.placement(value)
        if raw is not wanted:
            self.elsewhere[value, id(raw), self.forward] = local
            local = self.move(value, local, raw, wanted)
        self.home[value] = local

    def read(self, value: Value, wanted: Placement) -> Value:
        """Return ``value`` in the placement that is wanted, with the collectives that this takes."""
        at = self.lowering.placement(value)
        if at is wanted:
            return self.home[value]
        found = self.elsewhere.get((value, id(wanted), self.forward))
        if found is None:
            found = self.move(value, self.home[value], at, wanted)
            self.elsewhere[value, id(wanted), self.forward] = found
        return found

    def move(self, value: Value, local: Value, source: Placement, target: Placement) -> Value:
        for step in self.lowering.recipe(value, source, target, self.top):
            exchanged = step.op_type == "MPIAlltoall" and step.attributes["axis"] == EXPERT
            if exchanged and value in self.counted and any(state.by_groups for state in target.states):
                rows = self.counted[value]
                self.counted = {each: of for each, of in self.counted.items() if of is not rows}
                local = self.counts_told(local, rows.sizes)
            name, same = local.name + step.suffix if step.suffix else local.name, self.next_alike()
            if same is None or not _is_step(same, step, local, name):
                made, origin = (Value(name, step.type),), self.maker.origin
                same = Op(step.op_type, (local,), made, step.attributes, name=origin)
            self.maker.adopt(same)
            local = same.outputs[0]
        return local

    def counts_told(self, rows: Value, sizes: tuple[int, ...]) -> Value:
        """Tell the ranks of experts how many rows this one has for them; the host waits for their numbers.

        It issues no exchange before: the sizes of what comes are arguments of that. Megatron-LM gathers what
        each rank has for every expert (token_dispatcher.py, MoEAlltoAllTokenDispatcher.preprocess, and
        cuda_sync_point), torchtitan exchanges it and copies it to the host, DeepEP's kernel does the same
        while the host waits ("implicit CPU wait", its README). Backward knows the sizes.
        """
        (own,) = self.maker.add("RowCounts", [rows], {"sizes": sizes})
        every = self.maker.add("MPIAllgather", [own], {"axis": EXPERT, "dim": 0})
        (there,) = self.maker.add("Await", [rows, *every], output_names=[rows.name])
        return there

    def op(self, op: Op) -> None:
        lowering = self.lowering
        along = [decision.strategies.get(op) for decision in lowering.decisions]
        places = lowering.places([each.inputs if each else () for each in along], len(op.inputs))
        inputs = [self.read(v, place) for v, place in zip(op.inputs, places, strict=True)]
        raw = lowering.places([each.outputs if each else () for each in along], len(op.outputs))
        expected = [lowering.local_type(v, p) for v, p in zip(op.outputs, raw, strict=True)]
        attributes = op.attributes
        rule = rule_of(signature_of(op))
        if rule is not None and rule.localize is not None:
            attributes = rule.localize(attributes, tuple(t.shape for t in expected))
        if not op.inputs:
            attributes = {**attributes, "device": lowering.mesh}
        decomposed = [
            (rule.decompositions[each.factor], axis.part_of or axis.name)
            for each, axis in zip(along, lowering.axes, strict=True)
            if rule and each and each.factor is not None and each.factor in rule.decompositions
        ]
        decomposed = [each for place, each in enumerate(decomposed) if each not in decomposed[:place]]
        if not decomposed:
            names = [value.name for value in op.outputs]
            made = self.maker.add(op.op_type, inputs, attributes, (), names, op.version, op.name)
        else:
            ((decomposition, axis),) = decomposed
            made = decomposition.build(self.maker, replace(op, attributes=attributes), inputs, axis)
        made = self.finished(op, rule, made, along)
        for value, local, type_, place in zip(op.outputs, made, expected, raw, strict=True):
            if local.type != type_:
                raise PlanError(
                    f"sharding {op!r} made {local.type} where {type_} was expected: the sharding rule of "
                    f"{op.op_type} is wrong for these shapes"
                )
            self.define(value, place, self.averaged(local, along))

    def finished(
        self, op: Op, rule: ShardingRule | None, made: Sequence[Value], along: Sequence[Strategy | None]
    ) -> Sequence[Value]:
        """Return what ranks that each made something of their own part have together.

        What they made of the rows of their own experts they keep.
        """
        found: dict[tuple[Finish, str], bool] = {}
        for each, axis in zip(along, self.lowering.axes, strict=True):
            finish = rule.finish.get(each.factor or "") if rule and each else None
            if each and finish is not None and not any(state.by_groups for state in each.inputs):
                key = finish, axis.part_of or axis.name
                exchanged = axis.experts and read_by_experts(self.function, op.outputs)
                found[key] = found.get(key, False) or exchanged
        for (finish, name), exchanged in found.items():
            made = [finish(self.maker, value, name, exchanged) for value in made]
        return made

    def averaged(self, local: Value, along: Sequence[Strategy | None]) -> Value:
        """A mean over one rank's part is divided by the ranks, so that the parts sum to the mean."""
        axes = zip(self.lowering.axes, along, strict=True)
        return share(self.maker, local, math.prod([axis.parts for axis, each in axes if each and each.mean]))

    def call(self, op: Op) -> None:
        same, home = next((each for each in self.alike if each.is_call), None), self.home
        plan = self.lowering.call(op, same)
        inputs = [home[value] for value in op.inputs]
        for index, wanted in plan.inputs:
            inputs[index] = self.read(op.inputs[index], wanted)
        if same is not None and same.callee is plan.like:
            values = [*same.outputs]
            for index in plan.resized:
                values[index] = Value(op.outputs[index].name, plan.types[index])
            made = tuple(values)
        else:
            made = tuple([Value(v.name, type_) for v, type_ in zip(op.outputs, plan.types, strict=True)])
        self.maker.adopt(Op("Call", tuple(inputs), made, op.attributes, (plan.callee,), None, op.name))
        home.update(zip(op.outputs, made, strict=True))
        for index, raw in plan.outputs:
            self.define(op.outputs[index], raw, made[index])


def _is_step(op: Op, step: Step, local: Value, name: str) -> bool:
    """Whether an op is a step of a recipe that moves a value, with a result of this name."""
    return (
        op.op_type == step.op_type
        and op.inputs == (local,)
        and op.attributes == step.attributes
        and op.outputs[0].type == step.type
        and op.outputs[0].name == name
    )
