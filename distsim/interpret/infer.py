"""Types re-derived from new input types: the same ops, for another batch size, dtype or device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from distsim.errors import DistsimError, TypeRuleError
from distsim.ir import Function, Op, Type, Value
from distsim.ir.registry import output_types

_Key = tuple[int, tuple[Type, ...]]


def infer_types(function: Function, inputs: Iterable[Value | Type]) -> Function:
    """Return ``function`` with all types derived from these input types, one for each input, in order.

    A value stands for its type. When every input has the type already, the result is ``function``
    itself; values whose type stays the same are shared with it. A callee is visited once per distinct
    tuple of argument types. Raises :class:`TypeRuleError`, or the error of the operator's type rule,
    naming the op and its inputs.

    >>> from distsim.ir import Float, FunctionMaker, Tensor
    >>> maker = FunctionMaker("f")
    >>> x = maker.add_input_value("x", Tensor(Float(), (2, 3)))
    >>> y = maker.add_op("Relu", inputs=[x])
    >>> print(infer_types(maker.finalize(), [Tensor(Float(), (8, 3))]).outputs[0].type)
    f32[8, 3]
    """
    types = tuple([item.type if isinstance(item, Value) else item for item in inputs])
    if len(types) != len(function.inputs):
        names = ", ".join(value.name for value in function.inputs)
        raise TypeRuleError(
            f"{function.name} takes {len(function.inputs)} inputs ({names}), {len(types)} types given"
        )
    return _retype(function, types, {})


def _retype(function: Function, types: tuple[Type, ...], memo: dict[_Key, Function]) -> Function:
    given = zip(function.inputs, types, strict=True)
    if all(value.type is type_ or value.type == type_ for value, type_ in given):
        return function
    key = (id(function), types)
    found = memo.get(key)
    if found is not None:
        return found
    new: dict[Value, Value] = {}
    inputs = tuple([_put(new, value, type_) for value, type_ in zip(function.inputs, types, strict=True)])
    ops: list[Op] = []
    for op in function.ops:
        values = tuple([new.get(value, value) for value in op.inputs])
        if values == op.inputs:  # values are equal when they are identical
            ops.append(op)
            continue
        made, subfunctions = _derive(function, op, values, memo)
        outputs = tuple([_put(new, value, type_) for value, type_ in zip(op.outputs, made, strict=True)])
        ops.append(replace(op, inputs=values, outputs=outputs, subfunctions=subfunctions))
    outputs = tuple([new.get(value, value) for value in function.outputs])
    result = replace(function, inputs=inputs, ops=tuple(ops), outputs=outputs)
    memo[key] = result
    return result


def _put(new: dict[Value, Value], value: Value, type_: Type) -> Value:
    """Return the value with this type, and remember it when it is another one."""
    if value.type is type_ or value.type == type_:
        return value
    changed = new[value] = replace(value, type=type_)
    return changed


def _derive(
    function: Function, op: Op, values: tuple[Value, ...], memo: dict[_Key, Function]
) -> tuple[tuple[Type, ...], tuple[Function, ...]]:
    types = tuple([value.type for value in values])
    if op.op_type == "Call":
        callee = _retype(op.callee, types, memo)
        return tuple([value.type for value in callee.outputs]), (callee,)
    try:
        made = output_types(op.op_type, op.attributes, types, op.subfunctions, op.version)
    except DistsimError as error:
        arguments = ", ".join(map(repr, values))
        names = ", ".join(value.name for value in op.outputs)
        raise type(error)(
            f"{function.name}: {names} = {op.op_type}({arguments}) does not fit its new input types: {error}"
        ) from error
    if len(made) != len(op.outputs):
        raise TypeRuleError(
            f"{function.name}: {op!r} has {len(op.outputs)} outputs, but makes {len(made)} of its new inputs"
        )
    return made, op.subfunctions
