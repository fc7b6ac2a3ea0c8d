"""The rules of the IR, checked: order, producers, arity, types, devices."""

from __future__ import annotations

from distsim.errors import DistsimError, IRError
from distsim.ir.function import Function, Op, callees
from distsim.ir.registry import output_types
from distsim.ir.type import Type
from distsim.ir.value import Value


def verify(function: Function) -> None:
    """Check ``function`` and its callees; raise :class:`IRError` naming the op, the value and the rule.

    The rules: every value has one producer; an op's inputs are defined before it; outputs are
    defined; the number and the types of an op's outputs are those of its operator, whose type rule
    in turn checks arity, element types, shapes and devices of the inputs.
    """
    for current in (*callees(function), function):
        verify_one(current)


def verify_one(function: Function) -> None:
    """Check one function, taking the functions it calls as verified."""
    defined: dict[Value, str] = {}
    for value in function.inputs:
        _define(function, defined, value, "an input")
    for index, op in enumerate(function.ops):
        where = f"op {index} ({op!r})"
        for value in op.inputs:
            if value not in defined:
                raise IRError(
                    f"{function.name}: {where} reads {value.name!r}, which no earlier op or input "
                    "defines; put its producer first"
                )
        _verify_types(function, op, where)
        for value in op.outputs:
            _define(function, defined, value, where)
    for value in function.outputs:
        if value not in defined:
            raise IRError(f"{function.name}: output {value.name!r} is defined by no op or input")


def _define(function: Function, defined: dict[Value, str], value: Value, where: str) -> None:
    if value in defined:
        raise IRError(
            f"{function.name}: value {value.name!r} is produced by {where} and before that by "
            f"{defined[value]}; a value has one producer"
        )
    defined[value] = where


def _verify_types(function: Function, op: Op, where: str) -> None:
    types: tuple[Type, ...] = tuple(value.type for value in op.inputs)
    try:
        expected = output_types(op.op_type, op.attributes, types, op.subfunctions, op.version)
    except DistsimError as error:
        raise type(error)(f"{function.name}: {where}: {error}") from error
    if len(expected) != len(op.outputs):
        raise IRError(
            f"{function.name}: {where} has {len(op.outputs)} outputs, {op.op_type} makes {len(expected)}"
        )
    for value, type_ in zip(op.outputs, expected, strict=True):
        if value.type != type_:
            raise IRError(
                f"{function.name}: {where} makes {value.name!r} of type {value.type}; "
                f"the rule of {op.op_type} says {type_}"
            )
