"""Operators along one axis, which every rank has whole: ArgMax, ArgMin, TopK, CumSum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distsim.ir.value import Attributes, Value
from distsim.ops.elementwise import no_gradient
from distsim.ops.operator import (
    Array,
    Dim,
    GradientContext,
    Operator,
    ShardingRule,
    Signature,
    Work,
    bytes_of,
    letters,
    memory_bound,
    register,
)
from distsim.ops.places import ints, operands, picked, shape_of
from distsim.ops.reduction import kept_labels

# --- ArgMax, ArgMin ----------------------------------------------------------------------------------


def _whole_axis(attributes: Mapping[str, Any], rank: int, default: int) -> tuple[int, tuple[Dim, ...]]:
    axis = ints(attributes.get("axis", default))[0] % max(rank, 1)
    return axis, tuple(None if i == axis else dim for i, dim in enumerate(letters(rank)))


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


def _scan_work(signature: Signature) -> Work:
    """One comparison, or one addition, for every element that is read."""
    return Work(float(signature.inputs[0].size), bytes_of(signature.inputs), bytes_of(signature.outputs))


for _name, _function in (("ArgMax", np.argmax), ("ArgMin", np.argmin)):
    register(
        Operator(
            _name,
            compute=_arg(_function),
            work=_scan_work,
            gradient=no_gradient,
            sharding=_arg_sharding,
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
        work=_scan_work,
        gradient=_top_k_gradient,
        sharding=_top_k_sharding,
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
    )
)
