"""Replay: reproduce the saves of a first partition on a graph captured anew."""

from __future__ import annotations

from distsim.transforms.recompute.saves.default import save_collectives, save_for_backward
from distsim.transforms.recompute.saves.graph import (
    EVERY_OUTPUT,
    JointGraph,
    JointNode,
    NodeKind,
    NodeRole,
    Saves,
    Tag,
)
from distsim.transforms.recompute.saves.split import needs, split


def save_replayed(graph: JointGraph) -> Saves:
    """Save the values with a replay tag or MUST_SAVE, and recompute everything else from them and the inputs.

    In order of precedence: MUST_RECOMPUTE blocks a save, be it of a tuple or an opaque value; symbolic sizes
    are saved; of a tuple MUST_SAVE saves all items, whatever indices a replay tag lists, and a replay tag
    those listed or all, never the tuple, which is told by the kind of the value; opaque values are saved;
    PREFER_RECOMPUTE does not block. Collectives are saved unless tagged for recomputation. Without a
    backward pass the default partitioner answers.

    These are the rules of AutoParallel's "save all" partitioner (pull request 485).

    >>> nodes = (
    ...     JointNode("x", role=NodeRole.PRIMAL, nbytes=8), JointNode("dy", role=NodeRole.TANGENT, nbytes=8),
    ...     JointNode("exp", (0,), 8, replay=EVERY_OUTPUT), JointNode("y", (2,), 8),
    ...     JointNode("dx", (1, 3), 8),
    ... )
    >>> saves = save_replayed(JointGraph(nodes, outputs=(3, 4), num_forward_outputs=1))
    >>> saves.names, saves.recomputed
    (('exp',), (3,))
    """
    graph = save_collectives(graph)
    need = needs(graph)
    if not need.backward:
        return save_for_backward(graph)
    saved: list[int] = []
    for position, node in enumerate(graph.nodes):
        if position in need.tangents or node.tag is Tag.MUST_RECOMPUTE:
            continue
        if node.kind is NodeKind.TUPLE:
            saved += _items(graph, position)
        elif node.kind is not NodeKind.TENSOR or node.role is not NodeRole.OP or _marked(node):
            saved.append(position)
    return split(graph, sorted(set(saved) - need.tangents))


def _marked(node: JointNode) -> bool:
    return node.tag is Tag.MUST_SAVE or node.replay is not None


def _items(graph: JointGraph, position: int) -> list[int]:
    """Return the items of a tuple that its tags save."""
    node = graph.nodes[position]
    if node.tag is Tag.MUST_SAVE:
        wanted = EVERY_OUTPUT
    elif node.replay is not None:
        wanted = node.replay
    else:
        return []
    items = [user for user in graph.users[position] if graph.nodes[user].item is not None]
    return [
        user
        for user in items
        if (wanted == EVERY_OUTPUT or graph.nodes[user].item in wanted)
        and graph.nodes[user].tag is not Tag.MUST_RECOMPUTE
        and graph.nodes[user].kind is not NodeKind.TUPLE
    ]
