"""Operands of 8 bits, once it is known what ranks run: delayed scaling, and operands as gradients read them.

What delayed scaling keeps up: after each pass the largest elements of its casts become new factors.

Transformer Engine's casts to 8 bits leave the largest element of each tensor. When a forward or a backward
pass of a microbatch ends, all of them are put together, reduced to the largest over the ranks that run the
stage, and made the factors of the next one (transformer_engine/pytorch/fp8.py,
``reduce_and_update_fp8_tensors``; Megatron-LM opens one context around the layers of a stage and gives it the
ranks of tp, cp and dp as the group: megatron/core/fp8_utils.py, ``get_fp8_context``). Computing waits for it.
What runs again for a backward pass counts once. Of weights that are cast once a step the largest elements,
four bytes each, are left out of the message.

The factors end here: those of a step somewhere in training are attributes of the casts.

A product reads its operands along the dimension that it sums over; the gradient of its weight sums over rows,
of what it multiplied and of the gradient of what it made. With scales of rows, or of a tensor, torchao casts
or turns both by kernels of their own (``Float8Turn``), each once however many products read it. So it does
with a weight, along whose other dimension the gradient of an input sums; with a scale of the tensor FSDP
gathers and casts it anew for backward, the one way that is read. Transformer Engine's casts write both ways
at once. XLA turns what does not lie along the dimension over which a product sums, by which scale of a
tensor whoever cast it, before each pass that reads it. Products of groups, of experts, turn nothing.

Scales of columns are made of their largest elements in float64 and rounded to powers of two (torchao 0.18,
float8_utils.py, ``amax_to_scale``), and what such a product makes is multiplied by both afterwards
(float8_ops.py, ``addmm_float8_unwrapped``: ``post_inverse_scale``). Torch's compiler makes them in the
kernels that read them, anew for each element (:data:`distsim.cost.roofline.CYCLES`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from distsim.cache import Cache
from distsim.hardware.rank_axes import EVERY
from distsim.ir import Attributes, DType, Float8E4M3FN, Float8E5M2, Function, Mesh, Op, Value, substitute
from distsim.ir.registry import output_types
from distsim.ir.rewrite import KeptRewrites
from distsim.ir.type import as_tensor
from distsim.ops.float8 import ANEW, MARKS
from distsim.ops.onnx_bridge import made_type, type_number
from distsim.program.block import RewrittenOps, StageBlocks, kept_rewrite, rewritten_stages
from distsim.transforms.kernels.policies import Kernels


def keep_scales(stages: Sequence[StageBlocks]) -> tuple[StageBlocks, ...]:
    """Return the blocks of all stages with what delayed scaling does after each pass.

    Those that share Functions share them still; without such casts nothing changes.
    """
    return rewritten_stages(stages, partial(_kept_up, to=Float8E4M3FN()), partial(_kept_up, to=Float8E5M2()))


_KEPT_UP = Cache[Function, RewrittenOps | None](
    "functions of passes that keep up scales, by function and type", 2
)
_COLLECTED = KeptRewrites("functions that return largest elements, by function and type", 2)


def _kept_up(function: Function, to: DType) -> RewrittenOps | None:
    """Return a function that ends with the new factors of its casts to a type, its callees' too."""
    return _KEPT_UP.get(function, to, lambda: _ended(function, to))


def _ended(function: Function, to: DType) -> RewrittenOps | None:
    found = _collected(function, to)
    amaxes = found.outputs[len(function.outputs) :]
    if not amaxes:
        return None
    ops, largest = list(found.ops), amaxes[0]

    def add(op_type: str, inputs: tuple[Value, ...], **attributes: object) -> Value:
        given = Attributes(attributes)
        (type_,) = output_types(op_type, given, tuple([value.type for value in inputs]), (), None)
        made = Value("amax", type_)
        ops.append(Op(op_type, inputs, (made,), given))
        return made

    if len(amaxes) > 1:
        largest = add("Concat", amaxes, axis=0)
    mesh = as_tensor(largest.type, largest.name).device
    if isinstance(mesh, Mesh) and len(mesh.devices) > 1:
        largest = add("MPIAllreduce", (largest,), axis=EVERY, reduce="max")
    add("Float8Scales", (largest,), to=type_number(to))
    own = [(place,) for place in range(len(function.ops))]
    return RewrittenOps(replace(function, ops=tuple(ops)), (*own, *[()] * (len(ops) - len(own))))


