"""Types re-derived from new input types: the same ops, for another batch size, dtype or device."""

from __future__ import annotations

from collections.abc import Iterable

from distsim.errors import TypeRuleError
from distsim.ir import Environment, Function, Op, Type, Value, retype, retype_op, rewrite, substitute

_Key = tuple[Function, tuple[Type, ...]]


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
    key = (function, types)
    found = memo.get(key)
    if found is not None:
        return found

    def change(op: Op, env: Environment) -> tuple[Op]:
        values = substitute(op.inputs, env)
        if values == op.inputs:  # values are equal when they are identical
            return (op,)
        own = tuple([value.type for value in values])
        callees = tuple([_retype(callee, own, memo) for callee in op.subfunctions])
        return (retype_op(op, env, function.name, subfunctions=callees),)

    inputs = [retype(value, type_) for value, type_ in zip(function.inputs, types, strict=True)]
    result = memo[key] = rewrite(function, change, inputs)
    return result
