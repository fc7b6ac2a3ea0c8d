"""Gradient buckets: many small collectives over data-parallel ranks become few large ones.

Gradients are taken in the order in which the backward pass completes them, which is about the reverse of
that of the parameters; a bucket is full once it holds so much (torch ``nn/parallel/distributed.py`` and
``reducer.cpp``, Megatron-LM ``param_and_grad_buffer.py``). One message moves a bucket
(:mod:`distsim.ops.coalescing`): its tensors lie side by side in one buffer, where backward writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from distsim.buckets import Buckets
from distsim.ir import Function, Op, Value
from distsim.ir.type import as_tensor
from distsim.ops import operator
from distsim.transforms.data_parallel.gathers import AXIS
from distsim.transforms.op_graph import Numbered, StageMap

Item = TypeVar("Item")

REDUCTIONS = ("MPIAllreduce", "MPIReduceScatter")
"""What sums gradients over ranks."""


class Bucketed(NamedTuple):
    """A function with its stages, and which of its ops reduce buckets early, or prepare for that."""

    function: Numbered
    assigned: StageMap
    early: frozenset[int]


class _Gradient(NamedTuple):
    """The op that reduces a gradient, the ops before it that follow its sum, the sum; and in which stage."""

    reduction: int
    before: Sequence[int]
    sum: int
    stage: int


def bucketed(function: Numbered, assigned: StageMap, buckets: Buckets | None) -> Bucketed:
    """Return the function, whose stages are assigned, with gradients reduced in buckets.

    Of what is reduced once a step, after the sum over microbatches, those of a stage, of one element type and
    by one kind of collective are of the same buckets. What else sums a gradient, over tp, does so after the
    buckets, all at once, as Megatron-LM's ``finalize_model_grads``. Without ``buckets`` the function itself.
    """
    found = _gradients(function, assigned) if buckets is not None else []
    if buckets is None or not found:
        return Bucketed(function, assigned, frozenset())
    return _Writer(function, assigned, buckets).write(found)


def _gradients(function: Numbered, assigned: StageMap) -> list[_Gradient]:
    found: list[_Gradient] = []
    for number, op in enumerate(function.ops):
        if not (function.steps[number] and reduces(op)):
            continue
        before: list[int] = []
        made = function.producer[function.reads[number][0]]
        while made >= 0 and function.steps[made] and len(function.reads[made]) == 1:
            before.insert(0, made)
            made = function.producer[function.reads[made][0]]
        chain = [made, *before, number]
        alone = all(made >= 0 and function.uses[function.makes[each][0]] == 1 for each in chain[:-1])
        if alone and function.sums[made] and not function.forward[made]:
            found.append(_Gradient(number, before, made, assigned.stage[made]))
    return found


def reduces(op: Op) -> bool:
    """Whether an op sums one tensor over the data-parallel ranks."""
    return (
        op.op_type in REDUCTIONS
        and op.attributes["axis"] == AXIS
        and op.attributes.get("reduce", "sum") == "sum"
        and len(op.inputs) == 1
    )


class _Writer:
    """Writes a function with its gradients in buckets."""

    def __init__(self, function: Numbered, assigned: StageMap, buckets: Buckets) -> None:
        self.function, self.assigned, self.buckets = function, assigned, buckets
        self.arrivals: dict[Function, dict[Value, tuple[int, ...]]] = {}
        self.ops: list[Op] = []
        self.stages: list[int] = []

    def write(self, found: Sequence[_Gradient]) -> Bucketed:
        """Return the function: what runs for each microbatch, the buckets, what else runs once a step."""
        function, ops = self.function, self.function.ops
        gone = {number for each in found for number in (each.reduction, *each.before)}
        for number, op in enumerate(ops):
            if not function.steps[number]:
                self._add(op, self.assigned.stage[number])
        first, later = len(self.ops), list[Op]()
        for group in grouped(found, self._kind):
            for bucket in filled(sorted(group, key=self._arrival), self._size, self.buckets):
                later += self._reduce(bucket)
        early = range(first, len(self.ops)) if self.buckets.early else ()
        for group in grouped(later, lambda op: (op.op_type, op.attributes, *_kind_of(op.inputs[0]))):
            self._add(together(group))
        for number, op in enumerate(ops):
            if function.steps[number] and number not in gone:
                self._add(op)
        outputs = tuple([function.values[value] for value in function.outputs])
        made = Numbered(Function(function.name, tuple(function.inputs), tuple(self.ops), outputs))
        place = {value: i for i, value in enumerate(made.values)}
        homes = {place[function.values[value]]: at for value, at in self.assigned.homes.items()}
        return Bucketed(made, StageMap(self.stages, homes), frozenset(early))

    def _add(self, op: Op, stage: int = -1) -> None:
        self.ops.append(op)
        self.stages.append(stage)

    def _kind(self, each: _Gradient) -> Hashable:
        op = self.function.ops[each.reduction]
        return each.stage, op.op_type, op.attributes, *_kind_of(op.inputs[0])

    def _size(self, each: _Gradient) -> int:
        sent = self.function.ops[each.reduction].inputs[0]
        type_ = as_tensor(sent.type, sent.name)
        return type_.size if self.buckets.elements else type_.nbytes

    def _arrival(self, each: _Gradient) -> tuple[int, ...]:
        """Return when the backward pass completes a gradient: after which op, within a Call after which."""
        (value,) = self.function.reads[each.sum]
        made = self.function.producer[value]
        if made < 0:
            return ()
        return made, *self._within(self.function.ops[made], self.function.values[value])

    def _within(self, op: Op, value: Value) -> tuple[int, ...]:
        if not op.is_call:
            return ()
        known = self.arrivals.get(op.callee)
        if known is None:
            known = self.arrivals[op.callee] = {}
            for number, inner in enumerate(op.callee.ops):
                known.update({made: (number, *self._within(inner, made)) for made in inner.outputs})
        return known.get(op.callee.outputs[op.outputs.index(value)], ())

    def _reduce(self, bucket: Sequence[_Gradient]) -> list[Op]:
        """Add the op that reduces a bucket; return what is to be done to its gradients after that."""
        ops, later, sent = self.function.ops, list[Op](), list[Op]()
        for each in bucket:
            value = ops[each.sum].outputs[0]
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
        self._add(together(sent))
        return later


def together(ops: Sequence[Op]) -> Op:
    """Return the op that moves at once what several of one kind move, each a tensor."""
    first = ops[0]
    inputs = tuple([value for op in ops for value in op.inputs])
    outputs = tuple([value for op in ops for value in op.outputs])
    return first if len(ops) == 1 else replace(first, inputs=inputs, outputs=outputs)


def grouped(items: Iterable[Item], kind: Callable[[Item], Hashable]) -> list[list[Item]]:
    """Return items of one kind together, kinds in order of appearance."""
    found: dict[Hashable, list[Item]] = {}
    for item in items:
        found.setdefault(kind(item), []).append(item)
    return list(found.values())


def filled(items: Iterable[Item], size: Callable[[Item], int], buckets: Buckets) -> Iterator[list[Item]]:
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


def _kind_of(value: Value) -> tuple[Hashable, ...]:
    type_ = as_tensor(value.type, value.name)
    return type_.dtype, type_.device
