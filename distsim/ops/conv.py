"""Convolutions: ``Conv`` and ``ConvGrad``.

Factors: the batch ``n``; output channels ``co`` (rows of the weight, the bias); input channels ``ci``,
over which the output is a sum. With groups, the groups ``g`` are divided, where each rank then has
whole groups. Spatial dimensions are whole: dividing them needs an exchange of borders.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from distsim.errors import TypeRuleError
from distsim.ir.type import Tensor
from distsim.ir.value import Attributes, Value
from distsim.ops.operator import (
    Array,
    Dim,
    GradientContext,
    Operator,
    OutputPart,
    ShardingRule,
    Signature,
    Work,
    arity,
    bytes_of,
    common_device,
    register,
)
from distsim.ops.places import Localize, by_place, operands, picked, places, shape_of, wanted
from distsim.ops.windows import Windows, windows

_CONV = ("X", "W", "B")
_GRAD = ("x", "w", "dy")
OPTIONS = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")


def _columns(x: Array, where: Windows, group: int) -> Array:
    """Return [group, ci * kernel, n * counts]: im2col (Chellapilla, Puri and Simard 2006), per group."""
    seen = where.stack(where.pad(x, 0))
    rank = len(where.kernel)
    seen = seen.reshape(seen.shape[0], group, -1, *seen.shape[2:])
    order = (1, 2, *range(3 + rank, 3 + 2 * rank), 0, *range(3, 3 + rank))
    return seen.transpose(order).reshape(group, -1, x.shape[0] * math.prod(where.counts))


def _rows(y: Array, group: int) -> Array:
    """Return [group, co, n * counts] of [n, group * co, *counts]."""
    n, channels = y.shape[:2]
    split = y.reshape(n, group, channels // group, -1)
    return split.transpose(1, 2, 0, 3).reshape(group, channels // group, -1)


def _wide(array: Array) -> Array:
    """Return half-precision numbers as float32: sums are taken in float32, as on the matrix units."""
    return array.astype(np.float32) if array.dtype.itemsize == 2 else array


def conv(x: Array, w: Array, where: Windows, group: int) -> Array:
    """Return the convolution [n, co, *counts] of x [n, ci, *sizes] and w [co, ci / group, *kernel]."""
    weight = _wide(w).reshape(group, w.shape[0] // group, -1)
    made = weight @ _columns(_wide(x), where, group)
    made = made.reshape(group, -1, x.shape[0], *where.counts)
    order = (2, 0, 1, *range(3, made.ndim))
    return made.transpose(order).reshape(x.shape[0], w.shape[0], *where.counts).astype(x.dtype)


def conv_dx(w: Array, dy: Array, where: Windows, group: int) -> Array:
    """Return the gradient [n, ci, *sizes] of ``conv`` with respect to x; this is ConvTranspose."""
    weight = _wide(w).reshape(group, w.shape[0] // group, -1)
    columns = weight.transpose(0, 2, 1) @ _rows(_wide(dy), group)
    channels, rank = w.shape[1], len(where.kernel)
    columns = columns.reshape(group, channels, *where.kernel, dy.shape[0], *where.counts)
    order = (2 + rank, 0, 1, *range(3 + rank, 3 + 2 * rank), *range(2, 2 + rank))
    stacked = columns.transpose(order).reshape(dy.shape[0], -1, *where.counts, *where.kernel)
    return where.unstack(stacked).astype(dy.dtype)


def conv_dw(x: Array, dy: Array, where: Windows, group: int) -> Array:
    """Return the gradient [co, ci / group, *kernel] of ``conv`` with respect to w."""
    made = _rows(_wide(dy), group) @ _columns(_wide(x), where, group).transpose(0, 2, 1)
    return made.reshape(dy.shape[1], x.shape[1] // group, *where.kernel).astype(dy.dtype)


def _conv(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    given = operands(_CONV, attributes, arrays)
    x, w = given["X"], given["W"]
    where = windows(attributes, x.shape[2:], w.shape[2:])
    made = conv(x, w, where, attributes.get("group", 1))
    return [biased(made, given.get("B"))]


def biased(made: Array, bias: Array | None) -> Array:
    """Return [n, co, *counts] with the bias [co], if any, added."""
    if bias is None:
        return made
    return made + bias.astype(made.dtype).reshape(-1, *(1,) * (made.ndim - 2))


def _weight_shape(signature: Signature) -> tuple[int, ...]:
    index = places(_CONV, signature.attributes, len(signature.inputs))
    if "W" in index:
        return signature.inputs[index["W"]].shape
    return (1,) * signature.outputs[0].rank  # a static weight is one number


def _conv_work(signature: Signature) -> Work:
    """2 n co out ci/group kernel: one multiply-add per output element and weight of its channel."""
    elements = signature.outputs[0].size
    flops = 2.0 * elements * math.prod(_weight_shape(signature)[1:])
    bias = elements if "B" in places(_CONV, signature.attributes, len(signature.inputs)) else 0
    return Work(flops + bias, bytes_of(signature.inputs), bytes_of(signature.outputs), matrix=True)


def groups_divide(group: int, weight: tuple[int, ...]) -> bool:
    """Return whether every number of ranks that divides both channel counts divides the groups."""
    rows, columns = weight[0], weight[1] * group
    return group > 1 and math.gcd(rows, columns) == group


def channel_labels(group: int, weight: tuple[int, ...]) -> tuple[Dim, tuple[Dim, Dim], Dim]:
    """Return the labels of the input's channels, the weight's first two dimensions, the output's channels."""
    if group == 1:
        return "ci", ("co", "ci"), "co"
    if groups_divide(group, weight):
        return "g", ("g", None), "g"
    return None, (None, None), None


