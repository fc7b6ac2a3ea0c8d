"""Softmax, LogSoftmax, and the losses of ONNX that are made of them.

The classes are whole on every rank; the other dimensions may be divided. A mean over all positions
divides by their number, which backward takes from the undivided op.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from distsim.errors import BoundsError, TypeRuleError
from distsim.ir.type import Tensor, as_tensor
from distsim.ir.value import Attributes, Literal, Value
from distsim.ops.bounds import require
from distsim.ops.elementwise import grad_types
from distsim.ops.onnx_bridge import static_array
from distsim.ops.operator import (
    Array,
    Bounds,
    GradientContext,
    Operator,
    Shapes,
    Signature,
    Work,
    common_device,
    memory_bound,
    reading_bound,
    register,
)
from distsim.ops.places import by_place, operands, picked, places, refuse, shape_of, whole_rule
from distsim.ops.sharding_rule import Dim, ShardingRule, letters, letters_but

Axes = tuple[int, ...]

CAUSAL, TRIANGLE = "causal", "triangle"
"""The attributes that say of a softmax, and of its gradient, that a mask hides all after the diagonal, and
that its kernel reads nothing of that."""


def triangle_reads(signature: Signature, whole: float) -> float:
    """Return the bytes that a kernel reads of ``whole``, those of its inputs, where the attribute is set.

    Of square matrices [s, s] like its first result it reads rows up to the diagonal: (s + 1) / 2s of them.
    """
    if not signature.attributes.get(TRIANGLE, 0):
        return whole
    shape = signature.outputs[0].shape
    left_out = 0.5 - 0.5 / shape[-1]
    return whole - left_out * sum([tensor.nbytes for tensor in signature.inputs if tensor.shape == shape])


def _along_rows(signature: Signature, flops: float) -> Work:
    made = memory_bound(signature, flops)
    return replace(made, bytes_read=triangle_reads(signature, made.bytes_read))


def softmax_axes(attributes: Mapping[str, Any], version: int | None, rank: int) -> Axes:
    """Return the axes whose elements sum to one: before operator set 13, all from ``axis`` on.

    >>> softmax_axes({"axis": 1}, None, 3), softmax_axes({"axis": 1}, 11, 3)
    ((1,), (1, 2))
    """
    if version is None or version >= 13:
        return (int(attributes.get("axis", -1)) % rank,)
    return tuple(range(int(attributes.get("axis", 1)) % rank, rank))


def log_softmax(x: Array, axes: Axes) -> Array:
    """Return the logarithm of the softmax over some dimensions, without overflow."""
    shifted = x - x.max(axis=axes, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=axes, keepdims=True))


def _softmax(x: Array, axes: Axes) -> Array:
    weights = np.exp(x - x.max(axis=axes, keepdims=True))
    return weights / weights.sum(axis=axes, keepdims=True)


def _softmax_grad(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    y, dy = arrays
    return [y * (dy - (dy * y).sum(axis=attributes["axes"], keepdims=True))]


def _log_softmax_grad(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    y, dy = arrays
    return [dy - np.exp(y) * dy.sum(axis=attributes["axes"], keepdims=True)]


def _softmax_sharding(signature: Signature) -> ShardingRule:
    rank = signature.inputs[0].rank
    dims = letters_but(rank, softmax_axes(signature.attributes, signature.version, rank))
    return ShardingRule((dims,), (dims,))


def _softmax_grad_sharding(signature: Signature) -> ShardingRule:
    dims = letters_but(signature.inputs[0].rank, signature.attributes["axes"])
    return ShardingRule((dims, dims), (dims,), ((1,),))


def _register(name: str, function: Any, grad: Any) -> None:
    grad_name = f"{name}Grad"

    def compute(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
        x = arrays[0]
        made = function(x, softmax_axes(attributes, attributes.get("version"), x.ndim))
        return [made.astype(x.dtype, copy=False)]

    def gradient(ctx: GradientContext) -> Sequence[Value | None]:
        rank = len(shape_of(ctx.inputs[0]))
        axes = softmax_axes(ctx.attributes, ctx.op.version, rank)
        kept = picked(ctx.attributes, CAUSAL)
        return [ctx.add(grad_name, ctx.outputs[0], ctx.grad, axes=axes, **kept)]

    register(
        Operator(
            name,
            compute=compute,
            # Maximum, subtract, exponential, sum, divide (or logarithm and subtract).
            work=lambda s: _along_rows(s, 5.0),
            gradient=gradient,
            sharding=_softmax_sharding,
            bounds=Bounds(axes=(0, 0)),
        )
    )
    register(
        Operator(
            grad_name,
            types=grad_types(grad_name),
            compute=grad,
            work=lambda s: _along_rows(s, 4.0),
            sharding=_softmax_grad_sharding,
        )
    )


_register("Softmax", _softmax, _softmax_grad)
register(Operator("Softmax", beside=(CAUSAL, TRIANGLE)))
_register("LogSoftmax", log_softmax, _log_softmax_grad)

# --- SoftmaxCrossEntropyLoss(scores, labels, weights), NegativeLogLikelihoodLoss(input, target, weight)
# scores [N, C, d...], labels [N, d...], weights [C]; reduction "none", "sum" or "mean". The gradient op
# takes (scores, labels, [weights], dy) and the attribute count: how many labels the mean is over.


def _reduction(attributes: Mapping[str, Any]) -> str:
    return str(attributes.get("reduction", "mean"))


def _uneven(attributes: Mapping[str, Any], weighted: bool) -> bool:
    """Whether the mean divides by what the labels say."""
    return _reduction(attributes) == "mean" and (weighted or "ignore_index" in attributes)


def _label_weights(
    attributes: Mapping[str, Any], labels: Array, weights: Array | None, classes: int, like: Array
) -> tuple[Array, Array]:
    """Return the weight of every position, and labels that are all classes."""
    ignored = (
        labels == attributes["ignore_index"] if "ignore_index" in attributes else np.zeros(labels.shape, bool)
    )
    valid = np.where(ignored, 0, labels)
    weight = np.ones(classes, like.dtype) if weights is None else weights
    return np.where(ignored, 0, weight[valid]).astype(like.dtype), valid


def _losses(attributes: Attributes, logs: Array, labels: Array, weights: Array | None) -> Array:
    weight, valid = _label_weights(attributes, labels, weights, logs.shape[1], logs)
    losses = -np.take_along_axis(logs, valid[:, None], axis=1)[:, 0] * weight
    if _reduction(attributes) == "none":
        return losses
    total = losses.sum()
    return np.asarray(total if _reduction(attributes) == "sum" else total / weight.sum(), logs.dtype)


def _loss_sharding(signature: Signature, grad: bool, formals: tuple[str, str, str]) -> ShardingRule:
    """With an uneven mean, or labels that are known, the positions are whole; else the loss is a sum, or a
    mean, over them."""
    scores = signature.inputs[0]
    if formals[1] in signature.attributes:
        return whole_rule(signature)
    values = signature.inputs[:-1] if grad else signature.inputs
    rows: tuple[Dim, ...] = letters(scores.rank - 1)
    if _uneven(signature.attributes, len(values) > 2 or formals[2] in signature.attributes):
        rows = (None,) * len(rows)
    full = (rows[0], None, *rows[1:])
    others = ((None,),) * (len(values) - 2)
    loss = rows if _reduction(signature.attributes) == "none" else ()
    if grad:
        return ShardingRule((full, rows, *others, loss), (full,), ((len(values),),))
    averaged = tuple(row for row in rows if isinstance(row, str))
    mean = averaged if _reduction(signature.attributes) == "mean" else ()
    return ShardingRule((full, rows, *others), (loss, full)[: len(signature.outputs)], (), mean)


def _loss_bounds(op_type: str, names: tuple[str, str, str]) -> Bounds:
    def check(attributes: Attributes, shapes: Shapes) -> None:
        scores, labels, weights = (shapes.get(name) for name in names)
        if scores is None or len(scores) < 2:
            raise BoundsError(f"{op_type} takes [N, C, ...], not {list(scores or ())}")
        for name, given, wanted in (
            (names[1], labels, (scores[0], *scores[2:])),
            (names[2], weights, scores[1:2]),
        ):
            fits = given is None or given == wanted
            require(fits, f"{op_type}: {name} {list(given or ())} must be {list(wanted)}")
        modes = ("none", "mean", "sum")
        mode = attributes.get("reduction", "mean")
        require(mode in modes, f"{op_type}: reduction {mode!r} is not one of {', '.join(modes)}")

    return Bounds(names, check)


def _as_values(ctx: GradientContext, formals: tuple[str, str, str]) -> list[Value]:
    """Return the operands that are given, static ones as values, too: the gradient op takes no others."""
    index = places(formals, ctx.attributes, len(ctx.inputs))
    device = as_tensor(ctx.inputs[0].type, ctx.inputs[0].name).device
    values: list[Value] = []
    for formal in formals:
        if formal in index:
            values.append(ctx.inputs[index[formal]])
        elif formal in ctx.attributes:
            known = static_array(ctx.attributes[formal], None)
            values.append(ctx.maker.add("Constant", (), {"value": Literal(known), "device": device})[0])
    return values


def _register_loss(name: str, from_scores: bool, formals: tuple[str, str, str]) -> None:
    grad_name = f"{name}Grad"

    def compute(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
        given = operands(formals, attributes, arrays)
        scores, labels = given[formals[0]], given[formals[1]]
        logs = log_softmax(scores, (1,)) if from_scores else scores
        made = [_losses(attributes, logs, labels, given.get(formals[2])), logs]
        return made[: int(attributes.get("outputs", 1))]

    def gradient(ctx: GradientContext) -> Sequence[Value | None]:
        if any(grad is not None for grad in ctx.grads[1:]):
            raise TypeRuleError(f"{name}: only the loss, not the log-probabilities, may influence the loss")
        refuse(name, formals, ctx, formals[2])
        options = picked(ctx.attributes, "reduction", "ignore_index")
        values = _as_values(ctx, formals)
        count = math.prod(shape_of(values[1]))
        made = ctx.add(grad_name, *values, ctx.grad, count=count, **options)
        return by_place(formals, ctx, {formals[0]: made})

    def buffers(attributes: Attributes, count: int) -> Sequence[int]:
        """The weights of the classes are given."""
        index = places(formals, attributes, count)
        return [index[formals[2]]] if formals[2] in index else []

    def types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if len(inputs) not in (3, 4):
            raise TypeRuleError(f"{grad_name} takes scores, labels, maybe weights, and dy, not {inputs}")
        return (inputs[0].on(common_device(grad_name, inputs)),)

    def compute_grad(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
        scores, labels, *rest, dy = arrays
        weight, valid = _label_weights(attributes, labels, rest[0] if rest else None, scores.shape[1], scores)
        if _reduction(attributes) == "mean":
            uneven = _uneven(attributes, bool(rest))
            dy = dy / (weight.sum() if uneven else attributes["count"])
        factor = (weight * dy)[:, None]
        made = _softmax(scores, (1,)) * factor if from_scores else np.zeros(scores.shape, scores.dtype)
        at = valid[:, None]
        np.put_along_axis(made, at, np.take_along_axis(made, at, 1) - factor, 1)
        return [made.astype(scores.dtype, copy=False)]

    flops = 6.0 if from_scores else 1.0
    register(
        Operator(
            name,
            compute=compute,
            work=lambda s: reading_bound(s, flops),
            gradient=gradient,
            sharding=lambda s: _loss_sharding(s, False, formals),
            buffers=buffers,
            bounds=_loss_bounds(name, formals),
        )
    )
    register(
        Operator(
            grad_name,
            types=types,
            compute=compute_grad,
            work=lambda s: memory_bound(s, flops),
            sharding=lambda s: _loss_sharding(s, True, formals),
        )
    )


_register_loss("SoftmaxCrossEntropyLoss", True, ("scores", "labels", "weights"))
_register_loss("NegativeLogLikelihoodLoss", False, ("input", "target", "weight"))
