"""Sends between the stages of a mesh, as the cost model has them."""

from __future__ import annotations

from distsim.cost.cost_model import CostModel, Group
from distsim.ir import NO_ATTRIBUTES, Mesh, Tensor
from distsim.ir.type import UInt8
from distsim.ops import Signature
from distsim.stage_balance.cost import Communication


def mesh_communication(mesh: Mesh, cost_model: CostModel) -> Communication:
    """Return what a send between stages of ``mesh`` (axes pp, dp, tp) takes, on its slowest pair.

    Raises ``TopologyError``, when asked, where nothing links two devices.
    """
    pairs: dict[tuple[int, int], list[Group]] = {}
    known: dict[tuple[int, int, int], float] = {}

    def seconds(source: int, target: int, nbytes: float) -> float:
        key = (source, target, round(nbytes))
        if key not in known:
            if key[:2] not in pairs:
                pairs[key[:2]] = _distinct(mesh, source, target, cost_model)
            type_ = Tensor(UInt8(), (key[2],))
            signature = Signature("Send", NO_ATTRIBUTES, (type_,), (type_,))
            known[key] = max(cost_model.communication_seconds(signature, pair) for pair in pairs[key[:2]])
        return known[key]

    return seconds


def _distinct(mesh: Mesh, source: int, target: int, cost_model: CostModel) -> list[Group]:
    """Return a pair of ranks of each kind of route from one stage to another."""
    ends = (mesh.at(pp=stage).devices for stage in (source, target))
    groups: list[Group] = list(zip(*ends, strict=True))
    routes = cost_model.routes(groups)
    return groups[:1] if len(routes) == 1 else list(dict(zip(routes, groups, strict=True)).values())