def fewer_groups(whole: int, output: int, dim: int) -> Localize:
    """Return the ``localize`` that keeps as many groups as the rank has of the ``whole`` channels."""

    def localize(attributes: Attributes, outputs: tuple[tuple[int, ...], ...]) -> Attributes:
        return Attributes({**attributes, "group": attributes["group"] * outputs[output][dim] // whole})

    return localize


def _conv_rule(signature: Signature) -> ShardingRule:
    index = places(_CONV, signature.attributes, len(signature.inputs))
    group = signature.attributes.get("group", 1)
    source, weight, target = channel_labels(group, _weight_shape(signature))
    if "W" not in index or ("B" not in index and "B" in signature.attributes):
        source = target = None
        weight = (None, None)
    rest: tuple[Dim, ...] = (None,) * (signature.outputs[0].rank - 2)
    labels = {"X": ("n", source, *rest), "W": (*weight, *rest), "B": (target,)}
    localize = fewer_groups(signature.outputs[0].shape[1], 0, 1) if target == "g" else None
    added = (index["B"],) if "B" in index else ()
    fixed = "B" in signature.attributes
    linear = () if fixed else tuple((index[name], *added) for name in ("X", "W") if name in index)
    inputs = tuple(labels[name] for name in index)
    return ShardingRule(inputs, (("n", target, *rest),), linear, addends=added, localize=localize)


def _conv_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    index = places(_CONV, ctx.attributes, len(ctx.inputs))
    kept = picked(ctx.attributes, *OPTIONS)
    grads: dict[str, Value | None] = {}
    if not index.keys() >= {"X", "W"}:
        raise TypeRuleError(f"{ctx.op!r}: the gradient needs X and W as values, not as attributes")
    names = tuple(gradient for name, gradient in (("X", "dx"), ("W", "dw")) if wanted(_CONV, ctx, name))
    if names:
        inputs = (ctx.inputs[index["X"]], ctx.inputs[index["W"]], ctx.grad)
        made = ctx.add_many("ConvGrad", *inputs, wanted=names, **kept)
        grads = {name[1].upper(): grad for name, grad in zip(names, made, strict=True)}
    if wanted(_CONV, ctx, "B"):
        grads["B"] = bias_gradient(ctx)
    return by_place(_CONV, ctx, grads)


def bias_gradient(ctx: GradientContext) -> Value:
    """Return the gradient of the bias: the output's, summed over all but the channels."""
    axes = (0, *range(2, len(shape_of(ctx.grad))))
    return ctx.add("ReduceSum", ctx.grad, axes=axes, keepdims=0)


# ConvGrad(x, w, dy) -> dx, dw: those of the two that the attribute wanted names. The gradient of the
# bias is a ReduceSum of its own, as it is a kernel of its own.


def _grad_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    arity("ConvGrad", inputs, 3)
    device = common_device("ConvGrad", inputs)
    x, w, dy = inputs
    counts = windows(attributes, x.shape[2:], w.shape[2:]).counts
    if dy.shape != (x.shape[0], w.shape[0], *counts) or x.shape[1] != w.shape[1] * attributes.get("group", 1):
        raise TypeRuleError(f"ConvGrad: {dy} is not the gradient of the convolution of {x} with {w}")
    made = {"dx": x.on(device), "dw": w.on(device)}
    return tuple(made[name] for name in attributes.get("wanted", ("dx", "dw")))


def _grad(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    x, w, dy = arrays
    where = windows(attributes, x.shape[2:], w.shape[2:])
    group = attributes.get("group", 1)
    names = attributes.get("wanted", ("dx", "dw"))
    return [conv_dx(w, dy, where, group) if n == "dx" else conv_dw(x, dy, where, group) for n in names]


def _grad_work(signature: Signature) -> Work:
    """Each of dx and dw takes as many multiply-adds as the convolution."""
    _, w, dy = signature.inputs
    flops = 2.0 * dy.size * math.prod(w.shape[1:]) * len(signature.outputs)
    return Work(flops, bytes_of(signature.inputs), bytes_of(signature.outputs), matrix=True)


def _grad_rule(signature: Signature) -> ShardingRule:
    x, w, _ = signature.inputs
    source, weight, target = channel_labels(signature.attributes.get("group", 1), w.shape)
    rest: tuple[Dim, ...] = (None,) * (x.rank - 2)
    labels = {"dx": ("n", source, *rest), "dw": (*weight, *rest)}
    names = signature.attributes.get("wanted", ("dx", "dw"))
    localize = None
    if target == "g":
        dim = 1 if names[0] == "dx" else 0
        localize = fewer_groups(signature.outputs[0].shape[dim], 0, dim)
    inputs = (labels["dx"], labels["dw"], ("n", target, *rest))
    return ShardingRule(inputs, tuple(labels[name] for name in names), ((2,),), localize=localize)


register(
    Operator(
        "Conv",
        compute=_conv,
        work=_conv_work,
        gradient=_conv_gradient,
        sharding=_conv_rule,
        formals=_CONV,
    )
)


def _grad_part(signature: Signature, output: int) -> OutputPart:
    name = signature.attributes.get("wanted", ("dx", "dw"))[output]
    return OutputPart("ConvGrad", (0, 1, 2), Attributes({**signature.attributes, "wanted": (name,)}))


register(
    Operator(
        "ConvGrad",
        types=_grad_types,
        compute=_grad,
        work=_grad_work,
        sharding=_grad_rule,
        part=_grad_part,
    )
)
