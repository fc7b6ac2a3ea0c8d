"""Tags made plain before a partitioner reads them: regions, collectives, the gathers of parameters."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

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


FREE_OF_CHARGE = Trait.VIEW | Trait.ALIAS


@dataclass(frozen=True)
class GatherChain:
    """The ops from a sharded parameter to the whole one: casts and views, all-gather, wait, casts and views.

    ``last`` are the values behind which only views of the chain come: what is saved when it is kept.
    """

    parameter: int
    nodes: tuple[int, ...]
    last: tuple[int, ...]


def gather_chains(graph: JointGraph, parameters: Collection[int] | None = None) -> tuple[GatherChain, ...]:
    """Return the chains that gather ``parameters``, by default the inputs with the trait FREE.

    Before the all-gather come ops of one input; after it the wait, and what only looks at the gathered
    parameter differently: views, items of them, casts, concatenations of nothing else.
    """
    if parameters is None:
        parameters = [i for i, node in enumerate(graph.nodes) if node.has(Trait.FREE)]
    roots, forward = frozenset(parameters), needs(graph).forward
    chains: list[GatherChain] = []
    for position, node in enumerate(graph.nodes):
        if node.has(Trait.GATHER) and position in forward:
            before = _before(graph, position)
            if before and before[0] in roots:
                nodes = (*before[1:], position, *_after(graph, position, forward))
                chains.append(GatherChain(before[0], nodes, _last(graph, nodes)))
    return tuple(chains)


def with_gathers(graph: JointGraph, reshard: bool, parameters: Collection[int] | None = None) -> JointGraph:
    """Return the graph with tags on its gather chains.

    With ``reshard`` (the parameter is sharded again after forward) all of a chain is MUST_RECOMPUTE, so no
    gathered parameter is held from forward to backward; without it the last value that is no view is
    MUST_SAVE and the views of it are recomputed. A value that is tagged with an order keeps it.

    >>> nodes = (
    ...     JointNode("shard", role=NodeRole.PRIMAL, nbytes=2, traits=Trait.FREE),
    ...     JointNode("dy", role=NodeRole.TANGENT, nbytes=8),
    ...     JointNode("gather", (0,), 8, traits=Trait.COLLECTIVE | Trait.GATHER),
    ...     JointNode("wait", (2,), 8, traits=Trait.COLLECTIVE | Trait.WAIT),
    ...     JointNode("y", (3,), 8), JointNode("dx", (1, 3), 8),
    ... )
    >>> graph = JointGraph(nodes, outputs=(4, 5), num_forward_outputs=1)
    >>> [[node.tag for node in with_gathers(graph, reshard).nodes[2:4]] for reshard in (True, False)]
    [[<Tag.MUST_RECOMPUTE: 4>, <Tag.MUST_RECOMPUTE: 4>], [None, <Tag.MUST_SAVE: 3>]]
    """
    changes: dict[int, JointNode] = {}
    for chain in gather_chains(graph, parameters):
        for position in chain.nodes:
            node = graph.nodes[position]
            if node.tag in (Tag.MUST_SAVE, Tag.MUST_RECOMPUTE):
                continue
            if reshard or node.has(FREE_OF_CHARGE) or node.item is not None:
                # Of no region: nothing of the chain is saved because a region reads it.
                changes[position] = replace(node, tag=Tag.MUST_RECOMPUTE, region=None)
            elif position in chain.last:
                changes[position] = replace(node, tag=Tag.MUST_SAVE)
    return with_nodes(graph, changes)


def _before(graph: JointGraph, gather: int) -> list[int]:
    """Return what leads to the gather from an input, the input first; nothing if it is no chain."""
    found: list[int] = []
    position = gather
    while len(graph.nodes[position].inputs) == 1:
        position = graph.nodes[position].inputs[0]
        found.insert(0, position)
    return found if found and graph.nodes[position].role is NodeRole.PRIMAL else []


def _after(graph: JointGraph, gather: int, forward: frozenset[int]) -> list[int]:
    looks = FREE_OF_CHARGE | Trait.WAIT | Trait.CAST | Trait.CONCATENATION
    inside = {gather}
    found: list[int] = []
    for position in range(gather + 1, len(graph)):
        node = graph.nodes[position]
        follows = position in forward and node.inputs and inside.issuperset(node.inputs)
        if follows and (node.has(looks) or node.item is not None):
            inside.add(position)
            found.append(position)
    return found


def _last(graph: JointGraph, nodes: tuple[int, ...]) -> tuple[int, ...]:
    """Return for each end of a chain the nearest value on the way back that is no view."""
    inside, outputs, found = set(nodes), set(graph.outputs), set[int]()
    for position in nodes:
        if position in outputs or not inside.issuperset(graph.users[position]):
            end = position
            while end in inside and (
                graph.nodes[end].has(FREE_OF_CHARGE) or graph.nodes[end].item is not None
            ):
                end = graph.nodes[end].inputs[0]
            if end in inside:
                found.add(end)
    return tuple(sorted(found))
