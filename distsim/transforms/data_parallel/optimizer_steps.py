"""What an update of parameters reads and makes, as far as it goes through them element by element."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distsim.errors import PlanError
from distsim.ir import Function, Op, Value, all_ops
from distsim.ir.rewrite import inline
from distsim.ir.type import as_tensor
from distsim.ops import operator


def with_plain_updates(function: Function) -> Function:
    """Write out the Calls that update parameters and do more: what else they do is done on whole values."""
    known: dict[Function, bool] = {}

    def mixed(callee: Function) -> bool:
        if callee not in known:
            updates = [
                bool(operator(op.op_type).in_place) for op in all_ops(callee) if op.op_type != "ScaleGradient"
            ]
            known[callee] = any(updates) and not all(updates)
        return known[callee]

    while calls := {op for op in function.ops if op.is_call and mixed(op.callee)}:
        function = inline(function, calls)
    return function


@dataclass(frozen=True)
class OptimizerStep:
    """The operands of an optimizer: the parameter, its gradient, its state; and its results."""

    parameter: Value
    gradient: Value
    state: tuple[Value, ...]
    results: tuple[Value, ...]


def updates_of(op: Op) -> list[OptimizerStep]:
    """Return the optimizers that an op is, or that a Call runs, in values of the caller.

    The gradient of one that is scaled first is what is scaled.

    Raises :class:`PlanError` if it does anything else, of which it would need whole operands.
    """
    if not op.is_call:
        return [_update(op)]
    known = dict(zip(op.callee.inputs, op.inputs, strict=True))
    known |= dict(zip(op.callee.outputs, op.outputs, strict=True))
    found: list[OptimizerStep] = []
    for part in op.callee.ops:
        if part.op_type == "ScaleGradient" and part.inputs[0] in known:
            known[part.outputs[0]] = known[part.inputs[0]]
            continue
        for each in updates_of(part):
            if not all(v in known for v in (each.parameter, each.gradient, *each.state, *each.results)):
                raise whole_needed(part)
            found.append(
                OptimizerStep(
                    known[each.parameter],
                    known[each.gradient],
                    tuple([known[v] for v in each.state]),
                    tuple([known[v] for v in each.results]),
                )
            )
    return found


_BY_ELEMENT = ("GradientCopy", "ScaleGradient")
"""What may stand between the sum of a gradient and its update, besides views."""


def before_update(
    gradient: Value, producer: Mapping[Value, Op], readers: Mapping[Value, int]
) -> tuple[Value, list[Op]]:
    """Return the sum that an update's gradient is made of element by element, and the ops between the two."""
    between: list[Op] = []
    while readers.get(gradient, 0) == 1 and gradient in producer:
        op = producer[gradient]
        if op.op_type not in _BY_ELEMENT:
            break
        between.append(op)
        gradient = op.inputs[0]
    return gradient, between


def _update(op: Op) -> OptimizerStep:
    held = set(operator(op.op_type).in_place.values())
    shapes = {as_tensor(v.type, v.name).shape for v in (*op.inputs, *op.outputs)}
    gradients = [v for i, v in enumerate(op.inputs) if i not in held]
    if 0 not in held or len(gradients) != 1 or len(shapes) > 1:
        raise whole_needed(op)
    state = tuple([v for i, v in enumerate(op.inputs) if i in held and i > 0])
    return OptimizerStep(op.inputs[0], gradients[0], state, op.outputs)


def whole_needed(op: Op) -> PlanError:
    """Return the error of an op that is part of an update and does not go through it so."""
    return PlanError(
        f"{op!r} is part of an update, or follows one, and needs its operands whole; divided over dp a rank "
        "has a part of the elements of each parameter, its gradient and its state: use zero=0, or an "
        "optimizer that goes through them element by element"
    )
