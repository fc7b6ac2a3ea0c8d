"""The ops of a function whose stages are assigned, put into the blocks of the stages.

The blocks of a pipeline's stages: each distinct one written once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from statistics import multimode
from typing import NamedTuple

from distsim.ir import Function, Op, Role, Value, substitute
from distsim.ir.module_names import shared_name
from distsim.ops import operator
from distsim.ops.replaced import replaced_by
from distsim.program.block import FIRST_CALL, LAST_CALL, Block, StageBlocks
from distsim.transforms.data_parallel.buckets import Bucketed
from distsim.transforms.data_parallel.gradient_buckets import is_data_reduction
from distsim.transforms.op_graph import Numbered, StageMap, hands_on_gradient, is_sum
from distsim.transforms.pipelining.sized import Sized, sized_values


class CutOutput(NamedTuple):
    """The stage that makes an output, or holds it; whether there is one a step; other stages that get it."""

    stage: int
    once: bool
    copies: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class CutBlocks:
    """The blocks of all stages; the keys of the inputs of the whole, with the stages that hold each, and of
    its outputs. ``sized`` are the values on whose sizes it may depend how these follow from the stages."""

    name: str
    stages: tuple[StageBlocks, ...]
    inputs: tuple[Value, ...]
    holders: tuple[tuple[int, ...], ...]
    outputs: tuple[Value, ...]
    places: tuple[CutOutput, ...]
    sized: frozenset[Value]

    def resized(self, sized: Sized) -> CutBlocks:
        """Return the blocks of a function if these are of its first one; raises :class:`Unlike`."""
        values = {} if sized.likeness is None else sized.likeness.values
        stages = sized.stages(self.stages)
        inputs, outputs = substitute(self.inputs, values), substitute(self.outputs, values)
        return replace(self, stages=stages, inputs=inputs, outputs=outputs)


def cut_blocks(made: Bucketed, count: int, overlaps: bool) -> CutBlocks:
    """Return the blocks of the stages of a function, of which there are so many.

    ``overlaps``: whether backward passes go on while what they have made is reduced.
    """
    return _Cutter(made, count, overlaps).cut()


def place_steps(function: Numbered, assigned: StageMap) -> tuple[list[int], list[int]]:
    """Return the stage of each op, of those that run once per step too, and the rounds of these (else -1).

    Such an op is where its parameter is, or else with most of what it reads that is made: what is given, such
    as optimizer state, is where it is read.
    """
    stages, rounds, homes = list(assigned.stage), [-1] * len(function.ops), assigned.homes
    for op, read in enumerate(function.reads):
        if not function.steps[op]:
            continue
        of = {v: m for v in read if (m := function.producer[v]) >= 0 and not function.loose[m]}
        owned = [homes[v][0] for v in (_viewed(function, v) for v in read) if v in homes]
        most = max([function.values[v].type.nbytes for v in of], default=0)
        with_most = [stages[m] for v, m in of.items() if function.values[v].type.nbytes == most]
        stage = stages[op] = min(owned or multimode(with_most) or [0])
        before = [rounds[m] + (stages[m] != stage) for m in of.values() if rounds[m] >= 0]
        rounds[op] = max(before, default=0)
    return stages, rounds


def _viewed(function: Numbered, value: int) -> int:
    """Return what a value is a view of that is taken once per step, such as a rank's part of a weight."""
    op = function.producer[value]
    while op >= 0 and function.steps[op] and operator(function.ops[op].op_type).view:
        value = function.reads[op][0]
        op = function.producer[value]
    return value


_NAMES = {"R": "reduce", "A": "gather"}
"""What runs once a step within the last backward call of a stage, and within its first forward call."""


