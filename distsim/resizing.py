"""Functions that differ in sizes alone: what is equal they share, what was made of one follows for others.

Plans that differ in the size of a microbatch divide a function into the same ops on tensors of other shapes.
How these are cut, wired and scheduled follows from the ops alone, so it is worked out for the first of them
and *carried over*: its ops are replaced by those of the other, value by value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

from distsim.cache import Cache
from distsim.errors import TypeRuleError
from distsim.ir import Environment, Function, Op, Tensor, Type, Value, place_of, substitute
from distsim.ir.rewrite import retype_op
from distsim.ops.conversion import ONCE


class Unlike(Exception):
    """What was made of one function cannot be carried over to another."""


@dataclass(frozen=True, eq=False)
class Likeness:
    """The function that another one differs from in sizes alone.

    ``values`` are those of ``like`` that the other has of another size, ``ops`` those of its ops that read or
    make such a value, call another function or have other attributes, each with what the other has instead.
    All else they share.
    """

    like: Function
    values: dict[Value, Value]
    ops: dict[Op, Op]
    carried: dict[Function, Function] = field(default_factory=dict[Function, Function])

    def carry_function(self, function: Function) -> Function:
        """Return what a function made of ops of ``like`` is of the other's, itself if that is the same.

        Raises :class:`Unlike` where its ops were written for a size.
        """
        found = self.carried.get(function)
        if found is None:
            ops = self.carry_ops(function.ops)
            inputs, outputs = (substitute(each, self.values) for each in (function.inputs, function.outputs))
            same = ops == function.ops and inputs == function.inputs and outputs == function.outputs
            found = function if same else replace(function, ops=ops, inputs=inputs, outputs=outputs)
            if not same:
                _LIKE.get(found, None, lambda: self._of(function, found))
            self.carried[function] = found
        return found

    def carry_ops(self, ops: Iterable[Op]) -> tuple[Op, ...]:
        """Return what ops of ``like``, or made of these, are of the other's; raises :class:`Unlike`."""
        own, values, makers = self.ops, self.values.keys(), _makers(self.like)
        return tuple(
            [
                own[op]
                if op in own
                else op
                if values.isdisjoint(op.inputs)
                and values.isdisjoint(op.outputs)
                and makers.get(op.outputs[0] if op.outputs else None) not in own
                else self._carried(op)
                for op in ops
            ]
        )

    def _of(self, function: Function, other: Function) -> Likeness:
        ops = {a: b for a, b in zip(function.ops, other.ops, strict=True) if a is not b}
        return Likeness(function, self.values, ops)

    def _carried(self, op: Op) -> Op:
        """Return what an op becomes that is none of ``like``: wired or named otherwise, or added."""
        original = _makers(self.like).get(op.outputs[0] if op.outputs else None)
        changed = None if original is None else self.ops.get(original)
        if original is not None and changed is not None and original.op_type == op.op_type:
            if (op.attributes, op.subfunctions) != (original.attributes, original.subfunctions):
                raise Unlike
            inputs, outputs = substitute(op.inputs, self.values), substitute(op.outputs, self.values)
            own = changed
            found = Op(own.op_type, inputs, outputs, own.attributes, own.subfunctions, own.version, op.name)
        elif op.attributes or op.subfunctions:
            raise Unlike  # perhaps for the size
        else:
            env: Environment = dict(self.values)
            made = [env.pop(value, None) for value in op.outputs]
            try:
                found = retype_op(op, env, self.like.name)
            except TypeRuleError as error:  # it reads what has a size of its own, as sums of gradients have
                raise Unlike from error
            if any(value is not None for value in made):
                outputs = [b if a is None else a for a, b in zip(made, found.outputs, strict=True)]
                if any(a.type != b.type for a, b in zip(outputs, found.outputs, strict=True)):
                    raise Unlike
                found = replace(found, outputs=tuple(outputs))
            self.values.update({a: b for a, b in zip(op.outputs, found.outputs, strict=True) if a is not b})
        self.ops[op] = found
        return found


_LIKE = Cache[Function, Likeness]("what functions differ from in sizes alone", 1)
_MAKERS = Cache[Function, dict[Value | None, Op]]("which op makes each value, by function", 1)
_KEPT = ("axis", "reduce", ONCE)
"""Attributes on which it depends how a function is cut, and no size: over which ranks, how, how often."""
MOST_ALIKE = 8
"""With how many functions of the same ops in the same order, wired otherwise, one is compared."""
_FIRST: WeakValueDictionary[tuple[object, ...], Function] = WeakValueDictionary()


