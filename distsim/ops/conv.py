"""Convolutions: ``Conv``, ``ConvGrad`` and ``ConvTranspose``.

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
from distsim.ops.bounds import at_least, fits_to, require
from distsim.ops.matmul import signature_shapes
from distsim.ops.operator import (
    Array,
    Bounds,
    BoundsRule,
    GradientContext,
    Operator,
    OutputPart,
    Shapes,
    Signature,
    Work,
    arity,
    common_device,
    register,
    work_of,
)
from distsim.ops.places import Localize, by_place, operands, picked, places, shape_of, wanted
from distsim.ops.sharding_rule import Dim, ShardingRule
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
    return [_biased(made, given.get("B"))]


def _biased(made: Array, bias: Array | None) -> Array:
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
    return work_of(signature, flops, matrix=True, added=bias)


def _channel_labels(group: int, weight: tuple[int, ...]) -> tuple[Dim, tuple[Dim, Dim], Dim]:
    """Return the labels of the input's channels, the weight's first two dimensions, the output's channels."""
    if group == 1:
        return "ci", ("co", "ci"), "co"
    if math.gcd(weight[0], weight[1] * group) == group:  # what divides both channel counts divides the groups
        return "g", ("g", None), "g"
    return None, (None, None), None


def _fewer_groups(whole: int, dim: int) -> Localize:
    """Return the ``localize`` that keeps as many groups as the rank has of the ``whole`` channels."""

    def localize(attributes: Attributes, outputs: tuple[tuple[int, ...], ...]) -> Attributes:
        return Attributes({**attributes, "group": attributes["group"] * outputs[0][dim] // whole})

    return localize


def _conv_rule(signature: Signature) -> ShardingRule:
    index = places(_CONV, signature.attributes, len(signature.inputs))
    group = signature.attributes.get("group", 1)
    source, weight, target = _channel_labels(group, _weight_shape(signature))
    if "W" not in index or ("B" not in index and "B" in signature.attributes):
        source = target = None
        weight = (None, None)
    rest: tuple[Dim, ...] = (None,) * (signature.outputs[0].rank - 2)
    labels = {"X": ("n", source, *rest), "W": (*weight, *rest), "B": (target,)}
    localize = _fewer_groups(signature.outputs[0].shape[1], 1) if target == "g" else None
    added = (index["B"],) if "B" in index else ()
    fixed = "B" in signature.attributes
    linear = () if fixed else tuple((index[name], *added) for name in ("X", "W") if name in index)
    inputs = tuple(labels[name] for name in index)
    return ShardingRule(inputs, (("n", target, *rest),), linear, addends=added, localize=localize)


def _data_and_weight(ctx: GradientContext) -> tuple[Value, Value]:
    index = places(_CONV, ctx.attributes, len(ctx.inputs))
    if not index.keys() >= {"X", "W"}:
        raise TypeRuleError(f"{ctx.op!r}: the gradient needs X and W as values, not as attributes")
    return ctx.inputs[index["X"]], ctx.inputs[index["W"]]


def _conv_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    x, w = _data_and_weight(ctx)
    kept = picked(ctx.attributes, *OPTIONS)
    grads: dict[str, Value | None] = {}
    names = tuple(gradient for name, gradient in (("X", "dx"), ("W", "dw")) if wanted(_CONV, ctx, name))
    if names:
        made = ctx.add_many("ConvGrad", x, w, ctx.grad, wanted=names, **kept)
        grads = {name[1].upper(): grad for name, grad in zip(names, made, strict=True)}
    if wanted(_CONV, ctx, "B"):
        grads["B"] = _bias_gradient(ctx)
    return by_place(_CONV, ctx, grads)


def _bias_gradient(ctx: GradientContext) -> Value:
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
    return work_of(signature, flops, matrix=True)


def _grad_rule(signature: Signature) -> ShardingRule:
    x, w, _ = signature.inputs
    source, weight, target = _channel_labels(signature.attributes.get("group", 1), w.shape)
    rest: tuple[Dim, ...] = (None,) * (x.rank - 2)
    labels = {"dx": ("n", source, *rest), "dw": (*weight, *rest)}
    names = signature.attributes.get("wanted", ("dx", "dw"))
    localize = None
    if target == "g":
        dim = 1 if names[0] == "dx" else 0
        localize = _fewer_groups(signature.outputs[0].shape[dim], dim)
    inputs = (labels["dx"], labels["dw"], ("n", target, *rest))
    return ShardingRule(inputs, tuple(labels[name] for name in names), ((2,),), localize=localize)


def _conv_bounds(op_type: str) -> BoundsRule:
    transposed = op_type == "ConvTranspose"

    def check(attributes: Attributes, shapes: Shapes) -> None:
        x, w = shapes["X"], shapes.get("W", ())
        group = attributes.get("group", 1)
        at_least(op_type, "group", group, 1)
        if not w:  # a static weight is one number
            return
        require(len(w) == len(x) >= 2, f"{op_type}: the weight {list(w)} does not fit {list(x)}")
        channels, made = (w[0], w[1] * group) if transposed else (w[1] * group, w[0])
        require(
            x[1] == channels and channels % group == made % group == 0,
            f"{op_type}: {x[1]} channels do not fit the weight {list(w)} in {group} groups",
        )
        kernel = attributes.get("kernel_shape", w[2:])
        require(tuple(kernel) == w[2:], f"{op_type}: kernel_shape={list(kernel)}, the weight is {list(w)}")
        if "B" in shapes:
            fits_to(op_type, "B", shapes["B"], (made,))
        least = dict.fromkeys(("output_shape", "strides", "dilations"), 1) | {"output_padding": 0}
        for name, low in least.items():
            high = 2**31 if name == "output_shape" else 2**16
            sizes = attributes.get(name, (1,) * len(kernel))
            require(
                len(sizes) == len(kernel) and all(low <= n <= high for n in sizes),
                f"{op_type}: {name}={list(sizes)} must be {len(kernel)} numbers from {low} to {high}",
            )

    return check


register(
    Operator(
        "Conv",
        compute=_conv,
        work=_conv_work,
        gradient=_conv_gradient,
        sharding=_conv_rule,
        formals=_CONV,
        bounds=Bounds(_CONV, _conv_bounds("Conv")),
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


# --- ConvTranspose: the dx of a convolution whose x is its output ---------------------------------------
# Its weight is [ci, co / group, *kernel]. The gradients are a Conv of dy, and the dw of a ConvGrad in which
# dy and x have changed places.

_STEPS = ("dilations", "strides")


def _transpose_sizes(attributes: Attributes, x: tuple[int, ...], w: tuple[int, ...]) -> tuple[int, ...]:
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


def _transpose_windows(
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


def _transpose(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    given = operands(_CONV, attributes, arrays)
    x, w = given["X"], given["W"]
    where = _transpose_windows(attributes, x.shape, w.shape, _transpose_sizes(attributes, x.shape, w.shape))
    return [_biased(conv_dx(w, x, where, attributes.get("group", 1)), given.get("B"))]


def _transpose_work(signature: Signature) -> Work:
    """2 n ci in co/group kernel: one multiply-add per input element and weight of its channel."""
    shapes = signature_shapes(_CONV, signature)
    index = places(_CONV, signature.attributes, len(signature.inputs))
    bias = signature.outputs[0].size if "B" in index else 0
    flops = 2.0 * math.prod(shapes["X"]) * math.prod(shapes["W"][1:])
    return work_of(signature, flops, matrix=True, added=bias)


def _transpose_rule(signature: Signature) -> ShardingRule:
    attributes = signature.attributes
    index = places(_CONV, attributes, len(signature.inputs))
    group = attributes.get("group", 1)
    # Rows and columns of the weight are exchanged against those of Conv.
    target, weight, source = _channel_labels(group, signature_shapes(_CONV, signature)["W"])
    has_bias = "B" in index or "B" in attributes
    if group == 1 and has_bias:  # the bias is added once, so the sum over ci cannot be left open
        source, weight = None, (None, weight[1])
    if len(index) < 2 + has_bias:  # one is static, hence whole
        source = target = None
        weight = (None, None)
    samples: Dim = "n" if "X" in index else None
    rest: tuple[Dim, ...] = (None,) * (signature.outputs[0].rank - 2)
    labels = {"X": (samples, source, *rest), "W": (*weight, *rest), "B": (target,)}
    localize = _fewer_groups(signature.outputs[0].shape[1], 1) if target == "g" else None
    inputs = tuple(labels[name] for name in index)
    linear = () if has_bias else tuple((place,) for place in range(len(inputs)))
    return ShardingRule(inputs, ((samples, target, *rest),), linear, localize=localize)


def _transpose_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    x, w = _data_and_weight(ctx)
    where = _transpose_windows(ctx.attributes, shape_of(x), shape_of(w), shape_of(ctx.grad)[2:])
    kept = picked(ctx.attributes, *_STEPS, "group") | {"pads": where.before + where.after}
    grads: dict[str, Value | None] = {}
    if wanted(_CONV, ctx, "X"):
        grads["X"] = ctx.add("Conv", ctx.grad, w, **kept)
    if wanted(_CONV, ctx, "W"):
        grads["W"] = ctx.add("ConvGrad", ctx.grad, w, x, wanted=("dw",), **kept)
    if wanted(_CONV, ctx, "B"):
        grads["B"] = _bias_gradient(ctx)
    return by_place(_CONV, ctx, grads)


register(
    Operator(
        "ConvTranspose",
        compute=_transpose,
        work=_transpose_work,
        gradient=_transpose_gradient,
        sharding=_transpose_rule,
        formals=_CONV,
        bounds=Bounds(_CONV, _conv_bounds("ConvTranspose")),
    )
)
