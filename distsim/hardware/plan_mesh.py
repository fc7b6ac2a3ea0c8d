"""Which devices of a topology play which rank of a plan."""

from __future__ import annotations

import numpy as np

from distsim.cache import Cache, cached
from distsim.errors import PlanError
from distsim.hardware.rank_axes import EXPERT, INNER, OUTER, PARTS, WITHIN, RankAxes
from distsim.ir.device import Mesh
from distsim.ir.topology import Topology
from distsim.plan import Plan
from distsim.plan.rank_layout import ExpertRanks, parse_cp_kind

DEGREES = {
    **dict.fromkeys(("cp_ring", "cp_heads"), "cp"),
    **dict.fromkeys(("edp", "edp_inner", OUTER, INNER), "dp"),
    **dict.fromkeys((WITHIN, "ep_outer", "ep_inner"), EXPERT),
    **{part: axis.partition("_")[0] for part, axis in PARTS.items()},
}
"""The degree of a plan that an axis is of, where it has another name."""

_MESHES = Cache[Topology, Mesh]("meshes of plans, by topology, its version and degrees", 4096)


def rank_axes(plan: Plan) -> RankAxes:
    """Return the axes of the ranks of a stage."""
    ulysses = parse_cp_kind(plan.cp_kind)[1]
    return _axes_of(plan.dp, plan.tp, plan.cp, ulysses, plan.expert_ranks, plan.zero_ranks)


@cached("axes of the ranks of a stage, by degrees", 4096)
def _axes_of(dp: int, tp: int, cp: int, ulysses: int, experts: ExpertRanks, inner: int) -> RankAxes:
    return RankAxes.of(dp, tp, cp, ulysses, experts, inner)


def plan_mesh(plan: Plan, topology: Topology) -> Mesh:
    """Return the mesh of the first devices of a topology, on which ranks lie as the order of the plan says.

    Raises :class:`PlanError` when there are too few.
    """
    degrees = (
        plan.pp,
        plan.dp,
        plan.tp,
        plan.cp,
        plan.cp_kind,
        plan.ep,
        plan.etp,
        plan.zero_ranks,
        plan.order,
    )
    return _MESHES.get(topology, (topology.version, *degrees), lambda: _mesh(plan, topology))


def _mesh(plan: Plan, topology: Topology) -> Mesh:
    devices = topology.devices
    if len(devices) < plan.devices:
        raise PlanError(
            f"plan {plan} needs {plan.devices} devices, the topology has {len(devices)}; use a larger "
            "cluster or smaller degrees"
        )
    axes = rank_axes(plan)
    # The axes of a mesh have one order: it is the devices that are put in another.
    sizes = {"pp": plan.pp, **axes.sizes}
    lying = sorted(sizes, key=lambda axis: plan.order.split("-").index(DEGREES.get(axis, axis)), reverse=True)
    place = np.arange(plan.devices).reshape([sizes[axis] for axis in lying])
    order = place.transpose([lying.index(axis) for axis in sizes]).reshape(-1)
    return axes.mesh([devices[i] for i in order.tolist()], plan.pp)
