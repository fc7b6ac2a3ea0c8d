"""Constants that are divided over ranks.

All ranks run one function, in which a constant is an attribute of the op that reads it, or what ops make of
nothing. An array among the attributes of which ranks may need different parts becomes a value
(:func:`as_values`).
"""

from __future__ import annotations

from dataclasses import replace
from operator import is_

from distsim.errors import DistsimError
from distsim.ir import Attributes, Function, Literal, Op, Tensor, Value
from distsim.ir.registry import output_types
from distsim.ir.type import as_tensor, from_numpy
from distsim.ops import operator, signature_of
from distsim.ops.onnx_bridge import static_array
from distsim.ops.operator import Array, labels_of
from distsim.ops.places import places
from distsim.transforms.strategies import rule_of


def as_values(function: Function) -> Function:
    """Return ``function`` with the arrays that ops may divide as values in place of attributes.

    Callees likewise; a function without any is returned as it is.
    """
    done: dict[int, Function] = {}

    def visit(current: Function) -> Function:
        if id(current) not in done:
            ops: list[Op] = []
            for op in current.ops:
                if op.op_type != "Call":
                    ops += _with_values(op)
                    continue
                callee = visit(op.callee)
                ops.append(op if callee is op.callee else replace(op, subfunctions=(callee,)))
            same = len(ops) == len(current.ops) and all(map(is_, ops, current.ops))
            done[id(current)] = current if same else replace(current, ops=tuple(ops))
        return done[id(current)]

    return visit(function)


def _with_values(op: Op) -> list[Op]:
    """Return the op, before it a Constant for each array among its attributes if one may be divided."""
    rule = operator(op.op_type).formals
    formals = rule(op.attributes) if callable(rule) else rule
    given = [name for name in formals if name in op.attributes]
    arrays = {name: static_array(op.attributes[name], None) for name in given}
    constants = {name: _constant(op, name, array) for name, array in arrays.items() if array.size > 1}
    if not constants:
        return [op]
    index = places(formals, op.attributes, len(op.inputs))
    values = {name: op.inputs[i] for name, i in index.items()}
    values |= {name: made.outputs[0] for name, made in constants.items()}
    last = max(formals.index(name) for name in values)
    absent = tuple(name for name in formals[:last] if name not in values and name not in given)
    attributes = {k: v for k, v in op.attributes.items() if k not in constants and k != "absent"}
    changed = replace(
        op,
        inputs=tuple(values[name] for name in formals if name in values),
        attributes=Attributes({**attributes, "absent": absent} if absent else attributes),
    )
    fresh = {made.outputs[0] for made in constants.values()}
    return [*constants.values(), changed] if _divides(changed, fresh) else [op]


def _constant(op: Op, name: str, array: Array) -> Op:
    device = as_tensor(op.outputs[0].type, op.outputs[0].name).device
    value = Value(f"{op.outputs[0].name}.{name}", Tensor(from_numpy(array.dtype), array.shape, device))
    return Op("Constant", (), (value,), Attributes({"value": Literal(array), "device": device}))


def _divides(op: Op, fresh: set[Value]) -> bool:
    """Whether an op takes these operands as values, makes the same of them, and may divide one."""
    try:
        types = tuple([value.type for value in op.inputs])
        made = output_types(op.op_type, op.attributes, types, (), op.version)
    except DistsimError:
        return False
    rule = rule_of(signature_of(op)) if made == tuple([value.type for value in op.outputs]) else None
    return rule is not None and any(
        value in fresh and any(labels_of(dim) for dim in dims)
        for value, dims in zip(op.inputs, rule.inputs, strict=True)
    )
