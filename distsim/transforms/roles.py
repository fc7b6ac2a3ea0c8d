"""What each input is to training, and which dimensions carry the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from distsim.errors import PlanError
from distsim.ir import Function, Op, Role, Tensor, Value
from distsim.ops import signature_of
from distsim.ops.training import LOSSES
from distsim.ops.operator import Dim, factors_of, labels_of
from distsim.transforms.strategies import rule_of

Marks = dict[Value, frozenset[int]]
"""The marked dimensions of values; a value that is absent has none."""


def roles(function: Function) -> dict[Value, Role]:
    """Return the role of every input.

    A function in which some input is marked says so itself. In one without marks (a joint function
    written by hand, as in the DistIR notebooks) the loss tells: inputs that carry its batch dimension
    are data, the others are parameters. Raises :class:`PlanError` when there is no loss either.
    """
    if any(value.role is not Role.INPUT for value in function.inputs):
        return {value: value.role for value in function.inputs}
    seeds: Marks = {}
    for op in function.ops:
        if op.op_type in LOSSES:
            seeds |= {value: frozenset((0,)) for value in op.inputs}
    if not seeds:
        raise PlanError(
            f"{function.name}: no input is marked as a parameter and there is no loss to tell which "
            "inputs carry the batch; mark the parameters (Role.PARAMETER) or differentiate first"
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


def propagate(function: Function, seeds: Marks, pieces: bool = False) -> Marks:
    """Return the marks that follow forward from ``seeds``, in ``function`` and in its callees.

    A dimension of an output is marked when a factor of it labels a marked dimension of an input.
    ``pieces``: also by labels of pieces; without it a mark stands for whole, contiguous division.
    """
    marks = dict(seeds)

    def visit(current: Function) -> None:
        for op in current.ops:
            if op.op_type == "Call":
                if _pass_down(op, marks):
                    visit(op.callee)
                for outer, inner in zip(op.outputs, op.callee.outputs, strict=True):
                    _mark(marks, outer, marks.get(inner, frozenset()))
            else:
                _mark_op(op, marks, pieces)

    visit(function)
    return marks


def propagate_back(function: Function, seeds: Marks) -> Marks:
    """Return the marks that follow from ``seeds`` against the direction of the ops (no Calls)."""
    marks = dict(seeds)
    for op in reversed(function.ops):
        rule = None if op.op_type == "Call" else rule_of(signature_of(op))
        if rule is None:
            continue
        labels = {
            label
            for i, v in enumerate(op.outputs)
            for dim in marks.get(v, ())
            for label in _labels(rule.outputs[i][dim], pieces=False)
        }
        for value, dims in zip(op.inputs, rule.inputs, strict=True):
            found = (i for i, dim in enumerate(dims) if labels.intersection(_labels(dim, pieces=False)))
            _mark(marks, value, frozenset(found))
    return marks


def marked(op: Op, marks: Marks, pieces: bool = False) -> Callable[[str], bool]:
    """Return the test whether a factor of ``op`` labels a marked dimension of an input."""
    rule = rule_of(signature_of(op))
    labels: set[str] = set()
    if rule is not None:
        for value, dims in zip(op.inputs, rule.inputs, strict=True):
            labels.update(name for i in marks.get(value, ()) for name in _labels(dims[i], pieces))
    return lambda factor: factor in labels


def _pass_down(op: Op, marks: Marks) -> bool:
    changed = False
    for outer, inner in zip(op.inputs, op.callee.inputs, strict=True):
        before = marks.get(inner)
        _mark(marks, inner, marks.get(outer, frozenset()))
        if before is None:
            marks.setdefault(inner, frozenset())
        changed |= before is None or before != marks[inner]
    return changed or not op.callee.inputs


def _labels(dim: Dim, pieces: bool) -> tuple[str, ...]:
    return factors_of(dim) if pieces else tuple(n for n in labels_of(dim) if isinstance(n, str))


def _mark_op(op: Op, marks: Marks, pieces: bool) -> None:
    rule = rule_of(signature_of(op))
    if rule is None:
        return
    test = marked(op, marks, pieces)
    for value, dims in zip(op.outputs, rule.outputs, strict=True):
        _mark(
            marks, value, frozenset(i for i, dim in enumerate(dims) if any(map(test, _labels(dim, pieces))))
        )


def _mark(marks: Marks, value: Value, dims: frozenset[int]) -> None:
    if dims:
        marks[value] = marks.get(value, frozenset()) | dims


def _tensor(value: Value) -> Tensor:
    if not isinstance(value.type, Tensor):
        raise PlanError(f"input {value.name} must be a tensor, not {value.type}")
    return value.type
