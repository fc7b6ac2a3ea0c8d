"""``RotaryEmbedding``: pairs of numbers turned by the angle of their position (Su et al. 2021), as ONNX has
it since operator set 23, and its gradient, which turns back.

X [batch, heads, seq, size], or [batch, seq, heads, size] with ``seq_axis`` 1; cos_cache and sin_cache
[batch or 1, seq, rotary / 2], or tables [positions, rotary / 2] of which position_ids [batch or 1, seq] picks
rows. The first ``rotary_embedding_dim`` numbers of a head turn (0: all), those of a pair half of that apart,
or side by side if ``interleaved``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distsim.errors import TypeRuleError
from distsim.ir.type import Tensor
from distsim.ir.value import Attributes, Value
from distsim.ops.normalization import widened
from distsim.ops.operator import (
    Array,
    GradientContext,
    Operator,
    Signature,
    Work,
    bytes_of,
    common_device,
    register,
)
from distsim.ops.places import picked, refuse
from distsim.ops.sharding_rule import Dim, ShardingRule

_FORMALS = ("X", "cos_cache", "sin_cache", "position_ids")
_NAMES = ("interleaved", "rotary_embedding_dim", "seq_axis")


def _rotary(attributes: Attributes, size: int) -> int:
    """Return how many numbers of a head turn."""
    return int(attributes.get("rotary_embedding_dim", 0)) or size


def _types(op_type: str, attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if len(inputs) not in (3, 4):
        raise TypeRuleError(
            f"{op_type} takes X, cos_cache, sin_cache and maybe position_ids, not {len(inputs)} values"
        )
    unknown = [name for name in attributes if name not in _NAMES]
    axis = int(attributes.get("seq_axis", 2))
    if unknown or axis not in (1, 2):
        raise TypeRuleError(
            f"{op_type}: {unknown or axis} is not one of {', '.join(_NAMES)}, seq_axis 1 or 2"
        )
    x, cos, sin, *ids = inputs
    if x.rank != 4 or any(tensor.dtype != x.dtype for tensor in (cos, sin)) or not x.dtype.is_floating:
        raise TypeRuleError(f"{op_type} takes X with four dimensions, and tables of its type, not {inputs}")
    turned, size = _rotary(attributes, x.shape[3]), x.shape[3]
    if turned % 2 or not 0 < turned <= size:
        raise TypeRuleError(f"{op_type}: rotary_embedding_dim={turned} must be even and at most {size}")
    batch, seq = x.shape[0], x.shape[axis]
    places = ids[0].shape if ids else cos.shape[:-1]
    fits = len(places) == 2 and places[0] in (1, batch) and places[1] == seq
    if not fits or cos.shape != sin.shape or cos.shape[-1:] != (turned // 2,) or cos.rank != 3 - len(ids):
        raise TypeRuleError(
            f"{op_type}: tables {cos}, {sin} {f'and positions {ids[0]} ' if ids else ''}do not fit {turned} "
            f"turning numbers at {seq} positions of {batch} samples"
        )
    if ids and (ids[0].dtype.is_floating or ids[0].dtype.name == "bool"):
        raise TypeRuleError(f"{op_type}: position_ids {ids[0]} must be whole numbers")
    return (x.on(common_device(op_type, inputs)),)


def _turned(attributes: Attributes, arrays: Sequence[Array], direction: int) -> Sequence[Array]:
    x, cos, sin, *ids = arrays
    if ids:
        cos, sin = cos[ids[0]], sin[ids[0]]
    axis = 1 if int(attributes.get("seq_axis", 2)) == 2 else 2
    cos, sin = (np.expand_dims(widened(table), axis) for table in (cos, sin * direction))
    rotary = _rotary(attributes, x.shape[-1])
    wide = widened(x)
    moving, rest = wide[..., :rotary], wide[..., rotary:]
    if attributes.get("interleaved", 0):
        first, second = moving[..., 0::2], moving[..., 1::2]
    else:
        first, second = moving[..., : rotary // 2], moving[..., rotary // 2 :]
    pair = (cos * first - sin * second, sin * first + cos * second)
    if attributes.get("interleaved", 0):
        made = np.stack(pair, axis=-1).reshape(moving.shape)
    else:
        made = np.concatenate(pair, axis=-1)
    return [np.concatenate((made, rest), axis=-1).astype(x.dtype, copy=False)]


def _gradient(ctx: GradientContext) -> Sequence[Value | None]:
    refuse("RotaryEmbedding", _FORMALS, ctx, "cos_cache", "sin_cache")
    options = picked(ctx.attributes, *_NAMES)
    grad = ctx.add("RotaryEmbeddingGrad", ctx.grad, *ctx.inputs[1:], **options)
    return [grad, *[None] * (len(ctx.inputs) - 1)]


def _work(signature: Signature) -> Work:
    """Three flops for each number that turns. Of tables as many rows are read as there are positions."""
    x, cos, _, *ids = signature.inputs
    turned = _rotary(signature.attributes, x.shape[3])
    rows = ids[0].size if ids else cos.size // cos.shape[-1]
    read = x.nbytes + 2 * rows * cos.shape[-1] * cos.dtype.itemsize + bytes_of(ids)
    return Work(3.0 * x.size * turned / x.shape[3], read, bytes_of(signature.outputs))


def _sharding(signature: Signature) -> ShardingRule:
    x, cos, _, *ids = signature.inputs
    axis = int(signature.attributes.get("seq_axis", 2))
    dims: tuple[Dim, ...] = ("batch", "heads", "seq", None) if axis == 2 else ("batch", "seq", "heads", None)
    places = ids[0] if ids else cos
    batch: Dim = "batch" if places.shape[0] == x.shape[0] else None
    table: tuple[Dim, ...] = (None, None) if ids else (batch, "seq", None)
    inputs = (dims, table, table, *(((batch, "seq"),) if ids else ()))
    return ShardingRule(inputs, (dims,), ((0,),))


def _register(op_type: str, direction: int) -> None:
    register(
        Operator(
            op_type,
            types=lambda attributes, inputs: _types(op_type, attributes, inputs),
            compute=lambda attributes, arrays: _turned(attributes, arrays, direction),
            work=_work,
            gradient=_gradient if direction > 0 else None,
            sharding=_sharding,
            buffers=lambda attributes, count: (1, 2),  # files keep their tables among the weights
            tables=True,
        )
    )


_register("RotaryEmbedding", 1)
_register("RotaryEmbeddingGrad", -1)
