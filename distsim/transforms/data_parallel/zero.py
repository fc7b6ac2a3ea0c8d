"""zero: what data-parallel ranks would hold alike, divided over them (ZeRO, Rajbhandari et al. 2020).

Each stage divides more: the optimizer's state, master copies included (1, Megatron-LM's distributed
optimizer); gradients too (2); parameters too, gathered where they are used (3, fully sharded data
parallelism, Zhao et al. 2023). Whatever is divided, each rank updates its part of each parameter. Gradients
are reduce-scattered in place of being all-reduced: in stage 1 once a step, their sum over microbatches; from
stage 2 on those of each microbatch, whose parts are summed, unless the sums are to be reduced there too, as
torch's pipeline stages let FSDP reduce them after their last backward pass. What parameters are not divided
are gathered after their update, in their own type, into the place of the old ones.

Parts are flat, as those of DeepSpeed and of torch's FlatParameter: the elements in order, padded with zeros
to a multiple of the ranks, so that any number of ranks divides any parameter.

Of ranks in groups (``zero_ranks``; hybrid sharding, Zhao et al. 2023) each group divides all: gradients are
reduce-scattered within it, and their parts all-reduced over those ranks of all groups that have the same.
Where one rank of a group has all of a parameter, as of an expert, its gradient is such a part as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from distsim.errors import PlanError
from distsim.interpret import infer_types
from distsim.ir import Function, FunctionMaker, Op, Tensor, Type, Value
from distsim.ir.rewrite import inline
from distsim.ir.type import as_tensor
from distsim.ops import operator
from distsim.ops.conversion import ONCE
from distsim.ops.parts import flat_part
from distsim.ops.training import sums_squares
from distsim.transforms.data_parallel.gathers import gathered_behind, outer_axis, replicating_axis, sums_over
from distsim.transforms.data_parallel.optimizer_steps import (
    OptimizerStep,
    before_update,
    updates_of,
    whole_needed,
    with_plain_updates,
)
from distsim.transforms.op_graph import is_sum, numbered
from distsim.transforms.sharding.collectives import share
from distsim.transforms.sharding.layout import Placement
from distsim.transforms.sharding.problem_graph import written
from distsim.transforms.sharding.shard import Sharded


def zero(
    local: Sharded,
    stage: int = 3,
    smallest: int = 1,
    ahead: bool = False,
    kept: bool = False,
    whole_sums: bool = False,
) -> Sharded:
    """Divide over the dp ranks what a stage of ZeRO divides of what :func:`shard` made.

    Of each parameter of at least ``smallest`` elements, as tp leaves it, of its gradient or its optimizer
    state, a rank holds ceil(elements / ranks). Before stage 3 what no optimizer updates stays as it is.
    In stage 3 the whole parameter is gathered at the top level, before the first op or Call that reads it:
    once for each run of ops between Calls, and for each Call, that reads it in forward; backward reads what
    forward gathered (:func:`gathered` tags it to be gathered again instead), also where it reads copies that
    forward cast of that (:func:`gathered_behind`).

    ``kept``: in stage 3 parameters are gathered once a step (:data:`ONCE`), and held for every microbatch.
    ``whole_sums``: from stage 2 on too, gradients are summed over microbatches before they are reduced.
    ``ahead``: before stage 3, a step ends with each rank's part of the new parameters: who cuts the function
    into stages gathers them when the next step begins (:func:`bucketed`).

    ``local`` must be on a mesh with all its replicas, since shapes depend on how many there are. Raises
    :class:`PlanError` if it is not, for an update that does more than go through a parameter element by
    element, and before stage 3 where nothing is updated.
    """
    shown = local.mesh.axis_size("dp")
    if shown != local.dp:
        raise PlanError(
            f"{local.function.name} is on a pattern of {shown} of {local.dp} data-parallel ranks; shard it "
            f"on a mesh of dp={local.dp}, for the shapes depend on it"
        )
    axis = replicating_axis(local.mesh)
    if not axis:
        return local
    local = replace(local, function=with_plain_updates(local.function))
    places = dict(zip(local.function.inputs, local.inputs, strict=True))
    chosen = {
        v: replicating_axis(local.mesh, places[v])
        for v in local.function.parameters
        if as_tensor(v.type, v.name).size >= max(smallest, 1)
    }
    chosen = {v: own for v, own in chosen.items() if own}
    if stage == 3 and not kept:
        local = replace(local, function=gathered_behind(local.function, chosen))
    whole_sums = whole_sums or stage == 1
    divider = _Divider(local, axis, stage, chosen, ahead, kept, whole_sums)
    if mixed := divider.mixed_sums():
        written_out = replace(local, function=inline(local.function, mixed))
        divider = _Divider(written_out, axis, stage, chosen, ahead, kept, whole_sums)
    return divider.run()


class _Divider:
    """Rewrites the function of one Sharded.

    A parameter and what belongs to it are divided over the ranks that all have it: those of ``axis``, over
    which a batch and its sequences are divided, or, of an expert, some of them; ``outer`` is, by each such
    axis, the one whose ranks have the same parts. Where that axis is none, "", one rank has it: the gradients
    of those, ``alone``, are summed over the outer axis when those of others are.
    """

    def __init__(
        self,
        local: Sharded,
        axis: str,
        stage: int,
        chosen: dict[Value, str],
        ahead: bool,
        kept: bool,
        whole_sums: bool,
    ) -> None:
        self.local, self.axis, self.function = local, axis, local.function
        self.stage, self.chosen, self.ahead, self.whole_sums = stage, chosen, ahead, whole_sums
        self.marks = {ONCE: True} if kept else {}
        places = dict(zip(self.function.inputs, local.inputs, strict=True))
        parameters = [v for v in self.function.parameters if not replicating_axis(local.mesh, places[v])]
        early = [] if whole_sums else [v for v in parameters if outer_axis(local.mesh, places[v])]
        self.alone = dict.fromkeys(early, "")
        self.outer = {own: outer_axis(local.mesh, places[v]) for v, own in (self.alone | chosen).items()}
        self.parameters = dict(chosen) if stage == 3 else {}  # that are divided, and casts of them
        self.divided = dict(self.parameters)  # and all that is divided like them: over which axis
        self.producer = {v: op for op in self.function.ops for v in op.outputs}
        reading = [op for op in self.function.ops if not (op.op_type == "SquareSum" or sums_squares(op))]
        self.readers = Counter([value for op in reading for value in op.inputs])
        self.sums: dict[Op, Value] = {}  # first op of a gradient's sum -> the gradient
        self.sum_of: dict[Value, list[Op]] = {}
        self.skipped: set[Op] = set()
        self.updating: set[Op] = set()
        self.updates: dict[Op, list[OptimizerStep]] = {}  # of parameters that are not divided
        self.by_part: set[Op] = set()  # ops between a gradient and its update
        self.partial: dict[Value, str] = {}  # sums over the parts of an axis, not yet taken
        self.sliced: set[Value] = set()
        self.returned = frozenset(self.function.outputs)
        for op in self.function.ops:
            self._plan(op)
        if stage < 3 and chosen and not self.updating:
            raise PlanError(
                f"zero={stage} divides what an optimizer updates and keeps, and {self.function.name} updates "
                "no parameter; use zero=0, or train with an optimizer"
            )
        self.maker = FunctionMaker(self.function.name)
        self.env: dict[Value, Value] = {}
        self.whole: dict[Value, Value] = {}  # as the latest unit gathered it
        self.first: dict[Value, Value] = {}  # as the first unit did
        self.callees: dict[tuple[Function, tuple[Type, ...]], Function] = {}

    def mixed_sums(self) -> set[Op]:
        """Return the Calls that sum squares of divided gradients and of others, or over unlike axes.

        A rank adds the squares of its parts, and a share of those of what all ranks have.
        """
        return {op for op in self.function.ops if sums_squares(op) and len(self._axes_over(op)) > 1}

    def _axes_over(self, op: Op) -> set[str | None]:
        return {None if value in self.sliced else self.divided.get(value) for value in op.inputs}

    # --- what is divided --------------------------------------------------------------------------

    def _plan(self, op: Op) -> None:
        places = [written(op, index) for index in range(len(op.outputs))]
        updated = {op.inputs[place] for place in places if place is not None}
        if not updated.isdisjoint(self.alone):
            for update in [each for each in updates_of(op) if each.parameter in self.alone]:
                self._plan_sum(before_update(update.gradient, self.producer, self.readers)[0], "")
        if updated.isdisjoint(self.chosen):
            return
        self.updating.add(op)
        for update in updates_of(op):
            if update.parameter not in self.chosen:
                continue
            axis = self.chosen[update.parameter]
            new, *others = update.results
            self.divided |= dict.fromkeys([*update.state, *others], axis)
            if self.stage == 3 or self.ahead:
                self.divided[new] = axis
            if self.stage < 3:
                self.updates.setdefault(op, []).append(update)
            self._plan_gradient(update.gradient, axis)

    def _plan_gradient(self, gradient: Value, axis: str) -> None:
        """Divide a gradient where it is summed, and what is made of it before the update."""
        source, between = before_update(gradient, self.producer, self.readers)
        self._plan_sum(source, axis)
        if source in self.sum_of:
            self.by_part.update(between)
            self.divided |= dict.fromkeys([source, *[op.outputs[0] for op in between]], axis)
        else:
            self.sliced.add(gradient)
            self.divided[gradient] = axis

    def _plan_sum(self, gradient: Value, axis: str) -> None:
        """Find the ops that sum a gradient over microbatches and ranks, the last ones that make it.

        Views are among them: flat, a value is the same under any shape.
        """
        found: list[Op] = []
        value = gradient
        while value in self.producer and self.readers.get(value, 0) == 1 and value not in self.returned:
            op = self.producer[value]
            if not (operator(op.op_type).view or op.op_type == "MPIAllreduce"):
                break
            found.insert(0, op)
            value = op.inputs[0]
        if [op for op in found if self._reduces(op, axis)]:
            self.sum_of[gradient] = found
            self.sums[found[0]] = gradient
            self.skipped.update(found)

    # --- writing -----------------------------------------------------------------------------------

    def run(self) -> Sharded:
        function, maker = self.function, self.maker
        forward = numbered(function).forward
        for value in function.inputs:
            apart = value in self.divided and value not in self.sliced
            type_ = self._type(value, self.divided[value]) if apart else value.type
            self.env[value] = maker.add_input_value(value.name, type_, value.role)
        for number, op in enumerate(function.ops):
            if op in self.updating:
                self._update(op)
            elif op in self.sums:
                self._sum(self.sums[op])
            elif op in self.by_part:
                self._take(op.inputs)
                self.env.update(zip(op.outputs, maker.copy(op, self.env), strict=True))
            elif self._adds_parts(op):
                self._partial(op)
            elif op not in self.skipped:
                self._op(op, forward[number])
        maker.set_outputs([self.env[value] for value in function.outputs])
        return replace(
            self.local,
            function=maker.finalize(),
            inputs=self._places(function.inputs, self.local.inputs),
            outputs=self._places(function.outputs, self.local.outputs),
            needs_dp=True,
        )

    def _reduces(self, op: Op, axis: str) -> bool:
        """Whether an op sums a gradient over all ranks that have it, of which those of an axis divide it."""
        every = [each for each in (axis, self.outer[axis]) if each]
        return op.op_type == "MPIAllreduce" and sums_over(self.local.mesh, op.attributes["axis"], every)

    def _ranks(self, axis: str) -> int:
        return self.local.mesh.axis_size(axis)

    def _type(self, value: Value, axis: str) -> Tensor:
        whole = as_tensor(value.type, value.name)
        return whole.with_shape((flat_part(whole.size, self._ranks(axis)),))

    def _places(self, values: Sequence[Value], places: Sequence[Placement]) -> tuple[Placement, ...]:
        return tuple(
            [
                place._replace(flat=(self.divided[v], as_tensor(v.type, v.name).shape))
                if v in self.divided and v not in self.sliced
                else place
                for v, place in zip(values, places, strict=True)
            ]
        )

    def _op(self, op: Op, forward: bool) -> None:
        """Copy an op; it reads whole parameters. Of one that is cast once the parts are, and gathered so."""
        if op.op_type == "Cast" and op.attributes.get(ONCE) and op.inputs[0] in self.parameters:
            (made,) = self.maker.copy(op, self.env)
            self.env[op.outputs[0]] = made
            self.parameters[op.outputs[0]] = self.parameters[op.inputs[0]]
            return
        starts = forward and op.is_call
        self._take(op.inputs)
        if starts:
            self.whole.clear()
        values: dict[Value, Value] = {}
        for value in op.inputs:
            if value in self.parameters:
                values[value] = self._gathered(value, forward)
            elif value in self.divided and value not in self.sliced:
                raise whole_needed(op)
            else:
                values[value] = self.env[value]
        self.env.update(zip(op.outputs, self.maker.copy(op, values), strict=True))
        if starts:
            self.whole.clear()

    def _adds_parts(self, op: Op) -> bool:
        """Whether an op sums squares of a gradient that is divided, or is linear in such sums."""
        if op.op_type == "SquareSum" or sums_squares(op):
            return self._axes_over(op) != {None}
        linear = op.op_type == "Add" or (op.op_type == "Mul" and len(op.inputs) == 1)
        return linear and not self.partial.keys().isdisjoint(op.inputs)

    def _partial(self, op: Op) -> None:
        """Sum squares of parts, or sums of them: of what all ranks have each adds an equal share.

        Of two sums over unlike axes the one over all ranks of the data stays partial; one over some of these
        ranks, as of experts, becomes partial over all of them by a share as well, without a message.
        """
        axes = [self.partial.get(value) or self.divided.get(value) for value in op.inputs]
        axis = self.axis if self.axis in axes else next(each for each in axes if each)
        axes_of = self.local.mesh.axes_of
        self._take([v for v in op.inputs if not {*axes_of(self.partial.get(v, axis))} <= {*axes_of(axis)}])
        values = {value: self.env[value] for value in op.inputs}
        for value in op.inputs if op.op_type == "Add" else ():
            summed = self._ranks(self.partial[value]) if value in self.partial else 1
            values[value] = share(self.maker, self.env[value], self._ranks(axis) // summed)
        subfunctions = [self._callee_of_parts(op, values)] if op.is_call else None
        made = self.maker.copy(op, values, subfunctions=subfunctions)
        self.env.update(zip(op.outputs, made, strict=True))
        self.partial |= dict.fromkeys(op.outputs, axis)

    def _take(self, values: Sequence[Value]) -> None:
        """Take the sums over ranks of those values that are partial."""
        for value in values:
            if value in self.partial:
                axis = self.partial.pop(value)
                self.env[value] = self._add("MPIAllreduce", self.env[value], value, axis=axis)

    def _gathered(self, value: Value, forward: bool) -> Value:
        known = self.whole if forward else self.first
        if value not in known:
            axis = self.parameters[value]
            padded = self._add("MPIAllgather", self.env[value], value, axis=axis, dim=0, **self.marks)
            made = self._add("Unflatten", padded, value, shape=as_tensor(value.type, value.name).shape)
            known[value] = made
            self.first.setdefault(value, made)
        return known[value]

    def _flat(self, value: Value, like: Value, axis: str) -> Value:
        """Write a whole value flat, padded so that the ranks of an axis divide it."""
        size = as_tensor(value.type, value.name).size
        flat = self._add("Reshape", value, like, shape=(size,))
        ranks = self._ranks(axis)
        padding = flat_part(size, ranks) * ranks - size
        return self._add("Pad", flat, like, pads=(0, padding)) if padding else flat

    def _sum(self, gradient: Value) -> None:
        """Reduce and scatter what is summed over the ranks, then sum the parts as the whole was.

        With ``whole_sums`` microbatches are summed before that. What one rank has stays in its shape.
        """
        ops = self.sum_of[gradient]
        value = self.env[ops[0].inputs[0]]
        early = [op for op in ops if is_sum(op)] if self.whole_sums else []
        for op in early:
            value = self._add(op.op_type, value, gradient, **op.attributes)
        axis = self.divided.get(gradient, "")
        if axis:
            value = self._flat(value, gradient, axis)
            value = self._add("MPIReduceScatter", value, gradient, axis=axis, dim=0)
        if self.outer[axis]:
            value = self._add("MPIAllreduce", value, gradient, axis=self.outer[axis])
        for op in ops:
            if op in early or self._reduces(op, axis):
                continue
            if is_sum(op) or op.op_type == "MPIAllreduce" or not axis:
                value = self._add(op.op_type, value, gradient, **op.attributes)
        self.env[gradient] = value

    def _update(self, op: Op) -> None:
        values = {value: self.env[value] for value in op.inputs}
        for value in values:
            if value in self.sliced:
                axis = self.divided[value]
                flat = self._flat(values[value], value, axis)
                values[value] = self._add("LocalSlice", flat, value, axis=axis, dim=0)
        updates = self.updates.get(op, ())
        for update in updates:
            waits = [self.env[update.parameter], values[update.gradient]]
            values[update.parameter] = self._add(
                "LocalPart", waits, update.parameter, axis=self.chosen[update.parameter]
            )
        subfunctions = [self._callee_of_parts(op, values)] if op.is_call else None
        made = self.maker.copy(op, values, subfunctions=subfunctions)
        self.env.update(zip(op.outputs, made, strict=True))
        for update in () if self.ahead else updates:
            new, old = update.results[0], self.env[update.parameter]
            shape = as_tensor(old.type, old.name).shape
            parts = [self.env[new], old]
            axis = self.chosen[update.parameter]
            self.env[new] = self._add("MPIAllgatherInto", parts, new, axis=axis, shapes=(shape,))

    def _callee_of_parts(self, op: Op, values: Mapping[Value, Value]) -> Function:
        """Return what a Call runs on parts of its operands."""
        types = tuple([values[value].type for value in op.inputs])
        if (op.callee, types) not in self.callees:
            self.callees[op.callee, types] = infer_types(op.callee, types)
        return self.callees[op.callee, types]

    def _add(self, op_type: str, read: Value | Sequence[Value], like: Value, **attributes: object) -> Value:
        """Add an op of one result, which has the name of ``like``."""
        operands = [read] if isinstance(read, Value) else read
        return self.maker.add(op_type, operands, attributes, output_names=[like.name])[0]
