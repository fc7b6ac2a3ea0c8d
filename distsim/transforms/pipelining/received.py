"""What the host waits for before it issues the kernels of a pass: what the stage receives; all of the device.

Frameworks receive a microbatch before they run the forward or backward pass of it, so that nothing of the
pass, what it computes again included, starts before what it reads has come. Where they wait for NCCL's work
alone, that stops the stream of the computation and no host: torch's schedules (00722e64,
distributed/pipelining/schedules.py: ``_wait_batch_p2p``) and DeepSpeed's pipeline (38327e07,
runtime/pipe/p2p.py: ``dist.recv``). Others stop the host as well, until the device has done all that it was
given before (``Kernels.receiving``): Megatron-LM synchronises with the device after each exchange (7ffea978
of February 2021, megatron/p2p_communication.py; core 0.12, pipeline_parallel/p2p_communication.py:
``batch_p2p_sync``), but for interleaved stages, whose exchanges run beside the passes by default since
4eeff55d of October 2023 (``overlap_p2p_comm``); nanotron reads the sizes of what it receives (2411b022,
parallel/pipeline_parallel/p2p.py: ``first_metadata.tolist()``).

Some wait besides, before each forward pass, until the device has done all that it was given
(``Kernels.waiting``). The timers of Megatron-LM did so as they start and stop, around each forward and each
backward pass and the update (megatron/global_vars.py, ``_Timer``: ``torch.cuda.synchronize()``;
megatron/schedules.py, ``forward_step``, ``backward_step``; optimizer/optimizer.py, ``step``), until 77efcccb
of August 2022 left that to levels that one asks for. Megatron-LM of 2019 to 2023 broadcasts the sizes of each
microbatch's tokens to its tensor-parallel ranks and copies them to the host (mpu/data.py,
``_build_key_size_numel_dictionaries``: ``sizes_cuda.cpu()``), on every stage. DeepSpeed times its throughput:
``torch.cuda.synchronize()`` before each forward pass (utils/timer.py, ``ThroughputTimer.start``, called by
runtime/engine.py, ``forward``). nanotron copies what a stage reads of a microbatch, tokens or labels, to the
device when it is at it (dataloader.py, ``sanity_check_dataloader``: ``v.to("cuda")``), and torch waits for
the stream of a copy that it is not told not to wait for (aten/src/ATen/native/cuda/Copy.cu,
``memcpy_and_sync``).

DeepSpeed asks of each gradient in float16 whether it overflowed (``Kernels.checks_gradients``): its host has
it cast to float32 and summed, and reads the sum, one gradient after the other, before it goes on to copy and
scale them (v0.9.2, runtime/utils.py: ``CheckOverflow._has_inf_or_nan``, ``float(x.float().sum())``, called by
runtime/fp16/fused_optimizer.py, ``step``). Megatron-LM and apex ask once, of all, and read the norm of all
gradients before they launch what multiplies these by a factor (``Kernels.reads_norm``; 6985e58,
optimizer/clip_grads.py: ``total_norm.item()``, optimizer.py: ``found_inf.item()``, both in core 0.12 too), as
DeepSpeed does (b005db86, runtime/utils.py). torch's ``clip_grad_norm_`` and nanotron's read neither.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace

from onnx import TensorProto

from distsim.ir import Attributes, Float16, Float32, Function, Op, Role, Tensor, Value
from distsim.ir.type import as_tensor
from distsim.program.block import Block, StageBlocks
from distsim.transforms.kernels import Kernels
from distsim.transforms.kernels.fusion import kernel_of

Places = tuple[int, ...]
Updates = tuple[tuple[int, Block], ...]
Made = dict[tuple[Function, Places, bool, bool], Function]
_FACTOR = "GradientFactor"
_ALL, _DEVICE, _HOST = Attributes({"all": 1}), Attributes({"device": 1}), Attributes({})


def await_received(stages: Sequence[StageBlocks], kernels: Kernels) -> tuple[StageBlocks, ...]:
    """Return the blocks of all stages, of which each pass awaits first what other stages make: the host, and
    all of the device, if ``kernels.receiving`` is ``device``, else the device.

    As ``kernels.waiting`` says, each forward pass, or each that reads the batch, or each pass and each
    update, awaits first all that its device was given.

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
    stops = kernels.receiving == "device"

    def awaiting(block: Block, stage: int, waiting: bool) -> Block:
        places = tuple([i for i, key in enumerate(block.inputs) if maker.get(key, stage) != stage])
        everything = bool(places and stops) or (waiting and bool(block.inputs))
        return _awaiting(block, places, everything, stops, made)

    def waits(block: Block) -> bool:
        if kernels.waiting == "reading":
            return any(key.role is Role.INPUT and key not in maker for key in block.inputs)
        return kernels.waiting in ("everywhere", "passes")

    if kernels.checks_gradients:
        wholes = _wholes(stages)
        stages = [
            (f, b, tuple([(number, _checking(own, wholes)) for number, own in more])) for f, b, more in stages
        ]
    timed = kernels.waiting == "passes"
    if kernels.reads_norm:
        stages = _reading_norms(stages)

    def updating(updates: Updates) -> Updates:
        if not timed:
            return updates
        return tuple(
            [(number, _awaiting(block, (), bool(block.inputs), stops, made)) for number, block in updates]
        )

    return tuple(
        [
            (awaiting(forward, stage, waits(forward)), awaiting(backward, stage, timed), updating(updates))
            for stage, (forward, backward, updates) in enumerate(stages)
        ]
    )


