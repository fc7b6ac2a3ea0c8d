"""The axes that the ranks of a pipeline stage lie along, and meshes of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from distsim.cache import cached
from distsim.errors import TopologyError
from distsim.ir.device import Device, Mesh
from distsim.rank_layout import ExpertRanks

OUTER, INNER = "dp_outer", "dp_inner"
"""The axes, or views, of data-parallel ranks of which some divide what all would hold: these lie along the
inner one."""

EXPERT, WITHIN = "ep", "ep_dp"
"""The axis, or view, along which ranks have experts each; and the axis of those that are ranks of dp, where
the view has others too."""

_JOINT = {
    (OUTER, INNER): "dp",
    ("edp", EXPERT): "dp",
    ("edp", WITHIN): "dp",
    (OUTER, "edp_inner"): "edp",
    ("edp_inner", EXPERT): INNER,
    ("edp_inner", WITHIN): INNER,
    ("edp", "ep_outer"): OUTER,
    ("ep_outer", "ep_inner"): WITHIN,
    (OUTER, "ep_inner"): "dp",
}
"""What two axes, or views, are together where that has a name of its own."""
_ONE = ExpertRanks()


@dataclass(frozen=True)
class RankAxes:
    """The axes of the ranks of a pipeline stage, ``sizes`` by name, slowest first, and views of them.

    ``data`` are the axes over which the batch or its sequences are divided, and what is updated is not: the
    views that join several of these have their names between "+".

    >>> axes = RankAxes.of(dp=4, tp=2, cp=3)
    >>> axes.sizes, axes.views
    ({'dp': 4, 'cp': 3, 'tp': 2}, {'dp+cp': ('dp', 'cp')})
    >>> axes = RankAxes.of(dp=4, tp=2, ep=ExpertRanks(dp=2))
    >>> axes.sizes, axes.views
    ({'edp': 2, 'ep': 2, 'tp': 2}, {'dp': ('edp', 'ep')})
    >>> axes = RankAxes.of(dp=4, tp=2, ep=ExpertRanks(dp=2, tp=2))
    >>> axes.sizes, axes.views
    ({'edp': 2, 'ep_dp': 2, 'tp': 2}, {'dp': ('edp', 'ep_dp'), 'ep': ('ep_dp', 'tp')})
    >>> RankAxes.of(dp=4, tp=2, inner=2).sizes
    {'dp_outer': 2, 'dp_inner': 2, 'tp': 2}
    >>> axes = RankAxes.of(dp=8, tp=1, ep=ExpertRanks(dp=2), inner=4)
    >>> axes.sizes, axes.views["dp_inner"], axes.views["edp"]
    ({'dp_outer': 2, 'edp_inner': 2, 'ep': 2, 'tp': 1}, ('edp_inner', 'ep'), ('dp_outer', 'edp_inner'))
    """

    sizes: Mapping[str, int]
    data: tuple[str, ...]
    views: Mapping[str, tuple[str, ...]]

    @staticmethod
    def of(
        dp: int, tp: int, cp: int = 1, ulysses: int = 1, ep: ExpertRanks = _ONE, inner: int = 0
    ) -> RankAxes:
        """Return the axes of these degrees; of ``cp`` ranks ``ulysses`` exchange heads, rings are of others.

        An axis of context parallelism is there only if it divides anything. ``ep`` says along which ranks
        experts are divided: neighbours of the ``dp`` ranks, of whom those with the same are along ``edp``,
        all of ``cp`` and ``tp``, or none. ``inner`` neighbours of the ``dp`` ranks, if that is more than one
        and not all, have an axis of their own, or a view: of those along which experts are divided, and of
        some with the same; or these are among those along which experts are divided.
        """
        if dp % ep.dp or ep.cp not in (1, cp) or ep.tp not in (1, tp):
            raise TopologyError(f"experts over {ep} do not divide dp={dp}, cp={cp}, tp={tp}")
        if 1 < inner < dp and (dp % inner or (inner % ep.dp and ep.dp % inner)):
            raise TopologyError(f"inner={inner} does not divide dp={dp} with experts over {ep.dp}")
        rings = {"cp": cp} if ulysses in (1, cp) else {"cp_ring": cp // ulysses, "cp_heads": ulysses}
        batch = _batch_axes(dp, inner if 1 < inner < dp else dp, ep)
        data = batch | (rings if cp > 1 else {})
        views = {
            joined_axes(names): names
            for count in range(2, len(data) + 1)
            for names in combinations(data, count)
        }
        if ep.ranks > 1 and EXPERT not in data:
            within = [axis for axis in batch if axis in (WITHIN, "ep_outer", "ep_inner")]
            others = {**dict.fromkeys(rings, ep.cp), "tp": ep.tp}
            views[EXPERT] = (*within, *[axis for axis, size in others.items() if size > 1])
        return RankAxes({**data, "tp": tp}, tuple(data), views)

    def mesh(self, devices: Sequence[Device], pp: int | None = None) -> Mesh:
        """Return the mesh of these ranks, or of ``pp`` pipeline ranks that have them each."""
        stages = {} if pp is None else {"pp": pp}
        return Mesh(devices, self.views, **stages, **self.sizes)


def _batch_axes(dp: int, inner: int, ep: ExpertRanks) -> dict[str, int]:
    """Return the axes of the ranks of dp, cut where experts differ and into ``inner`` neighbours."""
    within = EXPERT if ep.ranks == ep.dp else WITHIN
    if inner == dp:
        return {"edp": dp // ep.dp, within: ep.dp} if ep.dp > 1 else {"dp": dp}
    if ep.dp == 1:
        return {OUTER: dp // inner, INNER: inner}
    if inner % ep.dp == 0:
        return {OUTER: dp // inner, "edp_inner": inner // ep.dp, within: ep.dp}
    return {"edp": dp // ep.dp, "ep_outer": ep.dp // inner, "ep_inner": inner}


def joined_axes(names: Sequence[str]) -> str:
    """Return the name of the view of several axes, or of the one axis.

    >>> joined_axes(["dp", "cp"]), joined_axes(["edp", "ep", "cp"]), joined_axes(["edp_inner", "ep", "cp"])
    ('dp+cp', 'dp+cp', 'dp_inner+cp')
    """
    found: list[str] = []
    for name in names:
        joint = _JOINT.get((found[-1], name)) if found else None
        found[-1:] = [joint] if joint else [*found[-1:], name]
    return "+".join(found)


@cached("meshes of ranks that lie nowhere, by device and degrees", 1024)
def logical_mesh(
    device: Device, dp: int, tp: int, cp: int = 1, ulysses: int = 1, ep: ExpertRanks = _ONE, inner: int = 0
) -> Mesh:
    """Return a mesh of devices like ``device``, numbered from 0: ranks (:class:`RankAxes`) of no place yet.

    >>> logical_mesh(Device(7, "gpu"), 2, 4)
    Mesh(dp=2, tp=4)[gpu:0..gpu:7]
    """
    axes = RankAxes.of(dp, tp, cp, ulysses, ep, inner)
    return axes.mesh([replace(device, id=i) for i in range(math.prod(axes.sizes.values()))])
