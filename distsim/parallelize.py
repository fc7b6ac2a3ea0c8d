"""parallelize: model + Plan + Topology -> Program, the one composition."""

from __future__ import annotations

from distsim.errors import PlanError
from distsim.executor.program import Program
from distsim.ir import Function, Mesh, Topology
from distsim.plan import Plan
from distsim.schedule import schedule
from distsim.transforms import build_program


def parallelize(function: Function, plan: Plan, topology: Topology) -> Program:
    """Return the scheduled training step of a joint function under ``plan``.

    The first ``plan.devices`` devices of ``topology`` are used: tensor-parallel ranks next to each
    other, where links are fastest, then data-parallel ones, then pipeline stages. Raises
    :class:`PlanError` when the plan does not fit the topology, the batch or the function.
    """
    devices = topology.devices
    if len(devices) < plan.devices:
        raise PlanError(
            f"plan {plan} needs {plan.devices} devices, the topology has {len(devices)}; "
            "use a larger cluster or smaller degrees"
        )
    mesh = Mesh(devices[: plan.devices], pp=plan.pp, dp=plan.dp, tp=plan.tp)
    return build_program(function, mesh, schedule(plan.schedule, plan.pp, plan.microbatches))
