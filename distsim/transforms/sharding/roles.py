"""What each input is to training, and which dimensions carry the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from distsim.errors import PlanError
from distsim.ir import Function, Op, Role, Tensor, Value, all_ops
from distsim.ops import signature_of
from distsim.ops.parts import Parts
from distsim.ops.sharding_rule import Dim, factors_of, labels_of
from distsim.ops.training import LOSSES
from distsim.transforms.autodiff.loss import how_to_mark
from distsim.transforms.sharding.strategies import rule_of

Mark = tuple[int, Parts]
Marks = dict[Value, frozenset[Mark]]
"""The marked dimensions of values; a value that is absent has none."""

WHOLE_BATCH: frozenset[Mark] = frozenset({(0, None)})


def roles(function: Function) -> dict[Value, Role]:
    """Return the role of every input.

    A function in which some input is marked says so itself. In one without marks (a joint function
    written by hand, as in the DistIR notebooks) the loss tells: inputs that carry its batch dimension
    are data, the others are parameters. Raises :class:`PlanError` when there is no loss either.
    """
    if any(value.role is not Role.INPUT for value in function.inputs):
        return {value: value.role for value in function.inputs}
    seeds: Marks = {}
    for op in all_ops(function):
        if op.op_type in LOSSES:
            seeds |= {value: WHOLE_BATCH for value in op.inputs[:2] if _tensor(value).rank}
    if not seeds:
        raise PlanError(
            f"{function.name}: no input is marked as a parameter and there is no loss to tell which "
            f"inputs carry the batch; mark the parameters (Role.PARAMETER); {how_to_mark(function)}"
        )
    marks = propagate_back(function, seeds)
    return {v: Role.INPUT if marks.get(v) else Role.PARAMETER for v in function.inputs}


def batch_inputs(function: Function, known: Mapping[Value, Role]) -> tuple[Value, ...]:
    """Return the data inputs, whose dimension 0 is the batch. Scalars carry none.

    Inputs that disagree about the size of the batch are an error that names them.
    """
    found = tuple(v for v in function.inputs if known[v] is Role.INPUT and _tensor(v).rank)
    sizes = {_tensor(v).shape[0] for v in found}
    if len(sizes) > 1:
        listed = ", ".join(f"{v.name}: {v.type}" for v in found)
        raise PlanError(f"{function.name}: data inputs differ in their batch (dimension 0): {listed}")
    return found


def propagate(function: Function, seeds: Marks) -> Marks:
    """Return the marks that follow forward from ``seeds``, in ``function`` and in its callees.

    A dimension of an output is marked when a factor of it labels a marked dimension of an input.
    """
    marks = dict(seeds)
    _walk(function, marks, forward=True)
    return marks


def propagate_back(function: Function, seeds: Marks) -> Marks:
    """Return the marks that follow from ``seeds`` against the direction of the ops, and in callees."""
    marks = dict(seeds)
    _walk(function, marks, forward=False)
    return marks


def propagate_both(function: Function, seeds: Marks) -> Marks:
    """Return the marks that follow from ``seeds`` in any direction.

    What derives from no seed, such as a mask made of constants, is marked where it has a factor in common
    with something that does.
    """
    marks = dict(seeds)
    before: Marks = {}
    known: _Known = {}
    while marks != before:
        before = dict(marks)
        _walk(function, marks, forward=True, known=known)
        _walk(function, marks, forward=False, known=known)
    return marks


_Known = dict[Op, tuple[frozenset[Mark] | None, ...]]
"""The marks of all operands and results of an op when it was last looked at from both sides."""


def _walk(function: Function, marks: Marks, forward: bool, known: _Known | None = None) -> None:
    """Mark what follows op by op, in their order or against it; with what is ``known`` from either side."""
    _visit(function, marks, forward, known, set())


def _visit(
    current: Function, marks: Marks, forward: bool, known: _Known | None, visited: set[Function]
) -> None:
    for op in current.ops if forward else reversed(current.ops):
        if not op.is_call:
            _mark_op(op, marks, forward, known)
            continue
        callee = op.callee
        given = zip(op.inputs, callee.inputs, strict=True)
        made = zip(op.outputs, callee.outputs, strict=True)
        into, out = (given, made) if forward else (made, given)
        changed = [_mark(marks, inner, marks.get(outer, frozenset())) for outer, inner in into]
        if any(changed) or callee not in visited:
            visited.add(callee)
            _visit(callee, marks, forward, known, visited)
        for outer, inner in out:
            _mark(marks, outer, marks.get(inner, frozenset()))


def _mark_op(op: Op, marks: Marks, forward: bool, known: _Known | None) -> None:
    """Mark the dimensions on one side of an op that have a factor marked on the other, or on both.

    The same marks on both sides give the same again: then that is left out.
    """
    both = known is not None
    given = (*op.inputs, *op.outputs) if both else op.inputs if forward else op.outputs
    if marks.keys().isdisjoint(given):
        return
    if known is not None and known.get(op) == tuple(map(marks.get, given)):
        return
    rule = rule_of(signature_of(op))
    if rule is None:
        return
    source, target = (op.inputs, rule.inputs), (op.outputs, rule.outputs)
    if both:
        source = target = (*op.inputs, *op.outputs), (*rule.inputs, *rule.outputs)
    elif not forward:
        source, target = target, source
    found = _factors(*source, marks)
    for value, dims in zip(*target, strict=True):
        _mark(marks, value, _labelled(dims, found))
    if known is not None:
        known[op] = tuple(map(marks.get, given))


def met_in_products(products: Iterable[Op], marks: Marks, data: Marks) -> Marks:
    """Return the dimensions, of what data make, that products have in common with marked ones of the other,
    and that are not marked: those that all operands and results have, none that is summed over.

    Of attention these are heads of queries and keys, where those of values alone follow from parameters: a
    norm of all heads together is between. ``data`` are the dimensions that follow from data.
    """
    found: Marks = {}
    for op in products:
        rule = rule_of(signature_of(op))
        if rule is None:
            continue
        ends = [(v, dims) for v, dims in zip(op.inputs, rule.inputs, strict=True) if data.get(v)]
        if len(ends) < 2:
            continue
        every = [
            [f for dim in dims for f in factors_of(dim)]
            for dims in (*(dims for _, dims in ends), *rule.outputs)
        ]
        met = _factors([value for value, _ in ends], [dims for _, dims in ends], marks)
        met = frozenset([mark for mark in met if all(mark[0] in own for own in every)])
        for value, dims in ends:
            known = {index for index, _ in marks.get(value, ())}
            fresh = [mark for mark in _labelled(dims, met) if mark[0] not in known]
            _mark(found, value, frozenset([mark for mark in fresh if (mark[0], None) not in data[value]]))
    return {value: dims for value, dims in found.items() if dims}


def marked(op: Op, marks: Marks) -> Callable[[str, Parts], bool]:
    """Return the test whether a factor of ``op``, divided so, labels a marked dimension of an operand."""
    rule = rule_of(signature_of(op))
    if rule is None:
        return lambda factor, pieces: False
    found = _factors((*op.inputs, *op.outputs), (*rule.inputs, *rule.outputs), marks)
    return lambda factor, pieces: (factor, pieces) in found


def _factors(
    values: Sequence[Value], groups: Sequence[tuple[Dim, ...]], marks: Marks
) -> frozenset[tuple[str, Parts]]:
    """Return the factors that label marked dimensions, and how they are divided."""
    found: set[tuple[str, Parts]] = set()
    for value, dims in zip(values, groups, strict=True):
        for index, pieces in marks.get(value, ()):
            for label in labels_of(dims[index]):
                if isinstance(label, str):
                    found.add((label, pieces))
                elif label.sizes == pieces:
                    found.add((label.factor, None))
    return frozenset(found)


def _labelled(dims: tuple[Dim, ...], found: frozenset[tuple[str, Parts]]) -> frozenset[Mark]:
    marks: set[Mark] = set()
    for index, dim in enumerate(dims):
        for label in labels_of(dim):
            if isinstance(label, str):
                marks.update((index, pieces) for factor, pieces in found if factor == label)
            elif (label.factor, None) in found:
                marks.add((index, label.sizes))
    return frozenset(marks)


def _mark(marks: Marks, value: Value, dims: frozenset[Mark]) -> bool:
    """Mark dimensions of a value; return whether one of them was not marked before."""
    before = marks.get(value, frozenset())
    if dims <= before:
        return False
    marks[value] = before | dims
    return True


def _tensor(value: Value) -> Tensor:
    if not isinstance(value.type, Tensor):
        raise PlanError(f"input {value.name} must be a tensor, not {value.type}")
    return value.type
