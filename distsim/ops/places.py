"""Which operand of an op is which, and rules that many operators share.

An operand is a value or, when it is known and small, an attribute under its formal name; the values
take the formal places that no attribute takes, in order (see :mod:`distsim.ops.onnx_bridge`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from distsim.errors import UnknownOperatorError
from distsim.ir.type import Tensor
from distsim.ir.value import Attributes, Literal, Value
from distsim.ops.onnx_bridge import static_array
from distsim.ops.operator import (
    Array,
    GradientContext,
    Signature,
    Work,
    arity,
    bytes_of,
    common_device,
    work_of,
)
from distsim.ops.sharding_rule import Dim, ShardingRule, letters

Localize = Callable[[Attributes, tuple[tuple[int, ...], ...]], Attributes]


def places(formals: Sequence[str], attributes: Mapping[str, Any], count: int) -> dict[str, int]:
    """Return the index of each operand that is one of ``count`` values, by formal name.

    >>> places(("X", "W", "B"), {"W": 2.0}, 2)
    {'X': 0, 'B': 1}
    """
    absent: tuple[str, ...] = attributes.get("absent", ())
    names = [name for name in formals if name not in attributes and name not in absent]
    return dict(zip(names[:count], range(count), strict=True))


def select(
    formals: Sequence[str], signature: Signature, **dims: tuple[Dim, ...]
) -> tuple[tuple[Dim, ...], ...]:
    """Return the labels of those operands that are values, in order; static ones stay whole."""
    index = places(formals, signature.attributes, len(signature.inputs))
    return tuple(dims[name] for name in index)


def operands(
    formals: Sequence[str], attributes: Mapping[str, Any], arrays: Sequence[Array]
) -> dict[str, Array]:
    """Return the operands that are given, static or not, by formal name."""
    index = places(formals, attributes, len(arrays))
    given = {name: arrays[i] for name, i in index.items()}
    given |= {name: static_array(attributes[name], None) for name in formals if name in attributes}
    return given


def by_place(
    formals: Sequence[str], ctx: GradientContext, grads: Mapping[str, Value | None]
) -> list[Value | None]:
    """Return the gradients in the order of the op's values; operands not named have none."""
    index = places(formals, ctx.attributes, len(ctx.inputs))
    return [grads.get(name) for name in index]


def wanted(formals: Sequence[str], ctx: GradientContext, name: str) -> bool:
    """Return whether the operand is a value that needs a gradient."""
    index = places(formals, ctx.attributes, len(ctx.inputs)).get(name)
    return index is not None and ctx.wanted[index]


def refuse(op_type: str, formals: Sequence[str], ctx: GradientContext, *names: str) -> None:
    """Raise when an operand that has no gradient here needs one."""
    for name in names:
        if wanted(formals, ctx, name):
            raise UnknownOperatorError(f"{op_type} has no gradient of its operand {name}; make it a constant")


def ints(value: Any) -> tuple[int, ...]:
    """Return a static operand, or an attribute, as a tuple of integers.

    >>> ints(3), ints((1, -1)), ints(Literal([2]))
    ((3,), (1, -1), (2,))
    """
    array = value.array if isinstance(value, Literal) else np.asarray(value)
    return tuple(int(item) for item in array.reshape(-1))


def shape_of(value: Value) -> tuple[int, ...]:
    """Return the shape of a tensor value."""
    return value.type.shape if isinstance(value.type, Tensor) else ()


def picked(attributes: Attributes, *names: str) -> dict[str, Any]:
    """Return those attributes of these names that are set."""
    return {name: attributes[name] for name in names if name in attributes}


def resizing(name: str) -> Localize:
    """Return the ``localize`` of an op whose attribute ``name`` is the shape of its first output."""

    def localize(attributes: Attributes, outputs: tuple[tuple[int, ...], ...]) -> Attributes:
        return Attributes({**attributes, name: outputs[0]})

    return localize


def like_shape(op_type: str, count: int) -> Callable[[Attributes, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """Return the type rule of an op that makes a tensor of its attribute ``shape``.

    It has the element type of the last of its ``count`` operands, of which static ones are attributes.
    """

    def types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        arity(op_type, inputs, count - ("indices" in attributes))
        device = common_device(op_type, inputs)
        return (Tensor(inputs[-1].dtype, attributes["shape"], device),)

    return types


def view_work(signature: Signature) -> Work:
    """Return the work of an op that only changes metadata: no kernel runs."""
    return Work(0.0, 0.0, 0.0)


def copy_work(signature: Signature) -> Work:
    """Return the work of an op that reads only what it writes, element by element."""
    written = bytes_of(signature.outputs)
    return Work(0.0, written, written)


def fill_work(signature: Signature) -> Work:
    """Return the work of an op that only writes."""
    return Work(0.0, 0.0, bytes_of(signature.outputs))


def move_work(signature: Signature) -> Work:
    """Return the work of an op that reads its operands and writes its results, and computes nothing."""
    return work_of(signature, 0.0)


def whole_rule(signature: Signature) -> ShardingRule:
    """Return the rule of an op of which nothing can be divided."""
    inputs = tuple((None,) * tensor.rank for tensor in signature.inputs)
    return ShardingRule(inputs, tuple((None,) * tensor.rank for tensor in signature.outputs))


def same_shape_rule(signature: Signature, linear: tuple[tuple[int, ...], ...] = ()) -> ShardingRule:
    """Return the rule of an op whose operands and results all have one shape: any dimension divides."""
    dims = letters(signature.outputs[0].rank)
    return ShardingRule((dims,) * len(signature.inputs), (dims,) * len(signature.outputs), linear)