def _collected(function: Function, to: DType) -> Function:
    """Return a function that also returns the largest elements of its casts to a type."""
    return _COLLECTED.of(function, to, lambda: _collecting(function, to))


def _collecting(function: Function, to: DType) -> Function:
    amaxes: list[Value] = []
    ops: list[Op] = []
    for op in function.ops:
        made = op
        if op.op_type == "Float8Cast" and op.attributes.get("delayed", 0) and made_type(op.attributes) == to:
            attributes = Attributes({**op.attributes, "amax": 1})
            types = output_types(op.op_type, attributes, tuple([v.type for v in op.inputs]), (), op.version)
            amaxes.append(Value("amax", types[1]))
            made = replace(op, attributes=attributes, outputs=(*op.outputs, amaxes[-1]))
        elif op.subfunctions:
            (callee,) = op.subfunctions
            inner = _collected(callee, to)
            more = [Value("amax", value.type) for value in inner.outputs[len(callee.outputs) :]]
            if more:
                made = replace(op, subfunctions=(inner,), outputs=(*op.outputs, *more))
                amaxes += more
        ops.append(made)
    return replace(function, ops=tuple(ops), outputs=(*function.outputs, *amaxes)) if amaxes else function


def turn_operands(stages: Sequence[StageBlocks], kernels: Kernels) -> tuple[StageBlocks, ...]:
    """Return the blocks of all stages, with operands turned that products read along another dimension.

    Those that share Functions share them still; policies of one kernel for both gradients turn nothing, nor
    do those whose casts write both ways.
    """
    rewrite = _TURNED.get(kernels.turns) if kernels.gradients_apart else None
    return rewritten_stages(stages, rewrite) if rewrite is not None else tuple(stages)


def _with_turns(ops: Sequence[Op], outputs: Sequence[Value], way: str) -> Iterator[tuple[Op, int]]:
    columns = Attributes({"rows": 1, ANEW: 1} if way == "anew" else {"rows": 1})
    turned: dict[Value, Value] = {}
    for place, op in enumerate(ops):
        scales_of_rows = _has_scales_of_rows(op)
        read = _turned_operands(op, way == "all")
        for value in read:
            if value not in turned:
                turned[value] = Value(value.name, value.type)
                how = columns if scales_of_rows else Attributes()
                yield Op("Float8Turn", (value,), (turned[value],), how), place
        own = {value: turned[value] for value in read}
        yield (replace(op, inputs=substitute(op.inputs, own)) if read else op), place


def _has_scales_of_rows(op: Op) -> bool:
    return len(op.inputs) == 2 and op.attributes.keys().isdisjoint(MARKS)


def _turned_operands(op: Op, of_every: bool) -> tuple[Value, ...]:
    """Return the operands of a product that a kernel turns for it, which no cast writes both ways:
    ``of_every`` those of a tensor's scale that do not lie along what it sums over."""
    scales_of_rows = _has_scales_of_rows(op)
    if of_every and not scales_of_rows and "both" not in op.attributes:
        return op.inputs[slice(*_ALL_TURNED.get(op.op_type, (0, 0)))]
    if not op.attributes.keys().isdisjoint(MARKS):
        return ()
    read = {"Float8MatMulGradB": 2, "Float8MatMulGradA": 1 if scales_of_rows else 0}.get(op.op_type, 0)
    return op.inputs[:read]


_ALL_TURNED = {"Float8MatMul": (1, 2), "Float8MatMulGradB": (0, 2)}
"""Of row-major operands which do not lie along what a product sums over: the weight; both of the gradient of
a weight. That of an input sums over the columns of both."""

_TURNED = {
    way: kept_rewrite(f"functions whose operands of 8 bits are turned, by {way}")(
        partial(_with_turns, way=way)
    )
    for way in ("kernels", "anew", "all")
}
"""By which kernels turn."""
