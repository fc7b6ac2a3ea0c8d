"""What the forward pass and the backward pass each need of a joint graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from distsim.errors import RematerializationError
from distsim.transforms.recompute.saves.graph import JointGraph, NodeRole, Phase, Trait

FAR = 10**9
"""The distance from backward of what backward never reads."""


def available(graph: JointGraph, inputs: Iterable[int], phase: Phase) -> list[bool]:
    """For each node, whether it can be computed from ``inputs`` and constants in this pass."""
    given = set(inputs)
    barred = Phase.MUST_BACKWARD if phase is Phase.FORWARD else Phase.MUST_FORWARD
    found: list[bool] = []
    for position, node in enumerate(graph.nodes):
        if position in given:
            found.append(True)
        elif node.phase is barred:
            found.append(False)
        elif node.role is NodeRole.OP:
            found.append(all(found[each] for each in node.inputs))
        else:
            found.append(node.role is NodeRole.CONSTANT)
    return found


def extract(
    graph: JointGraph, inputs: Sequence[int], outputs: Iterable[int | None], phase: Phase
) -> tuple[int, ...]:
    """Return the ops that compute ``outputs`` from ``inputs``, in order.

    Ops that survive though nothing reads them (random ones, side effects) come along where they can be
    computed. Raises :class:`RematerializationError` for an output that cannot.
    """
    wanted = [each for each in outputs if each is not None]
    found = available(graph, inputs, phase)
    for output in wanted:
        if not found[output]:
            raise RematerializationError(
                f"{graph.nodes[output].name} is an output of the {phase.value} pass but does not follow from "
                f"its {len(inputs)} inputs; what it needs is neither saved nor recomputable"
            )
    given = set(inputs)
    for position, node in enumerate(graph.nodes):
        if node.has(Trait.KEPT | Trait.IMPURE) and found[position] and position not in given:
            wanted.append(position)
    live = graph.ancestors(wanted, stop=given)
    return tuple(each for each in sorted(live - given) if graph.nodes[each].role is NodeRole.OP)


@dataclass(frozen=True)
class Needs:
    """The nodes of a joint graph by the pass that needs them.

    ``forward`` compute the forward outputs; ``tangents`` follow from a gradient that comes in, so only
    backward can compute them; ``backward`` are those and the backward outputs. What is neither in
    ``forward`` nor in ``backward`` is *unclaimed*: backward may compute it from what is saved.
    """

    graph: JointGraph
    forward: frozenset[int]
    tangents: frozenset[int]
    backward: frozenset[int]

    @property
    def inputs(self) -> tuple[int, ...]:
        """The inputs of the forward pass."""
        return forward_inputs(self.graph)

    @cached_property
    def order(self) -> dict[int, int]:
        """The place of each forward node among them."""
        return {position: place for place, position in enumerate(sorted(self.forward))}

    @cached_property
    def distance(self) -> tuple[int, ...]:
        """Ops between each node and the first that is not forward: 0 for these, FAR if there is none."""
        distance = [0] * len(self.graph)
        for position in reversed(range(len(self.graph))):
            if position in self.forward:
                users = [distance[user] + 1 for user in self.graph.users[position]]
                distance[position] = min([FAR, *users])
        return tuple(distance)


def forward_inputs(graph: JointGraph) -> tuple[int, ...]:
    """Return the primals, then the seeds."""
    primals = [i for i, node in enumerate(graph.nodes) if node.role is NodeRole.PRIMAL]
    return (*primals, *(i for i, node in enumerate(graph.nodes) if node.role is NodeRole.SEED))


def backward_inputs(graph: JointGraph) -> tuple[int, ...]:
    """Return the gradients that come in."""
    return tuple(i for i, node in enumerate(graph.nodes) if node.role is NodeRole.TANGENT)


def needs(graph: JointGraph) -> Needs:
    """Tell what each pass needs of the graph."""
    inputs = forward_inputs(graph)
    forward = {
        *inputs,
        *graph.ancestors(extract(graph, inputs, graph.forward_outputs, Phase.FORWARD), inputs),
    }
    forward.update(graph.ancestors(graph.forward_outputs, inputs))
    tangents: set[int] = set()
    for position, node in enumerate(graph.nodes):
        if node.role is NodeRole.TANGENT or node.phase is Phase.MUST_BACKWARD:
            tangents.add(position)
        if position in tangents:
            tangents.update(graph.users[position])
    outputs = {each for each in graph.backward_outputs if each is not None}
    return Needs(graph, frozenset(forward), frozenset(tangents), frozenset(tangents | outputs))
