"""Functions of several numbers, element by element, with ONNX's broadcasting.

An operand may be static (a number in the attributes). The gradient of an operand that was repeated is
the sum over what it was repeated along.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from distsim.errors import TypeRuleError
from distsim.ir.type import Tensor
from distsim.ir.value import Attributes, Value
from distsim.ops.elementwise import no_gradient
from distsim.ops.onnx_bridge import static_array
from distsim.ops.operator import (
    Array,
    ComputeRule,
    GradientContext,
    GradientRule,
    Operator,
    Signature,
    arity,
    common_device,
    memory_bound,
    register,
)
from distsim.ops.places import by_place, picked, places, refuse, shape_of, wanted
from distsim.ops.shape import summed
from distsim.ops.sharding_rule import Dim, ShardingRule, letters

Shape = tuple[int, ...]
Linear = tuple[tuple[str, ...], ...]
Binary = Callable[[Any, Any, Attributes], Any]

AB = ("A", "B")
_XY = ("X", "Y")


def sum_to(array: Array, shape: Sequence[int]) -> Array:
    """Return ``array`` summed over the dimensions along which ``shape`` was broadcast to its shape."""
    array = array.sum(axis=tuple(range(array.ndim - len(shape))))
    axes = tuple(i for i, n in enumerate(shape) if n == 1 and array.shape[i] != 1)
    return array.sum(axis=axes, keepdims=True).reshape(tuple(shape))


def aligned(shape: Shape, whole: Shape, names: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Return the labels of an operand that is broadcast to ``whole``, whose labels are ``names``.

    >>> aligned((4, 1), (2, 4, 3), ("a", "b", "c"))
    ('b', None)
    """
    lead = len(whole) - len(shape)
    pairs = zip(shape, whole[lead:], names[lead:], strict=True)
    return tuple(name if size == full else None for size, full, name in pairs)


def whole_where_static(
    formals: Sequence[str], attributes: Mapping[str, Any], whole: Shape, names: tuple[Dim, ...]
) -> tuple[Dim, ...]:
    """Return the labels without those of dimensions that a static operand fills; 1 needs no part."""
    for formal in formals:
        if formal in attributes:
            taken = aligned(static_array(attributes[formal], None).shape, whole, names)
            pairs = zip(names, whole, strict=True)
            names = tuple(None if name in taken and size != 1 else name for name, size in pairs)
    return names


def broadcast_rule(
    signature: Signature, formals: tuple[str, ...] = (), linear: Linear = (), static: Linear = ()
) -> ShardingRule:
    """Return the rule of an op whose operands are broadcast to the shape of its outputs.

    ``linear`` names sets of operands in which the op is jointly linear when all of them are values;
    ``static`` sets of which the values are linear even when others are static. Without ``formals``
    the operands are all values. A dimension that a static array fills is whole.
    """
    whole = signature.outputs[0].shape
    names = whole_where_static(formals, signature.attributes, whole, letters(len(whole)))
    index = places(formals, signature.attributes, len(signature.inputs)) if formals else {}
    sets = [tuple(index[n] for n in group) for group in linear if all(n in index for n in group)]
    sets += [tuple(index[n] for n in group if n in index) for group in static]
    inputs = tuple(aligned(tensor.shape, whole, names) for tensor in signature.inputs)
    return ShardingRule(inputs, (names,) * len(signature.outputs), tuple(s for s in sets if s))


def all_operands(
    formals: tuple[str, ...], attributes: Attributes, arrays: Sequence[Array]
) -> list[Array | None]:
    """Return the operands in order, static or not; None where there is none.

    A plain number takes the element type of the first value, as the type rules have it.
    """
    index = places(formals, attributes, len(arrays))
    given: list[Array | None] = []
    for name in formals:
        if name in index:
            given.append(arrays[index[name]])
        elif name in attributes:
            plain = isinstance(attributes[name], (int, float))
            made = np.asarray(attributes[name]) if plain else static_array(attributes[name], None)
            given.append(made.astype(arrays[0].dtype) if plain else made)
        else:
            given.append(None)
    return given


