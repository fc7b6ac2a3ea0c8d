"""Constants that are divided over ranks and microbatches.

All ranks run one function, in which a constant is an attribute of the op that reads it, or what ops make of
nothing. An array among the attributes of which ranks may need different parts becomes a value
(:func:`as_values`). What is the same for all parts of the batch is made as large as a part; what is not
becomes an input that is divided as data are (:func:`as_inputs`), since no op knows which microbatch it is of.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from distsim.errors import DistsimError
from distsim.ir import (
    Attributes,
    Environment,
    Function,
    Literal,
    Op,
    Role,
    Tensor,
    Value,
    needed_ops,
    rewire_op,
    rewrite,
    rewrite_all,
    substitute,
)
from distsim.ir.registry import output_types
from distsim.ir.type import as_tensor, from_numpy
from distsim.ops import operator, signature_of
from distsim.ops.onnx_bridge import static_array
from distsim.ops.operator import Array
from distsim.ops.places import places
from distsim.ops.sharding_rule import Dim, label_of, labels_of
from distsim.transforms.sharding.roles import Marks
from distsim.transforms.sharding.strategies import rule_of

# --- arrays among the attributes ---------------------------------------------------------------------


def as_values(function: Function) -> Function:
    """Return ``function`` with the arrays that ops may divide as values in place of attributes.

    Callees likewise; a function without any is returned as it is.
    """

    def change(op: Op, _: Environment) -> Sequence[Op]:
        return (op,) if op.is_call else _with_values(op)

    return rewrite_all(function, lambda _, current: rewrite(current, change))


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


# --- constants that differ along the batch -------------------------------------------------------------


def as_inputs(function: Function, marks: Marks) -> tuple[Function, tuple[Function, ...]]:
    """Return ``function`` with an input for each constant that differs along a marked dimension.

    These inputs come after all others, with ``Role.CONSTANT``; each of the functions, which have no inputs,
    makes one. A function that needs none is returned as it is.
    """
    found, wanted = _Lifter(marks).lift(function)
    return found, tuple(wanted.values())


_Wanted = dict[Hashable, Function]
"""The constants that a function takes as inputs, in order: what they are, and what makes them."""


class _Lifter:
    def __init__(self, marks: Marks) -> None:
        self.marks = marks
        self.done: dict[Function, tuple[Function, _Wanted]] = {}

    def lift(self, function: Function) -> tuple[Function, _Wanted]:
        """Return a function that takes its constants as inputs, and these constants."""
        found = self.done.get(function)
        if found is None:
            found = self.done[function] = _FunctionLifter(self, function).lift()
        return found


class _FunctionLifter:
    """Lifts the constants of one function.

    ``constants`` are the values that are made of nothing, with the dimensions along which parts of them
    can be made.
    """

    def __init__(self, lifter: _Lifter, function: Function) -> None:
        self.lifter, self.function = lifter, function
        self.constants: dict[Value, set[int]] = {}
        self.wanted: _Wanted = {}
        self.inputs: dict[Hashable, Value] = {}
        self.env: dict[Value, Value] = {}

    def lift(self) -> tuple[Function, _Wanted]:
        ops: list[Op] = []
        for op in self.function.ops:
            if op.is_call:
                ops.append(self._call(op))
            else:
                self._look_at(op)
                ops.append(op)
        if not self.wanted:
            return self.function, {}
        outputs = substitute(self.function.outputs, self.env)
        read, kept = set(outputs), list[Op]()
        for op in reversed(ops):
            if op.outputs and op.outputs[0] in self.constants and read.isdisjoint(op.outputs):
                continue
            op = rewire_op(op, self.env)
            read.update(op.inputs)
            kept.append(op)
        inputs = (*self.function.inputs, *self.inputs.values())
        made = replace(self.function, inputs=inputs, ops=tuple(reversed(kept)), outputs=outputs)
        return made, self.wanted

    def _call(self, op: Op) -> Op:
        callee, wanted = self.lifter.lift(op.callee)
        if not wanted:
            return op
        given = [self._input(key, maker) for key, maker in wanted.items()]
        return replace(op, inputs=(*op.inputs, *given), subfunctions=(callee,))

    def _input(self, key: Hashable, maker: Function) -> Value:
        if key not in self.wanted:
            (made,) = maker.outputs
            self.wanted[key] = maker
            self.inputs[key] = Value(made.name, made.type, Role.CONSTANT)
        return self.inputs[key]

    def _look_at(self, op: Op) -> None:
        """Take note of what an op makes, if it is constant, and lift it if parts of it cannot be made."""
        if any(value not in self.constants for value in op.inputs):
            return
        rule = rule_of(signature_of(op))
        for place, value in enumerate(op.outputs):
            dims = sorted(dim for dim, pieces in self.lifter.marks.get(value, ()) if pieces is None)
            labels = rule.outputs[place] if rule is not None else ()
            able = {dim for dim in dims if rule and self._in_parts(op, rule.inputs, labels[dim])}
            self.constants[value] = able
            if dims and not able:
                key = (op.attributes, value.type) if op.op_type == "Constant" else value
                self.env[value] = self._input(key, self._maker(value))
                able.add(dims[0])

    def _in_parts(self, op: Op, inputs: Sequence[tuple[Dim, ...]], dim: Dim) -> bool:
        """Whether an op can make parts along a dimension, because its operands can be had in parts."""
        factors = [label for label in labels_of(dim) if isinstance(label, str)]
        return bool(factors) and all(
            label is None or (isinstance(label, str) and place in self.constants[value])
            for value, dims in zip(op.inputs, inputs, strict=True)
            for place, each in enumerate(dims)
            for label in [label_of(each, factors[0])]
        )

    def _maker(self, value: Value) -> Function:
        """Return the function of the ops that make a constant."""
        return Function(value.name, (), tuple(needed_ops(self.function.ops, [value])), (value,))
