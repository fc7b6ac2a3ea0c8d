"""inline: write out the Calls of a function."""

from __future__ import annotations

from distsim.ir import Function, FunctionMaker, Value


def inline(function: Function) -> Function:
    """Return ``function`` with each of its Calls replaced by the ops of the callee (one level)."""
    maker = FunctionMaker(function.name)
    maker.adopt_inputs(function.inputs)
    copies: dict[Value, Value] = {value: value for value in function.inputs}
    for op in function.ops:
        inputs = [copies[value] for value in op.inputs]
        if op.op_type != "Call":
            names = [value.name for value in op.outputs]
            made = maker.add(op.op_type, inputs, op.attributes, op.subfunctions, names, op.version, op.name)
            copies.update(zip(op.outputs, made, strict=True))
            continue
        inner: dict[Value, Value] = dict(zip(op.callee.inputs, inputs, strict=True))
        for part in op.callee.ops:
            names = [value.name for value in part.outputs]
            operands = [inner[value] for value in part.inputs]
            name = f"{op.name}.{part.name}" if op.name and part.name else op.name or part.name
            made = maker.add(
                part.op_type, operands, part.attributes, part.subfunctions, names, part.version, name
            )
            inner.update(zip(part.outputs, made, strict=True))
        copies.update((o, inner[i]) for o, i in zip(op.outputs, op.callee.outputs, strict=True))
    maker.set_outputs([copies[value] for value in function.outputs])
    return maker.finalize()
