"""What several stages make of a parameter that they share, each makes itself: casts of a tied embedding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from distsim.ir import FunctionMaker, Value
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
