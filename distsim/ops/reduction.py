"""Reductions over axes: sums, means, norms, extrema; and what selects along an axis: ArgMax, TopK, CumSum.

A reduction that is a sum of what ranks have may divide the reduced axes: the result is partial. The
others need these axes whole. ``XGrad(x, y, dy)`` is the gradient of a reduction X that is not linear.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distsim.errors import TypeRuleError
from distsim.ir.type import Tensor
from distsim.ir.value import Attributes, Value
from distsim.ops.operator import (
    Array,
    Dim,
    GradientContext,
    Operator,
    ShardingRule,
    Signature,
    Work,
    arity,
    bytes_of,
    common_device,
    letters,
    register,
)
from distsim.ops.places import ints, picked, shape_of
from distsim.ops.shape import reshaped

Axes = tuple[int, ...]


def reduced_axes(attributes: Mapping[str, Any], rank: int) -> Axes:
    """Return the axes that a reduction of a tensor of ``rank`` dimensions takes, sorted.

    >>> reduced_axes({"axes": (-1, 0)}, 3), reduced_axes({}, 2)
    ((0, 2), (0, 1))
    """
    axes = ints(attributes["axes"]) if "axes" in attributes else ()
    if not axes:
        return () if attributes.get("noop_with_empty_axes", 0) else tuple(range(rank))
    return tuple(sorted({axis % rank for axis in axes}))


@dataclass(frozen=True)
class Reduction:
    """A reduction ``f(x, axes)``, computed with the reduced axes kept at size 1.

    ``slope(x, y, axes)`` is the derivative of y by x, None for those that are linear. ``additive``: the
    whole is the sum over the parts of a reduced axis; ``mean``: the average over them. ``pointwise``:
    the slope at an element needs no other element than y.
    """

    name: str
    f: Callable[[Any, Axes], Any]
    slope: Callable[[Any, Any, Axes], Any] | None = None
    additive: bool = False
    mean: bool = False
    pointwise: bool = True
    flops: float = 1.0


def _sum(x: Any, axes: Axes) -> Any:
    return x.sum(axis=axes, keepdims=True, dtype=x.dtype)


def _log_sum_exp(x: Any, axes: Axes) -> Any:
    top = x.max(axis=axes, keepdims=True)
    top = np.where(np.isfinite(top), top, 0).astype(x.dtype, copy=False)
    return np.log(_sum(np.exp(x - top), axes)) + top


def _share(x: Any, y: Any, axes: Axes) -> Any:
    """Elements that equal the extremum share its gradient evenly."""
    hits = x == y
    return hits / np.maximum(hits.sum(axis=axes, keepdims=True), 1)


def _product_of_others(x: Any, y: Any, axes: Axes) -> Any:
    """The product of all other elements, also where there are zeros."""
    zeros = (x == 0).sum(axis=axes, keepdims=True)
    filled = np.where(x == 0, 1, x)
    product = filled.prod(axis=axes, keepdims=True)
    return np.where(zeros == 0, y / filled, np.where((zeros == 1) & (x == 0), product, 0))


REDUCTIONS: tuple[Reduction, ...] = (
    Reduction("ReduceSum", _sum, additive=True),
    Reduction("ReduceMean", lambda x, axes: x.mean(axis=axes, keepdims=True), mean=True),
    Reduction("ReduceMax", lambda x, axes: x.max(axis=axes, keepdims=True), _share, pointwise=False),
    Reduction("ReduceMin", lambda x, axes: x.min(axis=axes, keepdims=True), _share, pointwise=False),
    Reduction(
        "ReduceProd",
        lambda x, axes: x.prod(axis=axes, keepdims=True, dtype=x.dtype),
        _product_of_others,
        pointwise=False,
    ),
    Reduction(
        "ReduceL1", lambda x, axes: _sum(np.abs(x), axes), lambda x, y, axes: np.sign(x), additive=True
    ),
    Reduction(
        "ReduceL2",
        lambda x, axes: np.sqrt(_sum(x * x, axes)),
        lambda x, y, axes: x / np.where(y == 0, 1, y),
        flops=2,
    ),
    Reduction(
        "ReduceSumSquare",
        lambda x, axes: _sum(x * x, axes),
        lambda x, y, axes: 2 * x,
        additive=True,
        flops=2,
    ),
    Reduction("ReduceLogSum", lambda x, axes: np.log(_sum(x, axes)), lambda x, y, axes: np.exp(-y)),
    Reduction("ReduceLogSumExp", _log_sum_exp, lambda x, y, axes: np.exp(x - y), flops=3),
)


def kept_labels(dims: Sequence[Dim], axes: Axes, attributes: Mapping[str, Any]) -> tuple[Dim, ...]:
    """Return the labels of what a reduction of ``dims`` makes."""
    if attributes.get("keepdims", 1):
        return tuple(None if i in axes else dim for i, dim in enumerate(dims))
    return tuple(dim for i, dim in enumerate(dims) if i not in axes)


def _kept_shape(shape: Sequence[int], axes: Axes) -> tuple[int, ...]:
    return tuple(1 if i in axes else n for i, n in enumerate(shape))


def _register(entry: Reduction) -> None:
    grad_name = f"{entry.name}Grad"

    def compute(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
        x = arrays[0]
        axes = reduced_axes(attributes, x.ndim)
        made = np.asarray(entry.f(x, axes)).astype(x.dtype, copy=False)
        return [made if attributes.get("keepdims", 1) else made.squeeze(axes)]

    def work(signature: Signature) -> Work:
        flops = entry.flops * signature.inputs[0].size
        return Work(flops, bytes_of(signature.inputs), bytes_of(signature.outputs))

    def gradient(ctx: GradientContext) -> Sequence[Value | None]:
        options = picked(ctx.attributes, "axes", "keepdims", "noop_with_empty_axes")
        dx = ctx.add(grad_name, ctx.inputs[0], ctx.outputs[0], ctx.grad, **options)
        return [dx]

    def linear_gradient(ctx: GradientContext) -> Sequence[Value | None]:
        shape = shape_of(ctx.inputs[0])
        kept = _kept_shape(shape, reduced_axes(ctx.attributes, len(shape)))
        grad = reshaped(ctx, ctx.grad, kept)
        if entry.mean:
            grad = ctx.add("Mul", grad, B=float(np.prod(kept) / np.prod(shape)))
        if kept != shape:
            grad = ctx.add("Expand", grad, shape=shape)
        return [grad]

    def sharding(signature: Signature) -> ShardingRule:
        rank = signature.inputs[0].rank
        axes = reduced_axes(signature.attributes, rank)
        dims: tuple[Dim, ...] = letters(rank)
        if not (entry.additive or entry.mean):
            dims = tuple(None if i in axes else dim for i, dim in enumerate(dims))
        averaged = tuple(name for i, name in enumerate(dims) if i in axes and isinstance(name, str))
        out = kept_labels(dims, axes, signature.attributes)
        linear = ((0,),) if entry.slope is None else ()
        return ShardingRule((dims,), (out,), linear, averaged if entry.mean else ())

    rule = linear_gradient if entry.slope is None else gradient
    register(Operator(entry.name, compute=compute, work=work, gradient=rule, sharding=sharding))
    if entry.slope is not None:
        _register_grad(entry, grad_name, entry.slope)


def _register_grad(entry: Reduction, op_type: str, slope: Callable[[Any, Any, Axes], Any]) -> None:
    def types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        arity(op_type, inputs, 3)
        if inputs[1].shape != inputs[2].shape:
            raise TypeRuleError(f"{op_type}: the result {inputs[1]} and its gradient {inputs[2]} must agree")
        return (inputs[0].on(common_device(op_type, inputs)),)

    def compute(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
        x, y, dy = arrays
        axes = reduced_axes(attributes, x.ndim)
        kept = _kept_shape(x.shape, axes)
        made = dy.reshape(kept) * slope(x, y.reshape(kept), axes)
        return [np.broadcast_to(made, x.shape).astype(dy.dtype)]

    def sharding(signature: Signature) -> ShardingRule:
        rank = signature.inputs[0].rank
        axes = reduced_axes(signature.attributes, rank)
        dims: tuple[Dim, ...] = letters(rank)
        if not entry.pointwise:
            dims = tuple(None if i in axes else dim for i, dim in enumerate(dims))
        kept = kept_labels(dims, axes, signature.attributes)
        return ShardingRule((dims, kept, kept), (dims,), ((2,),))

    def work(signature: Signature) -> Work:
        flops = 2.0 * signature.inputs[0].size
        return Work(flops, bytes_of(signature.inputs), bytes_of(signature.outputs))

    register(Operator(op_type, types=types, compute=compute, work=work, sharding=sharding))


for _entry in REDUCTIONS:
    _register(_entry)
