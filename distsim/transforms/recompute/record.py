"""Finding on a second graph the values that a first partition saved: by what they compute."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from distsim.ir import Function, Value
from distsim.transforms.recompute.joint import split_joint

TRANSPARENT = ("Identity", "OptimizationBarrier")
"""Operators whose result is their first operand."""


def recorded(first: Function, second: Function) -> list[Value]:
    """Return the values of ``second``, or of its callees, that compute what ``first`` saves for backward.

    Both are joint functions of one model, perhaps captured differently: with its blocks as Calls or
    written out, with ops in between that change nothing, in another order. A value is known by the
    operators and attributes that make it from the inputs, these by their names. Feed the result to the
    policy :data:`REPLAY`, which saves these values again.

    >>> from distsim.models import mlp
    >>> from distsim.transforms import differentiate, inline, rematerialize
    >>> joint = differentiate(mlp(layers=4, width=4, batch=2), None)
    >>> [value.name for value in recorded(rematerialize(joint, "full"), inline(joint))]
    ['a1', 'a3']
    """
    keys = _Keys()
    one: dict[Value, set[int]] = {}
    keys.visit(first, keys.inputs(first), one)
    saved = {key for value in split_joint(first).saved for key in one[value]}
    other: dict[Value, set[int]] = {}
    keys.visit(second, keys.inputs(second), other)
    return [value for value, own in other.items() if not own.isdisjoint(saved)]


class _Keys:
    """A number for each thing that is computed."""

    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}

    def number(self, key: Hashable) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def inputs(self, function: Function) -> list[int]:
        return [self.number(value.name) for value in function.inputs]

    def visit(self, function: Function, given: Iterable[int], found: dict[Value, set[int]]) -> Sequence[int]:
        """Note what each value computed by ops is, given the inputs; return what the outputs are."""
        known = dict(zip(function.inputs, given, strict=True))
        for op in function.ops:
            read = [known[value] for value in op.inputs]
            if op.is_call:
                made = self.visit(op.callee, read, found)
            elif op.op_type in TRANSPARENT:
                made = read[:1]
            else:
                what = (op.op_type, op.attributes, op.version, tuple(read))
                made = [self.number((what, place)) for place in range(len(op.outputs))]
            for value, key in zip(op.outputs, made, strict=True):
                known[value] = key
                found.setdefault(value, set()).add(key)
        return [known[value] for value in function.outputs]
