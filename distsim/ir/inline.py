"""inline: write out the Calls of a function."""

from __future__ import annotations

from collections.abc import Collection

from distsim.ir import Function, FunctionMaker, Op, Value


def inline(function: Function, calls: Collection[Op] | None = None) -> Function:
    """Return ``function`` with its Calls, or those given, replaced by the ops of the callee (one level).

    What a Call returns keeps the names that the Call gives it.
    """
    maker = FunctionMaker(function.name, function.notes)
    maker.adopt_inputs(function.inputs)
    copies: dict[Value, Value] = {value: value for value in function.inputs}
    for op in function.ops:
        if op.op_type != "Call" or (calls is not None and op not in calls):
            copies.update(zip(op.outputs, maker.copy(op, copies), strict=True))
            continue
        inner = {formal: copies[value] for formal, value in zip(op.callee.inputs, op.inputs, strict=True)}
        named = {v: outer.name for v, outer in zip(op.callee.outputs, op.outputs, strict=True)}
        for part in op.callee.ops:
            name = f"{op.name}.{part.name}" if op.name and part.name else op.name or part.name
            operands = [inner[value] for value in part.inputs]
            names = [named.get(value, value.name) for value in part.outputs]
            made = maker.add(
                part.op_type, operands, part.attributes, part.subfunctions, names, part.version, name
            )
            inner.update(zip(part.outputs, made, strict=True))
        copies.update((o, inner[i]) for o, i in zip(op.outputs, op.callee.outputs, strict=True))
    maker.set_outputs([copies[value] for value in function.outputs])
    return maker.finalize()
