"""The two passes of a joint graph: what each needs, and a cut into them with what is saved in between."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from distsim.errors import RematerializationError
from distsim.transforms.recompute.saves.graph import JointGraph, NodeKind, NodeRole, Phase, Saves, Trait

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


def split(graph: JointGraph, saved: Iterable[int], lazily: bool = True) -> Saves:
    """Cut the graph into its two passes with ``saved`` between them, less what backward does not read.

    Saved values are tensors, then opaque values, then sizes, each in the order given and once. With
    ``lazily`` a recomputed op runs right before the first op that needs it, as an autograd engine would
    run it; otherwise all run in the graph's order.

    Raises :class:`~distsim.errors.RematerializationError` when backward cannot be computed from ``saved``.

    >>> from distsim.transforms.recompute.saves import JointNode, NodeRole
    >>> nodes = (
    ...     JointNode("x", role=NodeRole.PRIMAL, nbytes=4), JointNode("dy", role=NodeRole.TANGENT, nbytes=4),
    ...     JointNode("y", (0,), 4), JointNode("z", (2,), 4), JointNode("dx", (1, 2), 4),
    ... )
    >>> graph = JointGraph(nodes, outputs=(3, 4), num_forward_outputs=1)
    >>> split(graph, [2]).recomputed, split(graph, [0]).recomputed
    ((), (2,))
    """
    kept = list(dict.fromkeys(saved))
    tangents = tuple(i for i, node in enumerate(graph.nodes) if node.role is NodeRole.TANGENT)
    unread = _unread(graph, kept, tangents)
    kinds = (NodeKind.TENSOR, NodeKind.OPAQUE, NodeKind.SIZE)
    final = [each for kind in kinds for each in kept if graph.nodes[each].kind is kind and each not in unread]
    forward = extract(graph, forward_inputs(graph), [*graph.forward_outputs, *final], Phase.FORWARD)
    backward = extract(graph, [*final, *tangents], graph.backward_outputs, Phase.BACKWARD)
    if lazily:
        backward = _as_needed(graph, backward, tangents)
    both = set(forward) & set(backward)
    return Saves(
        graph, tuple(final), tuple(sorted(both)), _items_first(graph, forward), _items_first(graph, backward)
    )


def _unread(graph: JointGraph, saved: Sequence[int], tangents: Sequence[int]) -> set[int]:
    """Return the saved values that nothing in backward reads, waits that nothing reads aside."""
    ops = set(extract(graph, [*saved, *tangents], graph.backward_outputs, Phase.BACKWARD))
    outputs = set(graph.backward_outputs)

    def reads(position: int) -> bool:
        if position in outputs:
            return True
        users = [each for each in graph.users[position] if each in ops]
        return any(not _dead_wait(graph, each, ops, outputs) for each in users)

    return {each for each in saved if not reads(each)}


def _dead_wait(graph: JointGraph, position: int, ops: set[int], outputs: set[int | None]) -> bool:
    read = position in outputs or any(each in ops for each in graph.users[position])
    return graph.nodes[position].has(Trait.WAIT) and not read


def _as_needed(graph: JointGraph, ops: Sequence[int], tangents: Sequence[int]) -> tuple[int, ...]:
    """Order ops so that what does not follow from a gradient runs right before it is needed."""
    inside = set(ops)
    starts = [user for tangent in tangents for user in graph.users[tangent] if user in inside]
    if not starts:
        return tuple(ops)
    first = min(starts)
    mutations = [each for each in ops if each < first and graph.nodes[each].has(Trait.IMPURE)]
    goals = [*mutations, *(each for each in ops if each >= first)]
    goals += [each for each in graph.backward_outputs if each is not None and each in inside]
    placed: dict[int, None] = {}
    for goal in goals:
        pending, stack = set[int](), [goal]
        while stack:
            position = stack.pop()
            if position in inside and position not in placed and position not in pending:
                pending.add(position)
                stack += graph.nodes[position].inputs
        placed.update(dict.fromkeys(sorted(pending)))
    return tuple(placed)


def _items_first(graph: JointGraph, ops: Sequence[int]) -> tuple[int, ...]:
    """Order ops so that the items of a tuple come right after it."""
    inside = set(ops)
    items: dict[int, list[int]] = {}
    for each in ops:
        if graph.nodes[each].item is not None:
            items.setdefault(graph.nodes[each].inputs[0], []).append(each)
    ordered: list[int] = []
    for parent in [each for each in items if each not in inside]:
        ordered += items.pop(parent)
    for each in ops:
        if graph.nodes[each].item is None:
            pending = [each]
            while pending:
                position = pending.pop(0)
                ordered.append(position)
                pending += items.pop(position, [])
    return tuple(ordered)