# --- the factor of all gradients --------------------------------------------------------------------------


def _reading_norms(stages: Sequence[StageBlocks]) -> list[StageBlocks]:
    """Return the blocks of all stages, whose updates await on the host what multiplies all gradients."""
    factors = set[Value]()
    for block in [block for _, _, updates in stages for _, block in updates]:
        found = {v for op in block.function.ops if op.op_type == _FACTOR for v in op.outputs}
        keys = zip(block.outputs, block.function.outputs, strict=True)
        factors.update([key for key, value in keys if value in found])
    made: dict[tuple[Function, Places], Function] = {}
    return [
        (forward, backward, tuple([(number, _reading_norm(own, factors, made)) for number, own in updates]))
        for forward, backward, updates in stages
    ]


def _reading_norm(
    block: Block, factors: Collection[Value], made: dict[tuple[Function, Places], Function]
) -> Block:
    function = block.function
    places = tuple([place for place, key in enumerate(block.inputs) if key in factors])
    given = [function.inputs[place] for place in places]
    makers = [place for place, op in enumerate(function.ops) if op.op_type == _FACTOR]
    if not (given or makers):
        return block
    if (function, places) not in made:
        there = {value: Value(value.name, value.type) for value in given}
        ops = [Op("Await", (value,), (late,)) for value, late in there.items()]
        for op in function.ops:
            ops.append(_reading(op, there))
            if op.op_type == _FACTOR:
                (value,) = op.outputs
                there[value] = Value(value.name, value.type)
                ops.append(Op("Await", (value,), (there[value],)))
        made[function, places] = replace(function, ops=tuple(ops))
    names = [""] * len(given)
    for place, name in enumerate(block.names):
        names += [name, *[""] * (place in makers)]
    return replace(block, function=made[function, places], names=tuple(names) if block.names else ())


# --- gradients that are read one by one -------------------------------------------------------------------


def _wholes(stages: Sequence[StageBlocks]) -> dict[Value, Hashable]:
    """Return of keys that are parts of one tensor, gradients of one weight, the same of each."""
    found: dict[Value, Hashable] = {}
    for block in [block for stage in stages for block in stage[:2]]:
        for key, value in zip(block.outputs, block.function.outputs, strict=True):
            whole = _whole(block.function, value)
            if whole is not None:
                found[key] = whole
    for block in [block for _, _, updates in stages for _, block in updates]:
        origins = _origins(block)  # a sum over ranks is of the tensor that its operand is of
        keys = zip(block.outputs, block.function.outputs, strict=True)
        found |= {key: found[origin] for key, v in keys if (origin := origins.get(v)) in found}
    return found


def _origins(block: Block) -> dict[Value, Value]:
    """Return of which key of a block a value is what was read, waited for, or summed over ranks."""
    found = dict(zip(block.function.inputs, block.inputs, strict=True))
    for op in block.function.ops:
        if op.op_type in ("AverageGradients", "MPIAllreduce", "OptimizationBarrier", "Reshape"):
            given = zip(op.outputs, op.inputs, strict=False)
            found |= {made: found[read] for made, read in given if read in found}
    return found


