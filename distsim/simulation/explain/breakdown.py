"""What the seconds of a step consist of, along its critical path, by what people ask for."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from distsim.cost.efficiency import element_type, kind_of_work
from distsim.errors import SimulationError
from distsim.ir import Function, Op
from distsim.ir.module_names import module_of
from distsim.ops import op_label, operator, signature_of, work
from distsim.ops.kernel import MULTI_TENSOR
from distsim.ops.training import AVERAGE, NORM, ZERO_SUMS
from distsim.program.program import Program
from distsim.program.table import SEND, UPDATE
from distsim.schedule import LETTERS, Kind
from distsim.simulation.explain.critical_path import kind_of, sums
from distsim.simulation.explain.walk import critical_path
from distsim.simulation.tasks.rank_classes import communicates
from distsim.simulation.tasks.timeline import Timeline

HOST, OTHER, SLOWED, UPDATES = "host", "other", "slowed by collectives", "updates"

STEP_OPS = MULTI_TENSOR | {AVERAGE, NORM, ZERO_SUMS, "GradientFactor"}
"""What runs once a step, of the parameters of many modules together."""

PHASES = {
    **{kind.value: kind.phase for kind in Kind},
    **{UPDATE: "update", SEND: "send"},
}
"""The phases by the first letter of the name of a call, ``B3@0``, and of a transfer."""


def breakdown(timeline: Timeline, simulated: Function | Program, by: str) -> Mapping[str, float]:
    """Return the seconds of a step by part, most first; they sum to the step time.

    ``by``: ``operator``; ``kind`` of work (:data:`distsim.ir.device.KINDS_OF_WORK`, collectives by their
    kind, ``host`` for launches, and what computation loses to collectives); ``module`` of the model, backward
    pass, recomputation and collectives included (what is of many modules, as ``updates`` and collectives of
    gradients in buckets, apart); ``phase``; or ``axis`` of the mesh, ``compute`` for what communicates over
    none. Raises :class:`SimulationError` for another.
    """
    if by == "phase" and not isinstance(simulated, Program):
        raise SimulationError(f"{simulated.name} is a Function, which has no phases; simulate a Program")
    if by == "phase":
        path = critical_path(timeline, simulated)
        return sums([(_phase(segment.name), segment.end - segment.start) for segment in path.segments])
    if by not in PARTS:
        raise SimulationError(f"breakdown by {by!r:.40}: choose one of {', '.join((*PARTS, 'phase'))}")
    return critical_path(timeline, simulated, PARTS[by]).by_kind


def _phase(name: str) -> str:
    if name == SEND:
        return PHASES[name]
    letters = re.findall(rf"([{LETTERS}{UPDATE}])\d*@\d", name)  # of a pair, (F2@2;B1@1), both
    return " with ".join([PHASES[letter] for letter in letters]) or OTHER


def _kind(op: Op) -> str:
    meaning = operator(op.op_type)
    if meaning.issues:
        return HOST
    if meaning.communication is not None and meaning.moves:
        return meaning.communication.kind
    if meaning.host_stream:
        return meaning.host_stream
    if meaning.stalls:
        return SLOWED
    signature = signature_of(op)
    demand = work(signature)
    return OTHER if demand is None else kind_of_work(signature, demand, element_type(signature))


def _module(op: Op) -> str:
    meaning = operator(op.op_type)
    if meaning.issues:
        return HOST
    if meaning.stalls:
        return SLOWED
    if module := module_of(op):
        return module
    if communicates(op):
        return kind_of(op)
    return UPDATES if op_label(op) in STEP_OPS else OTHER


def _axis(op: Op) -> str:
    meaning = operator(op.op_type)
    if meaning.issues:
        return HOST
    if meaning.stalls:
        return SLOWED
    if not meaning.moves:
        return "compute" if meaning.computes else meaning.host_stream
    return str(op.attributes.get("axis", "pp"))


PARTS: Mapping[str, Callable[[Op], str]] = {
    "operator": kind_of,
    "kind": _kind,
    "module": _module,
    "axis": _axis,
}
"""What an op counts to, by what is asked for."""
