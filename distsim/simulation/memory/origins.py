"""Origins: the module of the model that a value comes from (:mod:`distsim.ir.module_names`).

What an op without a module, or added by a transform, makes by moving, casting or showing a value comes from
where that value does; what it computes, gradients above all, has no origin.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from distsim.cache import Cache
from distsim.ir import Function, Op, Role, Value
from distsim.ir.module_names import is_added, module_of
from distsim.ops import operator
from distsim.ops.coalescing import moved_values

Origin = str | int | None
"""A module; the place of the input of a function from which a value comes; or None, of what has none."""

OTHER = "other"
"""What ops without a module compute: gradients on their way, models without names."""

_OF_INPUTS = {Role.PARAMETER: "weights", Role.STATE: "state", Role.CONSTANT: "constants", Role.INPUT: "data"}
_MOVES = frozenset(
    ("Cast", "Concat", "Expand", "Float8Cast", "Identity", "Send", "Slice", "Split", "Transpose")
)
_MOVES_EACH = frozenset(("AverageGradients", "CopyIn", "CopyOut"))
"""What does so to several values, each of which has its result."""

_OUTPUTS = Cache[Function, tuple[Origin, ...]]("the origins of what a function returns, by function", 1)


def origins(function: Function) -> dict[Value, str]:
    """Return the origin of each value that the ops of a function make."""
    given = {value: _OF_INPUTS[value.role] for value in function.inputs}
    found = _origins(function, given)
    return {value: str(found[value] or OTHER) for op in function.ops for value in op.outputs}


def _returned(function: Function) -> tuple[Origin, ...]:
    def find() -> tuple[Origin, ...]:
        found = _origins(function, {value: place for place, value in enumerate(function.inputs)})
        return tuple([found[value] for value in function.outputs])

    return _OUTPUTS.get(function, None, find)


def _origins(function: Function, given: Mapping[Value, Origin]) -> dict[Value, Origin]:
    found = dict(given)
    for op in function.ops:
        first = found[op.inputs[0]] if op.inputs else None
        if op.subfunctions:
            module = module_of(op) if op.is_call else ""
            for value, inner in zip(op.outputs, _returned(op.callee), strict=True):
                if isinstance(inner, str):
                    found[value] = f"{module}.{inner}" if module else inner
                else:
                    found[value] = None if inner is None else found[op.inputs[inner]]
            continue
        own = "" if is_added(op) else module_of(op)
        if op.op_type in _MOVES_EACH or operator(op.op_type).host_stream:
            found.update({made: found[v] for v, made in zip(op.inputs, op.outputs, strict=True)})
            continue
        if not own and operator(op.op_type).communication is not None:
            found.update(dict.fromkeys(op.outputs))
            found.update({made: found[v] for v, made in zip(moved_values(op), op.outputs, strict=False)})
            continue
        found.update(dict.fromkeys(op.outputs, own or (first if _moves(op) else None)))
    return found


def _moves(op: Op) -> bool:
    meaning = operator(op.op_type)
    return meaning.view or op.op_type in _MOVES


def grouped(amounts: Mapping[str, int], most: int) -> dict[str, int]:
    """Return amounts by module in the finest grouping that has at most so many groups, the largest first.

    Modules are grouped by their first parts, as many as make no more groups; where the first one alone makes
    more, the smallest groups become ``other``.
    """
    depths = range(1, 1 + max([name.count(".") + 1 for name in amounts], default=0))
    chosen: dict[str, int] = {}
    for depth in depths:
        made = _summed((".".join(name.split(".")[:depth]), nbytes) for name, nbytes in amounts.items())
        if not chosen or len(made) <= most:
            chosen = made
    ordered = sorted(chosen, key=lambda name: (-chosen[name], name))
    named = ordered if len(ordered) <= most else ordered[: most - 1]
    return _summed((name if name in named else OTHER, chosen[name]) for name in ordered)


def _summed(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, nbytes in pairs:
        found[name] = found.get(name, 0) + nbytes
    return found
