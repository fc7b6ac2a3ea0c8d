"""The host waits for what a stage receives before it issues the stage's kernels.

Frameworks receive a microbatch, and wait for it, before they run the forward or backward pass of it:
Megatron-LM's ``recv_forward`` and ``recv_backward`` synchronise with the device (``batch_p2p_sync``,
megatron/core/pipeline_parallel/p2p_communication.py), DeepSpeed's engine runs its instructions one by one. So
the host issues nothing ahead while it waits, and nothing of a pass, what it computes again included, starts
before what it reads has come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from distsim.ir import Function, Op, Value
from distsim.program.block import Block, StageBlocks
from distsim.transforms.kernels import Kernels

Places = tuple[int, ...]


def await_received(stages: Sequence[StageBlocks], kernels: Kernels) -> tuple[StageBlocks, ...]:
    """Return the blocks of all stages, of which each pass awaits first what other stages make.

    Those that share Functions share them still. Where each op is a kernel without a host, nothing changes.
    """
    if kernels.name == "ops":
        return tuple(stages)
    maker = {
        key: stage
        for stage, (forward, backward, _) in enumerate(stages)
        for block in (forward, backward)
        for key in block.outputs
    }
    made: dict[tuple[Function, Places], Function] = {}
    return tuple(
        [
            (_awaiting(forward, stage, maker, made), _awaiting(backward, stage, maker, made), updates)
            for stage, (forward, backward, updates) in enumerate(stages)
        ]
    )


def _awaiting(
    block: Block, stage: int, maker: Mapping[Value, int], made: dict[tuple[Function, Places], Function]
) -> Block:
    """Return a block that awaits its inputs of other stages."""
    places = tuple([i for i, key in enumerate(block.inputs) if maker.get(key, stage) != stage])
    if not places or not block.function.ops:
        return block
    first = ("",) * len(places)
    return replace(
        block,
        function=_function(block.function, places, made),
        accumulating=None if block.accumulating is None else _function(block.accumulating, places, made),
        names=(*first, *block.names) if block.names else (),
        accumulating_names=(*first, *block.accumulating_names) if block.accumulating_names else (),
    )


def _function(function: Function, places: Places, made: dict[tuple[Function, Places], Function]) -> Function:
    found = made.get((function, places))
    if found is None:
        given = [function.inputs[place] for place in places]
        there = {value: Value(value.name, value.type) for value in given}
        waits = [Op("Await", (value,), (late,)) for value, late in there.items()]
        ops = [_reading(op, there) for op in function.ops]
        outputs = tuple([there.get(value, value) for value in function.outputs])
        found = made[function, places] = replace(function, ops=(*waits, *ops), outputs=outputs)
    return found


def _reading(op: Op, there: Mapping[Value, Value]) -> Op:
    if there.keys().isdisjoint(op.inputs):
        return op
    return replace(op, inputs=tuple([there.get(value, value) for value in op.inputs]))
