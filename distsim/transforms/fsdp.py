"""fsdp: parameters and optimizer state divided over data-parallel ranks, gathered where they are used.

Fully sharded data parallelism (Zhao et al. 2023; ZeRO stage 3, Rajbhandari et al. 2020): a rank holds an
equal part of each parameter, of its gradient and of its optimizer state. A parameter is all-gathered before
it is used, its gradient reduce-scattered per microbatch, and each rank updates its part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from distsim.errors import PlanError
from distsim.ir import Function, FunctionMaker, Op, Role, Tensor, Type, Value
from distsim.ir.type import as_tensor
from distsim.ops import operator
from distsim.partition.saves import Tag
from distsim.transforms.numbered import Numbered, is_sum
from distsim.transforms.placement import Placement, sharded
from distsim.transforms.shard import Sharded

AXIS = "dp"


def fsdp(local: Sharded, smallest: int = 1) -> Sharded:
    """Divide the parameters of what :func:`shard` made, and their optimizer state, over the dp ranks.

    Each parameter of at least ``smallest`` elements is divided along the first dimension of its local shape
    that the number of ranks divides; one without such a dimension stays whole, as does one that an update
    takes apart along another axis, and a note says so. The
    whole is gathered at the top level, before the first op or Call that reads it: once for each run of ops
    between Calls, and for each Call, that reads it in forward; backward reads what forward gathered
    (:func:`gathered` tags it to be gathered again instead). What an optimizer of a divided parameter reads
    and makes is divided like it.

    ``local`` must be on a mesh with all its replicas, since shapes depend on how many there are. Raises
    :class:`PlanError` if it is not.
    """
    ranks = local.mesh.axis_size(AXIS)
    if ranks != local.dp:
        raise PlanError(
            f"{local.function.name} is on a pattern of {ranks} of {local.dp} data-parallel ranks; shard it "
            f"on a mesh of dp={local.dp}, for the shapes depend on it"
        )
    if ranks == 1:
        return local
    whole = _updated_in_parts(local.function)
    dims = _divided([v for v in local.function.parameters if v not in whole], ranks, smallest)
    return _Divider(local, ranks, dims, smallest).run()


def gathered(function: Function, reshard: bool = True) -> dict[Value, Tag]:
    """Return tags that say what becomes of gathered parameters between forward and backward.

    The chain of each parameter is followed through casts, gathers over dp and views. ``reshard``: all of a
    chain is recomputed, so no gathered weight is held as an activation. Otherwise the last value that is no
    view is saved, and the rest is recomputed from it or from the parameter.
    """
    tags: dict[Value, Tag] = {}
    for chain in chains(function):
        tags |= dict.fromkeys([v for op in chain for v in op.outputs], Tag.MUST_RECOMPUTE)
        if not reshard:
            kept = [op for op in chain if not operator(op.op_type).view]
            tags[kept[-1].outputs[0]] = Tag.MUST_SAVE
    return tags


def chains(function: Function) -> list[tuple[Op, ...]]:
    """Return the ops that gather each parameter over dp: casts, the gather, views, in order."""
    known: dict[Value, tuple[Op, ...]] = dict.fromkeys(function.parameters, ())
    last: dict[Value, None] = {}
    for op in function.ops:
        if len(op.inputs) == 1 and op.inputs[0] in known and _passes(op):
            before = known[op.inputs[0]]
            known[op.outputs[0]] = (*before, op)
            last.pop(op.inputs[0], None)
            last[op.outputs[0]] = None
    return [known[value] for value in last if any(gathers(op) for op in known[value])]


def gathers(op: Op) -> bool:
    """Whether an op gathers something over the data-parallel ranks."""
    return op.op_type == "MPIAllgather" and op.attributes["axis"] == AXIS


def _passes(op: Op) -> bool:
    return gathers(op) or op.op_type == "Cast" or (operator(op.op_type).view and not is_sum(op))


def _divided(parameters: Sequence[Value], ranks: int, smallest: int) -> dict[Value, int]:
    """Return the dimension along which each parameter is divided."""
    found: dict[Value, int] = {}
    for value in parameters:
        type_ = as_tensor(value.type, value.name)
        dim = next((i for i, size in enumerate(type_.shape) if size and size % ranks == 0), None)
        if dim is not None and type_.size >= smallest:
            found[value] = dim
    return found


def _updated_in_parts(function: Function) -> set[Value]:
    """Return the parameters of which an update reads something else than the parameter as it is."""
    found: set[Value] = set()
    for op in function.ops:
        direct = {update.parameter for update in _updates(op)}
        if direct:
            found.update(v for v in op.inputs if v.role is Role.PARAMETER and v not in direct)
    return found


def _part(type_: Type, dim: int, ranks: int) -> Tensor:
    whole = as_tensor(type_, "a parameter")
    return whole.with_shape((*whole.shape[:dim], whole.shape[dim] // ranks, *whole.shape[dim + 1 :]))


@dataclass(frozen=True)
class _Update:
    """The operands of an optimizer: the parameter, its gradient, its state; and its results."""

    parameter: Value
    gradient: Value
    state: tuple[Value, ...]
    results: tuple[Value, ...]


def _updates(op: Op) -> list[_Update]:
    """Return the optimizers that an op is, or that a Call runs, in values of the caller."""
    if op.op_type != "Call":
        return [_update(op, {})] if operator(op.op_type).in_place and not is_sum(op) else []
    known = dict(zip(op.callee.inputs, op.inputs, strict=True))
    known |= dict(zip(op.callee.outputs, op.outputs, strict=True))
    inner = [each for part in op.callee.ops for each in _updates(part)]
    return [
        _Update(
            known[each.parameter],
            known[each.gradient],
            tuple([known[v] for v in each.state]),
            tuple([known[v] for v in each.results]),
        )
        for each in inner
        if all(v in known for v in (each.parameter, each.gradient, *each.state, *each.results))
    ]


def _update(op: Op, known: Mapping[Value, Value]) -> _Update:
    held = set(operator(op.op_type).in_place.values())
    state = tuple([v for i, v in enumerate(op.inputs) if i in held and i > 0])
    gradient = next(v for i, v in enumerate(op.inputs) if i not in held)
    return _Update(op.inputs[0], gradient, state, op.outputs)


class _Divider:
    """Rewrites the function of one Sharded."""

    def __init__(self, local: Sharded, ranks: int, dims: Mapping[Value, int], smallest: int) -> None:
        self.local, self.ranks, self.function = local, ranks, local.function
        self.parameters, self.smallest = dims, smallest
        self.dims = dict(dims)  # of all that is divided
        self.producer = {v: op for op in self.function.ops for v in op.outputs}
        self.readers: dict[Value, int] = {}
        for op in self.function.ops:
            for value in op.inputs:
                self.readers[value] = self.readers.get(value, 0) + 1
        self.sums: dict[Op, Value] = {}  # first op of a gradient's sum -> the gradient
        self.sum_of: dict[Value, list[Op]] = {}
        self.skipped: set[Op] = set()
        self.updating: set[Op] = set()
        self.sliced: list[Value] = []
        for op in self.function.ops:
            self._plan(op)
        self.maker = FunctionMaker(self.function.name)
        self.env: dict[Value, Value] = {}
        self.whole: dict[Value, Value] = {}  # as the latest unit gathered it
        self.first: dict[Value, Value] = {}  # as the first unit did
        self.callees: dict[tuple[Function, tuple[Type, ...]], Function] = {}

    # --- what is divided --------------------------------------------------------------------------

    def _plan(self, op: Op) -> None:
        for update in _updates(op):
            dim = self.parameters.get(update.parameter)
            if dim is None:
                continue
            self.updating.add(op)
            self.dims |= dict.fromkeys([*update.state, *update.results], dim)
            if update.gradient in self.producer:
                self._plan_sum(update.gradient, dim)
            else:
                self.sliced.append(update.gradient)
            self.dims[update.gradient] = dim

    def _plan_sum(self, gradient: Value, dim: int) -> None:
        """Find the ops that sum a gradient over microbatches and ranks, the last ones that make it."""
        found: list[Op] = []
        value = gradient
        while (
            value in self.producer and self.readers.get(value, 0) == 1 and value not in self.function.outputs
        ):
            op = self.producer[value]
            if not (is_sum(op) or op.op_type == "MPIAllreduce"):
                break
            found.insert(0, op)
            value = op.inputs[0]
        if [op for op in found if _reduces(op)]:
            self.sum_of[gradient] = found
            self.sums[found[0]] = gradient
            self.skipped.update(found)
        else:
            self.sliced.append(gradient)

    # --- writing -----------------------------------------------------------------------------------

    def run(self) -> Sharded:
        function, maker = self.function, self.maker
        numbered = Numbered(function)
        for value in function.inputs:
            type_ = self._type(value) if value in self.dims and value not in self.sliced else value.type
            self.env[value] = maker.add_input_value(value.name, type_, value.role)
        for number, op in enumerate(function.ops):
            if op in self.updating:
                self._update(op)
            elif op in self.sums:
                self._sum(self.sums[op])
            elif op not in self.skipped:
                self._op(op, numbered.forward[number])
        maker.set_outputs([self.env[value] for value in function.outputs])
        made = maker.finalize()
        local = self.local
        return replace(
            local,
            function=made,
            inputs=self._places(function.inputs, local.inputs),
            outputs=self._places(function.outputs, local.outputs),
            needs_dp=True,
            remarks=(*local.remarks, *self._remarks()),
        )

    def _type(self, value: Value) -> Tensor:
        return _part(value.type, self.dims[value], self.ranks)

    def _places(self, values: Sequence[Value], places: Sequence[Placement]) -> tuple[Placement, ...]:
        return tuple(
            [
                replace(place, held=sharded(self.dims[v]))
                if v in self.dims and v not in self.sliced
                else place
                for v, place in zip(values, places, strict=True)
            ]
        )

    def _remarks(self) -> list[str]:
        left = [v for v in self.function.parameters if v not in self.parameters]
        large = [v for v in left if as_tensor(v.type, v.name).size >= self.smallest]
        parts = _updated_in_parts(self.function)
        reasons = {
            f"have no dimension that dp={self.ranks} divides": [v for v in large if v not in parts],
            "are updated in parts, along another axis": [v for v in large if v in parts],
        }
        return [
            f"{len(found)} parameters of {sum(v.type.nbytes for v in found):,} bytes, {found[0].name} the "
            f"first, {reason}: every rank holds them whole"
            for reason, found in reasons.items()
            if found
        ]

    def _op(self, op: Op, forward: bool) -> None:
        """Copy an op; it reads whole parameters."""
        call = op.op_type == "Call"
        if forward and call:
            self.whole.clear()
        values = dict(self.env)
        for value in op.inputs:
            if value in self.parameters:
                values[value] = self._gathered(value, forward)
        self.env.update(zip(op.outputs, self.maker.copy(op, values), strict=True))
        if forward and call:
            self.whole.clear()

    def _gathered(self, value: Value, forward: bool) -> Value:
        known = self.whole if forward else self.first
        if value not in known:
            along = {"axis": AXIS, "dim": self.dims[value]}
            made = self.maker.add("MPIAllgather", [self.env[value]], along, output_names=[value.name])[0]
            known[value] = made
            self.first.setdefault(value, made)
        return known[value]

    def _sum(self, gradient: Value) -> None:
        """Reduce and scatter what is summed over the ranks, then sum the parts as the whole was."""
        ops = self.sum_of[gradient]
        along = {"axis": AXIS, "dim": self.dims[gradient]}
        name = gradient.name
        value = self.maker.add("MPIReduceScatter", [self.env[ops[0].inputs[0]]], along, output_names=[name])[
            0
        ]
        for op in ops:
            if not _reduces(op):
                value = self.maker.add(op.op_type, [value], op.attributes, output_names=[name])[0]
        self.env[gradient] = value

    def _update(self, op: Op) -> None:
        values = dict(self.env)
        for value in op.inputs:
            if value in self.sliced:
                along = {"axis": AXIS, "dim": self.dims[value]}
                part = self.maker.add("LocalSlice", [values[value]], along, output_names=[value.name])[0]
                values[value] = part
        subfunctions = None
        if op.op_type == "Call":
            subfunctions = [self._retyped(op.callee, tuple([values[v].type for v in op.inputs]))]
        made = self.maker.copy(op, values, subfunctions=subfunctions)
        self.env.update(zip(op.outputs, made, strict=True))

    def _retyped(self, callee: Function, types: tuple[Type, ...]) -> Function:
        """Return the callee for inputs of other types."""
        found = self.callees.get((callee, types))
        if found is None:
            maker = FunctionMaker(callee.name)
            values = {
                value: maker.add_input_value(value.name, type_, value.role)
                for value, type_ in zip(callee.inputs, types, strict=True)
            }
            for op in callee.ops:
                values.update(zip(op.outputs, maker.copy(op, values), strict=True))
            maker.set_outputs([values[value] for value in callee.outputs])
            found = self.callees[callee, types] = maker.finalize()
        return found


def _reduces(op: Op) -> bool:
    return op.op_type == "MPIAllreduce" and op.attributes["axis"] == AXIS
