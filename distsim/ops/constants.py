"""Operators that make tensors out of nothing, or out of a few integers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distsim.errors import TypeRuleError
from distsim.ir.type import Tensor, from_numpy
from distsim.ir.value import Attributes, Literal
from distsim.ops.operator import Array, Bounds, Operator, Signature, arity, memory_bound, register
from distsim.ops.places import fill_work, ints, move_work, places, resizing, view_work, whole_rule
from distsim.ops.sharding_rule import Dim, ShardingRule, letters

# Constant: a tensor that lies in memory from the start; making it takes no time.


def _literal(attributes: Attributes) -> Array:
    value = attributes.get("value")
    if not isinstance(value, Literal):
        raise TypeRuleError(f"Constant has its tensor in the attribute value, an ir.Literal, not {value!r}")
    return value.array


def _constant_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    arity("Constant", inputs, 0)
    array = _literal(attributes)
    return (Tensor(from_numpy(array.dtype), array.shape, attributes.get("device")),)


def _constant_rule(signature: Signature) -> ShardingRule:
    """Where all numbers along a dimension are the same, each rank may make fewer of them."""
    array = _literal(signature.attributes)
    same = [array.size > 0 and bool((array == array.take([0], axis)).all()) for axis in range(array.ndim)]
    dims = tuple(name if one else None for name, one in zip(letters(array.ndim), same, strict=True))
    return ShardingRule((), (dims,), localize=_fewer)


def _fewer(attributes: Attributes, outputs: tuple[tuple[int, ...], ...]) -> Attributes:
    part = _literal(attributes)[tuple(slice(size) for size in outputs[0])]
    return Attributes({**attributes, "value": Literal(part)})


register(
    Operator(
        "Constant",
        types=_constant_types,
        compute=lambda attributes, arrays: [_literal(attributes)],
        work=view_work,
        sharding=_constant_rule,
    )
)


# ConstantOfShape: one number, everywhere; the attribute device says where, since no input does.


def _fill(attributes: Attributes) -> Array:
    fill = _literal(attributes) if "value" in attributes else np.zeros((), np.float32)
    if fill.size != 1:
        raise TypeRuleError(f"ConstantOfShape: its value is one number, not {fill.size}")
    return fill.reshape(())


def _filled_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if inputs or "input" not in attributes:
        raise TypeRuleError("ConstantOfShape: its shape must be known, as the attribute input")
    return (Tensor(from_numpy(_fill(attributes).dtype), ints(attributes["input"]), attributes.get("device")),)


def _filled(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    fill = _fill(attributes)
    # The importer folds this operator also where its shape is still an operand.
    shape = ints(arrays[0] if arrays else attributes["input"])
    return [np.full(shape, fill, fill.dtype)]


def _filled_rule(signature: Signature) -> ShardingRule:
    return ShardingRule((), (letters(signature.outputs[0].rank),), localize=resizing("input"))


register(
    Operator(
        "ConstantOfShape",
        types=_filled_types,
        compute=_filled,
        work=fill_work,
        sharding=_filled_rule,
    )
)

register(Operator("Range", work=fill_work, sharding=whole_rule))


# OneHot: the new dimension is whole, the indices may be divided in any way.

_ONE_HOT = ("indices", "depth", "values")


def _one_hot_rule(signature: Signature) -> ShardingRule:
    index = places(_ONE_HOT, signature.attributes, len(signature.inputs))
    rank = signature.outputs[0].rank
    axis = signature.attributes.get("axis", -1) % rank
    dims: tuple[Dim, ...] = letters(rank - 1)
    inputs = tuple(
        dims if name == "indices" else (None,) * signature.inputs[i].rank for name, i in index.items()
    )
    if "indices" not in index:
        dims = (None,) * (rank - 1)
    linear = ((index["values"],),) if "values" in index else ()
    return ShardingRule(inputs, ((*dims[:axis], None, *dims[axis:]),), linear)


register(
    Operator(
        "OneHot", work=memory_bound, sharding=_one_hot_rule, formals=_ONE_HOT, bounds=Bounds(axes=(1, 1))
    )
)


# EyeLike reads the shape of its input only.

register(Operator("EyeLike", work=fill_work, gradient=lambda ctx: [None], sharding=whole_rule))


# Trilu: the matrices are whole, their stack may be divided.


def _trilu_rule(signature: Signature) -> ShardingRule:
    index = places(("input", "k"), signature.attributes, len(signature.inputs))
    dims = (*letters(signature.outputs[0].rank - 2), None, None)
    inputs = tuple(dims if name == "input" else () for name in index)
    return ShardingRule(inputs, (dims,), ((index["input"],),))


register(
    Operator(
        "Trilu",
        work=move_work,
        gradient=lambda ctx: [
            ctx.maker.add("Trilu", (ctx.grad, *ctx.inputs[1:]), ctx.attributes)[0],
            *(None for _ in ctx.inputs[1:]),
        ],
        sharding=_trilu_rule,
    )
)
