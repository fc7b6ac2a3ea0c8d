"""What a barrier of one stage waits for: nothing that another stage makes for no other reader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distsim.ir import FunctionMaker, Op, Value
from distsim.ops import operator
from distsim.transforms.op_graph import Numbered, Numbers, StageMap


def wait_for_own(function: Numbered, assigned: StageMap) -> Numbered:
    """Return the function whose barriers wait for what is at hand on their stage; itself if all do.

    A layer that runs again as a whole does so before its backward pass begins, and no sooner than its
    gradient is there. Where a cut lies within the layer, each stage runs its part again, whole, before its
    own part of the backward pass: what the other makes would be sent to be waited for alone.
    """
    own = {
        number: _at_hand(function, assigned.stage, number)
        for number, op in enumerate(function.ops)
        if len(op.inputs) > 1 and _waits(function, number) and assigned.stage[number] >= 0
    }
    if all(kept == function.reads[number] for number, kept in own.items()):
        return function
    maker = FunctionMaker(function.name)
    maker.adopt_inputs(function.inputs)
    left: dict[int, list[Value]] = {}  # by stage: what its own backward pass waits for
    for number, op in enumerate(function.ops):
        kept, stage = own.get(number), assigned.stage[number]
        if kept is not None:
            for value in set(function.reads[number]).difference(kept):
                made = function.producer[value]
                if made in function.copies:
                    left.setdefault(assigned.stage[made], []).append(function.values[value])
            op = replace(op, inputs=tuple([function.values[value] for value in kept]))
        elif left.get(stage) and _is_backward(function, number) and op.inputs:
            place = next((i for i, v in enumerate(function.reads[number]) if _is_late(function, v)), 0)
            ready = Value(op.inputs[place].name, op.inputs[place].type)
            maker.adopt(Op("OptimizationBarrier", (op.inputs[place], *left.pop(stage)), (ready,)))
            op = replace(op, inputs=(*op.inputs[:place], ready, *op.inputs[place + 1 :]))
        maker.adopt(op)
    maker.set_outputs([function.values[value] for value in function.outputs])
    return Numbered(maker.finalize())


def _waits(function: Numbered, op: int) -> bool:
    return operator(function.ops[op].op_type).waits


def _is_backward(function: Numbered, op: int) -> bool:
    """Whether an op is of the backward pass, and does not compute again."""
    ahead = function.forward[op] or function.loose[op] or function.steps[op]
    return not (ahead or op in function.copies or _waits(function, op))


def _is_late(function: Numbered, value: int) -> bool:
    """Whether the backward pass makes a value, a gradient."""
    return function.producer[value] >= 0 and _is_backward(function, function.producer[value])


def _at_hand(function: Numbered, stage: Sequence[int], barrier: int) -> Numbers:
    """Return what a barrier hands on, and of what it waits for that which its stage makes, has or reads."""
    first, *others = function.reads[barrier]
    own = stage[barrier]
    kept = [
        value
        for value in others
        if function.producer[value] < 0
        or stage[function.producer[value]] == own
        or any(
            stage[reader] == own and (function.reads[reader][0] == value or not _waits(function, reader))
            for reader in function.readers.get(value, ())
        )
    ]
    return (first, *kept)
