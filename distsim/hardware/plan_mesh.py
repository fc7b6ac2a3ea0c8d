"""Which devices of a topology play which rank of a plan."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from distsim.errors import PlanError
from distsim.ir.device import Mesh, RankAxes
from distsim.ir.topology import Topology
from distsim.plan import Plan, parse_cp_kind

Degrees = tuple[int, int, int, int, str]

_MESHES: WeakKeyDictionary[Topology, tuple[int, dict[Degrees, Mesh]]] = WeakKeyDictionary()
"""The meshes of a topology in its present version, by degrees."""


def rank_axes(plan: Plan) -> RankAxes:
    """Return the axes of the ranks of a stage."""
    return RankAxes.of(plan.dp, plan.tp, plan.cp, parse_cp_kind(plan.cp_kind)[1])


def plan_mesh(plan: Plan, topology: Topology) -> Mesh:
    """Return the mesh of the first devices of a topology: ranks of tp next to each other, then cp, dp, pp.

    Raises :class:`PlanError` when there are too few.
    """
    version, meshes = _MESHES.get(topology, (-1, dict[Degrees, Mesh]()))
    if version != topology.version:
        meshes = dict[Degrees, Mesh]()
        _MESHES[topology] = topology.version, meshes
    degrees = (plan.pp, plan.dp, plan.tp, plan.cp, plan.cp_kind)
    found = meshes.get(degrees)
    if found is None:
        devices = topology.devices
        if len(devices) < plan.devices:
            raise PlanError(
                f"plan {plan} needs {plan.devices} devices, the topology has {len(devices)}; "
                "use a larger cluster or smaller degrees"
            )
        found = rank_axes(plan).mesh(devices[: plan.devices], plan.pp)
        meshes[degrees] = found
    return found
