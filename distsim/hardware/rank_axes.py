"""The axes that the ranks of a pipeline stage lie along, and meshes of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import NamedTuple

from distsim.cache import cached
from distsim.errors import TopologyError
from distsim.ir.device import Device, Mesh
from distsim.plan.rank_layout import ExpertRanks

OUTER, INNER = "dp_outer", "dp_inner"
"""The axes, or views, of data-parallel ranks of which some divide what all would hold: these lie along the
inner one."""

EXPERT, WITHIN = "ep", "ep_dp"
"""The axis, or view, along which ranks have experts each; and the axis of those that are ranks of dp, where
the view has others too."""

TENSOR = "tp"
"""The axis, or view, along which parameters are divided, with the work on them."""

EVERY = "ranks"
"""The view of all ranks of a pipeline stage."""

_CONTEXT = ("cp", "cp_ring", "cp_heads")
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
    **{(f"e{axis}", f"ep_{axis}"): axis for axis in _CONTEXT},
    ("ep_tp", "etp"): TENSOR,
}
"""What two axes, or views, are together where that has a name of its own."""
PARTS = {part: joint for parts, joint in _JOINT.items() if joint in (*_CONTEXT, TENSOR) for part in parts}
"""The axes into which experts cut another, each with that: along one experts are divided, along one not."""
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
        and of those of ``cp`` and of ``tp``: where these are some, they have an axis of their own beside that
        of the others, and both are a view. ``inner`` neighbours of the ``dp`` ranks, if that is more than one
        and not all, have an axis of their own, or a view: of those along which experts are divided, and of
        some with the same; or these are among those along which experts are divided.
        """
        if dp % ep.dp or cp % ep.cp or tp % ep.tp:
            raise TopologyError(f"experts over {ep} do not divide dp={dp}, cp={cp}, tp={tp}")
        if 1 < inner < dp and (dp % inner or (inner % ep.dp and ep.dp % inner)):
            raise TopologyError(f"inner={inner} does not divide dp={dp} with experts over {ep.dp}")
        batch = _batch_axes(dp, inner if 1 < inner < dp else dp, ep)
        context = _context_axes(cp, ulysses, ep.cp) if cp > 1 else _Axes({}, ())
        tensor = _Axes({TENSOR: tp}, (TENSOR,) * (ep.tp > 1))
        if 1 < ep.tp < tp:
            tensor = _Axes({"ep_tp": ep.tp, "etp": tp // ep.tp}, ("ep_tp",))
        data = {**batch.sizes, **context.sizes}
        views = {
            joined_axes(names): names
            for count in range(2, len(data) + 1)
            for names in combinations(data, count)
        }
        if ep.ranks > 1 and EXPERT not in data:
            views[EXPERT] = (*batch.experts, *context.experts, *tensor.experts)
        if len(tensor.sizes) > 1:
            views[TENSOR] = tuple(tensor.sizes)
        return RankAxes({**data, **tensor.sizes}, tuple(data), views)

    def mesh(self, devices: Sequence[Device], pp: int | None = None) -> Mesh:
        """Return the mesh of these ranks, or of ``pp`` pipeline ranks that have them each.

        Beside the views it has that of all ranks of a stage, :data:`EVERY`.
        """
        views = {**self.views, EVERY: tuple(self.sizes)}
        stages = {} if pp is None else {"pp": pp}
        return Mesh(devices, views, **stages, **self.sizes)


class _Axes(NamedTuple):
    """Axes, slowest first, and those of them along which experts are divided."""

    sizes: dict[str, int]
    experts: tuple[str, ...]


def _batch_axes(dp: int, inner: int, ep: ExpertRanks) -> _Axes:
    """Return the axes of the ranks of dp, cut where experts differ and into ``inner`` neighbours."""
    within = EXPERT if ep.ranks == ep.dp else WITHIN
    if ep.dp == 1:
        return _Axes({"dp": dp} if inner == dp else {OUTER: dp // inner, INNER: inner}, ())
    if inner == dp:
        return _Axes({"edp": dp // ep.dp, within: ep.dp}, (within,))
    if inner % ep.dp == 0:
        return _Axes({OUTER: dp // inner, "edp_inner": inner // ep.dp, within: ep.dp}, (within,))
    sizes = {"edp": dp // ep.dp, "ep_outer": ep.dp // inner, "ep_inner": inner}
    return _Axes(sizes, ("ep_outer", "ep_inner"))


def _context_axes(cp: int, ulysses: int, ep: int) -> _Axes:
    """Return the axes of the ranks of a context, of which ``ep`` neighbours have experts each."""
    apart = ulysses not in (1, cp)
    ranks = {"cp_ring": cp // ulysses, "cp_heads": ulysses} if apart else {"cp": cp}
    sizes, experts = dict[str, int](), list[str]()
    for axis, size in reversed(ranks.items()):
        part = math.gcd(ep, size)
        ep //= part
        if 1 < part < size:
            sizes |= {f"ep_{axis}": part, f"e{axis}": size // part}
            experts.insert(0, f"ep_{axis}")
        else:
            sizes[axis] = size
            experts[:0] = [axis] * (part > 1)
    return _Axes(dict(reversed(sizes.items())), tuple(experts))


def over_tensor(axis: str) -> bool:
    """Whether an axis is the one along which parameters are divided, or a part of that."""
    return PARTS.get(axis, axis) == TENSOR


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
