"""A joint graph and what is saved -> the ops of the two passes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from distsim.transforms.recompute.saves.graph import JointGraph, NodeKind, Phase, Saves, Trait
from distsim.transforms.recompute.saves.needs import backward_inputs, extract, forward_inputs


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
    tangents = backward_inputs(graph)
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
