"""Which values are new values of others: what an optimizer makes of a parameter and of its state."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from distsim.cache import Cache
from distsim.ir import Function, Op, Value
from distsim.ops.operator import operator

_NOTHING: Mapping[int, int] = MappingProxyType({})


def replacements(function: Function) -> dict[Value, Value]:
    """Return of what each value of a function is the new value: of what in-place ops, and Calls, overwrite.

    An op need not overwrite it: of a parameter that is read again later both values are there.
    """
    found: dict[Value, Value] = {}
    for op in function.ops:
        for output, taken in replaced_by(op).items():
            found[op.outputs[output]] = op.inputs[taken]
    return found


def replaced_by(op: Op) -> Mapping[int, int]:
    """Return for each output of an op that is a new value of an input the place of that input."""
    if op.attributes.get("in_place"):  # sums over ranks, or the gradient of logits, the first that it reads
        pairs = zip(op.inputs, op.outputs, strict=False)
        return {place: place for place, (old, new) in enumerate(pairs) if old.type == new.type}
    if op.subfunctions:  # a Call, or a kernel of several ops
        return replaced_inputs(op.callee)
    meaning = operator(op.op_type)
    if not (meaning.in_place or meaning.overwrites):
        return _NOTHING
    places = {**meaning.in_place, **meaning.overwrites}
    if meaning.communication is not None and meaning.communication.operand is not None:
        size = len(op.inputs) // len(op.outputs)
        return {output: size * output + places[0] for output in range(len(op.outputs))}
    outputs, inputs = len(op.outputs), len(op.inputs)  # of a first part there is nothing to write into
    return {output: place for output, place in places.items() if output < outputs and place < inputs}


def replaced_inputs(function: Function) -> Mapping[int, int]:
    """Return for each output that is a new value of an input the place of that input."""
    return _PLACES.get(function, None, lambda: _replaced_inputs(function))


def _replaced_inputs(function: Function) -> dict[int, int]:
    before = replacements(function)
    number = {value: place for place, value in enumerate(function.inputs)}
    places: dict[int, int] = {}
    for output, value in enumerate(function.outputs):
        while value in before:
            value = before[value]
            if value in number:
                places[output] = number[value]
    return places


_PLACES = Cache[Function, Mapping[int, int]]("what outputs of a callee are new values of", 1)