class _Cutter:
    """Puts the ops of a function whose stages are assigned into blocks."""

    def __init__(self, made: Bucketed, count: int, overlaps: bool) -> None:
        self.count, self.overlaps = count, overlaps
        self.function, assigned, self.early = made
        self.ahead, self.homes = self.function.once(assigned.stage), assigned.homes
        self.stage, self.round = place_steps(self.function, assigned)

    def cut(self) -> CutBlocks:
        """Return the blocks of the stages."""
        groups = self._groups()
        make = Blocks(self.function, self._read_outside(groups), self.overlaps)
        empty: Group = ([], ())
        stages: list[StageBlocks] = []
        for index in range(self.count):
            rounds = sorted(r for s, phase, r in groups if s == index and phase == "U")
            updates = [(r, make.block("update", groups[index, "U", r])) for r in rounds]
            for phase, place, number in (("R", LAST_CALL, 0), ("A", FIRST_CALL, -1)):
                if (index, phase, 0) in groups:
                    block = make.block(_NAMES[phase], groups[index, phase, 0])
                    updates.insert(0, (number, replace(block, place=place)))
            forward = make.block("forward", groups.get((index, "F", 0), empty))
            backward = make.block("backward", groups.get((index, "B", 0), empty))
            stages.append((forward, backward, tuple(updates)))
        function, holders = self.function, self._holders(groups)
        shared = any(len(stages) > 1 for stages in self.homes.values())
        made_at = [self._output(value, holders, shared) for value in function.outputs]
        known: dict[CutOutput, CutOutput] = {}  # of thousands few differ
        outputs = tuple([known.setdefault(each, each) for each in made_at])
        made = tuple([function.values[value] for value in function.outputs])
        inputs = tuple(function.inputs)
        return CutBlocks(function.name, tuple(stages), inputs, holders, made, outputs, sized_values(function))

    def _groups(self) -> dict[tuple[int, str, int], Group]:
        groups: dict[tuple[int, str, int], list[int]] = {}
        function = self.function
        for op, stage in enumerate(self.stage):
            if function.loose[op]:
                continue
            if op in self.early or op in self.ahead:
                key = (stage, "R" if op in self.early else "A", 0)
            elif function.steps[op]:
                key = (stage, "U", self.round[op])
            else:
                key = (stage, "F" if function.forward[op] else "B", 0)
            groups.setdefault(key, []).append(op)
        return {key: group_of(function, ops) for key, ops in groups.items()}

    def _read_outside(self, groups: dict[tuple[int, str, int], Group]) -> Sequence[bool]:
        """Return which values some other block, or the caller, reads."""
        found = [False] * len(self.function.values)
        for values in (self.function.outputs, *(read for _, read in groups.values())):
            for value in values:
                found[value] = True
        return found

    def _holders(self, groups: dict[tuple[int, str, int], Group]) -> tuple[tuple[int, ...], ...]:
        """Return the stages that hold each input."""
        alone = [(stage,) for stage in range(self.count)]
        readers: dict[int, tuple[int, ...]] = {}
        for (stage, _, _), (_, read) in sorted(groups.items(), key=lambda item: item[0]):
            for value in read:
                known = readers.get(value, ())
                if value < self.function.num_inputs and stage not in known:
                    readers[value] = (*known, stage) if known else alone[stage]
        for value in self.function.outputs:  # an input that is only handed on
            if value < self.function.num_inputs:
                readers.setdefault(value, (0,))
        return tuple([readers.get(value, ()) for value in range(self.function.num_inputs)])

    def _output(self, value: int, holders: Sequence[tuple[int, ...]], shared: bool) -> CutOutput:
        op = self.function.producer[value]
        if op < 0:
            return CutOutput(holders[value][0], False, ())
        copies = self._copies(op, value, self.stage[op]) if shared else ()
        return CutOutput(self.stage[op], self.function.steps[op], copies)

    def _copies(self, op: int, value: int, stage: int) -> tuple[int, ...]:
        """Return the other stages that hold the parameter of which ``value`` is the new one."""
        made = self.function.ops[op]
        taken = replaced_by(made).get(value - self.function.makes[op][0])
        if taken is None:
            return ()
        old = _viewed(self.function, self.function.reads[op][taken])
        homes = self.homes.get(old, ()) if self.function.values[old].role is Role.PARAMETER else ()
        return tuple([other for other in homes if other != stage])


Group = tuple[Sequence[int], tuple[int, ...]]
"""Numbers of ops, in order, and of the values that they read and do not make."""


def group_of(function: Numbered, ops: Sequence[int]) -> Group:
    """Return ops, with those before them that make the constants they read, as a group."""
    needed: dict[int, None] = {}
    if function.has_loose:
        for op in ops:
            _need(function, op, needed)
    ops = [*needed, *ops]
    made = {value for op in ops for value in function.makes[op]}
    read = dict.fromkeys([value for op in ops for value in function.reads[op]])
    return ops, tuple([value for value in read if value not in made])


def _need(function: Numbered, op: int, needed: dict[int, None]) -> None:
    for value in function.reads[op]:
        made = function.producer[value]
        if made >= 0 and function.loose[made] and made not in needed:
            _need(function, made, needed)
            needed[made] = None


