"""Explaining a simulation: its critical path, how its stages are loaded, and what-ifs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from distsim.cost.cost_model import CostModel
from distsim.errors import ScheduleError
from distsim.ops import op_label, operator, signature_of
from distsim.ops.marks import LAUNCH
from distsim.program.program import Program
from distsim.schedule import FLUSH, longer
from distsim.simulation.details import ProgramTimeline
from distsim.simulation.explain import what_if
from distsim.simulation.explain.critical_path import CriticalPath, stages_of
from distsim.simulation.explain.explanation import Explanation, StageLoad, WhatIf
from distsim.simulation.maxplus.engine import run_program
from distsim.simulation.tasks.rank_classes import communicates

if TYPE_CHECKING:
    from distsim.simulation.simulation import Simulation

MOST_OPERATORS = 3
"""So many operators are tried for free: those that take most of the critical path."""


def explain(simulation: Simulation) -> Explanation:
    """Return why the step takes as long as it does; every what-if is simulated."""
    path = simulation.critical_path
    tried = [*_free(simulation, path), *_full_pipeline(simulation)]
    what_ifs = [WhatIf(change, step, simulation.step_time - step) for change, step in tried]
    what_ifs.sort(key=lambda what: -what.gain)
    return Explanation(simulation.name, simulation.step_time, path, _loads(simulation), tuple(what_ifs))


def _loads(simulation: Simulation) -> tuple[StageLoad, ...]:
    members = simulation.classes.members
    stages = stages_of(simulation.simulated, simulation.classes)
    found: list[StageLoad] = []
    for stage in np.unique(stages).tolist():
        own = np.flatnonzero(stages == stage).tolist()
        shares = [(simulation.shares(members[c][0]), len(members[c])) for c in own]
        total = sum(count for _, count in shares)
        busy = sum(each.busy * count for each, count in shares) / total
        exposed = sum(each.exposed_communication * count for each, count in shares) / total
        bubble = sum(each.bubble * count for each, count in shares) / total
        found.append(StageLoad(stage, total, busy, exposed, bubble))
    return tuple(found)


def _free(simulation: Simulation, path: CriticalPath) -> Iterator[tuple[str, float]]:
    """Yield (change, step time) with one thing free at a time, of those that occur."""
    ops = list(dict.fromkeys(each.op for each in simulation.timeline.op_runs))
    moving = [op for op in ops if communicates(op)]
    axes = dict.fromkeys(str(op.attributes["axis"]) for op in moving if "axis" in op.attributes)
    free: list[tuple[str, what_if.Frees]] = []
    if moving:
        free.append(("free communication", what_if.communication))
    free += [(f"free collectives over {axis}", what_if.collectives(axis)) for axis in axes]
    if any(what_if.sends(signature_of(op)) for op in moving):
        free.append(("free sends", what_if.sends))
    kinds = dict.fromkeys(op_label(op) for op in ops if not (communicates(op) or operator(op.op_type).issues))
    names = [kind for kind in path.by_kind if kind in kinds][:MOST_OPERATORS]
    free += [(f"free {name}", what_if.operators(name)) for name in names]
    base = simulation.cost_model
    models: list[tuple[str, CostModel]] = [(change, what_if.FreeOps(base, frees)) for change, frees in free]
    if any(device.kernel_launch_overhead or base.kernels for device in simulation.timestamps):
        models.append(("no kernel launch overhead", what_if.FreeLaunches(base)))
    if LAUNCH.op_type in path.by_kind and not base.graphs:
        models.append(("CUDA graphs of layers", what_if.Captured(base)))
    for change, model in models:
        yield change, simulation.again(model).step_time


def _full_pipeline(simulation: Simulation) -> Iterator[tuple[str, float]]:
    """Yield the step time if the pipeline neither filled nor drained, where there is one.

    Let P(m) be when the last of m microbatches has run. The same stages are simulated with 2 m
    microbatches: P(2 m) - P(m) is what m microbatches take that follow on others. What comes after the
    last microbatch (updates) stays as it is. For schedules that are known by name, and fixed durations; not
    for those without a flush, whose throughput is that of a full pipeline.
    """
    timeline, program = simulation.timeline, simulation.simulated
    if not (isinstance(timeline, ProgramTimeline) and isinstance(program, Program)):
        return
    order = program.schedule
    if order.num_ranks < 2 or order.weights != FLUSH:
        return
    try:
        twice = replace(program, schedule=longer(order, 2 * order.num_microbatches))
    except ScheduleError:  # a table of one's own, or it does not take twice as many
        return
    run = run_program(twice, simulation.cost_model, timeline.wiring.overlap)
    once = timeline.last_microbatch_end
    full = ProgramTimeline(run).last_microbatch_end - once
    if full <= once:  # else its order suits the first microbatches better than those that follow
        yield "a pipeline that is always full", simulation.step_time - once + full
