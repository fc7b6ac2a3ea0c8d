"""The blocks of a pipeline's stages: each distinct one written once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from distsim.ir import Function, Op, Value
from distsim.ir.module_names import shared_name
from distsim.ops import operator
from distsim.program.block import Block
from distsim.transforms.data_parallel.gradient_buckets import is_data_reduction
from distsim.transforms.op_graph import Numbered, hands_on_gradient, is_sum

Group = tuple[Sequence[int], tuple[int, ...]]
"""Numbers of ops, in order, and of the values that they read and do not make."""


def group_of(function: Numbered, ops: Sequence[int]) -> Group:
    """Return ops, with those before them that make the constants they read, as a group."""
    needed: dict[int, None] = {}

    def need(op: int) -> None:
        for value in function.reads[op]:
            made = function.producer[value]
            if made >= 0 and function.loose[made] and made not in needed:
                need(made)
                needed[made] = None

    if function.has_loose:
        for op in ops:
            need(op)
    ops = [*needed, *ops]
    made = {value for op in ops for value in function.makes[op]}
    read = dict.fromkeys([value for op in ops for value in function.reads[op]])
    return ops, tuple([value for value in read if value not in made])


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
