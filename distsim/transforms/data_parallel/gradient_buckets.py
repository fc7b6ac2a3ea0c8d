"""Which gradients are reduced over ranks together: how each is reduced, and when backward completes it.

Gradients are taken in the order in which the backward pass completes them, which is about the reverse of
that of the parameters; a bucket is full once it holds so much (torch ``nn/parallel/distributed.py`` and
``reducer.cpp``, Megatron-LM ``param_and_grad_buffer.py``), or holds those of a layer (torch's FSDP).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import NamedTuple, TypeVar

from distsim.hardware.rank_axes import over_tensor
from distsim.ir import Function, Op, Role, Value
from distsim.ir.module_names import layer_of
from distsim.ir.type import as_tensor
from distsim.plan.buckets import Buckets
from distsim.transforms.op_graph import Numbered, StageMap

Item = TypeVar("Item")

REDUCTIONS = ("MPIAllreduce", "MPIReduceScatter")
"""What sums gradients over ranks."""


def is_data_reduction(op: Op) -> bool:
    """Whether an op sums something over ranks that have other parts of the data."""
    return op.op_type in REDUCTIONS and not over_tensor(op.attributes["axis"])


class GradientReduction(NamedTuple):
    """An op that reduces a gradient, the ops that write it flat before that, what made it; on which stage.

    Once a step, ``made`` is the sum over microbatches. ``outer`` is the op that sums over groups of ranks
    what ``reduction`` scattered within each, if there are groups; else -1.
    """

    reduction: int
    outer: int
    before: tuple[int, ...]
    made: int
    stage: int


def held_gradients(function: Function, buckets: Buckets | None) -> float:
    """Return the bytes of what holds gradients all step, by byte of the parameters of a rank.

    That is what ``buckets`` hold of an element as it is sent: of all parameters, those too that no other rank
    has. The type of the largest that is sent counts (norms are summed in others), and the narrowest that
    parameters have.
    """
    if buckets is None or not buckets.held:
        return 0.0
    types = [as_tensor(value.type, value.name) for value in function.inputs if value.role is Role.PARAMETER]
    reduced = [as_tensor(op.inputs[0].type, op.inputs[0].name) for op in function.ops if _reduces(op)]
    if not reduced or not types:
        return 0.0
    sent = max(reduced, key=lambda type_: type_.nbytes).dtype.itemsize
    made = min(type_.dtype.itemsize for type_ in types)
    return (sent + made * buckets.twice) / made


def gradient_buckets(
    function: Numbered, assigned: StageMap, buckets: Buckets
) -> list[list[GradientReduction]]:
    """Return the gradients of each bucket, in the order in which backward completes them.

    Those of a stage, of one element type and by one kind of collective are of the same buckets. Buckets that
    are reduced during backward are in that order too, of whichever kind; others are kind by kind.
    """
    return _BucketFinder(function, assigned, buckets).find()


def _gradients(function: Numbered, assigned: StageMap) -> list[GradientReduction]:
    found: list[GradientReduction] = []
    outer_of = _outer_sums(function)
    outer_sums = {*outer_of.values()}
    within = {  # what a microbatch waits for, which is no gradient of a parameter
        value
        for number, read in enumerate(function.reads)
        if number not in outer_sums and not function.sums[number] and not function.steps[number]
        for value in read
    }
    for number, op in enumerate(function.ops):
        if not _reduces(op) or function.forward[number] or number in outer_sums:
            continue
        outer = outer_of.get(number, -1)
        if not within.isdisjoint(function.makes[number if outer < 0 else outer]):
            continue
        step, uses, makes = function.steps[number], function.uses, function.makes
        before: list[int] = []
        made = function.producer[function.reads[number][0]]
        while made >= 0 and _is_before(function, made, step):
            before.insert(0, made)
            made = function.producer[function.reads[made][0]]
        alone = all(uses[makes[each][0]] == 1 for each in before)
        if not alone or made < 0:
            continue
        if not step:
            found.append(GradientReduction(number, outer, tuple(before), made, assigned.stage[number]))
        elif function.sums[made] and not function.forward[made] and uses[makes[made][0]] == 1:
            found.append(GradientReduction(number, outer, tuple(before), made, assigned.stage[made]))
    return found


def _outer_sums(function: Numbered) -> dict[int, int]:
    """Return the ops that sum, over groups of ranks, the parts that others have scattered within each."""
    found: dict[int, int] = {}
    for number, op in enumerate(function.ops):
        if op.op_type != "MPIAllreduce" or not _reduces(op):
            continue
        (value,) = function.reads[number]
        scatter = function.producer[value]
        if scatter < 0 or function.uses[value] > 1 or function.ops[scatter].op_type != "MPIReduceScatter":
            continue
        if _reduces(function.ops[scatter]):
            found[scatter] = number
    return found


def _is_before(function: Numbered, number: int, step: bool) -> bool:
    """Whether an op may stand between what makes a gradient and what reduces it."""
    op = function.ops[number]
    if step:
        return function.steps[number] and len(function.reads[number]) == 1
    return op.op_type in ("Pad", "Reshape")


def _reduces(op: Op) -> bool:
    """Whether an op sums one tensor over the data-parallel ranks."""
    return is_data_reduction(op) and op.attributes.get("reduce", "sum") == "sum" and len(op.inputs) == 1


class _BucketFinder:
    def __init__(self, function: Numbered, assigned: StageMap, buckets: Buckets) -> None:
        self.function, self.assigned, self.buckets = function, assigned, buckets
        self.arrivals: dict[Function, dict[Value, tuple[int, ...]]] = {}
        self.units: dict[int, int] = {}

    def find(self) -> list[list[GradientReduction]]:
        """Return what :func:`gradient_buckets` does."""
        if self.buckets.layers:
            self._find_units()
        found = _gradients(self.function, self.assigned)
        made = [
            bucket
            for group in grouped(found, self._kind)
            for bucket in _filled(sorted(group, key=self._arrival), self._size, self.buckets)
        ]
        return sorted(made, key=lambda bucket: self._arrival(bucket[-1])) if self.buckets.early else made

    def _find_units(self) -> None:
        """Number the units of the backward pass: a Call, or a run of ops of one layer between Calls."""
        count, open_ = 0, dict[int, tuple[int, str]]()
        for number, op in enumerate(self.function.ops):
            function, stage = self.function, self.assigned.stage[number]
            if function.forward[number] or function.steps[number] or function.loose[number]:
                continue
            unit, layer = open_.get(stage, (-1, ""))
            if op.is_call or unit < 0 or (layer_of(op) and layer_of(op) != layer):
                count, unit, layer = count + 1, count, layer_of(op)
            self.units[number] = unit
            open_[stage] = (-1, "") if op.is_call else (unit, layer)

    def _kind(self, each: GradientReduction) -> Hashable:
        op = self.function.ops[each.reduction]
        type_ = as_tensor(op.inputs[0].type, op.inputs[0].name)
        unit = self.units.get(self._source(each)[0], -1) if self.buckets.layers else 0
        once = self.function.steps[each.reduction]
        return each.stage, once, op.op_type, op.attributes, type_.dtype, type_.device, unit

    def _size(self, each: GradientReduction) -> int:
        sent = self.function.ops[each.reduction].inputs[0]
        type_ = as_tensor(sent.type, sent.name)
        return type_.size if self.buckets.elements else type_.nbytes

    def _source(self, each: GradientReduction) -> tuple[int, Value]:
        """Return the op of the backward pass that makes a gradient, and what it makes; -1 for none."""
        function = self.function
        number, value = each.made, function.makes[each.made][0]
        if function.sums[number]:
            value = function.reads[number][0]
            number = function.producer[value]
        elif each.before:
            value = function.reads[each.before[0]][0]
        else:
            value = function.reads[each.reduction][0]
        while number >= 0 and function.ops[number].op_type == "GradientCast":
            value = function.reads[number][0]
            number = function.producer[value]
        return number, function.values[value]

    def _arrival(self, each: GradientReduction) -> tuple[int, ...]:
        """Return when the backward pass completes a gradient: after which op, within a Call after which."""
        number, value = self._source(each)
        return (number, *self._within(self.function.ops[number], value)) if number >= 0 else ()

    def _within(self, op: Op, value: Value) -> tuple[int, ...]:
        if not op.is_call:
            return ()
        known = self.arrivals.get(op.callee)
        if known is None:
            known = self.arrivals[op.callee] = {}
            for number, inner in enumerate(op.callee.ops):
                known.update({made: (number, *self._within(inner, made)) for made in inner.outputs})
        return known.get(op.callee.outputs[op.outputs.index(value)], ())


def grouped(items: Iterable[Item], kind: Callable[[Item], Hashable]) -> list[list[Item]]:
    """Return items of one kind together, kinds in order of appearance."""
    found: dict[Hashable, list[Item]] = {}
    for item in items:
        found.setdefault(kind(item), []).append(item)
    return list(found.values())


def _filled(items: Iterable[Item], size: Callable[[Item], int], buckets: Buckets) -> Iterator[list[Item]]:
    """Yield the items of each bucket, in order."""
    bucket, left = list[Item](), buckets.first
    for item in items:
        bucket.append(item)
        left -= size(item)
        if left <= 0:
            yield bucket
            bucket, left = [], buckets.limit
    if bucket:
        yield bucket
