"""Operators that choose among numbers, element by element: Where, Clip, Max, Min, PRelu; Sum and Mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from distsim.errors import TypeRuleError
from distsim.ir.type import Tensor, as_tensor
from distsim.ir.value import Attributes, Literal, Value
from distsim.ops.bounds import broadcast_bounds, single_bounds
from distsim.ops.broadcast import (
    all_operands,
    both_operands,
    broadcast_rule,
    operand,
    sum_for,
)
from distsim.ops.onnx_bridge import static_array
from distsim.ops.operator import (
    Array,
    Bounds,
    GradientContext,
    Operator,
    Signature,
    Work,
    arity,
    common_device,
    memory_bound,
    register,
)
from distsim.ops.places import by_place, places, refuse, shape_of, wanted
from distsim.ops.shape import summed
from distsim.ops.sharding_rule import ShardingRule, letters

# --- Where -------------------------------------------------------------------------------------------

_WHERE = ("condition", "X", "Y")


def _is_zero(attributes: Attributes, name: str) -> bool:
    return name in attributes and not static_array(attributes[name], None).any()


def _where(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    index = places(_WHERE, attributes, len(arrays))
    numbers = [arrays[index[name]] for name in ("X", "Y") if name in index]
    like = numbers[0].dtype if numbers else None

    def given(name: str) -> Array:
        if name in index:
            return arrays[index[name]]
        if isinstance(attributes[name], Literal):
            return attributes[name].array
        return np.asarray(attributes[name], like)

    return [np.where(given("condition").astype(bool), given("X"), given("Y"))]


def _where_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    zero = Literal(np.zeros((), as_tensor(ctx.grad.type, "the gradient").dtype.np))
    condition = operand(_WHERE, ctx, "condition")
    chosen = () if condition is None else (condition,)
    static = {} if condition is not None else {"condition": ctx.attributes["condition"]}
    grads: dict[str, Value | None] = {}
    for name, other in (("X", "Y"), ("Y", "X")):
        if wanted(_WHERE, ctx, name):
            part = ctx.add("Where", *chosen, ctx.grad, **{other: zero}, **static)
            grads[name] = sum_for(ctx, _WHERE, name, part)
    return by_place(_WHERE, ctx, grads)


def _where_sharding(signature: Signature) -> ShardingRule:
    attributes = signature.attributes
    # With one choice static the other is linear only beside zeros.
    alone = tuple((name,) for name, other in (("X", "Y"), ("Y", "X")) if _is_zero(attributes, other))
    return broadcast_rule(signature, _WHERE, linear=(("X", "Y"), *alone))


register(
    Operator(
        "Where",
        compute=_where,
        work=memory_bound,
        gradient=_where_gradient,
        sharding=_where_sharding,
        formals=_WHERE,
    )
)

# --- Clip(input, min, max) and ClipGrad(input, min, max, dy) -----------------------------------------

_CLIP = ("input", "min", "max")


def _bounds(attributes: Attributes, arrays: Sequence[Array]) -> tuple[Array, Array | None, Array | None]:
    x, low, high = all_operands(_CLIP, attributes, arrays)
    if x is None:
        raise TypeRuleError("Clip has no input")
    return x, low, high


def _clip(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    made, low, high = _bounds(attributes, arrays)
    if low is not None:
        made = np.maximum(made, low)
    if high is not None:
        made = np.minimum(made, high)
    return [made.astype(arrays[0].dtype, copy=False)]


def _clip_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    refuse("Clip", _CLIP, ctx, "min", "max")
    options = {name: ctx.attributes[name] for name in ("min", "max", "absent") if name in ctx.attributes}
    return by_place(_CLIP, ctx, {"input": ctx.add("ClipGrad", *ctx.inputs, ctx.grad, **options)})


def _clip_grad_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if len(inputs) < 2 or inputs[0].shape != inputs[-1].shape:
        raise TypeRuleError(f"ClipGrad takes an input, its bounds and a gradient of its shape, not {inputs}")
    return (inputs[-1].on(common_device("ClipGrad", inputs)),)


def _clip_grad(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    x, low, high = _bounds(attributes, arrays[:-1])
    inside = np.ones(x.shape, bool)
    if low is not None:
        inside &= x >= low
    if high is not None:
        inside &= x <= high
    return [arrays[-1] * inside]


def _clip_sharding(signature: Signature) -> ShardingRule:
    linear = ((len(signature.inputs) - 1,),) if signature.op_type == "ClipGrad" else ()
    dims = letters(signature.outputs[0].rank)
    inputs = tuple(dims if t.rank else () for t in signature.inputs)  # the bounds are scalars
    return ShardingRule(inputs, (dims,), linear)


register(
    Operator(
        "Clip",
        compute=_clip,
        work=lambda s: memory_bound(s, 2.0),
        gradient=_clip_gradient,
        sharding=_clip_sharding,
        bounds=Bounds(_CLIP, single_bounds("Clip", "min", "max")),
    )
)
register(
    Operator(
        "ClipGrad",
        types=_clip_grad_types,
        compute=_clip_grad,
        work=lambda s: memory_bound(s, 3.0),
        sharding=_clip_sharding,
    )
)

# --- Max, Min, Sum, Mean of any number of values -----------------------------------------------------


def _fold(function: Callable[[Any, Any], Any], mean: bool = False) -> Any:
    def compute(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
        made = arrays[0]
        for array in arrays[1:]:
            made = np.asarray(function(made, array))
        return [made / len(arrays) if mean else made]

    return compute


def _variadic_work(signature: Signature) -> Work:
    return memory_bound(signature, max(1.0, len(signature.inputs) - 1.0))


def _extremum_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    made = ctx.add_many("ExtremumGrad", *ctx.inputs, ctx.outputs[0], ctx.grad)
    return [
        summed(ctx, grad, shape_of(value)) if needed else None
        for grad, value, needed in zip(made, ctx.inputs, ctx.wanted, strict=True)
    ]


def _extremum_grad_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if len(inputs) < 3 or inputs[-1].shape != inputs[-2].shape:
        raise TypeRuleError(f"ExtremumGrad takes values, the extremum and its gradient, not {inputs}")
    return (inputs[-1].on(common_device("ExtremumGrad", inputs)),) * (len(inputs) - 2)


def _extremum_grad(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    """Equal values share the gradient evenly."""
    *values, extremum, dy = arrays
    hits = [value == extremum for value in values]
    share = dy / np.maximum(np.sum(hits, axis=0), 1)
    return [(share * hit).astype(dy.dtype, copy=False) for hit in hits]


def _sum_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    grad = ctx.grad
    if ctx.op.op_type == "Mean":
        grad = ctx.add("Mul", grad, B=1.0 / len(ctx.inputs))
    return [
        summed(ctx, grad, shape_of(value)) if needed else None
        for value, needed in zip(ctx.inputs, ctx.wanted, strict=True)
    ]


for _name, _function in (("Max", np.maximum), ("Min", np.minimum)):
    register(
        Operator(
            _name,
            compute=_fold(_function),
            work=_variadic_work,
            gradient=_extremum_gradient,
            sharding=broadcast_rule,
        )
    )
for _name in ("Sum", "Mean"):
    register(
        Operator(
            _name,
            compute=_fold(np.add, mean=_name == "Mean"),
            work=_variadic_work,
            gradient=_sum_gradient,
            sharding=lambda s: replace(broadcast_rule(s), linear=(tuple(range(len(s.inputs))),)),
        )
    )
register(
    Operator(
        "ExtremumGrad",
        types=_extremum_grad_types,
        compute=_extremum_grad,
        work=lambda s: memory_bound(s, 3.0),
        sharding=lambda s: replace(broadcast_rule(s), linear=((len(s.inputs) - 1,),)),
    )
)

# --- PRelu(X, slope) and PReluGrad(X, slope, dy) -> (dX, dslope before its sum) ----------------------

_PRELU = ("X", "slope")


def _prelu(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    x, slope = both_operands(_PRELU, attributes, arrays)
    return [np.where(x < 0, slope * x, x).astype(x.dtype, copy=False)]


def _prelu_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    static = {"slope": ctx.attributes["slope"]} if "slope" in ctx.attributes else {}
    made = ctx.add_many("PReluGrad", *ctx.inputs, ctx.grad, **static)
    grads: dict[str, Value | None] = {}
    if wanted(_PRELU, ctx, "X"):
        grads["X"] = made[0]
    if wanted(_PRELU, ctx, "slope"):
        grads["slope"] = sum_for(ctx, _PRELU, "slope", made[1])
    return by_place(_PRELU, ctx, grads)


def _prelu_grad_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    arity("PReluGrad", inputs, 3 - ("slope" in attributes))
    if inputs[0].shape != inputs[-1].shape:
        raise TypeRuleError(f"PReluGrad: {inputs[0]} and its gradient {inputs[-1]} must agree")
    grad = inputs[-1].on(common_device("PReluGrad", inputs))
    return (grad,) if "slope" in attributes else (grad, grad)


def _prelu_grad(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    dy = arrays[-1]
    x, slope = both_operands(_PRELU, attributes, arrays[:-1])
    made = [np.where(x < 0, slope * dy, dy), np.where(x < 0, x * dy, 0)]
    return [grad.astype(dy.dtype, copy=False) for grad in made[: 1 if "slope" in attributes else 2]]


register(
    Operator(
        "PRelu",
        compute=_prelu,
        work=memory_bound,
        gradient=_prelu_gradient,
        sharding=lambda s: broadcast_rule(s, _PRELU),
        formals=_PRELU,
        bounds=Bounds(_PRELU, broadcast_bounds("PRelu", "slope")),
    )
)
register(
    Operator(
        "PReluGrad",
        types=_prelu_grad_types,
        compute=_prelu_grad,
        work=lambda s: memory_bound(s, 2.0),
        sharding=lambda s: broadcast_rule(s, (*_PRELU, "dy"), static=(("dy",),)),
    )
)
