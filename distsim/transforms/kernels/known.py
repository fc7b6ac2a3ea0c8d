"""Values that a function's constants determine, also where a Call hands them in: masks, scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from distsim.ir import Environment, Function, Op, Value, callees, rewrite, trim
from distsim.ir.function import readers_of
from distsim.ir.type import as_tensor
from distsim.ops import compute, operator
from distsim.ops.operator import Array
from distsim.ops.places import shape_of

MOST_ELEMENTS = 2**26
"""Larger values are not computed: a table of 8,192 x 8,192."""

Changes = dict[Op, tuple[Op, ...]]
"""What stands for an op."""

_DRAWN = frozenset({"Dropout", "RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike"})


def draws(op: Op) -> bool:
    """Whether an op draws random numbers."""
    return op.op_type in _DRAWN


class FunctionScope:
    """A function, and where it is called: a list of scopes and their Calls, empty for the outermost one."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.sites: list[tuple[FunctionScope, Op]] = []
        self.makers = {value: op for op in function.ops for value in op.outputs}
        self.numbers = {op: number for number, op in enumerate(function.ops)}
        self.readers = readers_of(function.ops)
        self._places = {value: place for place, value in enumerate(function.inputs)}
        self._fixed: set[Value] = set()
        self._known: dict[Value, Array | None] = {}

    def find_fixed(self) -> None:
        """Find the values that nothing but constants determine; to be called once, in callers first."""
        for place, value in enumerate(self.function.inputs):
            if self.sites and all(op.inputs[place] in scope._fixed for scope, op in self.sites):
                self._fixed.add(value)
        for op in self.function.ops:
            moves = op.is_call or operator(op.op_type).communication is not None
            if not moves and not draws(op) and self._fixed.issuperset(op.inputs):
                self._fixed.update(op.outputs)

    def known(self, value: Value) -> Array | None:
        """Return what a value is in every step and in every Call; None where that is not known."""
        if value not in self._fixed:
            return None
        if value not in self._known:
            self._known[value] = self._given(value) if value in self._places else self._computed(value)
        return self._known[value]

    def number(self, value: Value) -> float | None:
        """Return the one number that a value is known to hold."""
        array = self.known(value) if shape_of(value).count(1) == len(shape_of(value)) else None
        return None if array is None else float(array.reshape(-1)[0])

    def _given(self, value: Value) -> Array | None:
        found = [scope.known(op.inputs[self._places[value]]) for scope, op in self.sites]
        if not found or found[0] is None:
            return None
        alike = all(other is found[0] or (other is not None and _equal(other, found[0])) for other in found)
        return found[0] if alike else None

    def _computed(self, value: Value) -> Array | None:
        op = self.makers[value]
        if sum(as_tensor(v.type, v.name).size for v in op.outputs) > MOST_ELEMENTS:
            return None
        arrays: list[Array] = []
        for operand in op.inputs:
            array = self.known(operand)
            if array is None:
                return None
            arrays.append(array)
        return compute(op.op_type, op.attributes, op.version, arrays, len(op.outputs))[
            op.outputs.index(value)
        ]


def _equal(one: Array, other: Array) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and bool(np.array_equal(one, other))


def scopes_of(function: Function) -> Sequence[FunctionScope]:
    """Return a scope for the function and each callee, callers first."""
    scopes = {current: FunctionScope(current) for current in (function, *reversed(callees(function)))}
    for scope in scopes.values():
        for op in scope.function.ops:
            if op.is_call:
                scopes[op.callee].sites.append((scope, op))
    for scope in scopes.values():
        scope.find_fixed()
    return list(scopes.values())


def rewrite_scopes(function: Function, changes: Callable[[FunctionScope], Changes]) -> Function:
    """Return the function with other ops in the place of some, in callees too, and without ops then dead.

    It is ``function`` itself if nothing changes.
    """
    made: dict[Function, Function] = {}
    for scope in reversed(scopes_of(function)):  # callees first
        made[scope.function] = _changed(scope.function, changes(scope), made)
    whole = made[function]
    return whole if whole is function else trim(whole).function


def _changed(function: Function, changes: Changes, callees: dict[Function, Function]) -> Function:
    """Return the function with other ops in the place of some, and other callees."""

    def change(op: Op, env: Environment) -> Sequence[Op]:
        if op.is_call and callees[op.callee] is not op.callee:
            return (replace(op, subfunctions=(callees[op.callee],)),)
        return changes.get(op, (op,))

    return rewrite(function, change)
