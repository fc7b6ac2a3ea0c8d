"""Losses, and the sum over microbatches: what training adds to a model beside its optimizer.

``N`` is the number of samples (tokens) in the *global* batch, so a loss over part of the batch is a
part of the sum: partial over data-parallel ranks and over microbatches.

``XGrad(x, z, dy)`` is dy times the gradient of the loss X; dy, a scalar, is the gradient of the loss itself.
Without it, it is one: the loss is what is trained. As a number that is known (the weight of an auxiliary
loss) it is the attribute ``dy``: no kernel scales it, no stage of a pipeline waits for it.

What stands between the gradients and the optimizer: their norm over all parameters, and a common factor.

``SquareSum(x)`` is the sum of squares in float32, ``GradientFactor(total; clip, loss_scale)`` what every
gradient is multiplied by, and ``ScaleGradient(x, factor; to)`` that product, of the type ``to``;
``ScaleGradient(x; to, factor)`` is that with a number which is known.

The norm is clipped as torch.nn.utils.clip_grad_norm_ does it (Pascanu et al. 2013): by clip / (norm + 1e-6)
if that is less than 1. A gradient of a loss that was scaled is divided by ``loss_scale`` (Micikevicius et al.
2018, "Mixed precision training", section 3.2). Where some number is not finite the factor is 0, and 0 times
anything is 0 here: a step that overflowed moves no weight by its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from distsim.errors import TypeRuleError
from distsim.ir import Op
from distsim.ir.type import Tensor, dtype_named
from distsim.ir.value import Attributes, Value
from distsim.ops.normalization import widened, wider
from distsim.ops.onnx_bridge import made_type
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
    register,
    work_of,
)
from distsim.ops.places import move_work, same_shape_rule
from distsim.ops.sharding_rule import ShardingRule, letters


def _two_alike(op_type: str, y: Tensor, z: Tensor) -> None:
    if z.shape != y.shape:
        raise TypeRuleError(f"{op_type}: shapes {y.shape} and {z.shape} must agree")
    if z.dtype != y.dtype:
        raise TypeRuleError(f"{op_type}: {y.dtype.name} and {z.dtype.name} must agree")


# Loss: mean squared error, sum((y - z)^2) / N.


def _loss_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    arity("Loss", inputs, 2)
    _two_alike("Loss", *inputs)
    return (Tensor(inputs[0].dtype, (), common_device("Loss", inputs)),)


def _loss(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    return [np.asarray(np.square(arrays[0] - arrays[1]).sum() / attributes["N"], arrays[0].dtype)]


def _loss_sharding(signature: Signature) -> ShardingRule:
    dims = letters(signature.inputs[0].rank)
    return ShardingRule((dims, dims), ((),))


def incoming(ctx: GradientContext) -> tuple[tuple[Value, ...], dict[str, Any]]:
    """Return the gradient of a loss as operand or as attribute dy, and the attributes of the loss."""
    number = ctx.number
    if number is None:
        return (ctx.grad,), {**ctx.attributes}
    return (), {**ctx.attributes} if number == 1.0 else {**ctx.attributes, "dy": number}


def _loss_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    """The gradient of the target is minus that of the prediction: the roles exchanged."""
    (y, z), (dy, options) = ctx.inputs, incoming(ctx)
    if not ctx.wanted[1]:
        return [ctx.add("LossGrad", y, z, *dy, **options), None]
    if not ctx.wanted[0]:
        return [None, ctx.add("LossGrad", z, y, *dy, **options)]
    grad = ctx.add("LossGrad", y, z, *dy, **options)
    return [grad, ctx.add("Neg", grad)]


def check_incoming(op_type: str, attributes: Attributes, inputs: tuple[Tensor, ...], count: int = 2) -> None:
    """Raise unless there are ``count`` operands, or one more, which is the gradient of a loss."""
    if len(inputs) != count + 1:
        return arity(op_type, inputs, count)
    if "dy" in attributes:
        raise TypeRuleError(f"{op_type} takes dy as an operand or as an attribute, not both")
    dy = inputs[count]
    if dy.shape or dy.dtype != inputs[0].dtype:
        raise TypeRuleError(f"{op_type}: dy must be a scalar of {inputs[0].dtype.name}, not {dy}")


def scaled(attributes: Attributes, arrays: Sequence[Array], grad: Array, count: int = 2) -> Sequence[Array]:
    """Return ``grad`` times dy, wherever it is given: as the operand after ``count`` others, if it is one."""
    if len(arrays) > count:
        grad = arrays[count] * grad
    elif "dy" in attributes:
        grad = attributes["dy"] * grad
    return [grad.astype(arrays[0].dtype, copy=False)]


def _loss_grad_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    check_incoming("LossGrad", attributes, inputs)
    _two_alike("LossGrad", *inputs[:2])
    return (inputs[0].on(common_device("LossGrad", inputs)),)


def _loss_grad_sharding(signature: Signature) -> ShardingRule:
    dims, dy = letters(signature.inputs[0].rank), ((),) * (len(signature.inputs) - 2)
    return ShardingRule((dims, dims, *dy), (dims,), ((0, 1), *((2,) for _ in dy)))


register(
    Operator(
        "Loss",
        types=_loss_types,
        compute=_loss,
        work=lambda s: memory_bound(s, 3.0 * s.inputs[0].size),
        gradient=_loss_gradient,
        sharding=_loss_sharding,
    )
)
register(
    Operator(
        "LossGrad",
        types=_loss_grad_types,
        compute=lambda a, x: scaled(a, x, (2.0 / a["N"]) * (x[0] - x[1])),
        work=lambda s: memory_bound(s, 2.0),
        sharding=_loss_grad_sharding,
    )
)


# GradientCast(gradient; to): the gradient of a parameter in the type in which it is summed. Wherever the sum
# is taken, over microbatches or over ranks, it is taken of this: what is cast is handed on as it was made.
# GradientCopy(sum; to): that sum as the optimizer reads it. The sum stays, as Megatron-LM's buffer of
# gradients does when its optimizer takes float32 copies (dist_optimizer.md: 20 bytes a parameter in fp16).


def _gradient_cast_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    arity("a cast of a gradient", inputs, 1)
    to = made_type(attributes)
    return (replace(inputs[0], dtype=to),)


def _gradient_cast(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    return [arrays[0].astype(made_type(attributes).np, copy=False)]


register(
    Operator(
        "GradientCast",
        types=_gradient_cast_types,
        compute=_gradient_cast,
        work=move_work,
        sharding=lambda s: same_shape_rule(s, ((0,),)),
        pinned=True,
    )
)
register(
    Operator(
        "GradientCopy",
        types=_gradient_cast_types,
        compute=_gradient_cast,
        work=move_work,
        sharding=lambda s: same_shape_rule(s, ()),
        holds=True,
    )
)


# AccumulateInto(sum, part): the sum so far, in its own type, with one more part added to it where it lies.


def _sum_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    arity("AccumulateInto", inputs, 2)
    total, part = inputs
    if total.shape != part.shape:
        raise TypeRuleError(f"AccumulateInto: shapes {total.shape} and {part.shape} must agree")
    return (total.on(common_device("AccumulateInto", inputs)),)


register(
    Operator(
        "AccumulateInto",
        types=_sum_types,
        compute=lambda a, x: [x[0] + x[1].astype(x[0].dtype, copy=False)],
        work=lambda s: memory_bound(s, 1.0),
        sharding=lambda s: same_shape_rule(s, ((0, 1),)),
        in_place={0: 0},
    )
)


# ZeroSums(; shapes, dtypes) -> sums: a buffer of zeros, filled by one kernel, of which each sum is a part.

ZERO_SUMS = "ZeroSums"


def _zero_sums(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    kinds: Iterable[tuple[tuple[int, ...], str]] = zip(
        attributes["shapes"], attributes["dtypes"], strict=True
    )
    return [np.zeros(tuple(shape), dtype_named(name).np) for shape, name in kinds]


register(
    Operator(
        ZERO_SUMS,
        compute=_zero_sums,
        work=lambda s: Work(0.0, 0.0, float(bytes_of(s.outputs))),
    )
)


# AverageGradients(gradients...; in_place): the buffer of a bucket as it is divided by the ranks of the data
# before these sum it. ``N`` of a loss is that of all ranks, so their sum is the mean as it is, and no number
# changes here; the kernel that divides reads and writes all of it.

AVERAGE = "AverageGradients"


def _average_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if not inputs:
        raise TypeRuleError(f"{AVERAGE} divides the gradients of a bucket; none given")
    common_device(AVERAGE, inputs)
    if len({tensor.dtype for tensor in inputs}) > 1:
        raise TypeRuleError(f"{AVERAGE} divides a buffer of one element type, not {[*map(str, inputs)]}")
    return inputs


register(
    Operator(
        AVERAGE,
        types=_average_types,
        compute=lambda attributes, arrays: list(arrays),
        work=lambda s: memory_bound(s, 1.0),
    )
)


# GradientNorm(gradients...) -> norm: that of the buffer of a bucket, of which the host asks whether it is a
# number.

NORM = "GradientNorm"


def _norm_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if not inputs:
        raise TypeRuleError(f"{NORM} is of the gradients of a bucket; none given")
    if len({tensor.dtype for tensor in inputs}) > 1:
        raise TypeRuleError(f"{NORM} reads a buffer of one element type, not {[*map(str, inputs)]}")
    return (Tensor(inputs[0].dtype, (), common_device(NORM, inputs)),)


def _norm(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    total = sum(float(np.square(array.astype(np.float64)).sum()) for array in arrays)
    return [np.asarray(np.sqrt(total)).astype(arrays[0].dtype)]


register(
    Operator(
        NORM,
        types=_norm_types,
        compute=_norm,
        work=lambda s: work_of(s, 2.0 * sum(tensor.size for tensor in s.inputs)),
    )
)


LOSSES = ("CrossEntropyLoss", "CrossEntropyLossGrad", "Loss", "LossGrad")
"""Operators whose first two inputs carry the batch in dimension 0 and whose ``N`` counts the global batch."""


def sums_squares(op: Op) -> bool:
    """Whether a Call does nothing but sum the squares of what it is given, or a share of them."""
    if not op.is_call:
        return False
    inner = {part.op_type for part in op.callee.ops}
    return "SquareSum" in inner and inner <= {"SquareSum", "Add", "Mul"}


def _square_sum_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    arity("SquareSum", inputs, 1)
    return (Tensor(wider(inputs[0].dtype), (), inputs[0].device),)


def _square_sum(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    return [np.asarray(np.square(widened(arrays[0])).sum())]


def _square_sum_work(signature: Signature) -> Work:
    given, made = signature.inputs[0], signature.outputs[0]
    return Work(2.0 * given.size, float(given.nbytes), float(made.nbytes))


register(
    Operator(
        "SquareSum",
        types=_square_sum_types,
        compute=_square_sum,
        work=_square_sum_work,
        sharding=lambda s: ShardingRule((letters(s.inputs[0].rank),), ((),)),
    )
)


def _factor_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    arity("GradientFactor", inputs, 1)
    if inputs[0].shape:
        raise TypeRuleError(f"GradientFactor takes the sum of all squares, a scalar, not {inputs[0]}")
    return inputs


def _factor(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    (total,) = arrays
    scale, clip = attributes.get("loss_scale", 1.0), attributes.get("clip")
    norm = math.sqrt(float(total)) / scale if np.isfinite(total) else math.inf
    factor = 0.0 if math.isinf(norm) else 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
    return [np.asarray(factor / scale, total.dtype)]


register(
    Operator(
        "GradientFactor",
        types=_factor_types,
        compute=_factor,
        work=lambda s: memory_bound(s, 4.0),
        sharding=lambda s: ShardingRule(((),), ((),)),
    )
)


def _scale_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    known = "factor" in attributes
    arity("ScaleGradient", inputs, 1 if known else 2)
    if not known and inputs[1].shape:
        raise TypeRuleError(f"ScaleGradient: the factor must be a scalar, not {inputs[1]}")
    to = made_type(attributes)
    return (Tensor(to, inputs[0].shape, common_device("ScaleGradient", inputs)),)


def _scale(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    grad = arrays[0]
    factor = attributes["factor"] if "factor" in attributes else arrays[1]
    made = widened(grad) * factor if factor != 0 else np.zeros(grad.shape)
    return [made.astype(made_type(attributes).np, copy=False)]


def _scale_sharding(signature: Signature) -> ShardingRule:
    dims, *rest = letters(signature.inputs[0].rank), *signature.inputs[1:]
    return ShardingRule((dims, *[() for _ in rest]), (dims,))


register(
    Operator(
        "ScaleGradient",
        types=_scale_types,
        compute=_scale,
        work=lambda s: memory_bound(s, 1.0),
        sharding=_scale_sharding,
        overwrites={0: 0},
    )
)
