"""Parameters that several stages share, as a tied embedding: each stage makes itself what it makes of one, as
casts, and sums its own gradient over microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from distsim.ir import FunctionMaker, Op, Value
from distsim.transforms.op_graph import Numbered, StageMap


def copy_weights(function: Numbered, assigned: StageMap) -> Numbered:
    """Return the function with what ops make of weights alone made on each stage that reads it.

    A parameter that several stages read is on each of them; what follows from it alone would be sent from the
    first to the others with every microbatch otherwise. The function itself if there is nothing to copy.
    """
    stages = _stages(function, assigned.stage)
    if all(len(own) < 2 for own in stages.values()):
        return function
    copies: dict[tuple[Value, int], Value] = {}  # by original and stage; those of one stage are the originals
    maker = FunctionMaker(function.name)
    maker.adopt_inputs(function.inputs)

    def read(value: Value, own: Sequence[int], stage: int) -> Value:
        return copies.get((value, stage if stage in own else own[-1] if own else stage), value)

    for number, op in enumerate(function.ops):
        makers = [stages.get(function.producer[value], ()) for value in function.reads[number]]
        for stage in stages.get(number, (assigned.stage[number],)):
            inputs = [read(value, own, stage) for value, own in zip(op.inputs, makers, strict=True)]
            outputs = op.outputs
            if stage != stages.get(number, (stage,))[0]:
                outputs = tuple([Value(value.name, value.type) for value in op.outputs])
                copies |= {(a, stage): b for a, b in zip(op.outputs, outputs, strict=True)}
            maker.adopt(replace(op, inputs=tuple(inputs), outputs=outputs))
    maker.set_outputs([function.values[value] for value in function.outputs])
    return Numbered(maker.finalize())


def _stages(function: Numbered, stage: Sequence[int]) -> Mapping[int, tuple[int, ...]]:
    """Return the stages that read, in forward, what each op makes of weights alone; its own if none does."""
    found: dict[int, set[int]] = {}
    for number in reversed(range(len(function.ops))):
        if not function.forward[number]:
            continue
        where = found.get(number, {stage[number]}) if number in function.of_weights else {stage[number]}
        for value in function.reads[number]:
            if function.producer[value] in function.of_weights:
                found.setdefault(function.producer[value], set()).update(where)
    return {number: tuple(sorted(found.get(number, {stage[number]}))) for number in function.of_weights}


def untie(function: Numbered, assigned: StageMap) -> Numbered:
    """Return the function with gradients that come from two stages summed over microbatches before they are
    added; the function itself if there are none.

    A parameter that two stages read (tied embeddings) gets a gradient from each, and each may have a part of
    the loss; adding them per microbatch would send one of them every time.
    """
    tied: dict[Op, tuple[Op, ...]] = {}
    for number, op in enumerate(function.ops):
        if function.sums[number]:
            found = _added_before(function, number)
            if found and _from_two_stages(function, assigned, found[0]):
                tied[op] = tuple([function.ops[each] for each in found])
    if not tied:
        return function
    maker = FunctionMaker(function.name)
    maker.adopt_inputs(function.inputs)
    gone = {each for ops in tied.values() for each in ops}
    for op in function.ops:
        if op in tied:
            added, *scattered = tied[op]
            sums: list[Value] = []
            for value in added.inputs:
                for each in scattered:
                    value = maker.add(each.op_type, [value], each.attributes, output_names=[value.name])[0]
                sums += maker.add("Accumulate", [value], output_names=[value.name])
            maker.adopt(Op(added.op_type, tuple(sums), op.outputs))
        elif op not in gone:
            maker.adopt(op)
    maker.set_outputs([function.values[value] for value in function.outputs])
    return Numbered(maker.finalize())


def _added_before(function: Numbered, sum_: int) -> list[int]:
    """Return the op that makes what is summed over microbatches, and what casts and scatters it after it."""
    found = [function.producer[function.reads[sum_][0]]]
    # As zero writes a gradient flat and scatters it, and before that precision casts it.
    for passed in ("MPIReduceScatter", "Pad", "Reshape", "GradientCast"):
        made = found[0]
        if made < 0:
            break
        if passed in ("Pad", "Reshape") and len(found) == 1:
            continue
        if function.ops[made].op_type == passed and function.uses[function.makes[made][0]] == 1:
            found.insert(0, function.producer[function.reads[made][0]])
    return found if found[0] >= 0 else []


def _from_two_stages(function: Numbered, assigned: StageMap, added: int) -> bool:
    """Whether an op adds what two stages make, and its sum is read once."""
    if function.ops[added].op_type not in ("Add", "Sum") or len(function.reads[added]) < 2:
        return False
    (value,) = function.makes[added]
    if function.uses[value] + function.outputs.count(value) > 1:
        return False
    makers = [function.producer[v] for v in function.reads[added]]
    return len({assigned.stage[op] for op in makers if op >= 0 and assigned.stage[op] >= 0}) > 1
