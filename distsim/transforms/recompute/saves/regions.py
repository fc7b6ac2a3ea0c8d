"""Activation checkpointing: of a region only what crosses its boundary is kept."""

from __future__ import annotations

from distsim.transforms.recompute.saves.default import save_for_backward
from distsim.transforms.recompute.saves.graph import JointGraph, NodeRole, Saves, Tag, Trait
from distsim.transforms.recompute.saves.needs import needs
from distsim.transforms.recompute.saves.tags import with_tags


def save_by_region(graph: JointGraph) -> Saves:
    """Save what crosses a region's boundary, and outside of regions what backward reads; recompute the rest.

    A value crosses when an op of another region, or of none, reads it in the forward pass. Tags go before
    regions. Inside a region collectives and random values are saved too, unless tagged otherwise.

    Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016).

    >>> from distsim.transforms.recompute.saves import JointNode, Phase
    >>> forward = Phase.FORWARD
    >>> nodes = (
    ...     JointNode("x", role=NodeRole.PRIMAL, nbytes=4), JointNode("dy", role=NodeRole.TANGENT, nbytes=4),
    ...     JointNode("a", (0,), 4, phase=forward, region=0),
    ...     JointNode("b", (2,), 4, phase=forward, region=0),
    ...     JointNode("y", (3,), 4, phase=forward, region=1),
    ...     JointNode("db", (1, 3), 4), JointNode("dx", (5, 2), 4),
    ... )
    >>> saves = save_by_region(JointGraph(nodes, outputs=(4, 6), num_forward_outputs=1))
    >>> saves.names, saves.recomputed
    (('x', 'b'), (2,))
    """
    return save_for_backward(checkpointed(graph))


def checkpointed(graph: JointGraph) -> JointGraph:
    """Return the graph with the tags that its regions stand for; what has a tag keeps it."""
    forward = needs(graph).forward
    tags: dict[int, Tag] = {}
    for position, node in enumerate(graph.nodes):
        if node.region is None or node.tag is not None or node.role is not NodeRole.OP:
            continue
        readers = [graph.nodes[user].region for user in graph.users[position] if user in forward]
        if any(region != node.region for region in readers):
            tags[position] = Tag.MUST_SAVE
        elif not node.has(Trait.COLLECTIVE | Trait.WAIT | Trait.RANDOM):
            tags[position] = Tag.PREFER_RECOMPUTE
    return with_tags(graph, tags)