class Blocks:
    """Makes blocks; groups of ops that do the same, wired in the same way, share their Functions.

    ``outside`` says of each value whether another block, or the caller, reads it; ``overlaps``, whether a
    microbatch goes on while what it has made is reduced.
    """

    def __init__(self, function: Numbered, outside: Sequence[bool], overlaps: bool) -> None:
        self.function, self.outside, self.overlaps = function, outside, overlaps
        self.made: dict[Hashable, tuple[Function, Function | None]] = {}

    def block(self, phase: str, group: Group) -> Block:
        """Return the block of a group."""
        function, (numbers, read) = self.function, group
        returned = [v for op in numbers for v in function.makes[op] if self.outside[v]]
        values, ops = function.values, [function.ops[op] for op in numbers]
        sums = tuple([function.ops[op].outputs[0] for op in numbers if function.sums[op]])
        inputs, outputs = tuple([values[v] for v in read]), tuple([values[v] for v in returned])
        key = phase, self._structure(numbers, read, returned)
        adding = _added_later(ops) if sums and self.overlaps else ops
        found = self.made.get(key)
        if found is None:
            plain = _write(phase, ops, inputs, outputs, ())
            found = plain, _write(f"{phase}_next", adding, inputs, outputs, sums) if sums else None
            self.made[key] = found
        own = tuple([op.name for op in ops if not is_sum(op)])
        added = _added(ops, outputs) if sums else frozenset[Op]()
        names = tuple([op.name for op in adding if op not in added])
        return Block(found[0], inputs, outputs, sums, found[1], own, names if sums else ())

    def _structure(self, ops: Sequence[int], read: Sequence[int], returned: Sequence[int]) -> Hashable:
        """Return what two groups of ops have in common when they differ in names only."""
        function = self.function
        number = {value: i for i, value in enumerate(read)}
        wired: list[int] = []
        for op in ops:
            wired.append(function.kinds[op])  # says how many values are read and made
            wired += [number[value] for value in function.reads[op]]
            for value in function.makes[op]:
                number[value] = len(number)
        given = [function.values[value] for value in read]
        return (
            tuple([(value.type, value.role) for value in given]),
            tuple(wired),
            tuple([number[value] for value in returned]),
        )


def _added(ops: Sequence[Op], outputs: Sequence[Value]) -> frozenset[Op]:
    """Return the GradientCasts that only a sum reads: it adds what they cast, in the type of the sum."""
    casts = {op.outputs[0]: op for op in ops if op.op_type == "GradientCast"}
    if not casts:
        return frozenset()
    others = {value for op in ops if not is_sum(op) for value in op.inputs}
    summed = {op.inputs[0] for op in ops if is_sum(op)}
    return frozenset(
        [op for value, op in casts.items() if value in summed and value not in others | set(outputs)]
    )


def _added_later(ops: Sequence[Op]) -> Sequence[Op]:
    """Return ops with what ranks have reduced of a microbatch added to sums when the next reduction follows
    that something is computed for, mostly a layer, or at the end: so that computation goes on meanwhile. The
    parts of a layer wait to be added, where FSDP adds them at once.

    FSDP adds on the stream that reduces (torch/distributed/fsdp/_runtime_utils.py: _post_backward_hook, and
    _fully_shard/_fsdp_collectives.py: foreach_reduce), and DeepSpeed when a backward pass ends
    (runtime/zero/stage_1_and_2.py: independent_gradient_partition_epilogue).
    """
    reduced, written, waiting = set[Value](), list[Op](), list[Op]()
    computed = False
    for op in ops:
        if is_sum(op):
            (waiting if op.inputs[0] in reduced else written).append(op)
            continue
        if is_data_reduction(op):
            if computed:
                written += waiting
                waiting.clear()
            computed = False
            reduced.update(op.outputs)
        elif hands_on_gradient(op):
            reduced.update(op.outputs if not reduced.isdisjoint(op.inputs) else ())
        elif op.is_call or operator(op.op_type).computes:
            computed = True
        written.append(op)
    return [*written, *waiting] if reduced else ops


def _write(
    name: str, ops: Sequence[Op], inputs: Sequence[Value], outputs: Sequence[Value], sums: Sequence[Value]
) -> Function:
    """Return the function of these ops; the mark of a sum adds to ``sums``, or else is nothing.

    Ops and values are those of the function that is cut, whose types have been checked.
    """
    so_far = {value: Value(f"{value.name}.sum", value.type) for value in sums}
    added = _added(ops, outputs) if sums else frozenset[Op]()
    env: dict[Value, Value] = {}
    written: list[Op] = []
    for op in ops:
        if op in added:
            env[op.outputs[0]] = env.get(op.inputs[0], op.inputs[0])
            continue
        if not is_sum(op):
            shared = shared_name(op)
            if op.name != shared or not env.keys().isdisjoint(op.inputs):
                read = tuple([env.get(value, value) for value in op.inputs])
                op = Op(op.op_type, read, op.outputs, op.attributes, op.subfunctions, op.version, shared)
            written.append(op)
            continue
        part, key = env.get(op.inputs[0], op.inputs[0]), op.outputs[0]
        if key in so_far:
            written.append(Op("AccumulateInto", (so_far[key], part), op.outputs))
        else:
            env[key] = part
    made = tuple([env.get(value, value) for value in outputs])
    return Function(name, (*inputs, *so_far.values()), tuple(written), made)
