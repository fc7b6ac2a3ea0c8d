"""Gradient buckets: many small collectives over data-parallel ranks become few large ones.

Gradients are taken in the order in which the backward pass completes them, which is about the reverse of
that of the parameters; a bucket is full once it holds so much (torch ``nn/parallel/distributed.py`` and
``reducer.cpp``, Megatron-LM ``param_and_grad_buffer.py``), or holds those of a layer (torch's FSDP). One
message moves a bucket (:mod:`distsim.ops.coalescing`): its tensors lie side by side in one buffer, where
backward writes them. New parameters are gathered by the buckets of their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from distsim.buckets import Buckets
from distsim.ir import Attributes, Function, Op, Value
from distsim.ir.module_names import layer_of
from distsim.ir.type import as_tensor
from distsim.ops import operator
from distsim.ops.coalescing import in_messages
from distsim.transforms.op_graph import Numbered, StageMap
from distsim.transforms.sharding.collectives import TENSOR

Item = TypeVar("Item")

REDUCTIONS = ("MPIAllreduce", "MPIReduceScatter")
"""What sums gradients over ranks."""


class Bucketed(NamedTuple):
    """A function with its stages, and which of its ops reduce buckets early, or prepare for that."""

    function: Numbered
    assigned: StageMap
    early: frozenset[int]


class _Gradient(NamedTuple):
    """An op that reduces a gradient, the ops that write it flat before that, what made it; on which stage.

    Once a step, ``made`` is the sum over microbatches.
    """

    reduction: int
    before: tuple[int, ...]
    made: int
    stage: int


def bucketed(function: Numbered, assigned: StageMap, buckets: Buckets | None) -> Bucketed:
    """Return the function, whose stages are assigned, with gradients reduced in buckets.

    Those of a stage, of one element type and by one kind of collective are of the same buckets. What is
    reduced once a step, after the sum over microbatches, is summed over other ranks (tp) after that, all at
    once, as in Megatron-LM's ``finalize_model_grads``. Without ``buckets`` the function itself.
    """
    found = _gradients(function, assigned) if buckets is not None else []
    if buckets is None or not found:
        return Bucketed(function, assigned, frozenset())
    return _BucketWriter(function, assigned, buckets).write(found)


def _gradients(function: Numbered, assigned: StageMap) -> list[_Gradient]:
    found: list[_Gradient] = []
    within = {  # what a microbatch waits for, which is no gradient of a parameter
        value
        for number, read in enumerate(function.reads)
        for value in (() if function.sums[number] or function.steps[number] else read)
    }
    for number, op in enumerate(function.ops):
        if not _reduces(op) or function.forward[number] or not within.isdisjoint(function.makes[number]):
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
            found.append(_Gradient(number, tuple(before), made, assigned.stage[number]))
        elif function.sums[made] and not function.forward[made] and uses[makes[made][0]] == 1:
            found.append(_Gradient(number, tuple(before), made, assigned.stage[made]))
    return found


def _is_before(function: Numbered, number: int, step: bool) -> bool:
    """Whether an op may stand between what makes a gradient and what reduces it."""
    op = function.ops[number]
    if step:
        return function.steps[number] and len(function.reads[number]) == 1
    return op.op_type in ("Pad", "Reshape")


def _reduces(op: Op) -> bool:
    """Whether an op sums one tensor over the data-parallel ranks."""
    return (
        op.op_type in REDUCTIONS
        and op.attributes["axis"] != TENSOR
        and op.attributes.get("reduce", "sum") == "sum"
        and len(op.inputs) == 1
    )


class _BucketWriter:
    """Writes a function with its gradients in buckets."""

    def __init__(self, function: Numbered, assigned: StageMap, buckets: Buckets) -> None:
        self.function, self.assigned, self.buckets = function, assigned, buckets
        self.arrivals: dict[Function, dict[Value, tuple[int, ...]]] = {}
        self.bucket_of: dict[Value, int] = {}  # by the gradient as it is after its reduction
        self.units: dict[int, int] = {}
        self.missing: set[Value] = set()  # what follows from buckets that have not been sent
        self.waiting: dict[int, list[Op]] = {}
        self.held: dict[_Gradient, Value] = {}  # those that wait for all others
        self.ops: list[Op] = []
        self.stages: list[int] = []

    def write(self, found: Sequence[_Gradient]) -> Bucketed:
        """Return the function: what runs for each microbatch, the buckets, what else runs once a step."""
        function, ops = self.function, self.function.ops
        if self.buckets.layers:
            self._find_units()
        filled_ = [
            bucket
            for group in _grouped(found, self._kind)
            for bucket in _filled(sorted(group, key=self._arrival), self._size, self.buckets)
        ]
        once = [bucket for bucket in filled_ if function.steps[bucket[0].reduction]]
        each = [bucket for bucket in filled_ if not function.steps[bucket[0].reduction]]
        for number, bucket in enumerate(filled_):
            self.bucket_of.update({ops[own.reduction].outputs[0]: number for own in bucket})
        self._write_passes(each)
        first, later = len(self.ops), list[Op]()
        if not self.buckets.early:
            self._hold_back(once)
        for bucket in once:
            later += self._reduce(bucket)
        early = range(first, len(self.ops)) if self.buckets.early else ()
        for op in in_messages(later):
            self._add(op)
        gone = {number for bucket in once for own in bucket for number in (own.reduction, *own.before)}
        steps = [n for n in range(len(ops)) if function.steps[n] and n not in gone]
        for op in self._gathered([ops[number] for number in steps]):
            self._add(op)
        outputs = tuple([function.values[value] for value in function.outputs])
        made = Numbered(Function(function.name, tuple(function.inputs), tuple(self.ops), outputs))
        place = {value: i for i, value in enumerate(made.values)}
        homes = {place[function.values[value]]: at for value, at in self.assigned.homes.items()}
        return Bucketed(made, StageMap(self.stages, homes), frozenset(early))

    def _add(self, op: Op, stage: int = -1) -> None:
        self.ops.append(op)
        self.stages.append(stage)

    # --- which gradients are of a bucket --------------------------------------------------------------

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

    def _kind(self, each: _Gradient) -> Hashable:
        op = self.function.ops[each.reduction]
        type_ = as_tensor(op.inputs[0].type, op.inputs[0].name)
        unit = self.units.get(self._source(each)[0], -1) if self.buckets.layers else 0
        return each.stage, op.op_type, op.attributes, type_.dtype, type_.device, unit

    def _size(self, each: _Gradient) -> int:
        sent = self.function.ops[each.reduction].inputs[0]
        type_ = as_tensor(sent.type, sent.name)
        return type_.size if self.buckets.elements else type_.nbytes

    def _source(self, each: _Gradient) -> tuple[int, Value]:
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

    def _arrival(self, each: _Gradient) -> tuple[int, ...]:
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

    # --- what runs for each microbatch ----------------------------------------------------------------

    def _write_passes(self, buckets: Sequence[Sequence[_Gradient]]) -> None:
        """Write these ops, each bucket where its last gradient was reduced.

        What reads a bucket, the sum over microbatches, does so when the next one is sent, as torch's FSDP2
        waits for the reduction before: the compute stream need not wait for it earlier.
        """
        function, assigned = self.function, self.assigned
        gone = {own.reduction for bucket in buckets for own in bucket}
        last = {max(own.reduction for own in bucket): bucket for bucket in buckets}
        self.missing = {value for number in gone for value in function.ops[number].outputs}
        awaited: dict[int, Value] = {}  # by stage, what is to be done before its next op
        for number, op in enumerate(function.ops):
            if function.steps[number]:
                continue
            stage = assigned.stage[number]
            if number in last:
                self._write_waiting(stage)
                for message in in_messages([function.ops[own.reduction] for own in last[number]]):
                    self._add(message, stage)
                    self.missing.difference_update(message.outputs)
                    awaited[stage] = message.outputs[0]
                if self.buckets.early:
                    awaited.clear()
                else:
                    self._write_waiting(stage)
            elif number in gone:
                continue
            elif not self.missing.isdisjoint(op.inputs):
                self.waiting.setdefault(stage, []).append(op)
                self.missing.update(op.outputs)
            else:
                self._add(self._after(op, number, awaited), stage)
        for stage in [*self.waiting]:
            self._write_waiting(stage)

    def _write_waiting(self, stage: int) -> None:
        """Write what waited on a stage for buckets that have been sent."""
        left: list[Op] = []
        for op in self.waiting.pop(stage, ()):
            if self.missing.isdisjoint(op.inputs):
                self._add(op, stage)
                self.missing.difference_update(op.outputs)
            else:
                left.append(op)
        if left:
            self.waiting[stage] = left

    def _after(self, op: Op, number: int, awaited: dict[int, Value]) -> Op:
        """Return an op that does not run before what its stage is to wait for."""
        function, stage = self.function, self.assigned.stage[number]
        if stage not in awaited or function.forward[number] or function.loose[number] or not op.inputs:
            return op
        if function.sums[number] or (not op.is_call and operator(op.op_type).view):
            return op
        read = [v for v in op.inputs if v not in function.inputs]
        if not read:
            return op
        late = Value(read[0].name, read[0].type)
        self._add(Op("OptimizationBarrier", (read[0], awaited.pop(stage)), (late,)), stage)
        return replace(op, inputs=tuple([late if v is read[0] else v for v in op.inputs]))

    # --- what runs once a step ------------------------------------------------------------------------

    def _hold_back(self, buckets: Sequence[Sequence[_Gradient]]) -> None:
        """Let a gradient of each bucket be there when all of its stage are."""
        ops = self.function.ops
        sums: dict[int, list[Value]] = {}
        for bucket in buckets:
            sums.setdefault(bucket[0].stage, []).extend([ops[each.made].outputs[0] for each in bucket])
        for bucket in buckets:
            first = ops[bucket[0].made].outputs[0]
            others = [value for value in sums[bucket[0].stage] if value is not first]
            if others:
                late = self.held[bucket[0]] = Value(first.name, first.type)
                self._add(Op("OptimizationBarrier", (first, *others), (late,)))

    def _reduce(self, bucket: Sequence[_Gradient]) -> list[Op]:
        """Add the op that reduces a bucket; return what is to be done to its gradients after that."""
        ops, later, sent = self.function.ops, list[Op](), list[Op]()
        for each in bucket:
            value = self.held.get(each, ops[each.made].outputs[0])
            sums: list[Op] = []
            for number in each.before:
                op = ops[number]
                if operator(op.op_type).moves:
                    sums.append(op)
                    continue
                (result,) = op.outputs
                made = Value(result.name, result.type)
                self._add(replace(op, inputs=(value,), outputs=(made,)))
                value = made
            op = ops[each.reduction]
            result = op.outputs[0]
            for own in reversed(sums):
                made = Value(result.name, result.type)
                later.append(replace(own, inputs=(made,), outputs=(result,)))
                result = made
            sent.append(replace(op, inputs=(value,), outputs=(result,)))
        for op in in_messages(sent):
            # Nobody reads the sums after that, of which the buffer is.
            self._add(replace(op, attributes=Attributes({**op.attributes, "in_place": True})))
        return later

    def _gathered(self, ops: Sequence[Op]) -> list[Op]:
        """Return ops of which those that gather new parameters do so by bucket, after all others."""
        gathers = [op for op in ops if op.op_type == "MPIAllgatherInto"]
        if not gathers:
            return list(ops)
        producer = {value: op for op in self.function.ops for value in op.outputs}
        home = {self.function.values[value]: at[0] for value, at in self.assigned.homes.items()}
        gradient_of = {op.inputs[0]: op.inputs[1] for op in ops if op.op_type == "LocalPart"}

        def bucket(op: Op) -> tuple[int, int]:
            """Return the bucket and the stage; of one whose gradient is in none, itself."""
            value: Value | None = gradient_of.get(op.inputs[1])
            while value is not None and value not in self.bucket_of:
                made = producer.get(value)
                value = made.inputs[0] if made is not None and made.inputs else None
            stage = home.get(op.inputs[1], -1)
            return (self.bucket_of[value], stage) if value is not None else (-1, gathers.index(op))

        gone = {*gathers}
        rest = [op for op in ops if op not in gone]
        return [*rest, *[op for group in _grouped(gathers, bucket) for op in in_messages(group)]]


def _grouped(items: Iterable[Item], kind: Callable[[Item], Hashable]) -> list[list[Item]]:
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
