"""Normalizations of [N, C, ...] per sample: InstanceNormalization (Ulyanov et al. 2016), GroupNormalization
(Wu and He 2018), and the local response normalization LRN (Krizhevsky et al. 2012, section 3.3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distsim.errors import TypeRuleError
from distsim.ir.type import Tensor
from distsim.ir.value import Attributes, Value
from distsim.ops.batch_norm import channel_vectors
from distsim.ops.bounds import at_least, require
from distsim.ops.broadcast import sum_to
from distsim.ops.elementwise import grad_types as two_alike
from distsim.ops.normalization import epsilon_of, normalized, normalized_grad, widened
from distsim.ops.operator import (
    Array,
    Bounds,
    GradientContext,
    Operator,
    Shapes,
    Signature,
    common_device,
    reading_bound,
    register,
)
from distsim.ops.places import operands, picked
from distsim.ops.sharding_rule import Dim, ShardingRule, letters

Groups = Callable[[Mapping[str, Any], int], int]
"""(attributes, channels) -> number of groups."""

# --- InstanceNormalization(input, scale, B), GroupNormalization(X, scale, bias) ----------------------
# XGrad(x, scale, dy) -> (dx, dscale, dbias). An instance normalization has one group per channel.


def _grouped(x: Array, groups: int) -> Array:
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])


def _group_vector(array: Array, groups: int, x: Array) -> Array:
    """Return one number per group (operator set 18) or per channel (21) to broadcast."""
    shape = (groups, array.size // groups, *(1,) * (x.ndim - 2))
    return array.astype(x.dtype, copy=False).reshape(shape)


_FLOPS, _GRAD_FLOPS = 7.0, 13.0  # per element, as in LayerNormalization


@dataclass(frozen=True)
class _GroupNormKind:
    """A normalization of every sample over groups of channels."""

    name: str
    formals: tuple[str, str, str]
    count: Groups

    @property
    def grad_name(self) -> str:
        return f"{self.name}Grad"

    def compute(self, attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
        given = operands(self.formals, attributes, arrays)
        x = widened(given[self.formals[0]])
        groups = self.count(attributes, x.shape[1])
        xhat, _, _ = normalized(_grouped(x, groups), tuple(range(2, x.ndim + 1)), epsilon_of(attributes))
        y = xhat * _group_vector(given[self.formals[1]], groups, x) + _group_vector(
            given[self.formals[2]], groups, x
        )
        return [y.reshape(x.shape).astype(arrays[0].dtype, copy=False)]

    def compute_grad(self, attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
        x, scale, dy = widened(arrays[0]), arrays[1], widened(arrays[2])
        groups = self.count(attributes, x.shape[1])
        axes = tuple(range(2, x.ndim + 1))
        xhat, _, rate = normalized(_grouped(x, groups), axes, epsilon_of(attributes))
        parts, vector = _grouped(dy, groups), _group_vector(scale, groups, x)
        dx = normalized_grad(parts * vector, xhat, rate, axes).reshape(x.shape)
        made = [sum_to(parts * xhat, vector.shape), sum_to(parts, vector.shape)]
        return [dx.astype(arrays[0].dtype), *(g.reshape(scale.shape).astype(scale.dtype) for g in made)]

    def gradient(self, ctx: GradientContext) -> Sequence[Value | None]:
        if len(ctx.inputs) != 3:
            raise TypeRuleError(f"{self.name}: the gradient needs its scale and bias as values")
        options = picked(ctx.attributes, "epsilon", "num_groups")
        return ctx.add_many(self.grad_name, ctx.inputs[0], ctx.inputs[1], ctx.grad, **options)

    def types(self, attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not inputs or len(inputs) + sum(formal in attributes for formal in self.formals) != 3:
            raise TypeRuleError(f"{self.name} takes {', '.join(self.formals)}, {len(inputs)} values given")
        channels = inputs[0].shape[1] if inputs[0].rank > 1 else 0
        groups = self.count(attributes, channels)
        channel_vectors(self.name, inputs[0], (channels, groups), inputs[1:])
        if channels % groups:
            raise TypeRuleError(f"{self.name}: {groups} groups do not divide {channels} channels")
        return (inputs[0].on(common_device(self.name, inputs)),)

    def grad_types(self, attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if len(inputs) != 3 or inputs[0].shape != inputs[2].shape:
            raise TypeRuleError(f"{self.grad_name} takes x, scale and a gradient of x's shape, not {inputs}")
        device = common_device(self.grad_name, inputs)
        return (inputs[0].on(device), inputs[1].on(device), inputs[1].on(device))

    def sharding(self, signature: Signature) -> ShardingRule:
        x = signature.inputs[0]
        groups = self.count(signature.attributes, x.shape[1])
        static = any(name in signature.attributes for name in self.formals)
        # The channels are divided by whole groups: seen to divide where scale has one number per group.
        channel: Dim = "c" if not static and signature.inputs[1].size == groups else None
        dims: tuple[Dim, ...] = ("n", channel, *(None,) * (x.rank - 2))

        def localize(attributes: Attributes, outputs: tuple[tuple[int, ...], ...]) -> Attributes:
            if "num_groups" not in attributes:
                return attributes
            return Attributes({**attributes, "num_groups": groups * outputs[0][1] // x.shape[1]})

        def labels(tensors: Sequence[Tensor]) -> tuple[tuple[Dim, ...], ...]:
            return tuple(dims if tensor.rank == x.rank else (channel,) for tensor in tensors)

        linear = ((2,),) if signature.op_type == self.grad_name else ()
        inputs, outputs = labels(signature.inputs), labels(signature.outputs)
        return ShardingRule(inputs, outputs, linear, localize=localize)


def _group_bounds(op_type: str, names: tuple[str, str, str]) -> Bounds:
    """A vector with a number for each channel, or, before operator set 21, each group."""

    def check(attributes: Attributes, shapes: Shapes) -> None:
        groups = attributes.get("num_groups", 1)
        at_least(op_type, "num_groups", groups, 1)
        shape = shapes[names[0]]
        require(len(shape) > 1, f"{op_type} takes [N, C, ...], not {list(shape)}")
        sizes = {shape[1], groups} if op_type == "GroupNormalization" else {shape[1]}
        for name in names[1:]:
            given = shapes.get(name, shape[1:2])
            require(
                len(given) == 1 and given[0] in sizes,
                f"{op_type}: {name} {list(given)} must be a vector for the channels of {list(shape)}",
            )

    return Bounds(names, check)


def _register(kind: _GroupNormKind) -> None:
    register(
        Operator(
            kind.name,
            types=kind.types,
            compute=kind.compute,
            work=lambda s: reading_bound(s, _FLOPS),
            gradient=kind.gradient,
            sharding=kind.sharding,
            formals=kind.formals,
            bounds=_group_bounds(kind.name, kind.formals),
        )
    )
    register(
        Operator(
            kind.grad_name,
            types=kind.grad_types,
            compute=kind.compute_grad,
            work=lambda s: reading_bound(s, _GRAD_FLOPS),
            sharding=kind.sharding,
        )
    )


_register(
    _GroupNormKind("InstanceNormalization", ("input", "scale", "B"), lambda attributes, channels: channels)
)
_register(
    _GroupNormKind(
        "GroupNormalization", ("X", "scale", "bias"), lambda attributes, _: attributes["num_groups"]
    )
)

# --- LRN(X; size, alpha, beta, bias): x / (bias + alpha / size * sum of squares of near channels)^beta -
# LRNGrad(x, dy) -> dx.


def _near(x: Array, before: int, after: int) -> Array:
    """Return the sum over the channels from ``before`` places back to ``after`` places ahead."""
    total = np.cumsum(np.pad(x, [(0, 0), (before + 1, after), *((0, 0),) * (x.ndim - 2)]), axis=1)
    size = before + after + 1
    return total[:, size:] - total[:, :-size]


def _lrn_base(attributes: Attributes, x: Array) -> tuple[Array, int, int, float, float]:
    size = int(attributes["size"])
    before, after = (size - 1) // 2, math.ceil((size - 1) / 2)
    rate, beta = float(attributes.get("alpha", 1e-4)) / size, float(attributes.get("beta", 0.75))
    base = float(attributes.get("bias", 1.0)) + rate * _near(x * x, before, after)
    return base, before, after, rate, beta


def _lrn(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    x = widened(arrays[0])
    base, _, _, _, beta = _lrn_base(attributes, x)
    return [(x / base**beta).astype(arrays[0].dtype, copy=False)]


def _lrn_grad(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    x, dy = widened(arrays[0]), widened(arrays[1])
    base, before, after, rate, beta = _lrn_base(attributes, x)
    # Channel j feels i when i is near j: the window the other way round.
    felt = _near(dy * x * base ** (-beta - 1), after, before)
    return [(dy * base**-beta - 2 * rate * beta * x * felt).astype(arrays[1].dtype, copy=False)]


def _lrn_sharding(signature: Signature) -> ShardingRule:
    rank = signature.inputs[0].rank
    dims: tuple[Dim, ...] = ("n", None, *letters(rank - 2, "s"))
    linear = ((1,),) if len(signature.inputs) == 2 else ()
    return ShardingRule((dims,) * len(signature.inputs), (dims,), linear)


def _lrn_bounds(attributes: Attributes, shapes: Shapes) -> None:
    at_least("LRN", "size", attributes.get("size", 0), 1)


register(
    Operator(
        "LRN",
        compute=_lrn,
        # A square, a running sum of two operations, scale and offset, a power, a division.
        work=lambda s: reading_bound(s, 7.0),
        gradient=lambda ctx: [ctx.maker.add("LRNGrad", (ctx.inputs[0], ctx.grad), ctx.attributes)[0]],
        sharding=_lrn_sharding,
        bounds=Bounds(("X",), _lrn_bounds),
    )
)
register(
    Operator(
        "LRNGrad",
        types=two_alike("LRNGrad"),
        compute=_lrn_grad,
        work=lambda s: reading_bound(s, 14.0),
        sharding=_lrn_sharding,
    )
)