def both_operands(
    formals: tuple[str, str], attributes: Attributes, arrays: Sequence[Array]
) -> tuple[Array, Array]:
    """Return the two operands of an op, static or not."""
    left, right = all_operands(formals, attributes, arrays)
    if left is None or right is None:
        raise TypeRuleError(f"operands {formals} must both be given")
    return left, right


def operand(formals: tuple[str, ...], ctx: GradientContext, name: str) -> Value | None:
    """Return an operand's value, or None when it is static."""
    index = places(formals, ctx.attributes, len(ctx.inputs)).get(name)
    return None if index is None else ctx.inputs[index]


def scaled(ctx: GradientContext, op_type: str, value: Value, name: str) -> Value:
    """Return ``op_type(value, operand name of the op)`` for an op of the operands A and B."""
    other = operand(AB, ctx, name)
    if other is None:
        return ctx.add(op_type, value, B=ctx.attributes[name])
    return ctx.add(op_type, value, other)


def sum_for(ctx: GradientContext, formals: tuple[str, ...], name: str, value: Value) -> Value:
    """Return ``value`` summed to the shape of an operand."""
    target = operand(formals, ctx, name)
    return value if target is None else summed(ctx, value, shape_of(target))


# --- Add, Sub, Mul, Div ------------------------------------------------------------------------------


def _add_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    return by_place(AB, ctx, {n: sum_for(ctx, AB, n, ctx.grad) for n in AB if wanted(AB, ctx, n)})


def _sub_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    grads: dict[str, Value | None] = {}
    if wanted(AB, ctx, "A"):
        grads["A"] = sum_for(ctx, AB, "A", ctx.grad)
    if wanted(AB, ctx, "B"):
        grads["B"] = ctx.add("Neg", sum_for(ctx, AB, "B", ctx.grad))
    return by_place(AB, ctx, grads)


def _mul_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    grads: dict[str, Value | None] = {}
    for name, other in (("A", "B"), ("B", "A")):
        if wanted(AB, ctx, name):
            grads[name] = sum_for(ctx, AB, name, scaled(ctx, "Mul", ctx.grad, other))
    return by_place(AB, ctx, grads)


def _div_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    grads: dict[str, Value | None] = {}
    if wanted(AB, ctx, "A"):
        grads["A"] = sum_for(ctx, AB, "A", scaled(ctx, "Div", ctx.grad, "B"))
    if wanted(AB, ctx, "B"):  # d(a / b) / db = -(a / b) / b
        change = scaled(ctx, "Div", ctx.add("Mul", ctx.grad, ctx.outputs[0]), "B")
        grads["B"] = ctx.add("Neg", sum_for(ctx, AB, "B", change))
    return by_place(AB, ctx, grads)


def _divide(a: Array, b: Array) -> Array:
    if a.dtype.kind not in "iu":
        return np.asarray(a / b)
    # ONNX rounds integer quotients toward zero, NumPy's // toward minus infinity.
    quotient = np.abs(a) // np.abs(b)
    return np.where((a < 0) != (b < 0), -quotient, quotient).astype(a.dtype)


def _plain(function: Callable[[Any, Any], Any]) -> Binary:
    return lambda a, b, attributes: function(a, b)


def _mod(a: Array, b: Array, attributes: Attributes) -> Array:
    return np.asarray(np.fmod(a, b) if attributes.get("fmod", 0) else np.mod(a, b))


def _mod_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    refuse("Mod", AB, ctx, "B")
    grads = {"A": sum_for(ctx, AB, "A", ctx.grad)} if wanted(AB, ctx, "A") else {}
    return by_place(AB, ctx, grads)


