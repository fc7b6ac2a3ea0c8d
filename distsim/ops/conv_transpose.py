"""``ConvTranspose``: the dx of a convolution whose x is its output.

Its weight is [ci, co / group, *kernel]. The gradients are a ``Conv`` of dy, and the dw of a ``ConvGrad``
in which dy and x have changed places.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from distsim.errors import TypeRuleError
from distsim.ir.value import Attributes, Value
from distsim.ops.conv import bias_gradient, biased, channel_labels, conv_dx, fewer_groups
from distsim.ops.matmul import signature_shapes
from distsim.ops.operator import (
    Array,
    Dim,
    GradientContext,
    Operator,
    ShardingRule,
    Signature,
    Work,
    bytes_of,
    register,
)
from distsim.ops.places import by_place, operands, picked, places, shape_of, wanted
from distsim.ops.windows import Windows, windows

_OPERANDS = ("X", "W", "B")
_STEPS = ("dilations", "strides")


def _sizes(attributes: Attributes, x: tuple[int, ...], w: tuple[int, ...]) -> tuple[int, ...]:
    """Return the spatial sizes of the output, by the equations in ONNX's ConvTranspose."""
    rank = len(x) - 2
    if "output_shape" in attributes:
        return tuple(attributes["output_shape"])
    strides, dilations = attributes.get("strides", (1,) * rank), attributes.get("dilations", (1,) * rank)
    auto = attributes.get("auto_pad", "NOTSET")
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        return tuple(n * s for n, s in zip(x[2:], strides, strict=True))
    pads = attributes.get("pads", (0,) * (2 * rank)) if auto == "NOTSET" else (0,) * (2 * rank)
    extra = attributes.get("output_padding", (0,) * rank)
    return tuple(
        s * (n - 1) + e + (k - 1) * d + 1 - pads[i] - pads[rank + i]
        for i, (s, n, e, k, d) in enumerate(zip(strides, x[2:], extra, w[2:], dilations, strict=True))
    )


def _windows(
    attributes: Attributes, x: tuple[int, ...], w: tuple[int, ...], sizes: tuple[int, ...]
) -> Windows:
    """Return the windows of the convolution over the output's ``sizes`` that gives x its sizes."""
    rank = len(sizes)
    plain = windows(Attributes(picked(attributes, *_STEPS, "pads")), sizes, w[2:])
    before, after = plain.before, plain.after
    auto = attributes.get("auto_pad", "NOTSET")
    if auto == "VALID":
        before = after = (0,) * rank
    if "output_shape" in attributes or auto in ("SAME_UPPER", "SAME_LOWER"):
        extra = attributes.get("output_padding", (0,) * rank)
        total = [
            max(0, s * (n - 1) + e + (k - 1) * d + 1 - size)
            for s, n, e, k, d, size in zip(
                plain.strides, x[2:], extra, w[2:], plain.dilations, sizes, strict=True
            )
        ]
        small, large = tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)
        # ONNX gives the odd element to the end for SAME_UPPER and to the beginning otherwise.
        before, after = (small, large) if auto == "SAME_UPPER" else (large, small)
    return Windows(sizes, w[2:], plain.strides, plain.dilations, before, after, x[2:])


def _compute(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    given = operands(_OPERANDS, attributes, arrays)
    x, w = given["X"], given["W"]
    where = _windows(attributes, x.shape, w.shape, _sizes(attributes, x.shape, w.shape))
    return [biased(conv_dx(w, x, where, attributes.get("group", 1)), given.get("B"))]


def _work(signature: Signature) -> Work:
    """2 n ci in co/group kernel: one multiply-add per input element and weight of its channel."""
    shapes = signature_shapes(_OPERANDS, signature)
    index = places(_OPERANDS, signature.attributes, len(signature.inputs))
    bias = signature.outputs[0].size if "B" in index else 0
    flops = 2.0 * math.prod(shapes["X"]) * math.prod(shapes["W"][1:]) + bias
    return Work(flops, bytes_of(signature.inputs), bytes_of(signature.outputs), matrix=True)


def _rule(signature: Signature) -> ShardingRule:
    attributes = signature.attributes
    index = places(_OPERANDS, attributes, len(signature.inputs))
    group = attributes.get("group", 1)
    # Rows and columns of the weight are exchanged against those of Conv.
    target, weight, source = channel_labels(group, signature_shapes(_OPERANDS, signature)["W"])
    has_bias = "B" in index or "B" in attributes
    if group == 1 and has_bias:  # the bias is added once, so the sum over ci cannot be left open
        source, weight = None, (None, weight[1])
    if len(index) < 2 + has_bias:  # one is static, hence whole
        source = target = None
        weight = (None, None)
    samples: Dim = "n" if "X" in index else None
    rest: tuple[Dim, ...] = (None,) * (signature.outputs[0].rank - 2)
    labels = {"X": (samples, source, *rest), "W": (*weight, *rest), "B": (target,)}
    localize = fewer_groups(signature.outputs[0].shape[1], 0, 1) if target == "g" else None
    inputs = tuple(labels[name] for name in index)
    linear = () if has_bias else tuple((place,) for place in range(len(inputs)))
    return ShardingRule(inputs, ((samples, target, *rest),), linear, localize=localize)


def _gradient(ctx: GradientContext) -> Sequence[Value | None]:
    index = places(_OPERANDS, ctx.attributes, len(ctx.inputs))
    if not index.keys() >= {"X", "W"}:
        raise TypeRuleError(f"{ctx.op!r}: the gradient needs X and W as values, not as attributes")
    x, w = ctx.inputs[index["X"]], ctx.inputs[index["W"]]
    where = _windows(ctx.attributes, shape_of(x), shape_of(w), shape_of(ctx.grad)[2:])
    kept = picked(ctx.attributes, *_STEPS, "group") | {"pads": where.before + where.after}
    grads: dict[str, Value | None] = {}
    if wanted(_OPERANDS, ctx, "X"):
        grads["X"] = ctx.add("Conv", ctx.grad, w, **kept)
    if wanted(_OPERANDS, ctx, "W"):
        grads["W"] = ctx.add("ConvGrad", ctx.grad, w, x, wanted=("dw",), **kept)
    if wanted(_OPERANDS, ctx, "B"):
        grads["B"] = bias_gradient(ctx)
    return by_place(_OPERANDS, ctx, grads)


register(
    Operator(
        "ConvTranspose",
        compute=_compute,
        work=_work,
        gradient=_gradient,
        sharding=_rule,
        formals=_OPERANDS,
    )
)