def likeness_of(function: Function) -> Likeness | None:
    """Return what a function, as :func:`shared` returned it, differs from in sizes alone; None: it is unlike
    those before."""
    return _LIKE.find(function, None)


def shared(function: Function) -> Function:
    """Return the function with everything shared that is equal in the first of those that differ from it in
    sizes alone, while that is in use."""
    if likeness_of(function) is not None:
        return function
    places = dict.fromkeys(map(place_of, function.inputs))
    key = (function.name, len(function.inputs), *places, *[op.op_type for op in function.ops])
    for number in range(MOST_ALIKE):
        first = _FIRST.get((number, key))
        if first is None or first is function:
            _FIRST[number, key] = function
            return function
        found = _compared(first, function, {})
        if found is first:  # what is known of a function is of one place it came from
            found = _noted(replace(first), Likeness(first, {}, {}))
        if found is not None:
            return found
    return function


def _makers(function: Function) -> dict[Value | None, Op]:
    """Return which op makes each value."""
    return _MAKERS.get(function, None, lambda: {value: op for op in function.ops for value in op.outputs})


def _compared(
    like: Function, other: Function, done: dict[tuple[Function, Function], Function]
) -> Function | None:
    """Return the other function with what is equal shared; None if they differ by more than sizes."""
    ends = len(like.inputs), len(like.ops), len(like.outputs), like.name, like.notes
    if ends != (len(other.inputs), len(other.ops), len(other.outputs), other.name, other.notes):
        return None
    # Of a value of the other; one that both make or are given stands for itself: none reads what it has not.
    original: dict[Value, Value] = {}
    values: dict[Value, Value] = {}
    ops: dict[Op, Op] = {}
    if not _paired(like.inputs, other.inputs, original, values):
        return None
    written: list[Op] = []
    for a, b in zip(like.ops, other.ops, strict=True):
        if a is b:
            written.append(a)
            continue
        if (
            a.op_type != b.op_type
            or a.version != b.version
            or a.name != b.name
            or len(a.subfunctions) != len(b.subfunctions)
            or any(a.attributes.get(name) != b.attributes.get(name) for name in _KEPT)
        ):
            return None
        if b.inputs != a.inputs and [original.get(value, value) for value in b.inputs] != [*a.inputs]:
            return None
        if not _paired(a.outputs, b.outputs, original, values):
            return None
        callees: tuple[Function, ...] = ()
        for one, two in zip(a.subfunctions, b.subfunctions, strict=True):
            callee = one if one is two else done.get((one, two)) or _compared(one, two, done)
            if callee is None:
                return None
            done[one, two] = callee
            callees += (callee,)
        same = callees == a.subfunctions and a.attributes == b.attributes
        if same and values.keys().isdisjoint(a.inputs) and values.keys().isdisjoint(a.outputs):
            written.append(a)
            continue
        inputs, outputs = substitute(a.inputs, values), substitute(a.outputs, values)
        made = ops[a] = Op(a.op_type, inputs, outputs, b.attributes, callees, a.version, a.name)
        written.append(made)
    if [original.get(value, value) for value in other.outputs] != [*like.outputs]:
        return None
    if not (values or ops):
        return like
    inputs, outputs = substitute(like.inputs, values), substitute(like.outputs, values)
    found = Function(like.name, inputs, tuple(written), outputs, like.notes)
    return _noted(found, Likeness(like, values, ops))


def _noted(function: Function, likeness: Likeness) -> Function:
    _LIKE.get(function, None, lambda: likeness)
    return function


def _paired(
    ones: Sequence[Value], others: Sequence[Value], original: dict[Value, Value], values: dict[Value, Value]
) -> bool:
    """Pair values, if they differ in sizes alone."""
    if len(ones) != len(others):
        return False
    for a, b in zip(ones, others, strict=True):
        if a is b:
            continue
        original[b] = a
        if a.name != b.name or a.role is not b.role:
            return False
        if a.type is not b.type and a.type != b.type:
            if not _resized(a.type, b.type):
                return False
            values[a] = b
    return True


def _resized(one: Type, two: Type) -> bool:
    """Whether two types differ in sizes alone; nothing is of no size but in both."""
    return (
        isinstance(one, Tensor)
        and isinstance(two, Tensor)
        and one.rank == two.rank
        and one.dtype == two.dtype
        and one.device == two.device
        and one.on_host == two.on_host
        and bool(one.size) == bool(two.size)
    )