def _binary(function: Binary, boolean: bool = False) -> ComputeRule:
    def compute(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
        left, right = both_operands(AB, attributes, arrays)
        made = np.asarray(function(left, right, attributes))
        return [made if boolean else made.astype(arrays[0].dtype, copy=False)]

    return compute


def _register_binary(
    name: str,
    function: Binary,
    gradient: GradientRule = no_gradient,
    linear: Linear = (),
    static: Linear = (),
    boolean: bool = False,
) -> None:
    register(
        Operator(
            name,
            compute=_binary(function, boolean),
            work=memory_bound,
            gradient=gradient,
            sharding=lambda s: broadcast_rule(s, AB, linear, static),
            formals=AB,
        )
    )


_register_binary("Add", lambda a, b, _: a + b, _add_gradient, linear=(AB,))
_register_binary("Sub", lambda a, b, _: a - b, _sub_gradient, linear=(AB,))
_register_binary("Mul", lambda a, b, _: a * b, _mul_gradient, static=(("A",), ("B",)))
_register_binary("Div", _plain(_divide), _div_gradient, static=(("A",),))
_register_binary("Mod", _mod, _mod_gradient)
for _name, _function in (
    ("And", np.logical_and),
    ("Or", np.logical_or),
    ("Xor", np.logical_xor),
    ("Equal", np.equal),
    ("Greater", np.greater),
    ("GreaterOrEqual", np.greater_equal),
    ("Less", np.less),
    ("LessOrEqual", np.less_equal),
):
    _register_binary(_name, _plain(_function), boolean=True)
for _name, _function in (
    ("BitwiseAnd", np.bitwise_and),
    ("BitwiseOr", np.bitwise_or),
    ("BitwiseXor", np.bitwise_xor),
):
    _register_binary(_name, _plain(_function))


def _shift(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    left, right = both_operands(_XY, attributes, arrays)
    shift: Any = np.left_shift if attributes["direction"] == "LEFT" else np.right_shift
    return [np.asarray(shift(left, right)).astype(arrays[0].dtype, copy=False)]


register(
    Operator(
        "BitShift",
        compute=_shift,
        work=memory_bound,
        gradient=no_gradient,
        sharding=lambda s: broadcast_rule(s, _XY),
        formals=_XY,
    )
)


# --- Pow(X, Y) and PowGrad(X, Y, dy; of="X"), before the sum over what was repeated ------------------

_POW_GRAD = ("X", "Y", "dy")


def _pow(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    base, exponent = both_operands(_XY, attributes, arrays)
    return [np.asarray(np.power(base, exponent)).astype(base.dtype, copy=False)]


def _pow_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    static, grads = picked(ctx.attributes, *_XY), dict[str, Value | None]()
    for name in _XY:
        if wanted(_XY, ctx, name):
            of = {"of": "Y"} if name == "Y" else {}
            grads[name] = sum_for(ctx, _XY, name, ctx.add("PowGrad", *ctx.inputs, ctx.grad, **static, **of))
    return by_place(_XY, ctx, grads)


def _pow_grad_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    arity("PowGrad", inputs, 3 - sum(name in attributes for name in _XY))
    return (inputs[-1].on(common_device("PowGrad", inputs)),)


def _pow_grad(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    base, exponent, dy = *both_operands(_XY, attributes, arrays[:-1]), arrays[-1]
    if attributes.get("of") == "Y":  # x^y log x; where x is 0 all of its powers are, but those below zero
        some = np.where((base == 0) & (exponent >= 0), np.ones_like(base), base)
        return [np.asarray(dy * np.power(some, exponent) * np.log(some)).astype(dy.dtype, copy=False)]
    # x^0 has no slope, also at 0, where x^-1 is infinite.
    slope = exponent * np.power(base, np.where(exponent == 0, 1, exponent - 1))
    return [np.asarray(dy * slope).astype(dy.dtype, copy=False)]


register(
    Operator(
        "Pow",
        compute=_pow,
        work=memory_bound,
        gradient=_pow_gradient,
        sharding=lambda s: broadcast_rule(s, _XY),
        formals=_XY,
    )
)
register(
    Operator(
        "PowGrad",
        types=_pow_grad_types,
        compute=_pow_grad,
        work=lambda s: memory_bound(s, 3.0),
        sharding=lambda s: broadcast_rule(s, _POW_GRAD, static=(("dy",),)),
        formals=_POW_GRAD,
    )
)
