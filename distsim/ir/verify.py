"""The rules of the IR, checked: order, producers, arity, types, devices."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

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


def verify_one(function: Function, typed: AbstractSet[Op] = frozenset()) -> None:
    """Check one function, taking the functions it calls as verified, and of the ops ``typed`` the types."""
    defined: dict[Value, int] = dict.fromkeys(function.inputs, -1)  # by which op
    if len(defined) != len(function.inputs):
        twice = next(v for place, v in enumerate(function.inputs) if v in function.inputs[:place])
        raise _made_twice(function, twice, "an input", "an input")
    for index, op in enumerate(function.ops):
        for value in op.inputs:
            if value not in defined:
                raise IRError(
                    f"{function.name}: {_op_at(function, index)} reads {value.name!r}, which no earlier op "
                    "or input defines; put its producer first"
                )
        if op not in typed:
            _verify_types(function, index)
        for value in op.outputs:
            if value in defined:
                before = defined[value]
                first = "an input" if before < 0 else _op_at(function, before)
                raise _made_twice(function, value, _op_at(function, index), first)
            defined[value] = index
    for value in function.outputs:
        if value not in defined:
            raise IRError(f"{function.name}: output {value.name!r} is defined by no op or input")


def _op_at(function: Function, index: int) -> str:
    return f"op {index} ({function.ops[index]!r})"


def _made_twice(function: Function, value: Value, where: str, before: str) -> IRError:
    return IRError(
        f"{function.name}: value {value.name!r} is produced by {where} and before that by {before}; a value "
        "has one producer"
    )


def _verify_types(function: Function, index: int) -> None:
    op = function.ops[index]
    types: tuple[Type, ...] = tuple([value.type for value in op.inputs])
    try:
        expected = output_types(op.op_type, op.attributes, types, op.subfunctions, op.version)
    except DistsimError as error:
        raise type(error)(f"{function.name}: {_op_at(function, index)}: {error}") from error
    if len(expected) != len(op.outputs):
        raise IRError(
            f"{function.name}: {_op_at(function, index)} has {len(op.outputs)} outputs, {op.op_type} makes "
            f"{len(expected)}"
        )
    for value, type_ in zip(op.outputs, expected, strict=True):
        if value.type is not type_ and value.type != type_:
            raise IRError(
                f"{function.name}: {_op_at(function, index)} makes {value.name!r} of type {value.type}; "
                f"the rule of {op.op_type} says {type_}"
            )
