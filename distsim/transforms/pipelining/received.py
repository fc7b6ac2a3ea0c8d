"""What the host waits for before it issues the kernels of a pass: what the stage receives; all of the device.

Frameworks receive a microbatch, and wait for it, before they run the forward or backward pass of it:
Megatron-LM's ``recv_forward`` and ``recv_backward`` synchronise with the device (``batch_p2p_sync``,
megatron/core/pipeline_parallel/p2p_communication.py), DeepSpeed's engine runs its instructions one by one. So
the host issues nothing ahead while it waits, and nothing of a pass, what it computes again included, starts
before what it reads has come.

Some wait besides, before each forward pass, until the device has done all that it was given
(``Kernels.waiting``). Megatron-LM of 2019 to 2023 broadcasts the sizes of each microbatch's tokens to its
tensor-parallel ranks and copies them to the host (mpu/data.py, ``_build_key_size_numel_dictionaries``:
``sizes_cuda.cpu()``), on every stage. DeepSpeed times its throughput: ``torch.cuda.synchronize()`` before
each forward pass (utils/timer.py, ``ThroughputTimer.start``, called by runtime/engine.py, ``forward``).
nanotron copies what a stage reads of a microbatch, tokens or labels, to the device when it is at it
(dataloader.py, ``sanity_check_dataloader``: ``v.to("cuda")``), and torch waits for the stream of a copy that
it is not told not to wait for (aten/src/ATen/native/cuda/Copy.cu, ``memcpy_and_sync``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from distsim.ir import Attributes, Function, Op, Role, Value
from distsim.program.block import Block, StageBlocks
from distsim.transforms.kernels import Kernels

Places = tuple[int, ...]
Made = dict[tuple[Function, Places, bool], Function]
_ALL = Attributes({"all": 1})


def await_received(stages: Sequence[StageBlocks], kernels: Kernels) -> tuple[StageBlocks, ...]:
    """Return the blocks of all stages, of which each pass awaits first what other stages make.

    As ``kernels.waiting`` says, each forward pass, or each that reads the batch, awaits first all that its
    device was given.

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
    made: Made = {}

    def awaiting(block: Block, stage: int, waiting: bool) -> Block:
        places = tuple([i for i, key in enumerate(block.inputs) if maker.get(key, stage) != stage])
        return _awaiting(block, places, waiting and bool(block.inputs), made)

    def waits(block: Block) -> bool:
        if kernels.waiting == "reading":
            return any(key.role is Role.INPUT and key not in maker for key in block.inputs)
        return kernels.waiting == "everywhere"

    return tuple(
        [
            (awaiting(forward, stage, waits(forward)), awaiting(backward, stage, False), updates)
            for stage, (forward, backward, updates) in enumerate(stages)
        ]
    )


def _awaiting(block: Block, places: Places, waiting: bool, made: Made) -> Block:
    """Return a block that awaits inputs, after all of the device if it is ``waiting``."""
    if not (places or waiting) or not block.function.ops:
        return block
    first = ("",) * (len(places) + waiting)
    return replace(
        block,
        function=_function(block.function, places, waiting, made),
        accumulating=block.accumulating and _function(block.accumulating, places, waiting, made),
        names=(*first, *block.names) if block.names else (),
        accumulating_names=(*first, *block.accumulating_names) if block.accumulating_names else (),
    )


def _function(function: Function, places: Places, waiting: bool, made: Made) -> Function:
    found = made.get((function, places, waiting))
    if found is None:
        given = [function.inputs[place] for place in places]
        there = {value: Value(value.name, value.type) for value in given}
        waits = [Op("Await", (value,), (late,)) for value, late in there.items()]
        if waiting:
            value = function.inputs[0]
            waits.insert(0, Op("Await", (value,), (Value(f"{value.name}.device", value.type),), _ALL))
        ops = [_reading(op, there) for op in function.ops]
        outputs = tuple([there.get(value, value) for value in function.outputs])
        found = made[function, places, waiting] = replace(function, ops=(*waits, *ops), outputs=outputs)
    return found


def _reading(op: Op, there: Mapping[Value, Value]) -> Op:
    if there.keys().isdisjoint(op.inputs):
        return op
    return replace(op, inputs=tuple([there.get(value, value) for value in op.inputs]))
