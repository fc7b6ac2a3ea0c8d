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
from distsim.ops.elementwise import no_gradient
from distsim.ops.operator import (
    Array,
    Bounds,
    GradientContext,
    Operator,
    Signature,
    arity,
    common_device,
    memory_bound,
    reading_bound,
    register,
)
from distsim.ops.places import ints, operands, picked, shape_of
from distsim.ops.shape import reshaped
from distsim.ops.sharding_rule import Dim, ShardingRule, letters_but

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
        dims = letters_but(rank, () if entry.additive or entry.mean else axes)
        averaged = tuple(name for i, name in enumerate(dims) if i in axes and isinstance(name, str))
        out = kept_labels(dims, axes, signature.attributes)
        linear = ((0,),) if entry.slope is None else ()
        return ShardingRule((dims,), (out,), linear, averaged if entry.mean else ())

    rule = linear_gradient if entry.slope is None else gradient
    register(
        Operator(
            entry.name,
            compute=compute,
            work=lambda s: reading_bound(s, entry.flops),
            gradient=rule,
            sharding=sharding,
        )
    )
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
        dims = letters_but(rank, () if entry.pointwise else axes)
        kept = kept_labels(dims, axes, signature.attributes)
        return ShardingRule((dims, kept, kept), (dims,), ((2,),))

    register(
        Operator(
            op_type, types=types, compute=compute, work=lambda s: reading_bound(s, 2.0), sharding=sharding
        )
    )


for _entry in REDUCTIONS:
    _register(_entry)


# --- what selects along one axis, which every rank has whole ------------------------------------------

# --- ArgMax, ArgMin ----------------------------------------------------------------------------------


def _whole_axis(attributes: Mapping[str, Any], rank: int, default: int) -> tuple[int, tuple[Dim, ...]]:
    axis = ints(attributes.get("axis", default))[0] % max(rank, 1)
    return axis, letters_but(rank, (axis,))


def _arg(function: Any) -> Any:
    def compute(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
        x, axis = arrays[0], attributes.get("axis", 0)
        if attributes.get("select_last_index", 0):
            made = x.shape[axis] - 1 - function(np.flip(x, axis), axis=axis, keepdims=True)
        else:
            made = function(x, axis=axis, keepdims=True)
        made = np.asarray(made).astype(np.int64)
        return [made if attributes.get("keepdims", 1) else made.squeeze(axis)]

    return compute


def _arg_sharding(signature: Signature) -> ShardingRule:
    axis, dims = _whole_axis(signature.attributes, signature.inputs[0].rank, 0)
    return ShardingRule((dims,), (kept_labels(dims, (axis,), signature.attributes),))


for _name, _function in (("ArgMax", np.argmax), ("ArgMin", np.argmin)):
    register(
        Operator(
            _name,
            compute=_arg(_function),
            work=reading_bound,
            gradient=no_gradient,
            sharding=_arg_sharding,
            bounds=Bounds(axes=(0, 0)),
        )
    )

# --- TopK(X, K; axis, largest, sorted) -> (values, indices) ------------------------------------------


def _top_k(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    """Equal elements come in the order of their places, the lower place first, as ONNX has it."""
    x, axis = arrays[0], attributes.get("axis", -1)
    given = operands(("X", "K"), attributes, arrays)
    count = int(given["K"].reshape(())) if "K" in given else int(attributes["k"])
    if attributes.get("largest", 1):  # a stable sort from the back keeps the order of equal elements
        order = x.shape[axis] - 1 - np.argsort(np.flip(x, axis), axis=axis, kind="stable")
        order = np.flip(order, axis)
    else:
        order = np.argsort(x, axis=axis, kind="stable")
    places = np.take(order, np.arange(count), axis=axis)
    return [np.take_along_axis(x, places, axis=axis), places.astype(np.int64)]


def _top_k_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    rest = [None] * (len(ctx.inputs) - 1)
    if ctx.grads[0] is None:
        return [None, *rest]
    options = {"axis": -1, **picked(ctx.attributes, "axis")}
    shape = shape_of(ctx.inputs[0])
    return [ctx.add("GatherElementsGrad", ctx.outputs[1], ctx.grad, shape=shape, **options), *rest]


def _top_k_sharding(signature: Signature) -> ShardingRule:
    _, dims = _whole_axis(signature.attributes, signature.inputs[0].rank, -1)
    others = tuple((None,) * tensor.rank for tensor in signature.inputs[1:])
    return ShardingRule((dims, *others), (dims, dims))


register(
    Operator(
        "TopK",
        compute=_top_k,
        work=reading_bound,
        gradient=_top_k_gradient,
        sharding=_top_k_sharding,
        bounds=Bounds(axes=(0, 0)),
    )
)

# --- CumSum(x, axis; exclusive, reverse) -------------------------------------------------------------


def _cum_sum(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    given = operands(("x", "axis"), attributes, arrays)
    x, axis = given["x"], int(given["axis"].reshape(()))
    if attributes.get("reverse", 0):
        x = np.flip(x, axis)
    made = np.cumsum(x, axis=axis, dtype=x.dtype)
    if attributes.get("exclusive", 0):
        made = made - x
    return [np.flip(made, axis) if attributes.get("reverse", 0) else made]


def _cum_sum_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    """What element i adds to every later sum comes back as the sum over what is later: the other way."""
    options = {**ctx.attributes, "reverse": int(not ctx.attributes.get("reverse", 0))}
    rest = ctx.inputs[1:]
    return [ctx.maker.add("CumSum", (ctx.grad, *rest), options)[0], *(None for _ in rest)]


def _cum_sum_sharding(signature: Signature) -> ShardingRule:
    rank = signature.inputs[0].rank
    if "axis" not in signature.attributes:
        whole: tuple[Dim, ...] = (None,) * rank
        return ShardingRule((whole, (None,) * signature.inputs[1].rank), (whole,), ((0,),))
    _, dims = _whole_axis(signature.attributes, rank, 0)
    return ShardingRule((dims,), (dims,), ((0,),))


register(
    Operator(
        "CumSum",
        compute=_cum_sum,
        work=memory_bound,
        gradient=_cum_sum_gradient,
        sharding=_cum_sum_sharding,
        bounds=Bounds(axes=(0, 0)),
    )
)
