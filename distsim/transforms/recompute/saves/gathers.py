"""Fully sharded parameters: the chain of ops that gathers one, saved or gathered again for backward."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from distsim.transforms.recompute.saves.graph import JointGraph, JointNode, NodeRole, Tag, Trait
from distsim.transforms.recompute.saves.needs import needs
from distsim.transforms.recompute.saves.tags import with_nodes

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