def _whole(function: Function, value: Value) -> Hashable:
    """Return which product of a function makes a value as a part of what it makes; None if it is whole."""
    op = next((op for op in reversed(function.ops) if value in op.outputs), None)
    if op is None:
        return None
    if op.is_call:
        inner = _whole(op.callee, op.callee.outputs[op.outputs.index(value)])
        return None if inner is None else (op, inner)
    return op if op.attributes.get("columns", 0) else None


def _checking(block: Block, wholes: Mapping[Value, Hashable]) -> Block:
    """Return an update whose host reads of each gradient in float16 whether it overflowed."""
    function, origins = block.function, _origins(block)
    tensors: dict[Hashable, list[Op]] = {}  # parts of one weight are one tensor of the framework's
    for op in function.ops:
        if op.op_type == "GradientCopy" and _type(op.inputs[0]).dtype == Float16():
            key = origins.get(op.inputs[0], op.inputs[0])
            tensors.setdefault(wholes.get(key, key), []).append(op)
    if not tensors:
        return block
    first = {copies[0]: copies for copies in tensors.values()}
    names, ops, known = list[str](), list[Op](), dict[Value, Value]()
    for op, name in zip(function.ops, block.names or [""] * len(function.ops), strict=True):
        before = _check([copy.inputs[0] for copy in first[op]], known) if op in first else []
        ops += [*before, _reading(op, known) if op.op_type == "GradientCopy" else op]
        names += [*[""] * len(before), name]
    return replace(
        block, function=replace(function, ops=tuple(ops)), names=tuple(names) if block.names else ()
    )


def _type(value: Value) -> Tensor:
    return as_tensor(value.type, value.name)


def _check(parts: Sequence[Value], known: dict[Value, Value]) -> list[Op]:
    """Return what tells the host whether a gradient of some parts overflowed; note what is there then."""
    casts, sums = list[Op](), list[Op]()
    for part in parts:
        type_ = _type(part)
        wide = Value(part.name, replace(type_, dtype=Float32()))
        total = Value(f"{part.name}.sum", Tensor(Float32(), (), type_.device))
        casts.append(Op("Cast", (part,), (wide,), Attributes({"to": TensorProto.FLOAT})))
        whole = {"axes": tuple(range(type_.rank)), "keepdims": 0}
        sums.append(Op("ReduceSum", (wide,), (total,), Attributes(whole)))
    runs = [
        ops[0] if len(ops) == 1 else kernel_of(ops, [op.outputs[0] for op in ops]) for ops in (casts, sums)
    ]
    totals = [op.outputs[0] for op in sums]
    known |= {part: Value(part.name, part.type) for part in parts}
    return [*runs, *[Op("Await", (part, *totals), (known[part],)) for part in parts]]


def _awaiting(block: Block, places: Places, waiting: bool, stops: bool, made: Made) -> Block:
    """Return a block that awaits inputs, after all of the device if it is ``waiting``; its host if it
    ``stops``, else the device."""
    if not (places or waiting) or not block.function.ops:
        return block
    first = ("",) * (len(places) + waiting)
    return replace(
        block,
        function=_function(block.function, places, waiting, stops, made),
        accumulating=block.accumulating and _function(block.accumulating, places, waiting, stops, made),
        names=(*first, *block.names) if block.names else (),
        accumulating_names=(*first, *block.accumulating_names) if block.accumulating_names else (),
    )


def _function(function: Function, places: Places, waiting: bool, stops: bool, made: Made) -> Function:
    found = made.get((function, places, waiting, stops))
    if found is None:
        given = [function.inputs[place] for place in places]
        there = {value: Value(value.name, value.type) for value in given}
        kind = _HOST if stops else _DEVICE
        waits = [Op("Await", (value,), (late,), kind) for value, late in there.items()]
        if waiting:
            value = function.inputs[0]
            waits.insert(0, Op("Await", (value,), (Value(f"{value.name}.device", value.type),), _ALL))
        ops = [_reading(op, there) for op in function.ops]
        outputs = tuple([there.get(value, value) for value in function.outputs])
        found = made[function, places, waiting, stops] = replace(
            function, ops=(*waits, *ops), outputs=outputs
        )
    return found


def _reading(op: Op, there: Mapping[Value, Value]) -> Op:
    if there.keys().isdisjoint(op.inputs):
        return op
    return replace(op, inputs=tuple([there.get(value, value) for value in op.inputs]))
