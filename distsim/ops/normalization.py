"""LayerNormalization (Ba et al. 2016) and RMSNormalization (Zhang and Sennrich 2019), and the gradient
that all normalizations share.

With xhat = (x - mean) / sqrt(var + epsilon) over some axes and y = xhat * scale + bias, the gradient is
dx = (g - mean(g) - xhat mean(g xhat)) / sqrt(var + epsilon), where g = dy * scale; without centring the
term mean(g) is absent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distsim.errors import TypeRuleError
from distsim.ir.type import DType, Float32, Tensor
from distsim.ir.value import Attributes, Value
from distsim.ops.bounds import broadcast_bounds
from distsim.ops.broadcast import aligned, sum_to, whole_where_static
from distsim.ops.operator import (
    Array,
    Bounds,
    GradientContext,
    Operator,
    Signature,
    common_device,
    reading_bound,
    register,
)
from distsim.ops.places import by_place, operands, picked, places, shape_of, wanted
from distsim.ops.shape import summed
from distsim.ops.sharding_rule import Dim, ShardingRule, letters

Axes = tuple[int, ...]


def wider(dtype: DType) -> DType:
    """Return the type in which statistics of numbers of a type are taken: float32 at least."""
    return dtype if dtype.itemsize >= 4 else Float32()


def widened(x: Array) -> Array:
    """Return ``x`` in the precision that statistics are taken in: at least float32."""
    return x if x.dtype.kind == "f" and x.dtype.itemsize >= 4 else x.astype(np.float32)


def normalized(x: Array, axes: Axes, epsilon: float, center: bool = True) -> tuple[Array, Array, Array]:
    """Return xhat, the mean and 1 / sqrt(variance + epsilon) over ``axes``, which are kept."""
    mean = x.mean(axis=axes, keepdims=True) if center else np.zeros((), x.dtype)
    middle = x - mean
    rate = 1 / np.sqrt((middle * middle).mean(axis=axes, keepdims=True) + x.dtype.type(epsilon))
    return middle * rate, mean, rate


def normalized_grad(g: Array, xhat: Array, rate: Array, axes: Axes, center: bool = True) -> Array:
    """Return dx from g = dy * scale."""
    made = g - xhat * (g * xhat).mean(axis=axes, keepdims=True)
    if center:
        made = made - g.mean(axis=axes, keepdims=True)
    return made * rate


def _axis(attributes: Mapping[str, Any], rank: int) -> int:
    return int(attributes.get("axis", -1)) % rank


def epsilon_of(attributes: Mapping[str, Any]) -> float:
    """Return what is added to the variance."""
    return float(attributes.get("epsilon", 1e-5))


@dataclass(frozen=True)
class _LayerNormKind:
    """A normalization over the trailing dimensions from ``axis`` on."""

    name: str
    formals: tuple[str, ...]
    center: bool
    flops: float
    grad_flops: float

    @property
    def scale_name(self) -> str:
        return self.formals[1]

    @property
    def grad_name(self) -> str:
        return f"{self.name}Grad"

    def compute(self, attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
        given = operands(self.formals, attributes, arrays)
        x = widened(given["X"])
        axes = tuple(range(_axis(attributes, x.ndim), x.ndim))
        xhat, mean, rate = normalized(x, axes, epsilon_of(attributes), self.center)
        y = xhat * given[self.scale_name].astype(x.dtype, copy=False)
        if "B" in given:
            y = y + given["B"].astype(x.dtype, copy=False)
        # The statistics come in float32 (stash_type), whatever they were taken in.
        made = [y.astype(given["X"].dtype, copy=False), mean.astype(np.float32), rate.astype(np.float32)]
        return made[: int(attributes.get("outputs", 1))]

    def gradient(self, ctx: GradientContext) -> Sequence[Value | None]:
        if any(grad is not None for grad in ctx.grads[1:]):
            raise TypeRuleError(f"{self.name}: only its first output may influence the loss")
        index = places(self.formals, ctx.attributes, len(ctx.inputs))
        shapes = {name: shape_of(ctx.inputs[i]) for name, i in index.items()}
        fused = wanted(self.formals, ctx, "B") and shapes["B"] == shapes.get(self.scale_name)
        values = [ctx.inputs[index[name]] for name in ("X", self.scale_name) if name in index]
        options = picked(ctx.attributes, "axis", "epsilon", self.scale_name)
        if fused:
            options["bias"] = 1
        made = ctx.add_many(self.grad_name, *values, ctx.grad, **options)
        grads: dict[str, Value | None] = dict(
            zip((n for n in ("X", self.scale_name) if n in index), made, strict=False)
        )
        if fused:
            grads["B"] = made[-1]
        elif wanted(self.formals, ctx, "B"):
            grads["B"] = summed(ctx, ctx.grad, shapes["B"])
        return by_place(self.formals, ctx, grads)

    def sharding(self, signature: Signature) -> ShardingRule:
        x = signature.inputs[0]
        axis = _axis(signature.attributes, x.rank)
        dims: tuple[Dim, ...] = (*letters(axis), *(None,) * (x.rank - axis))
        dims = whole_where_static(self.formals[1:], signature.attributes, x.shape, dims)
        inputs = tuple(aligned(tensor.shape, x.shape, dims) for tensor in signature.inputs)
        return ShardingRule(inputs, (dims,) * len(signature.outputs))

    def grad_types(self, attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if len(inputs) + (self.scale_name in attributes) != 3 or inputs[0].shape != inputs[-1].shape:
            raise TypeRuleError(
                f"{self.grad_name} takes X, {self.scale_name} and a gradient of X's shape, not {inputs}"
            )
        device = common_device(self.grad_name, inputs)
        made = [tensor.on(device) for tensor in inputs[:-1]]
        return (*made, *([made[-1]] if attributes.get("bias", 0) else []))

    def grad_compute(self, attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
        given = operands(("X", self.scale_name, "dy"), attributes, arrays)
        x, scale, dy = (widened(given[name]) for name in ("X", self.scale_name, "dy"))
        axes = tuple(range(_axis(attributes, x.ndim), x.ndim))
        xhat, _, rate = normalized(x, axes, epsilon_of(attributes), self.center)
        made = [normalized_grad(dy * scale, xhat, rate, axes, self.center)]
        if self.scale_name not in attributes:
            made.append(sum_to(dy * xhat, scale.shape))
        if attributes.get("bias", 0):
            made.append(sum_to(dy, scale.shape))
        return [array.astype(arrays[0].dtype, copy=False) for array in made]

    def grad_sharding(self, signature: Signature) -> ShardingRule:
        rule = self.sharding(signature)
        made = list(rule.inputs[:-1])
        if signature.attributes.get("bias", 0):
            made.append(made[-1])
        return ShardingRule(rule.inputs, tuple(made), ((len(rule.inputs) - 1,),))

    def own_types(self, attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if len(inputs) + (self.scale_name in attributes) != 2:
            raise TypeRuleError(f"{self.name} takes X and {self.scale_name}, {len(inputs)} values given")
        return (inputs[0].on(common_device(self.name, inputs)),)


def _register(kind: _LayerNormKind) -> None:
    register(
        Operator(
            kind.name,
            # ONNX has RMSNormalization since operator set 23, above the house version.
            types=kind.own_types if not kind.center else None,
            compute=kind.compute,
            work=lambda s: reading_bound(s, kind.flops),
            gradient=kind.gradient,
            sharding=kind.sharding,
            formals=kind.formals,
            bounds=Bounds(kind.formals, broadcast_bounds(kind.name, *kind.formals[1:]), axes=(0, 0)),
        )
    )
    register(
        Operator(
            kind.grad_name,
            types=kind.grad_types,
            compute=kind.grad_compute,
            work=lambda s: reading_bound(s, kind.grad_flops),
            sharding=kind.grad_sharding,
        )
    )


# Per element, forward: sum, subtract, square and add, times rate, times scale, plus bias. Backward: xhat
# again (2), g (1), the two means (3), dx (4), dscale (2), dbias (1). RMS: what is left without the mean.
_LAYER = _LayerNormKind("LayerNormalization", ("X", "Scale", "B"), center=True, flops=7, grad_flops=13)
_RMS = _LayerNormKind("RMSNormalization", ("X", "scale"), center=False, flops=4, grad_flops=9)
_register(_LAYER)
_register(_RMS)
