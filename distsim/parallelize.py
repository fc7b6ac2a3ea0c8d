"""parallelize: model + Plan + Topology -> Program, the one composition."""

from __future__ import annotations

from functools import lru_cache
from weakref import WeakKeyDictionary

from distsim.errors import PlanError
from distsim.executor.cost_model import CostModel
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
    order = schedule(plan.schedule, plan.pp, plan.microbatches)
    costs = _cost_model(topology) if plan.stages == "auto" else None
    return build_program(function, _mesh(plan, topology), order, plan.remat, plan.fsdp, plan.stages, costs)


@lru_cache(8)
def _cost_model(topology: Topology) -> CostModel:
    """Return the cost model with which splits are simulated: one for all plans of a topology."""
    return CostModel(topology)


Degrees = tuple[int, int, int]

_MESHES: WeakKeyDictionary[Topology, tuple[int, dict[Degrees, Mesh]]] = WeakKeyDictionary()
"""The meshes of a topology in its present version, by pp, dp and tp."""


def _mesh(plan: Plan, topology: Topology) -> Mesh:
    version, meshes = _MESHES.get(topology, (-1, dict[Degrees, Mesh]()))
    if version != topology.version:
        meshes = dict[Degrees, Mesh]()
        _MESHES[topology] = topology.version, meshes
    degrees = (plan.pp, plan.dp, plan.tp)
    found = meshes.get(degrees)
    if found is None:
        devices = topology.devices
        if len(devices) < plan.devices:
            raise PlanError(
                f"plan {plan} needs {plan.devices} devices, the topology has {len(devices)}; "
                "use a larger cluster or smaller degrees"
            )
        found = Mesh(devices[: plan.devices], pp=plan.pp, dp=plan.dp, tp=plan.tp)
        meshes[degrees] = found
    return found
