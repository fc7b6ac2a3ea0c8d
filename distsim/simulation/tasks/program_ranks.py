"""Rank classes of a Program: one per pipeline rank where its mesh lies evenly on the topology, else more."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import proxy

import numpy as np

from distsim.cache import Cache
from distsim.cost.cost_model import CostModel
from distsim.cost.demand import Group
from distsim.hardware.routes import among
from distsim.ir import Function, Mesh, callees
from distsim.program.table import BoundBlock
from distsim.simulation.tasks.block_matrix import StageRanks
from distsim.simulation.tasks.color_refinement import Relation, refine
from distsim.simulation.tasks.rank_classes import communicates

_AXES = Cache[Function, tuple[str, ...]]("mesh axes that are communicated over, by function", 1)


def used_axes(function: Function) -> tuple[str, ...]:
    """Return the mesh axes over which a function and its callees communicate, in order of appearance."""

    def find() -> tuple[str, ...]:
        ops = (op for f in (*callees(function), function) for op in f.ops)
        return tuple(dict.fromkeys(op.attributes["axis"] for op in ops if communicates(op)))

    return _AXES.get(function, (), find)


class CommunicationPattern(NamedTuple):
    """What blocks move: the mesh axes that each rank uses, and the (source, target) of their transfers."""

    axes: tuple[tuple[str, ...], ...]
    sends: tuple[tuple[int, int], ...]


def communication(blocks: Sequence[BoundBlock], num_ranks: int) -> CommunicationPattern:
    """Return what the blocks of a table move between devices."""
    axes: list[set[str]] = [set() for _ in range(num_ranks)]
    sends: set[tuple[int, int]] = set()
    for block in blocks:
        if block.function is not None:
            axes[block.rank].update(used_axes(block.function))
        elif block.target >= 0:
            sends.add((block.rank, block.target))
    return CommunicationPattern(tuple([tuple(sorted(used)) for used in axes]), tuple(sorted(sends)))


@dataclass(frozen=True, eq=False)
class ProgramRanks:
    """The rank classes of every pipeline rank.

    ``context`` says what durations depend on: the figures of each class's devices, and how the groups of each
    axis lie on the topology. Ranks, of this or another program, that agree in them take equally long over
    everything.
    """

    slices: tuple[StageRanks, ...]
    context: tuple[dict[str, Hashable], ...]

    def key(self, rank: int, axes: Sequence[str]) -> Hashable:
        """Return what the durations of a block that communicates over these axes depend on."""
        context = self.context[rank]
        return (context["spec"], *[(axis, context[axis]) for axis in axes])


class MeshAnalysis:
    """How the pipeline ranks of one mesh (axes pp, dp, tp) lie on the topology, computed once."""

    def __init__(self, mesh: Mesh, cost_model: CostModel) -> None:
        self.mesh = mesh
        self.cost_model: CostModel = proxy(cost_model)  # which keeps this
        self.slices = mesh.slices("pp")
        self.specs = [
            np.array([cost_model.spec(device) for device in part.devices], np.int64) for part in self.slices
        ]
        self._groups: dict[tuple[int, str], tuple[Hashable, ...]] = {}
        self._pairs: dict[tuple[int, int], tuple[Hashable, ...]] = {}
        self._ranks: dict[CommunicationPattern, ProgramRanks] = {}

    def groups(self, rank: int, axis: str) -> tuple[Hashable, ...]:
        """Return how each group along an axis of a rank lies on the topology; one entry if all alike."""
        key = (rank, axis)
        if key not in self._groups:
            self._groups[key] = self.cost_model.routes(self.slices[rank].groups(axis))
        return self._groups[key]

    def pairs(self, source: int, target: int) -> tuple[Hashable, ...]:
        """Return the same for the pairs of a Send from one rank to another."""
        key = (source, target)
        if key not in self._pairs:
            pairs = zip(self.slices[source].devices, self.slices[target].devices, strict=True)
            self._pairs[key] = self.cost_model.routes(tuple(pairs))
        return self._pairs[key]

    def ranks(self, moved: CommunicationPattern) -> ProgramRanks:
        """Return the classes of blocks that move this."""
        found = self._ranks.get(moved)
        if found is None:
            found = self._ranks[moved] = self._made(moved)
        return found

    def _made(self, moved: CommunicationPattern) -> ProgramRanks:
        axes, sends = moved
        alike = (
            all((specs == specs[0]).all() for specs in self.specs)
            and all(len(self.groups(s, axis)) == 1 for s, used in enumerate(axes) for axis in used)
            and all(len(self.pairs(*send)) == 1 for send in sends)
        )
        classes = [np.zeros(len(s), np.int64) for s in self.specs] if alike else self._refined(moved)
        slices = tuple(StageRanks(mesh, own) for mesh, own in zip(self.slices, classes, strict=True))
        context: list[dict[str, Hashable]] = []
        routes, topology = self.cost_model.routes, self.cost_model.topology
        for number, (own, used) in enumerate(zip(slices, axes, strict=True)):
            if alike:
                about: dict[str, Hashable] = {axis: self.groups(number, axis)[0] for axis in used}
                about["spec"] = int(self.specs[number][0])
            else:
                about = {
                    axis: tuple(
                        (part.sources, routes((among(part.group, part.family, topology),)))
                        for part in own.along(axis)
                    )
                    for axis in used
                }
                about["spec"] = tuple(self.cost_model.spec(members[0]) for members in own.members)
            context.append(about)
        return ProgramRanks(slices, tuple(context))

    def _refined(self, moved: CommunicationPattern) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
        """Split the devices of each rank until those of a class meet the same classes at the same cost."""
        number = {device: i for i, device in enumerate(self.mesh.devices)}
        colours = np.concatenate([specs * len(self.slices) + s for s, specs in enumerate(self.specs)])
        kinds: dict[Hashable, int] = {}
        relations: list[Relation] = []

        def relate(groups: Sequence[Group], ordered: bool) -> None:
            found = self.cost_model.routes(groups)
            each = found * len(groups) if len(found) == 1 else found
            cost = np.array([kinds.setdefault(kind, len(kinds)) for kind in each], np.int64)
            members = np.array([[number[device] for device in group] for group in groups], np.int64)
            relations.append(Relation(members, cost, ordered))

        for part, used in zip(self.slices, moved.axes, strict=True):
            for axis in used:
                relate(part.groups(axis), ordered=False)
        for source, target in moved.sends:
            pairs = zip(self.slices[source].devices, self.slices[target].devices, strict=True)
            relate(tuple(pairs), ordered=True)
        refined = refine(colours, relations)
        ends = np.cumsum([len(specs) for specs in self.specs])[:-1]
        return [np.unique(part, return_inverse=True)[1] for part in np.split(refined, ends)]


_ANALYSES = Cache[CostModel, MeshAnalysis](
    "how ranks lie on the topology, by cost model, mesh and version of the topology", 1024
)


def program_ranks(mesh: Mesh, moved: CommunicationPattern, cost_model: CostModel) -> ProgramRanks:
    """Return the rank classes of every rank of a mesh (axes pp, dp, tp) on which blocks move something."""
    key = (mesh, cost_model.topology.version)
    return _ANALYSES.get(cost_model, key, lambda: MeshAnalysis(mesh, cost_model)).ranks(moved)
