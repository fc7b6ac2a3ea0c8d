"""Which devices of a topology play which rank of a plan."""

from __future__ import annotations

from distsim.cache import Cache
from distsim.errors import PlanError
from distsim.ir.device import Mesh, RankAxes
from distsim.ir.topology import Topology
from distsim.plan import Plan, parse_cp_kind

_MESHES = Cache[Topology, Mesh]("meshes of plans, by topology, its version and degrees", 4096)


def rank_axes(plan: Plan) -> RankAxes:
    """Return the axes of the ranks of a stage."""
    return RankAxes.of(plan.dp, plan.tp, plan.cp, parse_cp_kind(plan.cp_kind)[1])


def plan_mesh(plan: Plan, topology: Topology) -> Mesh:
    """Return the mesh of the first devices of a topology: ranks of tp next to each other, then cp, dp, pp.

    Raises :class:`PlanError` when there are too few.
    """
    degrees = (plan.pp, plan.dp, plan.tp, plan.cp, plan.cp_kind)
    return _MESHES.get(topology, (topology.version, *degrees), lambda: _mesh(plan, topology))


def _mesh(plan: Plan, topology: Topology) -> Mesh:
    devices = topology.devices
    if len(devices) < plan.devices:
        raise PlanError(
            f"plan {plan} needs {plan.devices} devices, the topology has {len(devices)}; use a larger "
            "cluster or smaller degrees"
        )
    return rank_axes(plan).mesh(devices[: plan.devices], plan.pp)
