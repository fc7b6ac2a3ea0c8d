"""Tags made plain before a partitioner reads them: regions and collectives."""

from __future__ import annotations

from dataclasses import replace

from distsim.transforms.recompute.saves.graph import JointGraph, JointNode, NodeRole, Tag, Trait
from distsim.transforms.recompute.saves.split import needs


def with_nodes(graph: JointGraph, changes: dict[int, JointNode]) -> JointGraph:
    """Return the graph with some nodes replaced."""
    if not changes:
        return graph
    return replace(graph, nodes=tuple(changes.get(i, node) for i, node in enumerate(graph.nodes)))


def with_tags(graph: JointGraph, tags: dict[int, Tag]) -> JointGraph:
    """Return the graph with some tags replaced."""
    return with_nodes(graph, {i: replace(graph.nodes[i], tag=tag) for i, tag in tags.items()})


def save_region_boundaries(graph: JointGraph, inputs: bool) -> JointGraph:
    """Save where a later region reads an earlier one's recomputed value, and with ``inputs`` what enters one.

    Two regions with nothing in between would otherwise be recomputed from the start of the first. A value
    of no region that a recomputed op reads enters a region; an item of a tuple is of the tuple's region.
    """
    tags: dict[int, Tag] = {}
    for position, node in enumerate(graph.nodes):
        again = [user for user in (graph.nodes[i] for i in graph.users[position]) if user.wants_recompute]
        if node.wants_recompute:
            if any(_later(user, node) for user in again):
                tags[position] = Tag.MUST_SAVE
        elif inputs and again and node.region is None:
            parent = None if node.item is None else graph.nodes[node.inputs[0]]
            if parent is None or parent.region is None:
                tags[position] = Tag.MUST_SAVE
    return with_tags(graph, tags)


def _later(user: JointNode, node: JointNode) -> bool:
    return user.region is not None and node.region is not None and user.region > node.region


def save_collectives(graph: JointGraph) -> JointGraph:
    """Return the graph with every collective to be saved that nobody asks to recompute."""
    collectives = {
        i: Tag.MUST_SAVE
        for i, node in enumerate(graph.nodes)
        if node.role is NodeRole.OP and node.has(Trait.COLLECTIVE | Trait.WAIT) and not node.wants_recompute
    }
    return with_tags(graph, collectives)


def wants_recompute(graph: JointGraph) -> bool:
    """Tell whether any value is to be recomputed."""
    return any(node.wants_recompute for node in graph.nodes)


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
