"""The default partitioner: forward runs as written, backward gets every value that it reads.

Of a checkpointed region it keeps only what crosses the boundary.

Tags made plain before a partitioner reads them: regions and collectives.
"""

from __future__ import annotations

from dataclasses import replace

from distsim.errors import RematerializationError
from distsim.transforms.recompute.saves.graph import (
    JointGraph,
    JointNode,
    NodeKind,
    NodeRole,
    Phase,
    Saves,
    Tag,
    Trait,
)
from distsim.transforms.recompute.saves.split import needs, split


def save_for_backward(graph: JointGraph) -> Saves:
    """Save the forward values that backward reads, those tagged for recomputation aside.

    Forward are the ops up to the last one recorded in the forward pass. What a recomputed op reads from
    outside its region is saved, and so is every collective that is not tagged for recomputation. Of a value
    of which backward asks only the sizes, the sizes are saved.

    Raises :class:`~distsim.errors.RematerializationError` for a graph without forward inputs or ops.
    """
    last = [
        i
        for i, node in enumerate(graph.nodes)
        if node.phase is Phase.FORWARD or node.role in (NodeRole.PRIMAL, NodeRole.SEED)
    ]
    if not last:
        raise RematerializationError(
            "the joint graph has no forward op and no input; there is nothing to save"
        )
    again = wants_recompute(graph)
    if again:
        graph = save_region_boundaries(graph, inputs=True)
    graph = save_collectives(graph)
    forward = {i for i in range(last[-1] + 1) if graph.nodes[i].role is not NodeRole.TANGENT}
    outputs = set(graph.outputs)
    saved: list[int] = []
    for position in sorted(forward):
        node = graph.nodes[position]
        if node.kind is NodeKind.TUPLE:
            continue
        if node.kind is not NodeKind.TENSOR or node.tag is Tag.MUST_SAVE or node.has(Trait.IMPURE):
            saved.append(position)
            continue
        readers = [user for user in graph.users[position] if user not in forward]
        if position not in outputs and all(graph.nodes[user].kind is NodeKind.SIZE for user in readers):
            saved += readers
        elif not node.wants_recompute:
            saved.append(position)
    return split(graph, saved, lazily=again)


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
