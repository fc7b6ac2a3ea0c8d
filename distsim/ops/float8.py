"""Products of 8-bit operands: ``Float8Amax``, ``Float8Cast``, ``Float8MatMul`` and its two gradients.

As Transformer Engine and torchao run a linear layer (Micikevicius et al. 2022, "FP8 formats for deep
learning"): the operands are e4m3, the gradient of the output e5m2. What is cast is multiplied by a factor:

- one that is known before, the attribute ``scale``, a power of two: delayed scaling has it from earlier
  steps, and takes the largest element on the way (``delayed``; with ``amax`` the cast makes it too);
- one of the operand itself: 448, or 57,344, over its largest element, which ``Float8Amax`` finds, by a kernel
  that reads all of it, before the cast reads that again (Transformer Engine's current scaling).

A product adds in float32 and makes the type ``to``; it reads the largest elements of both operands, or has
the ``scale`` of both. The gradient of an 8-bit value is of the type in which its product is made, that of a
cast goes straight through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from distsim.errors import TypeRuleError
from distsim.hardware.rank_axes import over_tensor
from distsim.ir.maker import FunctionMaker
from distsim.ir.type import DType, Float8E4M3FN, Float8E5M2, Float32, Tensor, as_tensor, from_numpy
from distsim.ir.value import Attributes, Value
from distsim.ops.matmul import GROUP, grad_a, grad_b, matmul_labels, matmul_shape
from distsim.ops.onnx_bridge import made_type, type_number
from distsim.ops.operator import (
    Array,
    GradientContext,
    Operator,
    Signature,
    Work,
    arity,
    bytes_of,
    common_device,
    memory_bound,
    reading_bound,
    register,
)
from distsim.ops.places import picked, resizing, shape_of
from distsim.ops.sharding_rule import Dim, ShardingRule, letters

GRADIENT_SCALE = 1024.0
"""Of the gradient of an output: e5m2 has no numbers between 0 and 1.5e-5."""

_LARGEST: dict[DType, float] = {Float8E4M3FN(): 448.0, Float8E5M2(): 57344.0}
EIGHT_BITS = tuple(_LARGEST)
MARKS = ("delayed", "both")
"""Attributes of a product that say how the gradient of its result is cast: as its operands were."""

ANEW = "anew"
"""Attribute of a cast along columns that makes the scale of each element anew, in float64."""

TWO_BYTES = 2
"""Of a number that is cast to 8 bits."""


# Float8Amax(x; whole): of each part along the first dimension the largest magnitude, in float32; with
# ``whole``, or of a vector, of all of x. Frameworks take one number a tensor, of what a rank has of it in a
# microbatch: of one sample that is the same. Samples have their own here, so that ranks of data parallelism
# and microbatches, which do not agree on one, need not. Those of tensor parallelism do where they divide
# rows (Transformer Engine, with_amax_reduction of sequence parallelism; a DTensor's maximum): the numbers are
# reduced over them. Where they divide columns each has that of its own, and so have those of a context, but
# for rows that these send to experts, and those that have experts for the rows of these (GroupedLinear).


def _amax_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    arity("Float8Amax", inputs, 1)
    (x,) = inputs
    if not x.dtype.is_floating:
        raise TypeRuleError(f"Float8Amax takes real numbers, not {x}")
    apart = 0 if attributes.get("whole", 0) or x.rank < 2 else 1
    return (Tensor(Float32(), (*x.shape[:apart], *(1,) * (x.rank - apart)), x.device),)


def _amax(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    (x,) = arrays
    apart = 0 if attributes.get("whole", 0) or x.ndim < 2 else 1
    over = tuple(range(apart, x.ndim))
    return [np.abs(x.astype(np.float32)).max(axis=over, keepdims=True, initial=0.0)]


def _of_own_part(maker: FunctionMaker, amax: Value, axis: str, exchanged: bool) -> Value:
    return amax


def _of_all_parts(maker: FunctionMaker, amax: Value, axis: str, exchanged: bool) -> Value:
    if not (exchanged or over_tensor(axis)):
        return amax
    reduced = {"axis": axis, "reduce": "max"}
    return maker.add("MPIAllreduce", [amax], reduced, output_names=[amax.name])[0]


def _amax_sharding(signature: Signature) -> ShardingRule:
    x, amax = signature.inputs[0], signature.outputs[0]
    labels = letters(x.rank)
    made = tuple([None if size == 1 else name for size, name in zip(amax.shape, labels, strict=True)])
    rows = _of_own_part if signature.attributes.get("whole", 0) else _of_all_parts
    # What is divided as its numbers are has those of its own part.
    finish = {name: _of_own_part if name == labels[-1] else rows for name in labels if name not in made}
    return ShardingRule((labels,), (made,), finish=finish)


register(
    Operator(
        "Float8Amax",
        types=_amax_types,
        compute=_amax,
        work=lambda s: reading_bound(s, 2.0),  # magnitude, compare
        gradient=lambda ctx: [None],
        sharding=_amax_sharding,
    )
)


# Float8Cast(x; to, scale) and Float8Cast(x, amax; to): x times the factor, rounded; what is out of range
# becomes the largest number there is. With ``amax=1`` the first one also makes the largest magnitude of x;
# with ``both=1`` it writes x twice, as the products of the pass and those of gradients read it: with scales
# of the rows, and of the columns (Transformer Engine's kernels for blocks).


def _cast_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if len(inputs) != 2:
        arity("Float8Cast", inputs, 1)
    to, device = made_type(attributes), common_device("Float8Cast", inputs)
    if to not in EIGHT_BITS or not inputs[0].dtype.is_floating:
        raise TypeRuleError(f"Float8Cast makes float8e4m3fn or float8e5m2 of real numbers, not {to.name}")
    _check_amaxes("Float8Cast", [inputs[0].shape], inputs[1:])
    made = Tensor(to, inputs[0].shape, device)
    return (made, Tensor(Float32(), (1,), device)) if attributes.get("amax", 0) else (made,)


def _check_amaxes(op_type: str, shapes: Sequence[tuple[int, ...]], amaxes: Sequence[Tensor]) -> None:
    for shape, amax in zip(shapes, amaxes, strict=bool(amaxes)):
        fits = len(shape) == amax.rank and all(
            own in (1, size) for own, size in zip(amax.shape, shape, strict=True)
        )
        if not fits or amax.dtype != Float32():
            raise TypeRuleError(f"{op_type}: {amax} are not the largest elements of an operand of {shape}")


def _factor(dtype: DType, amax: Array) -> Array:
    """Return by what a tensor of these largest elements is multiplied before it is rounded to a type."""
    return np.where(amax > 0, np.float32(_LARGEST[dtype]) / np.where(amax > 0, amax, 1), 1).astype(np.float32)


def _cast(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    to, x = made_type(attributes), arrays[0].astype(np.float32)
    factor = _factor(to, arrays[1]) if len(arrays) == 2 else attributes.get("scale", 1.0)
    made = np.clip(x * factor, -_LARGEST[to], _LARGEST[to]).astype(to.np)
    return [made, np.abs(x).max(initial=0.0).reshape(1)] if attributes.get("amax", 0) else [made]


def _cast_work(signature: Signature) -> Work:
    once = memory_bound(signature, 3.0)  # scale, largest element, round
    again = bytes_of(signature.outputs[:1]) if signature.attributes.get("both", 0) else 0
    return replace(once, bytes_written=once.bytes_written + again)


def _cast_sharding(signature: Signature) -> ShardingRule:
    dims = letters(signature.inputs[0].rank)
    amaxes = [amax_labels(dims, signature.inputs[0], amax) for amax in signature.inputs[1:]]
    made = (dims, (None,))[: len(signature.outputs)]
    return ShardingRule((dims, *amaxes), made)


def amax_labels(dims: Sequence[Dim], operand: Tensor, amax: Tensor) -> tuple[Dim, ...]:
    """Return the labels of the largest elements of an operand with these labels."""
    sizes = zip(dims, operand.shape, amax.shape, strict=True)
    return tuple([dim if own == size > 1 else None for dim, size, own in sizes])


register(
    Operator(
        "Float8Cast",
        types=_cast_types,
        compute=_cast,
        work=_cast_work,
        gradient=lambda ctx: [ctx.grad, *[None] * (len(ctx.inputs) - 1)],
        sharding=_cast_sharding,
    )
)


# Float8Turn(x; rows, anew): x as the gradient of a weight reads it, along its rows; the same numbers. A
# kernel that reads and writes 8 bits, as products of 8 bits on Hopper read both operands along the
# dimension that they sum over (torchao, float8_ops.py, ``preprocess_addmm``: ``.t().contiguous().t()``);
# with ``rows``, whose scales are of rows and for this of columns, what x was cast from is read twice, for
# the largest elements and for the cast (float8_linear.py casts each operand along either dimension); with
# ``anew`` in a compiler's kernels (:data:`distsim.cost.roofline.CYCLES`). Written beside products once it
# is known what ranks have (:mod:`distsim.transforms.pipelining.float8`).


def _turn_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    arity("Float8Turn", inputs, 1)
    if inputs[0].dtype not in EIGHT_BITS:
        raise TypeRuleError(f"Float8Turn takes 8-bit numbers, not {inputs[0]}; cast them with Float8Cast")
    return inputs


def _turn_work(signature: Signature) -> Work:
    (x,) = signature.inputs
    return Work(0.0, x.nbytes * (2 * TWO_BYTES if signature.attributes.get("rows", 0) else 1), x.nbytes)


register(
    Operator("Float8Turn", types=_turn_types, compute=lambda attributes, arrays: arrays, work=_turn_work)
)


# Float8Scales(amax; to): the factors of tensors with these largest elements, as delayed scaling updates them
# (of the passes that a history has, the latest: Megatron-LM's --fp8-amax-history-len is 1).


def _scales_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    arity("Float8Scales", inputs, 1)
    if inputs[0].dtype != Float32() or made_type(attributes) not in EIGHT_BITS:
        raise TypeRuleError(f"Float8Scales makes factors of largest elements in float32, not {inputs[0]}")
    return inputs


register(
    Operator(
        "Float8Scales",
        types=_scales_types,
        compute=lambda attributes, arrays: [_factor(made_type(attributes), arrays[0])],
        work=lambda s: memory_bound(s, 2.0),
    )
)


def cast_gradient(ctx: GradientContext, amaxes: Sequence[Value]) -> tuple[list[Value], dict[str, Any]]:
    """Return the gradient of a product as its gradients read it, with its largest element if ``amaxes`` are
    those of the operands; and their attributes."""
    to = type_number(Float8E5M2())
    to_read = type_number(as_tensor(ctx.grad.type, "the gradient").dtype)
    options: dict[str, Any] = {"to": to_read, **picked(ctx.attributes, GROUP)}
    if amaxes:
        largest = ctx.add("Float8Amax", ctx.grad)
        return [ctx.add("Float8Cast", ctx.grad, largest, to=to), largest], options
    marks = {name: ctx.attributes[name] for name in MARKS if name in ctx.attributes}
    scale = GRADIENT_SCALE * ctx.attributes.get("scale", 1.0)
    cast = ctx.add("Float8Cast", ctx.grad, to=to, scale=GRADIENT_SCALE, **marks)
    return [cast], options | {"scale": scale, **marks}


# Float8MatMul(a, b; to, scale) and Float8MatMul(a, b, amax of a, amax of b; to)


def check_operands(op_type: str, shapes: Sequence[tuple[int, ...]], inputs: Sequence[Tensor]) -> None:
    """Check that two inputs, of these shapes, are of 8 bits, and any others their largest elements."""
    if len(inputs) != 4:
        arity(op_type, tuple(inputs), 2)
    for tensor in inputs[:2]:
        if tensor.dtype not in EIGHT_BITS:
            raise TypeRuleError(
                f"{op_type} multiplies 8-bit numbers, not {tensor}; cast them with Float8Cast"
            )
    _check_amaxes(op_type, shapes, inputs[2:])


def _check(op_type: str, inputs: tuple[Tensor, ...]) -> None:
    check_operands(op_type, [tensor.shape for tensor in inputs[:2]], inputs)


def wide(attributes: Attributes, arrays: Sequence[Array]) -> list[Array]:
    """Return two operands, and maybe their largest elements, as the numbers that they stand for."""
    operands = [array.astype(np.float32) for array in arrays[:2]]
    if len(arrays) == 4:
        dtypes = [from_numpy(array.dtype) for array in arrays[:2]]
        return [x / _factor(dtype, amax) for x, dtype, amax in zip(operands, dtypes, arrays[2:], strict=True)]
    return [operands[0] / np.float32(attributes.get("scale", 1.0)), operands[1]]


def _product_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    _check("Float8MatMul", inputs)
    shape = matmul_shape(inputs[0].shape, inputs[1].shape)
    return (Tensor(made_type(attributes), shape, common_device("Float8MatMul", inputs)),)


def _product(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    a, b = wide(attributes, arrays)
    return [np.asarray(np.matmul(a, b)).astype(made_type(attributes).np)]


def _product_work(signature: Signature) -> Work:
    flops = 2.0 * signature.outputs[0].size * signature.inputs[0].shape[-1]
    return Work(flops, bytes_of(signature.inputs), bytes_of(signature.outputs), matrix=True)


def _product_sharding(signature: Signature) -> ShardingRule:
    first, second, *amaxes = signature.inputs
    a, b, y = matmul_labels(first.shape, second.shape)
    return ShardingRule((a, b, *_labels_of(amaxes, (a, b), (first, second))), (y,))


def _labels_of(
    amaxes: Sequence[Tensor], labels: Sequence[Sequence[Dim]], operands: Sequence[Tensor]
) -> list[tuple[Dim, ...]]:
    each = zip(labels, operands, amaxes, strict=False)
    return [amax_labels(dims, operand, amax) for dims, operand, amax in each]


def _product_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    a, b, *amaxes = ctx.inputs
    (dy, *largest), options = cast_gradient(ctx, amaxes)
    grads: list[Value | None] = [None] * len(ctx.inputs)
    for place, (name, wrt, other) in enumerate((("A", a, b), ("B", b, a))):
        if ctx.wanted[place]:
            more = [amaxes[1 - place], *largest] if amaxes else []
            read = (other, dy, *more)
            grads[place] = ctx.add(f"Float8MatMulGrad{name}", *read, shape=shape_of(wrt), **options)
    return grads


register(
    Operator(
        "Float8MatMul",
        types=_product_types,
        compute=_product,
        work=_product_work,
        gradient=_product_gradient,
        sharding=_product_sharding,
    )
)


# Float8MatMulGradA(b, dy; shape, to, scale) and Float8MatMulGradB(a, dy; shape, to, scale); or, in place of
# the scale, with the largest elements of both behind them


def _register_half(name: str) -> None:
    op_type = f"Float8MatMulGrad{name}"
    of_a = name == "A"

    def operands(attributes: Attributes, inputs: Sequence[Tensor]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        other, own = inputs[0].shape, tuple(attributes["shape"])
        return (own, other) if of_a else (other, own)

    def types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        _check(op_type, inputs)
        made = matmul_shape(*operands(attributes, inputs))
        if inputs[1].shape != made:
            raise TypeRuleError(f"{op_type}: the product has shape {made}, its gradient {inputs[1].shape}")
        return (Tensor(made_type(attributes), tuple(attributes["shape"]), common_device(op_type, inputs)),)

    def compute(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
        dy, other = wide(attributes, [arrays[place] for place in (1, 0, 3, 2)[: len(arrays)]])
        made = (grad_a if of_a else grad_b)(other, dy, tuple(attributes["shape"]))
        return [made.astype(made_type(attributes).np)]

    def work(signature: Signature) -> Work:
        inner = operands(signature.attributes, signature.inputs)[0][-1]
        flops = 2.0 * signature.inputs[1].size * inner
        return Work(flops, bytes_of(signature.inputs), bytes_of(signature.outputs), matrix=True)

    def sharding(signature: Signature) -> ShardingRule:
        a, b, dy = matmul_labels(*operands(signature.attributes, signature.inputs))
        other, own = (b, a) if of_a else (a, b)
        amaxes = _labels_of(signature.inputs[2:], (other, dy), signature.inputs)
        return ShardingRule((other, dy, *amaxes), (own,), localize=resizing("shape"))

    register(Operator(op_type, types=types, compute=compute, work=work, sharding=sharding))


_register_half("A")
_register_half("B")
