"""Gradient buckets: many small collectives over data-parallel ranks become few large ones.

One message moves a bucket (:mod:`distsim.ops.coalescing`): its tensors lie side by side in one buffer, where
backward writes them, or into which they are copied (:mod:`distsim.transforms.data_parallel.gathers`). New
parameters are gathered by the buckets of their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from distsim.hardware.rank_axes import over_tensor
from distsim.ir import Attributes, Function, Mesh, Op, Value, needed_ops
from distsim.ir.type import as_tensor
from distsim.ops import operator
from distsim.ops.coalescing import in_messages
from distsim.ops.conversion import ONCE
from distsim.ops.parts import flat_part
from distsim.plan.buckets import Buckets
from distsim.transforms.data_parallel.gathers import copied_in, listed
from distsim.transforms.data_parallel.gradient_buckets import (
    REDUCTIONS,
    GradientReduction,
    gradient_buckets,
    grouped,
    is_data_reduction,
)
from distsim.transforms.gradient_passes import passed
from distsim.transforms.op_graph import Numbered, StageMap


class Bucketed(NamedTuple):
    """A function with its stages.

    ``early`` are the ops that reduce buckets during backward, or prepare for that.
    """

    function: Numbered
    assigned: StageMap
    early: frozenset[int]


_NONE = Buckets(2**62, 2**62)
"""Where no data-parallel ranks reduce anything."""


def bucketed(
    function: Numbered, assigned: StageMap, buckets: Buckets | None, apart: bool = False
) -> Bucketed:
    """Return the function, whose stages are assigned, with gradients reduced in buckets.

    Those of a stage, of one element type and by one kind of collective are of the same buckets. What is
    summed over tensor-parallel ranks once a step is so after that, with or without ``buckets``: all of a
    stage at once, as in Megatron-LM's ``finalize_model_grads`` (``_allreduce_layernorm_grads``), or, if they
    are ``apart``, as DTensors are, each by itself.
    """
    found = gradient_buckets(function, assigned, buckets) if buckets is not None else []
    if not found and (apart or len(_sums_over_tensor(function, assigned)) < 2):
        return Bucketed(function, assigned, frozenset())
    return _BucketWriter(function, assigned, buckets or _NONE, apart).write(found)


def _sums_over_tensor(function: Numbered, assigned: StageMap) -> dict[Op, int]:
    """Return the stages of the ops that sum a gradient over tensor-parallel ranks, once a step."""
    found: dict[Op, int] = {}
    for number, op in enumerate(function.ops):
        if function.steps[number] and op.op_type == "MPIAllreduce" and over_tensor(op.attributes["axis"]):
            made = function.producer[function.reads[number][0]]
            while made >= 0 and _hands_on(function.ops[made]):
                made = function.producer[function.reads[made][0]]
            if made >= 0 and function.sums[made] and not function.forward[made]:
                found[op] = assigned.stage[made]
    return found


def _hands_on(op: Op) -> bool:
    """Whether an op sums a gradient over data-parallel ranks, or writes it flat before that."""
    return is_data_reduction(op) or op.op_type in ("Pad", "Reshape")


class _BucketWriter:
    """Writes a function with its gradients in buckets."""

    def __init__(self, function: Numbered, assigned: StageMap, buckets: Buckets, apart: bool) -> None:
        self.function, self.assigned, self.buckets, self.apart = function, assigned, buckets, apart
        self.bucket_of: dict[Value, int] = {}  # by the gradient as it is after its reduction
        self.axis_of: dict[Value, str] = {}  # over which a parameter is divided
        self.whole: dict[tuple[Value, int], Value] = {}  # parameters as they were gathered on a stage
        self.gathered_on: dict[Value, int] = {}  # and the first of those stages
        self.missing: set[Value] = set()  # what follows from buckets that have not been sent
        self.waiting: dict[int, list[Op]] = {}
        self.held: dict[GradientReduction, Value] = {}  # those that wait for all others
        self.copied: dict[Value, tuple[int, ...]] = {}  # what a copy casts -> the cast, what writes it flat
        self.sent: dict[int, Value] = {}  # by stage, what the latest message with copies made
        self.ops: list[Op] = []
        self.stages: list[int] = []

    def write(self, buckets: Sequence[Sequence[GradientReduction]]) -> Bucketed:
        """Return the function: what runs for each microbatch, the buckets, what else runs once a step."""
        function, ops = self.function, self.function.ops
        once = [bucket for bucket in buckets if function.steps[bucket[0].reduction]]
        each = [bucket for bucket in buckets if not function.steps[bucket[0].reduction]]
        for number, bucket in enumerate(buckets):
            self.bucket_of.update({ops[own.reduction].outputs[0]: number for own in bucket})
        self._gather_ahead()
        self._write_passes(each)
        first, later = len(self.ops), dict[int, list[Op]]()
        if self.buckets.together or not self.buckets.early:
            self._hold_back(once)
        for bucket in once:
            later.setdefault(bucket[0].stage, []).extend(self._reduce(bucket))
        early = range(first, len(self.ops)) if self.buckets.early else ()
        for own in later.values():
            for op in own if self.apart else in_messages(own):
                self._add(op)
        gone = {
            number for bucket in once for own in bucket for number in (own.reduction, own.outer, *own.before)
        }
        steps = [ops[n] for n in range(len(ops)) if function.steps[n] and n not in gone]
        for op in self._gathered(self._summed(steps)):
            self._add(op)
        outputs = tuple([function.values[value] for value in function.outputs])
        made = Numbered(Function(function.name, tuple(function.inputs), tuple(self.ops), outputs))
        place = {value: i for i, value in enumerate(made.values)}
        homes = {place[function.values[value]]: at for value, at in self.assigned.homes.items()}
        return Bucketed(made, StageMap(self.stages, homes), frozenset(early))

    def _add(self, op: Op, stage: int = -1) -> None:
        inputs = op.inputs
        if self.whole and not {*inputs}.isdisjoint(self.gathered_on):
            inputs = tuple([self._as_gathered(value, stage) for value in inputs])
        self.ops.append(op if inputs == op.inputs else replace(op, inputs=inputs))
        self.stages.append(stage)

    # --- parameters when a step begins ----------------------------------------------------------------

    def _as_gathered(self, value: Value, stage: int) -> Value:
        """Return a parameter as it is on a stage; for what runs once a step on the first that has it."""
        home = self.gathered_on.get(value, -1)
        return self.whole.get((value, stage if stage >= 0 else home), value)

    def _gather_ahead(self) -> None:
        """Gather each parameter on the stages that read it, by the buckets of their gradients."""
        if not self.buckets.ahead:
            return
        function = self.function
        bucket_of = self._buckets_of_parameters()
        stages: dict[Value, dict[int, None]] = {}
        for number, op in enumerate(function.ops):
            for value in () if function.steps[number] else op.inputs:
                if value in bucket_of:
                    stages.setdefault(value, {})[self.assigned.stage[number]] = None
        sent: dict[tuple[int, int], list[Op]] = {}
        for value, own in stages.items():
            type_ = as_tensor(value.type, value.name)
            self.gathered_on[value], axis = min(own), self.axis_of[value]
            ranks = type_.device.axis_size(axis) if isinstance(type_.device, Mesh) else 1
            for stage in own:
                part = Value(value.name, type_.with_shape((flat_part(type_.size, ranks),)))
                self.ops.append(Op("LocalPart", (value,), (part,), Attributes({"axis": axis})))
                self.stages.append(stage)
                made = self.whole[value, stage] = Value(value.name, type_)
                attributes = Attributes({"axis": axis, "shapes": (type_.shape,), ONCE: True})
                gather = Op("MPIAllgatherInto", (part, value), (made,), attributes)
                sent.setdefault((bucket_of[value], stage), []).append(gather)
        for (_, stage), gathers in sent.items():
            for op in in_messages(gathers):
                self.ops.append(op)
                self.stages.append(stage)

    # --- what runs for each microbatch ----------------------------------------------------------------

    def _write_passes(self, buckets: Sequence[Sequence[GradientReduction]]) -> None:
        """Write these ops, each bucket where its last gradient was reduced.

        What reads a bucket, the sum over microbatches, does so when the next one is sent, as torch's FSDP2
        waits for the reduction before: the compute stream need not wait for it earlier.
        """
        function, assigned = self.function, self.assigned
        gone = {n for bucket in buckets for own in bucket for n in (own.reduction, own.outer) if n >= 0}
        last = {max(own.reduction for own in bucket): bucket for bucket in buckets}
        gone |= self._find_copied_casts(buckets)
        self.missing = {value for number in gone for value in function.ops[number].outputs}
        awaited: dict[int, Value] = {}  # by stage, what is to be done before its next op
        for number, op in enumerate(function.ops):
            if function.steps[number]:
                continue
            stage = assigned.stage[number]
            if number in last:
                self._write_waiting(stage)
                outer = [function.ops[own.outer] for own in last[number] if own.outer >= 0]
                inner = [function.ops[own.reduction] for own in last[number]]
                for message in self._messages(inner, outer, stage):
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

    def _find_copied_casts(self, buckets: Sequence[Sequence[GradientReduction]]) -> set[int]:
        """Find the casts of gradients that the copies into their buckets do, and what is between the two."""
        function, found = self.function, set[int]()
        for own in [own for bucket in buckets for own in bucket] if self.buckets.copied else ():
            made, read = function.ops[own.made], function.makes[own.made][0]
            if made.op_type == "GradientCast" and function.uses[read] == 1:
                own_ops = (own.made, *own.before)
                self.copied[function.ops[own.reduction].inputs[0]] = own_ops
                found.update(own_ops)
        return found

    def _copied_from(self, value: Value, stage: int) -> Value:
        """Return what is copied in the place of a gradient: before its cast, written flat."""
        cast, *before = self.copied.get(value, (-1,))
        if cast < 0:
            return value
        (source,) = self.function.ops[cast].inputs
        for op in [self.function.ops[number] for number in before]:
            narrow = as_tensor(source.type, source.name).dtype
            type_ = replace(as_tensor(op.outputs[0].type, source.name), dtype=narrow)
            flat = Value(source.name, type_)
            self._add(replace(op, inputs=(source,), outputs=(flat,)), stage)
            source = flat
        return source

    def _messages(self, inner: Sequence[Op], outer: Sequence[Op], stage: int = -1) -> list[Op]:
        """Return reductions as messages; where new parameters are gathered into lists, each sums it all."""
        sent = [*in_messages(inner), *in_messages(outer)]
        if self.buckets.copied:
            first, sent = in_messages(inner), in_messages(outer)
            for op in reversed(first):
                sources = [self._copied_from(value, stage) for value in op.inputs]
                sent = [*copied_in(op, sources, self.sent.get(stage)), *sent]
            if stage >= 0:  # what is reduced once a step waits for nothing of a microbatch
                self.sent[stage] = first[-1].outputs[0]
        if self.buckets.checked or self.buckets.averaged:
            count = len(in_messages(inner))
            sent = [*[each for op in sent[:count] for each in passed(op, self.buckets)], *sent[count:]]
        if not self.buckets.listed:
            return sent
        whole = [Attributes({**op.attributes, "whole": 1}) for op in sent]
        pairs = zip(sent, whole, strict=True)
        return [replace(op, attributes=own) if op.op_type in REDUCTIONS else op for op, own in pairs]

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

    def _hold_back(self, buckets: Sequence[Sequence[GradientReduction]]) -> None:
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

    def _reduce(self, bucket: Sequence[GradientReduction]) -> list[Op]:
        """Add the op that reduces a bucket; return what is to be done to its gradients after that."""
        ops, later, sent, outer = self.function.ops, list[Op](), list[Op](), list[Op]()
        for each in bucket:
            value = self.held.get(each, ops[each.made].outputs[0])
            sums: list[Op] = []
            for number in each.before:
                op = ops[number]
                if op.op_type == "MPIAllreduce":  # of another shape, what it makes would not be its operand
                    sums.append(op)
                    continue
                (result,) = op.outputs
                made = Value(result.name, result.type)
                self._add(replace(op, inputs=(value,), outputs=(made,)))
                value = made
            op = ops[each.reduction]
            result = ops[each.reduction if each.outer < 0 else each.outer].outputs[0]
            for own in reversed(sums):
                made = Value(result.name, result.type)
                later.append(replace(own, inputs=(made,), outputs=(result,)))
                result = made
            if each.outer >= 0:
                (part,) = op.outputs
                scattered = Value(part.name, part.type)
                outer.append(replace(ops[each.outer], inputs=(scattered,), outputs=(result,)))
                result = scattered
            sent.append(replace(op, inputs=(value,), outputs=(result,)))
        for op in self._messages(sent, outer):
            # Nobody reads the sums after that, of which the buffer is.
            there = {"in_place": True} if op.op_type in REDUCTIONS else {}
            self._add(replace(op, attributes=Attributes({**op.attributes, **there})))
        return later

    def _summed(self, ops: Sequence[Op]) -> list[Op]:
        """Return ops of which those that sum a stage's gradients over tensor-parallel ranks do so at once,
        before all others but what makes these."""
        stage_of = {} if self.apart else _sums_over_tensor(self.function, self.assigned)
        by_stage = grouped([op for op in ops if op in stage_of], lambda op: stage_of[op])
        rest = [op for op in ops if op not in stage_of]
        first = needed_ops(rest, [op.inputs[0] for op in ops if op in stage_of])
        before = {*first}
        return [
            *first,
            *[op for own in by_stage for op in in_messages(own)],
            *[op for op in rest if op not in before],
        ]

    def _gathered(self, ops: Sequence[Op]) -> list[Op]:
        """Return ops of which those that gather new parameters do so by bucket, after all others."""
        gathers = [op for op in ops if op.op_type == "MPIAllgatherInto"]
        if not gathers:
            return list(ops)
        home = {self.function.values[value]: at[0] for value, at in self.assigned.homes.items()}
        bucket_of = self._buckets_of_parameters()

        def bucket(op: Op) -> tuple[int, int]:
            """Return the bucket and the stage."""
            return bucket_of[op.inputs[1]], home.get(op.inputs[1], -1)

        gone = {*gathers}
        rest = [op for op in ops if op not in gone]
        sent = [op for group in grouped(gathers, bucket) for op in in_messages(group)]
        return [*rest, *map(listed, sent)] if self.buckets.listed else [*rest, *sent]

    def _buckets_of_parameters(self) -> dict[Value, int]:
        """Return the bucket of each parameter that is updated by its parts; one whose gradient is in none
        has one of its own."""
        function, found = self.function, dict[Value, int]()
        producer = {value: op for op in function.ops for value in op.outputs}
        for number, op in enumerate(function.ops):
            if not function.steps[number] or op.op_type != "LocalPart":
                continue
            parameter, gradient = op.inputs
            self.axis_of[parameter] = op.attributes["axis"]
            value: Value | None = gradient
            while value is not None and value not in self.bucket_of:
                made = producer.get(value)
                value = made.inputs[0] if made is not None and made.inputs else None
            found[parameter] = -1 - len(found) if value is None else self.bucket_of[value]
        return found
