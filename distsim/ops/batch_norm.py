"""BatchNormalization (Ioffe and Szegedy 2015) of [N, C, ...], as in inference and in training.

In training it takes its statistics over the batch that a rank has, as data-parallel training does in
practice: dividing N changes the numbers (as a smaller batch would), not the work. The running statistics
are averaged over the ranks. A model without their outputs is in inference before operator set 14.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distsim.errors import TypeRuleError
from distsim.ir.type import Tensor
from distsim.ir.value import Attributes, Value
from distsim.ops.normalization import epsilon_of, normalized, normalized_grad, widened
from distsim.ops.operator import (
    Array,
    GradientContext,
    Operator,
    Signature,
    common_device,
    reading_bound,
    register,
)
from distsim.ops.places import operands, picked, places
from distsim.ops.sharding_rule import Dim, ShardingRule, letters

_BATCH = ("X", "scale", "B", "input_mean", "input_var")
_BATCH_9 = ("X", "scale", "B", "mean", "var")


def _channels(array: Array, rank: int, dtype: Any) -> Array:
    """Return a vector of C numbers so that it broadcasts against [N, C, ...]."""
    return array.astype(dtype, copy=False).reshape(-1, *(1,) * (rank - 2))


def _over(rank: int) -> tuple[int, ...]:
    return (0, *range(2, rank))


# --- BatchNormalization(X, scale, B, mean, var) -> (Y, running mean, running var) --------------------


def _batch_formals(attributes: Mapping[str, Any]) -> tuple[str, ...]:
    return _BATCH_9 if "mean" in attributes or "var" in attributes else _BATCH


def _in_training(attributes: Mapping[str, Any]) -> bool:
    """Before operator set 14, an op with more outputs than one is in training."""
    return bool(attributes.get("training_mode", 0)) or int(attributes.get("outputs", 1)) > 1


def channel_vectors(op_type: str, x: Tensor, sizes: Sequence[int], vectors: Sequence[Tensor]) -> None:
    """Raise unless x is [N, C, ...] and the others are vectors of one of these sizes."""
    if x.rank < 2:
        raise TypeRuleError(f"{op_type} takes [N, C, ...], not {x}")
    for vector in vectors:
        if vector.rank != 1 or vector.shape[0] not in sizes:
            raise TypeRuleError(
                f"{op_type}: {vector} must be a vector of {' or '.join(map(str, sizes))} numbers"
            )


def _batch_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    # ONNX's own rule insists on the running statistics in training, also where nothing reads them.
    formals = _batch_formals(attributes)
    index = places(formals, attributes, len(inputs))
    if not inputs or len(index) + sum(name in attributes for name in formals) != len(formals):
        raise TypeRuleError(f"BatchNormalization takes {', '.join(formals)}, {len(inputs)} values given")
    x = inputs[0].on(common_device("BatchNormalization", inputs))
    channel_vectors("BatchNormalization", x, x.shape[1:2], inputs[1:])
    dtype = inputs[index[formals[3]]].dtype if formals[3] in index else x.dtype
    return (x, *[Tensor(dtype, (x.shape[1],), x.device)] * (int(attributes.get("outputs", 1)) - 1))


def _batch(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    formals = _batch_formals(attributes)
    given = operands(formals, attributes, arrays)
    x = widened(given["X"])
    scale, bias, mean, var = (_channels(given[name], x.ndim, x.dtype) for name in formals[1:])
    if not _in_training(attributes):
        y = (x - mean) / np.sqrt(var + x.dtype.type(epsilon_of(attributes))) * scale + bias
        return [y.astype(given["X"].dtype, copy=False)]
    xhat, now, _ = normalized(x, _over(x.ndim), epsilon_of(attributes))
    spread = ((x - now) ** 2).mean(axis=_over(x.ndim))
    keep = float(attributes.get("momentum", 0.9))
    found = [now.reshape(-1), spread]
    old = [mean.reshape(-1), var.reshape(-1)]
    running = [keep * before + (1 - keep) * new for before, new in zip(old, found, strict=True)]
    y = (xhat * scale + bias).astype(given["X"].dtype, copy=False)
    kept = given[formals[3]].dtype if formals[3] not in attributes else given["X"].dtype
    stats = [array.astype(kept, copy=False) for array in (*running, *found)]
    return [y, *stats][: int(attributes.get("outputs", 1))]


def _batch_labels(
    rank: int, attributes: Mapping[str, Any], formals: tuple[str, ...]
) -> tuple[tuple[Dim, ...], tuple[Dim]]:
    """Return the labels of X and of a vector of channels, which are whole where one is static."""
    space: tuple[Dim, ...] = (None,) * (rank - 2) if _in_training(attributes) else letters(rank - 2, "s")
    channels = None if any(name in attributes for name in formals) else "c"
    return ("n", channels, *space), (channels,)


def _batch_sharding(signature: Signature) -> ShardingRule:
    attributes = signature.attributes
    dims, vector = _batch_labels(signature.inputs[0].rank, attributes, _batch_formals(attributes))
    inputs = (dims, *(vector,) * (len(signature.inputs) - 1))
    outputs = (dims, *(vector,) * (len(signature.outputs) - 1))
    mean = ("n",) if _in_training(attributes) else ()
    return ShardingRule(inputs, outputs, (), mean)


def _running(attributes: Attributes, count: int) -> Sequence[int]:
    """The running statistics are averages, not trained."""
    formals = _batch_formals(attributes)
    index = places(formals, attributes, count)
    return [index[name] for name in formals[3:] if name in index]


def _batch_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    """In training the first output does not depend on the running statistics."""
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
    if not training and any(ctx.wanted[place] for place in _running(ctx.attributes, len(ctx.inputs))):
        options["statistics"] = 1
    made = ctx.add_many("BatchNormalizationGrad", *values, ctx.grad, **options)
    grads = dict(zip(formals, made, strict=False))
    return [grads.get(name) for name in index]


def _batch_grad_formals(attributes: Mapping[str, Any]) -> tuple[str, ...]:
    return ("X", "scale", "dy") if attributes["training_mode"] else ("X", "scale", *_BATCH[3:], "dy")


def _batch_grad_vectors(attributes: Attributes) -> tuple[str, ...]:
    """Return whose element types the outputs behind dx have: dscale, dB and, if asked for, dmean, dvar."""
    return ("scale", "scale", *(_BATCH[3:] if attributes.get("statistics", 0) else ()))


def _batch_grad_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if len(inputs) < 2 or inputs[0].shape != inputs[-1].shape:
        raise TypeRuleError(f"BatchNormalizationGrad takes X first and its gradient last, not {inputs}")
    x = inputs[0].on(common_device("BatchNormalizationGrad", inputs))
    index = places(_batch_grad_formals(attributes), attributes, len(inputs))
    like = [inputs[index.get(name, 0)].dtype for name in _batch_grad_vectors(attributes)]
    return (x, *(Tensor(dtype, (x.shape[1],), x.device) for dtype in like))


def _batch_grad(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    given = operands(_batch_grad_formals(attributes), attributes, arrays)
    x, dy = widened(given["X"]), widened(given["dy"])
    axes = _over(x.ndim)
    scale = _channels(given["scale"], x.ndim, x.dtype)
    if attributes["training_mode"]:
        xhat, _, rate = normalized(x, axes, epsilon_of(attributes))
        dx = normalized_grad(dy * scale, xhat, rate, axes)
    else:
        mean, var = (_channels(given[name], x.ndim, x.dtype) for name in _BATCH[3:])
        rate = 1 / np.sqrt(var + x.dtype.type(epsilon_of(attributes)))
        xhat, dx = (x - mean) * rate, dy * scale * rate
    made = [(dy * xhat).sum(axis=axes), dy.sum(axis=axes)]
    if attributes.get("statistics", 0):  # y = (x - mean) rate scale + B, where rate = (var + epsilon)^-1/2
        slope = (scale * rate).reshape(-1)
        made += [-slope * made[1], -0.5 * slope * rate.reshape(-1) * made[0]]
    like = [given["X" if name in attributes else name].dtype for name in _batch_grad_vectors(attributes)]
    vectors = [grad.astype(dtype, copy=False) for grad, dtype in zip(made, like, strict=True)]
    return [dx.astype(given["X"].dtype, copy=False), *vectors]


def _batch_grad_sharding(signature: Signature) -> ShardingRule:
    attributes = signature.attributes
    dims, vector = _batch_labels(signature.inputs[0].rank, attributes, _batch_grad_formals(attributes))
    given, made = ((vector,) * (len(tensors) - 1) for tensors in (signature.inputs[1:], signature.outputs))
    return ShardingRule((dims, *given, dims), (dims, *made), ((len(signature.inputs) - 1,),))


register(
    Operator(
        "BatchNormalization",
        types=_batch_types,
        compute=_batch,
        # Inference is one multiplication and one addition; training as in LayerNormalization.
        work=lambda s: reading_bound(s, 7.0 if _in_training(s.attributes) else 2.0),
        gradient=_batch_gradient,
        sharding=_batch_sharding,
        buffers=_running,
        formals=_batch_formals,
    )
)
register(
    Operator(
        "BatchNormalizationGrad",
        types=_batch_grad_types,
        compute=_batch_grad,
        work=lambda s: reading_bound(s, 13.0 if s.attributes["training_mode"] else 5.0),
        sharding=_batch_grad_sharding,
        formals=_batch_grad_formals,
    )
)
