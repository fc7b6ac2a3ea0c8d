"""Rank classes of a Program: one per stage where its mesh is symmetric on the topology, else refined."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from distsim.cost.cost_model import CostModel, Group
from distsim.ir import Function, Mesh, callees
from distsim.program.program import Program
from distsim.simulate.tasks.block_matrix import StageRanks
from distsim.simulate.tasks.color_refinement import Relation, refine
from distsim.simulate.tasks.rank_classes import communicates

_axes: WeakKeyDictionary[Function, tuple[str, ...]] = WeakKeyDictionary()


def used_axes(function: Function) -> tuple[str, ...]:
    """Return the mesh axes over which a function and its callees communicate, in order of appearance."""
    found = _axes.get(function)
    if found is None:
        ops = (op for f in (*callees(function), function) for op in f.ops)
        found = tuple(dict.fromkeys(op.attributes["axis"] for op in ops if communicates(op)))
        _axes[function] = found
    return found


@dataclass(frozen=True, eq=False)
class ProgramRanks:
    """The rank classes of every stage.

    ``spec`` and ``routes`` say what durations depend on: the figures of each class's devices, and how the
    groups of each axis lie on the topology. Stages, of this or another program, that agree in them take
    equally long over everything.
    """

    stages: tuple[StageRanks, ...]
    context: tuple[dict[str, Hashable], ...]

    def key(self, stage: int, axes: Sequence[str]) -> Hashable:
        """Return what the durations of a block that communicates over these axes depend on."""
        context = self.context[stage]
        return (context["spec"], *[(axis, context[axis]) for axis in axes])


class MeshAnalysis:
    """How the stages of one mesh (axes pp, dp, tp) lie on the topology, computed once."""

    def __init__(self, mesh: Mesh, cost_model: CostModel) -> None:
        self.mesh, self.cost_model = mesh, cost_model
        self.stages = mesh.slices("pp")
        self.specs = [
            np.array([cost_model.spec(device) for device in stage.devices], np.int64) for stage in self.stages
        ]
        self._groups: dict[tuple[int, str], tuple[Hashable, ...]] = {}
        self._pairs: dict[tuple[int, int], tuple[Hashable, ...]] = {}
        self._ranks: dict[object, ProgramRanks] = {}

    def groups(self, stage: int, axis: str) -> tuple[Hashable, ...]:
        """Return how each group along an axis of a stage lies on the topology; one entry if all alike."""
        key = (stage, axis)
        if key not in self._groups:
            self._groups[key] = self.cost_model.routes(self.stages[stage].groups(axis))
        return self._groups[key]

    def pairs(self, source: int, target: int) -> tuple[Hashable, ...]:
        """Return the same for the pairs of a Send from one stage to another."""
        key = (source, target)
        if key not in self._pairs:
            pairs = zip(self.stages[source].devices, self.stages[target].devices, strict=True)
            self._pairs[key] = self.cost_model.routes(tuple(pairs))
        return self._pairs[key]

    def ranks(self, axes: tuple[tuple[str, ...], ...], sends: tuple[tuple[int, int], ...]) -> ProgramRanks:
        """Return the classes of a program whose stages communicate over ``axes`` and send along ``sends``."""
        key = (axes, sends)
        found = self._ranks.get(key)
        if found is None:
            found = self._ranks[key] = self._made(axes, sends)
        return found

    def _made(self, axes: tuple[tuple[str, ...], ...], sends: tuple[tuple[int, int], ...]) -> ProgramRanks:
        alike = (
            all((specs == specs[0]).all() for specs in self.specs)
            and all(len(self.groups(s, axis)) == 1 for s, used in enumerate(axes) for axis in used)
            and all(len(self.pairs(*send)) == 1 for send in sends)
        )
        if alike:
            classes = [np.zeros(len(specs), np.int64) for specs in self.specs]
        else:
            classes = self._refined(axes, sends)
        stages = tuple(StageRanks(mesh, own) for mesh, own in zip(self.stages, classes, strict=True))
        context: list[dict[str, Hashable]] = []
        for number, (stage, used) in enumerate(zip(stages, axes, strict=True)):
            if alike:
                about: dict[str, Hashable] = {axis: self.groups(number, axis)[0] for axis in used}
                about["spec"] = int(self.specs[number][0])
            else:
                about = {
                    axis: tuple(
                        (part.sources, self.cost_model.routes((part.group,))) for part in stage.along(axis)
                    )
                    for axis in used
                }
                about["spec"] = tuple(self.cost_model.spec(members[0]) for members in stage.members)
            context.append(about)
        return ProgramRanks(stages, tuple(context))

    def _refined(
        self, axes: tuple[tuple[str, ...], ...], sends: tuple[tuple[int, int], ...]
    ) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
        """Split the ranks of each stage until those of a class meet the same classes at the same cost."""
        number = {device: i for i, device in enumerate(self.mesh.devices)}
        colours = np.concatenate([specs * len(self.stages) + s for s, specs in enumerate(self.specs)])
        kinds: dict[Hashable, int] = {}
        relations: list[Relation] = []

        def relate(groups: Sequence[Group], ordered: bool) -> None:
            found = self.cost_model.routes(groups)
            each = found * len(groups) if len(found) == 1 else found
            cost = np.array([kinds.setdefault(kind, len(kinds)) for kind in each], np.int64)
            members = np.array([[number[device] for device in group] for group in groups], np.int64)
            relations.append(Relation(members, cost, ordered))

        for stage, used in zip(self.stages, axes, strict=True):
            for axis in used:
                relate(stage.groups(axis), ordered=False)
        for source, target in sends:
            pairs = zip(self.stages[source].devices, self.stages[target].devices, strict=True)
            relate(tuple(pairs), ordered=True)
        refined = refine(colours, relations)
        ends = np.cumsum([len(specs) for specs in self.specs])[:-1]
        return [np.unique(part, return_inverse=True)[1] for part in np.split(refined, ends)]


_analyses: WeakKeyDictionary[CostModel, dict[Mesh, tuple[int, MeshAnalysis]]] = WeakKeyDictionary()


def program_ranks(program: Program, cost_model: CostModel) -> ProgramRanks:
    """Return the rank classes of every stage of a program."""
    known = _analyses.setdefault(cost_model, {})
    version = cost_model.topology.version
    found = known.get(program.mesh)
    if found is None or found[0] != version:
        found = known[program.mesh] = (version, MeshAnalysis(program.mesh, cost_model))
    axes, sends = _communication(program)
    return found[1].ranks(axes, sends)


def _communication(program: Program) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[int, int], ...]]:
    """Return the axes that each stage communicates over, and which stages send to which."""
    axes: list[tuple[str, ...]] = []
    made: dict[object, int] = {}
    for index, stage in enumerate(program.stages):
        blocks = (stage.forward, stage.backward, *(block for _, block in stage.updates))
        functions = [f for b in blocks for f in (b.function, b.accumulating) if f is not None]
        axes.append(tuple(dict.fromkeys(axis for f in functions for axis in used_axes(f))))
        made.update((key, index) for block in blocks for key in block.outputs)
    given = {item.key: item.stages for item in program.inputs}
    sends: dict[tuple[int, int], None] = {}
    for index, stage in enumerate(program.stages):
        for block in (stage.forward, stage.backward, *(block for _, block in stage.updates)):
            for key in block.inputs:
                source = made.get(key)
                if source is None and index not in given.get(key, (index,)):
                    source = given[key][0]
                if source is not None and source != index:
                    sends[source, index] = None
    for output in program.outputs:
        sends.update(((output.stage, stage), None) for stage in output.copies)
    return tuple(axes), tuple(sends)
