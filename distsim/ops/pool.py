"""Pooling: maxima and means over windows, or over the whole plane.

Batch and channels may be divided. The windows are those of a convolution, so the plane is whole, but
for ``GlobalAveragePool``, which is a mean over it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from distsim.errors import TypeRuleError
from distsim.ir.type import Tensor
from distsim.ir.value import Attributes, Value
from distsim.ops.onnx_bridge import onnx_compute, onnx_types
from distsim.ops.operator import (
    Array,
    GradientContext,
    Operator,
    Signature,
    TypesRule,
    Work,
    arity,
    common_device,
    memory_bound,
    reading_bound,
    register,
    work_of,
)
from distsim.ops.places import Localize, ints, like_shape, picked, resizing, shape_of, whole_rule
from distsim.ops.sharding_rule import Dim, ShardingRule, letters
from distsim.ops.windows import Windows, windows

_OPTIONS = ("auto_pad", "ceil_mode", "count_include_pad", "dilations", "kernel_shape", "pads", "strides")


def _windows(attributes: Attributes, shape: tuple[int, ...]) -> Windows:
    return windows(attributes, shape[2:], ints(attributes["kernel_shape"]))


def _types(op_type: str) -> TypesRule:
    """The type rule of opset 22: the first that leaves out a window which starts behind the tensor.

    So do PyTorch, ONNX Runtime and onnx.reference for every opset (onnx issue 5711).
    """
    return lambda attributes, inputs: onnx_types(op_type, attributes, inputs, 22)


def _plane_rule(
    signature: Signature, linear: tuple[tuple[int, ...], ...] = (), localize: Localize | None = None
) -> ShardingRule:
    """Batch and channels are divided; the plane is whole."""
    rest: tuple[Dim, ...] = (None,) * (signature.inputs[0].rank - 2)
    dims: tuple[Dim, ...] = ("n", "c", *rest)
    inputs, outputs = (dims,) * len(signature.inputs), (dims,) * len(signature.outputs)
    return ShardingRule(inputs, outputs, linear, localize=localize)


def _window_work(signature: Signature) -> Work:
    """One operation per element of each window; each element of the output, or of dy (the last input), has a
    window.
    """
    pooled = signature.inputs[-1] if signature.op_type.endswith("Grad") else signature.outputs[0]
    flops = float(pooled.size * math.prod(ints(signature.attributes["kernel_shape"])))
    return work_of(signature, flops)


# MaxPool. Ties go to the first position, as in onnx.reference and in PyTorch.


def _lowest(dtype: np.dtype[np.generic]) -> float:
    return np.iinfo(str(dtype)).min if dtype.kind in "iu" else -np.inf


def _max_pool(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    if attributes.get("outputs", 1) > 1:
        return onnx_compute("MaxPool", attributes, None, arrays, 2)
    (x,) = arrays
    where = _windows(attributes, x.shape)
    seen = where.stack(where.pad(x, _lowest(x.dtype)))
    return [seen.max(axis=tuple(range(-len(where.kernel), 0)))]


def _max_pool_rule(signature: Signature) -> ShardingRule:
    if len(signature.outputs) == 1:
        return _plane_rule(signature)
    return whole_rule(signature)  # the second output counts positions in the whole tensor


def _max_pool_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    return [ctx.add("MaxPoolGrad", ctx.inputs[0], ctx.grad, **picked(ctx.attributes, *_OPTIONS))]


def _max_pool_grad_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    arity("MaxPoolGrad", inputs, 2)
    x, dy = inputs
    counts = _windows(attributes, x.shape).counts
    if dy.shape != (*x.shape[:2], *counts):
        raise TypeRuleError(f"MaxPoolGrad: {dy} is not the gradient of a pooling of {x} to {counts}")
    return (x.on(common_device("MaxPoolGrad", inputs)),)


def _max_pool_grad(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    x, dy = arrays
    where = _windows(attributes, x.shape)
    rank = len(where.kernel)
    seen = where.stack(where.pad(x, _lowest(x.dtype)))
    flat = seen.reshape(*seen.shape[:-rank], -1)
    spread = np.zeros(flat.shape, dy.dtype)
    np.put_along_axis(spread, flat.argmax(axis=-1)[..., None], dy[..., None], axis=-1)
    return [where.unstack(spread.reshape(seen.shape))]


register(
    Operator(
        "MaxPool",
        types=_types("MaxPool"),
        compute=_max_pool,
        work=_window_work,
        gradient=_max_pool_gradient,
        sharding=_max_pool_rule,
    )
)
register(
    Operator(
        "MaxPoolGrad",
        types=_max_pool_grad_types,
        compute=_max_pool_grad,
        work=_window_work,
        sharding=lambda s: _plane_rule(s, ((1,),)),
    )
)


# AveragePool divides by the positions of a window that lie in the tensor, or, with count_include_pad, in
# the tensor and its padding.


def _counted(attributes: Attributes, where: Windows, dtype: np.dtype[np.generic]) -> Array:
    inside = np.zeros((1, 1, *where.padded), dtype)
    if attributes.get("count_include_pad", 0):
        ends = [b + n + a for b, n, a in zip(where.before, where.sizes, where.after, strict=True)]
        inside[(..., *(slice(0, end) for end in ends))] = 1
    else:
        inside[(..., *where.inside())] = 1
    return where.stack(inside).sum(axis=tuple(range(-len(where.kernel), 0)))


def _average_pool(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    (x,) = arrays
    where = _windows(attributes, x.shape)
    total = where.stack(where.pad(x, 0)).sum(axis=tuple(range(-len(where.kernel), 0)))
    return [(total / _counted(attributes, where, x.dtype)).astype(x.dtype)]


def _average_pool_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    shape = shape_of(ctx.inputs[0])
    return [ctx.add("AveragePoolGrad", ctx.grad, shape=shape, **picked(ctx.attributes, *_OPTIONS))]


def _average_pool_grad(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    (dy,) = arrays
    where = _windows(attributes, attributes["shape"])
    shares = (dy / _counted(attributes, where, dy.dtype)).astype(dy.dtype)
    spread = np.broadcast_to(shares[(..., *(None,) * len(where.kernel))], (*dy.shape, *where.kernel))
    return [where.unstack(spread)]


register(
    Operator(
        "AveragePool",
        types=_types("AveragePool"),
        compute=_average_pool,
        work=_window_work,
        gradient=_average_pool_gradient,
        sharding=lambda s: _plane_rule(s, ((0,),)),
    )
)
register(
    Operator(
        "AveragePoolGrad",
        types=like_shape("AveragePoolGrad", 1),
        compute=_average_pool_grad,
        work=_window_work,
        sharding=lambda s: _plane_rule(s, ((0,),), resizing("shape")),
    )
)


# The global ones. The gradient of a mean over the plane carries the size of the whole plane as count.


def _global_average(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    (x,) = arrays
    return [x.mean(axis=tuple(range(2, x.ndim)), keepdims=True, dtype=_sum_dtype(x)).astype(x.dtype)]


def _sum_dtype(x: Array) -> np.dtype[np.generic]:
    return np.dtype(np.float32) if x.dtype.itemsize == 2 else x.dtype


def _global_average_rule(signature: Signature) -> ShardingRule:
    plane = letters(signature.inputs[0].rank - 2, "s")
    full, mean = ("n", "c", *plane), ("n", "c", *(None,) * len(plane))
    if signature.op_type == "GlobalAveragePool":
        return ShardingRule((full,), (mean,), ((0,),), mean=plane)
    return ShardingRule((mean,), (full,), ((0,),), localize=resizing("shape"))


def _global_average_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    shape = shape_of(ctx.inputs[0])
    return [ctx.add("GlobalAveragePoolGrad", ctx.grad, shape=shape, count=math.prod(shape[2:]))]


def _global_average_grad(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    (dy,) = arrays
    share = (dy / attributes["count"]).astype(dy.dtype)
    return [np.broadcast_to(share, attributes["shape"]).copy()]


def _global_max_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    kernel = shape_of(ctx.inputs[0])[2:]
    return [ctx.add("MaxPoolGrad", ctx.inputs[0], ctx.grad, kernel_shape=kernel)]


register(
    Operator(
        "GlobalAveragePool",
        compute=_global_average,
        work=reading_bound,
        gradient=_global_average_gradient,
        sharding=_global_average_rule,
    )
)
register(
    Operator(
        "GlobalAveragePoolGrad",
        types=like_shape("GlobalAveragePoolGrad", 1),
        compute=_global_average_grad,
        work=memory_bound,
        sharding=_global_average_rule,
    )
)
register(Operator("GlobalMaxPool", work=reading_bound, gradient=_global_max_gradient, sharding=_plane_rule))
