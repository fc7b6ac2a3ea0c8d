"""Normalizations of [N, C, ...] images: batch (Ioffe and Szegedy 2015), instance, group, local response.

Batch normalization in training takes its statistics over the batch that a rank has, as data-parallel
training does in practice: dividing N changes the numbers (as a smaller batch would), not the work. The
running statistics are averaged over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from distsim.errors import TypeRuleError
from distsim.ir.op import Attributes, Value
from distsim.ir.type import Tensor
from distsim.ops.elementwise import grad_types
from distsim.ops.normalization import norm_work, normalized, normalized_grad, sum_to, widened
from distsim.ops.operator import (
    Array,
    Dim,
    GradientContext,
    Operator,
    ShardingRule,
    Signature,
    common_device,
    letters,
    register,
)
from distsim.ops.places import operands, picked, places

_BATCH = ("X", "scale", "B", "input_mean", "input_var")
_BATCH_9 = ("X", "scale", "B", "mean", "var")


def _channels(array: Array, rank: int, dtype: Any) -> Array:
    """Return a vector of C numbers so that it broadcasts against [N, C, ...]."""
    return array.astype(dtype, copy=False).reshape(-1, *(1,) * (rank - 2))


def _over(rank: int) -> tuple[int, ...]:
    return (0, *range(2, rank))


def _epsilon(attributes: Mapping[str, Any]) -> float:
    return float(attributes.get("epsilon", 1e-5))


# --- BatchNormalization(X, scale, B, mean, var) -> (Y, running mean, running var) --------------------


def _batch_formals(attributes: Mapping[str, Any]) -> tuple[str, ...]:
    return _BATCH_9 if "mean" in attributes or "var" in attributes else _BATCH


def _in_training(attributes: Mapping[str, Any]) -> bool:
    """Before operator set 14, an op with more outputs than one is in training."""
    return bool(attributes.get("training_mode", 0)) or int(attributes.get("outputs", 1)) > 1


def _batch(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    formals = _batch_formals(attributes)
    given = operands(formals, attributes, arrays)
    x = widened(given["X"])
    scale, bias, mean, var = (_channels(given[name], x.ndim, x.dtype) for name in formals[1:])
    if not _in_training(attributes):
        y = (x - mean) / np.sqrt(var + x.dtype.type(_epsilon(attributes))) * scale + bias
        return [y.astype(given["X"].dtype, copy=False)]
    xhat, now, _ = normalized(x, _over(x.ndim), _epsilon(attributes))
    spread = ((x - now) ** 2).mean(axis=_over(x.ndim))
    keep = float(attributes.get("momentum", 0.9))
    found = [now.reshape(-1), spread]
    old = [mean.reshape(-1), var.reshape(-1)]
    running = [keep * before + (1 - keep) * new for before, new in zip(old, found, strict=True)]
    y = (xhat * scale + bias).astype(given["X"].dtype, copy=False)
    stats = [array.astype(given[formals[3]].dtype, copy=False) for array in (*running, *found)]
    return [y, *stats][: int(attributes.get("outputs", 1))]


def _batch_labels(rank: int, attributes: Mapping[str, Any]) -> tuple[Dim, ...]:
    space: tuple[Dim, ...] = (None,) * (rank - 2) if _in_training(attributes) else letters(rank - 2, "s")
    return ("n", "c", *space)


def _batch_sharding(signature: Signature) -> ShardingRule:
    attributes = signature.attributes
    dims = _batch_labels(signature.inputs[0].rank, attributes)
    inputs = (dims, *(("c",),) * (len(signature.inputs) - 1))
    outputs = (dims, *(("c",),) * (len(signature.outputs) - 1))
    mean = ("n",) if _in_training(attributes) else ()
    return ShardingRule(inputs, outputs, (), mean)


def _batch_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    """The running statistics are not trained: they get no gradient."""
    if any(grad is not None for grad in ctx.grads[1:]):
        raise TypeRuleError("BatchNormalization: only its first output may influence the loss")
    training = _in_training(ctx.attributes)
    formals = _batch_formals(ctx.attributes)
    index = places(formals, ctx.attributes, len(ctx.inputs))
    needed = formals[:2] if training else (*formals[:2], *formals[3:])
    values = [ctx.inputs[index[name]] for name in needed if name in index]
    names = zip(_BATCH, formals, strict=True)
    static = {new: ctx.attributes[old] for new, old in names if old in ctx.attributes and new != "B"}
    options = {**picked(ctx.attributes, "epsilon"), **static, "training_mode": int(training)}
    made = ctx.add_many("BatchNormalizationGrad", *values, ctx.grad, **options)
    grads = {formals[0]: made[0], formals[1]: made[1], formals[2]: made[2]}
    return [grads.get(name) for name in index]


def _batch_grad_formals(attributes: Mapping[str, Any]) -> tuple[str, ...]:
    return ("X", "scale", "dy") if attributes["training_mode"] else ("X", "scale", *_BATCH[3:], "dy")


def _batch_grad_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if len(inputs) < 2 or inputs[0].shape != inputs[-1].shape:
        raise TypeRuleError(f"BatchNormalizationGrad takes X first and its gradient last, not {inputs}")
    x = inputs[0].on(common_device("BatchNormalizationGrad", inputs))
    vector = Tensor((inputs[1] if len(inputs) > 2 else x).dtype, (x.shape[1],), x.device)
    return (x, vector, vector)


def _batch_grad(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    given = operands(_batch_grad_formals(attributes), attributes, arrays)
    x, dy = widened(given["X"]), widened(given["dy"])
    axes = _over(x.ndim)
    scale = _channels(given["scale"], x.ndim, x.dtype)
    if attributes["training_mode"]:
        xhat, _, rate = normalized(x, axes, _epsilon(attributes))
        dx = normalized_grad(dy * scale, xhat, rate, axes)
    else:
        mean, var = (_channels(given[name], x.ndim, x.dtype) for name in _BATCH[3:])
        rate = 1 / np.sqrt(var + x.dtype.type(_epsilon(attributes)))
        xhat, dx = (x - mean) * rate, dy * scale * rate
    made = [dx, (dy * xhat).sum(axis=axes), dy.sum(axis=axes)]
    return [made[0].astype(given["X"].dtype, copy=False), *(g.astype(given["scale"].dtype) for g in made[1:])]


def _batch_grad_sharding(signature: Signature) -> ShardingRule:
    dims = _batch_labels(signature.inputs[0].rank, signature.attributes)
    vectors = (("c",),) * (len(signature.inputs) - 2)
    return ShardingRule((dims, *vectors, dims), (dims, ("c",), ("c",)), ((len(signature.inputs) - 1,),))


register(
    Operator(
        "BatchNormalization",
        compute=_batch,
        # Inference is one multiplication and one addition; training as in LayerNormalization.
        work=lambda s: norm_work(s, 7.0 if _in_training(s.attributes) else 2.0),
        gradient=_batch_gradient,
        sharding=_batch_sharding,
    )
)
register(
    Operator(
        "BatchNormalizationGrad",
        types=_batch_grad_types,
        compute=_batch_grad,
        work=lambda s: norm_work(s, 13.0 if s.attributes["training_mode"] else 5.0),
        sharding=_batch_grad_sharding,
    )
)

# --- InstanceNormalization(input, scale, B), GroupNormalization(X, scale, bias) ----------------------
# XGrad(x, scale, dy) -> (dx, dscale, dbias). An instance normalization has one group per channel.

Groups = Callable[[Mapping[str, Any], int], int]


def _grouped(x: Array, groups: int) -> Array:
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])


def _group_vector(array: Array, groups: int, x: Array) -> Array:
    """Return one number per group (operator set 18) or per channel (21) to broadcast."""
    shape = (groups, array.size // groups, *(1,) * (x.ndim - 2))
    return array.astype(x.dtype, copy=False).reshape(shape)


def _register_group(name: str, formals: tuple[str, str, str], count: Groups) -> None:
    grad_name = f"{name}Grad"

    def compute(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
        given = operands(formals, attributes, arrays)
        x = widened(given[formals[0]])
        groups = count(attributes, x.shape[1])
        xhat, _, _ = normalized(_grouped(x, groups), tuple(range(2, x.ndim + 1)), _epsilon(attributes))
        y = xhat * _group_vector(given[formals[1]], groups, x) + _group_vector(given[formals[2]], groups, x)
        return [y.reshape(x.shape).astype(arrays[0].dtype, copy=False)]

    def compute_grad(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
        x, scale, dy = widened(arrays[0]), arrays[1], widened(arrays[2])
        groups = count(attributes, x.shape[1])
        axes = tuple(range(2, x.ndim + 1))
        xhat, _, rate = normalized(_grouped(x, groups), axes, _epsilon(attributes))
        parts, vector = _grouped(dy, groups), _group_vector(scale, groups, x)
        dx = normalized_grad(parts * vector, xhat, rate, axes).reshape(x.shape)
        made = [sum_to(parts * xhat, vector.shape), sum_to(parts, vector.shape)]
        return [dx.astype(arrays[0].dtype), *(g.reshape(scale.shape).astype(scale.dtype) for g in made)]

    def gradient(ctx: GradientContext) -> Sequence[Value | None]:
        if len(ctx.inputs) != 3:
            raise TypeRuleError(f"{name}: the gradient needs its scale and bias as values")
        options = picked(ctx.attributes, "epsilon", "num_groups")
        return ctx.add_many(grad_name, ctx.inputs[0], ctx.inputs[1], ctx.grad, **options)

    def types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if len(inputs) != 3 or inputs[0].shape != inputs[2].shape:
            raise TypeRuleError(f"{grad_name} takes x, scale and a gradient of x's shape, not {inputs}")
        device = common_device(grad_name, inputs)
        return (inputs[0].on(device), inputs[1].on(device), inputs[1].on(device))

    def sharding(signature: Signature) -> ShardingRule:
        x = signature.inputs[0]
        groups = count(signature.attributes, x.shape[1])
        # The channels are divided by whole groups: seen to divide where scale has one number per group.
        channel: Dim = "c" if signature.inputs[1:2] and signature.inputs[1].size == groups else None
        dims: tuple[Dim, ...] = ("n", channel, *(None,) * (x.rank - 2))

        def localize(attributes: Attributes, outputs: tuple[tuple[int, ...], ...]) -> Attributes:
            if "num_groups" not in attributes:
                return attributes
            return Attributes({**attributes, "num_groups": groups * outputs[0][1] // x.shape[1]})

        def labels(tensors: Sequence[Tensor]) -> tuple[tuple[Dim, ...], ...]:
            return tuple(dims if tensor.rank == x.rank else (channel,) for tensor in tensors)

        linear = ((2,),) if signature.op_type == grad_name else ()
        inputs, outputs = labels(signature.inputs), labels(signature.outputs)
        return ShardingRule(inputs, outputs, linear, localize=localize)

    work, grad_work = 7.0, 13.0  # as in LayerNormalization
    register(
        Operator(
            name,
            compute=compute,
            work=lambda s: norm_work(s, work),
            gradient=gradient,
            sharding=sharding,
        )
    )
    register(
        Operator(
            grad_name,
            types=types,
            compute=compute_grad,
            work=lambda s: norm_work(s, grad_work),
            sharding=sharding,
        )
    )


_register_group("InstanceNormalization", ("input", "scale", "B"), lambda attributes, channels: channels)
_register_group(
    "GroupNormalization", ("X", "scale", "bias"), lambda attributes, channels: attributes["num_groups"]
)

# --- LRN(X; size, alpha, beta, bias): x / (bias + alpha / size * sum of squares of near channels)^beta -
# Krizhevsky et al. 2012, section 3.3. LRNGrad(x, dy) -> dx.


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


register(
    Operator(
        "LRN",
        compute=_lrn,
        # A square, a running sum of two operations, scale and offset, a power, a division.
        work=lambda s: norm_work(s, 7.0),
        gradient=lambda ctx: [ctx.maker.add("LRNGrad", (ctx.inputs[0], ctx.grad), ctx.attributes)[0]],
        sharding=_lrn_sharding,
    )
)
register(
    Operator(
        "LRNGrad",
        types=grad_types("LRNGrad"),
        compute=_lrn_grad,
        work=lambda s: norm_work(s, 14.0),
        sharding=_lrn_sharding,
    )
)
