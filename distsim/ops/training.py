"""Losses, and the sum over microbatches: what training adds to a model beside its optimizer.

``N`` is the number of samples (tokens) in the *global* batch, so a loss over part of the batch is a
part of the sum: partial over data-parallel ranks and over microbatches.

``XGrad(x, z, dy)`` is dy times the gradient of the loss X; dy, a scalar, is the gradient of the loss itself.
Without it, it is one: the loss is what is trained. As a number that is known (the weight of an auxiliary
loss) it is the attribute ``dy``: no kernel scales it, no stage of a pipeline waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx.helper

from distsim.errors import TypeRuleError
from distsim.ir.type import Tensor, from_numpy
from distsim.ir.value import Attributes, Value
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
)
from distsim.ops.places import move_work, same_shape_rule
from distsim.ops.sharding_rule import ShardingRule, letters
from distsim.ops.softmax import log_softmax


def _same_shapes(op_type: str, inputs: tuple[Tensor, ...], count: int) -> None:
    arity(op_type, inputs, count)
    for tensor in inputs[1:]:
        if tensor.shape != inputs[0].shape:
            raise TypeRuleError(f"{op_type}: shapes {inputs[0].shape} and {tensor.shape} must agree")
        if tensor.dtype != inputs[0].dtype:
            raise TypeRuleError(f"{op_type}: {inputs[0].dtype.name} and {tensor.dtype.name} must agree")


# Loss: mean squared error, sum((y - z)^2) / N.


def _loss_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    _same_shapes("Loss", inputs, 2)
    return (Tensor(inputs[0].dtype, (), common_device("Loss", inputs)),)


def _loss(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    return [np.asarray(np.square(arrays[0] - arrays[1]).sum() / attributes["N"], arrays[0].dtype)]


def _loss_sharding(signature: Signature) -> ShardingRule:
    dims = letters(signature.inputs[0].rank)
    return ShardingRule((dims, dims), ((),))


def _incoming(ctx: GradientContext) -> tuple[tuple[Value, ...], dict[str, Any]]:
    """Return the gradient of a loss as operand or as attribute dy, and the attributes of the loss."""
    number = ctx.number
    if number is None:
        return (ctx.grad,), {**ctx.attributes}
    return (), {**ctx.attributes} if number == 1.0 else {**ctx.attributes, "dy": number}


def _loss_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    """The gradient of the target is minus that of the prediction: the roles exchanged."""
    (y, z), (dy, options) = ctx.inputs, _incoming(ctx)
    if not ctx.wanted[1]:
        return [ctx.add("LossGrad", y, z, *dy, **options), None]
    if not ctx.wanted[0]:
        return [None, ctx.add("LossGrad", z, y, *dy, **options)]
    grad = ctx.add("LossGrad", y, z, *dy, **options)
    return [grad, ctx.add("Neg", grad)]


def _check_incoming(op_type: str, attributes: Attributes, inputs: tuple[Tensor, ...]) -> None:
    """Raise unless there are two operands, or three and the last one is the gradient of a loss."""
    if len(inputs) != 3:
        return arity(op_type, inputs, 2)
    if "dy" in attributes:
        raise TypeRuleError(f"{op_type} takes dy as an operand or as an attribute, not both")
    if inputs[2].shape or inputs[2].dtype != inputs[0].dtype:
        raise TypeRuleError(f"{op_type}: dy must be a scalar of {inputs[0].dtype.name}, not {inputs[2]}")


def _scaled(attributes: Attributes, arrays: Sequence[Array], grad: Array) -> Sequence[Array]:
    """Return ``grad`` times dy, wherever it is given."""
    if len(arrays) == 3:
        grad = arrays[2] * grad
    elif "dy" in attributes:
        grad = attributes["dy"] * grad
    return [grad.astype(arrays[0].dtype, copy=False)]


def _loss_grad_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    _check_incoming("LossGrad", attributes, inputs)
    _same_shapes("LossGrad", inputs[:2], 2)
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
        compute=lambda a, x: _scaled(a, x, (2.0 / a["N"]) * (x[0] - x[1])),
        work=lambda s: memory_bound(s, 2.0),
        sharding=_loss_grad_sharding,
    )
)


# CrossEntropyLoss: -sum over positions of log softmax(logits)[label] / N.


def _check_labels(op_type: str, inputs: tuple[Tensor, ...]) -> None:
    arity(op_type, inputs, 2)
    logits, labels = inputs
    if logits.shape[:-1] != labels.shape or labels.dtype.is_floating:
        raise TypeRuleError(
            f"{op_type} takes logits [..., classes] and integer labels [...], not {logits} and {labels}"
        )


def _cross_entropy_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    _check_labels("CrossEntropyLoss", inputs)
    return (Tensor(inputs[0].dtype, (), common_device("CrossEntropyLoss", inputs)),)


def _cross_entropy_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    dy, options = _incoming(ctx)
    return [ctx.add("CrossEntropyLossGrad", *ctx.inputs, *dy, **options), None]


def _cross_entropy_grad_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    _check_incoming("CrossEntropyLossGrad", attributes, inputs)
    _check_labels("CrossEntropyLossGrad", inputs[:2])
    return (inputs[0].on(common_device("CrossEntropyLossGrad", inputs)),)


def _cross_entropy(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    logits, labels = arrays
    picked = np.take_along_axis(log_softmax(logits, (-1,)), labels[..., None].astype(np.int64), axis=-1)
    return [np.asarray(-picked.sum() / attributes["N"], logits.dtype)]


def _cross_entropy_grad(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    logits, labels = arrays[:2]
    grad = np.exp(log_softmax(logits, (-1,)))
    index = labels[..., None].astype(np.int64)
    np.put_along_axis(grad, index, np.take_along_axis(grad, index, axis=-1) - 1, axis=-1)
    return _scaled(attributes, arrays, grad / attributes["N"])


def _cross_entropy_sharding(signature: Signature) -> ShardingRule:
    labels = letters(signature.inputs[1].rank)
    outputs = tuple((*labels, None) if tensor.rank else () for tensor in signature.outputs)
    dy = ((),) * (len(signature.inputs) - 2)
    return ShardingRule(((*labels, None), labels, *dy), outputs, tuple((2,) for _ in dy))


register(
    Operator(
        "CrossEntropyLoss",
        types=_cross_entropy_types,
        compute=_cross_entropy,
        work=lambda s: memory_bound(s, 5.0 * s.inputs[0].size),
        gradient=_cross_entropy_gradient,
        sharding=_cross_entropy_sharding,
    )
)
register(
    Operator(
        "CrossEntropyLossGrad",
        types=_cross_entropy_grad_types,
        compute=_cross_entropy_grad,
        work=lambda s: memory_bound(s, 5.0),
        sharding=_cross_entropy_sharding,
    )
)


# GradientCast(gradient; to): the gradient of a parameter in the type in which it is summed. Wherever the sum
# is taken, over microbatches or over ranks, it is taken of this: what is cast is handed on as it was made.
# GradientCopy(sum; to): that sum as the optimizer reads it. The sum stays, as Megatron-LM's buffer of
# gradients does when its optimizer takes float32 copies (dist_optimizer.md: 20 bytes a parameter in fp16).


def _gradient_cast_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    arity("a cast of a gradient", inputs, 1)
    to = from_numpy(onnx.helper.tensor_dtype_to_np_dtype(attributes["to"]))
    return (replace(inputs[0], dtype=to),)


def _gradient_cast(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    return [arrays[0].astype(onnx.helper.tensor_dtype_to_np_dtype(attributes["to"]), copy=False)]


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


# LogLikelihoodLoss(logs, labels): CrossEntropyLoss of what a LogSoftmax of the logits makes; its gradient is
# that of the logs, of which it reads the type alone. They are written for kernels, of what a rank runs
# (transforms/kernels/losses.py): they have no gradient rule and are not divided.


def _log_likelihood_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    _check_labels("LogLikelihoodLoss", inputs)
    return (Tensor(inputs[0].dtype, (), common_device("LogLikelihoodLoss", inputs)),)


def _log_likelihood_grad_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    _check_incoming("LogLikelihoodLossGrad", attributes, inputs)
    _check_labels("LogLikelihoodLossGrad", inputs[:2])
    return (inputs[0].on(common_device("LogLikelihoodLossGrad", inputs)),)


def _log_likelihood(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    logs, labels = arrays
    picked = np.take_along_axis(logs, labels[..., None].astype(np.int64), axis=-1)
    return [np.asarray(-picked.sum() / attributes["N"], logs.dtype)]


def _log_likelihood_grad(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    logs, labels = arrays[:2]
    grad = np.zeros_like(logs)
    np.put_along_axis(grad, labels[..., None].astype(np.int64), -1.0 / attributes["N"], axis=-1)
    return _scaled(attributes, arrays, grad)


def _log_likelihood_work(signature: Signature) -> Work:
    """One logarithm a label is read; of a gradient all is written."""
    logs, labels = signature.inputs[:2]
    picked = labels.size * logs.dtype.itemsize
    return Work(float(labels.size), float(labels.nbytes + picked), bytes_of(signature.outputs))


register(
    Operator(
        "LogLikelihoodLoss",
        types=_log_likelihood_types,
        compute=_log_likelihood,
        work=_log_likelihood_work,
    )
)
register(
    Operator(
        "LogLikelihoodLossGrad",
        types=_log_likelihood_grad_types,
        compute=_log_likelihood_grad,
        work=_log_likelihood_work,
    )
)

LOSSES = ("CrossEntropyLoss", "CrossEntropyLossGrad", "Loss", "LossGrad")
"""Operators whose first two inputs carry the batch in dimension 0 and whose ``N`` counts the global batch."""
