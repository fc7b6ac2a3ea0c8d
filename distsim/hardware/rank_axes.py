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
"""The axes of data-parallel ranks of which some divide what all would hold: these lie along the inner one."""

EXPERT, WITHIN = "ep", "ep_dp"
"""The axis, or view, along which ranks have experts each; and the axis of those that are ranks of dp, where
the view has others too."""

_ALL_OF_DP = (("edp", EXPERT), ("edp", WITHIN), (OUTER, INNER))
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
        and not all, have an axis of their own.
        """
        if dp % ep.dp or ep.cp not in (1, cp) or ep.tp not in (1, tp):
            raise TopologyError(f"experts over {ep} do not divide dp={dp}, cp={cp}, tp={tp}")
        apart = 1 < inner < dp
        if apart and (dp % inner or ep.ranks > 1):
            raise TopologyError(f"inner={inner} does not divide dp={dp} with ep={ep.ranks}")
        rings = {"cp": cp} if ulysses in (1, cp) else {"cp_ring": cp // ulysses, "cp_heads": ulysses}
        within = EXPERT if ep.ranks == ep.dp else WITHIN
        batch = {"edp": dp // ep.dp, within: ep.dp} if ep.dp > 1 else {"dp": dp}
        batch = {OUTER: dp // inner, INNER: inner} if apart else batch
        data = batch | (rings if cp > 1 else {})
        views = {
            joined_axes(names): names
            for count in range(2, len(data) + 1)
            for names in combinations(data, count)
        }
        if ep.ranks > ep.dp:
            taken = {WITHIN: ep.dp, **dict.fromkeys(rings, ep.cp), "tp": ep.tp}
            views[EXPERT] = tuple([axis for axis, size in taken.items() if size > 1])
        return RankAxes({**data, "tp": tp}, tuple(data), views)

    def mesh(self, devices: Sequence[Device], pp: int | None = None) -> Mesh:
        """Return the mesh of these ranks, or of ``pp`` pipeline ranks that have them each."""
        stages = {} if pp is None else {"pp": pp}
        return Mesh(devices, self.views, **stages, **self.sizes)


def joined_axes(names: Sequence[str]) -> str:
    """Return the name of the view of several axes, or of the one axis.

    >>> joined_axes(["dp", "cp"]), joined_axes(["edp", "ep", "cp"])
    ('dp+cp', 'dp+cp')
    """
    return "+".join(["dp", *names[2:]] if tuple(names[:2]) in _ALL_OF_DP else names)


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
