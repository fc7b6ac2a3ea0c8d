"""Equal subexpressions of a joint graph become one, as PyTorch merges them before it partitions.

What was asked of any of them is asked of that one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from distsim.transforms.recompute.saves import EVERY_OUTPUT, JointGraph, JointNode, NodeRole, Trait


@dataclass(frozen=True)
class Merged:
    """A graph without equal subexpressions, and for each of its nodes those that it stands for, in order."""

    graph: JointGraph
    members: tuple[tuple[int, ...], ...]


def merge_equal(graph: JointGraph) -> Merged:
    """Merge ops of equal keys and inputs, and drop ops that nothing reads.

    Random ops, ops with side effects and what lies in an output's memory stay as they are. Tags combine: the
    strongest wins (MUST_RECOMPUTE, MUST_SAVE, PREFER_RECOMPUTE, PREFER_SAVE), replayed outputs are united,
    and with either of the two a value belongs to the first region that one of them names. PyTorch keeps the
    first one's and loses what was asked of the others.

    >>> from distsim.transforms.recompute.saves import Tag
    >>> nodes = (
    ...     JointNode("x", role=NodeRole.PRIMAL, nbytes=8), JointNode("dy", role=NodeRole.TANGENT, nbytes=8),
    ...     JointNode("exp", (0,), 8, key="exp"), JointNode("y", (2,), 8, key="add"),
    ...     JointNode("exp2", (0,), 8, key="exp", tag=Tag.MUST_SAVE), JointNode("dx", (1, 4), 8, key="mul"),
    ... )
    >>> merged = merge_equal(JointGraph(nodes, outputs=(3, 5), num_forward_outputs=1))
    >>> [node.name for node in merged.graph.nodes], merged.graph.nodes[2].tag, merged.members[2]
    (['x', 'dy', 'exp', 'y', 'dx'], <Tag.MUST_SAVE: 3>, (2, 4))
    """
    live = _live(graph)
    returned = {graph.storages[each] for each in graph.outputs if each is not None} - {None}
    place: dict[int, int] = {}
    first: dict[Hashable, int] = {}
    nodes: list[JointNode] = []
    members: list[list[int]] = []
    for position, node in enumerate(graph.nodes):
        if position not in live:
            continue
        inputs = tuple(place[each] for each in node.inputs)
        fixed = node.role is not NodeRole.OP or node.key is None or node.has(Trait.RANDOM | Trait.IMPURE)
        token = (node.key, inputs, node.item)
        if not fixed and graph.storages[position] not in returned and token in first:
            place[position] = first[token]
            members[first[token]].append(position)
            continue
        place[position] = len(nodes)
        if not fixed and graph.storages[position] not in returned:
            first[token] = len(nodes)
        nodes.append(replace(node, inputs=inputs))
        members.append([position])
    combined = [
        _combined(node, [graph.nodes[i] for i in group]) for node, group in zip(nodes, members, strict=True)
    ]
    outputs = tuple(None if each is None else place[each] for each in graph.outputs)
    result = JointGraph(tuple(combined), outputs, graph.num_forward_outputs)
    return Merged(result, tuple(map(tuple, members)))


def _live(graph: JointGraph) -> set[int]:
    """Return what an output follows from, what runs for its side effects, and all inputs."""
    roots: list[int | None] = list(graph.outputs)
    for position, node in enumerate(graph.nodes):
        if node.role not in (NodeRole.OP, NodeRole.CONSTANT) or node.has(Trait.KEPT | Trait.IMPURE):
            roots.append(position)
    return graph.ancestors(roots)


def _combined(node: JointNode, group: Sequence[JointNode]) -> JointNode:
    if len(group) == 1:
        return node
    tags = [each.tag for each in group if each.tag is not None]
    regions = [each.region for each in group if each.region is not None]
    return replace(
        node,
        tag=max(tags, key=lambda tag: tag.value) if tags else None,
        region=regions[0] if regions else None,
        replay=_united([each.replay for each in group if each.replay is not None]),
    )


def _united(replays: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    if not replays:
        return None
    if EVERY_OUTPUT in replays:
        return EVERY_OUTPUT
    return tuple(sorted({index for each in replays for index in each}))
