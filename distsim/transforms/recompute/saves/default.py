"""The default partitioner: forward runs as written, backward gets every value that it reads.

Of a checkpointed region it keeps only what crosses the boundary.
"""

from __future__ import annotations

from distsim.errors import RematerializationError
from distsim.transforms.recompute.saves.graph import JointGraph, NodeKind, NodeRole, Phase, Saves, Tag, Trait
from distsim.transforms.recompute.saves.split import split
from distsim.transforms.recompute.saves.tags import (
    checkpointed,
    save_collectives,
    save_region_boundaries,
    wants_recompute,
)


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
