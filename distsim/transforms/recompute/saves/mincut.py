"""Min-cut rematerialisation: the least bytes that let backward recompute the rest for almost nothing."""

from __future__ import annotations

from dataclasses import dataclass

from distsim.errors import RematerializationError
from distsim.transforms.recompute.saves.bans import Bans, MinCutOptions
from distsim.transforms.recompute.saves.default import save_for_backward
from distsim.transforms.recompute.saves.flow import Edge, minimum_cut
from distsim.transforms.recompute.saves.graph import JointGraph, NodeKind, NodeRole, Saves, Trait
from distsim.transforms.recompute.saves.needs import Needs, needs
from distsim.transforms.recompute.saves.split import split
from distsim.transforms.recompute.saves.tags import save_collectives, save_region_boundaries, wants_recompute

GROWTH = 1.1
"""How much dearer a value is per op between it and backward, up to 100 ops."""


def save_min_cut(graph: JointGraph, options: MinCutOptions | None = None) -> Saves:
    """Save the values of a minimum cut between what cannot be recomputed and what backward computes.

    The cost of a value is its bytes, times 1.1 per op to the backward pass, twice that if saving is all
    that writes it to memory. Equal subexpressions are to be merged before (:func:`merge_equal`). Without a
    backward pass the default partitioner answers.

    Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016) for recomputation; the cut and its
    rules are those of PyTorch's ``min_cut_rematerialization_partition``. Raises
    :class:`~distsim.errors.RematerializationError` when tags contradict each other.

    >>> from distsim.transforms.recompute.saves import JointNode
    >>> cheap = Trait.FUSIBLE | Trait.ALLOWED
    >>> nodes = (
    ...     JointNode("x", role=NodeRole.PRIMAL, nbytes=8), JointNode("dy", role=NodeRole.TANGENT, nbytes=8),
    ...     JointNode("cos", (0,), 8, traits=cheap), JointNode("cos2", (2,), 8, traits=cheap),
    ...     JointNode("sin2", (2,), 8, traits=cheap), JointNode("mul", (1, 4), 8, traits=cheap),
    ...     JointNode("sin", (0,), 8, traits=cheap), JointNode("dx", (5, 6), 8, traits=cheap),
    ... )
    >>> saves = save_min_cut(JointGraph(nodes, outputs=(3, 7), num_forward_outputs=1))
    >>> saves.names, [saves.graph.nodes[each].name for each in saves.recomputed]
    (('x',), ['cos'])
    """
    graph = prepared(graph)
    need = needs(graph)
    if not need.backward:
        return save_for_backward(graph)
    return split(graph, cut_values(need, options or MinCutOptions()).saved)


def prepared(graph: JointGraph) -> JointGraph:
    """Return the graph with the tags that region boundaries and collectives imply."""
    if wants_recompute(graph):
        graph = save_region_boundaries(graph, inputs=False)
    return save_collectives(graph)


@dataclass(frozen=True)
class FlowNetwork:
    """The flow network of a joint graph: value i enters at node 2 i and leaves at node 2 i + 1."""

    edges: list[Edge]
    nodes: int
    source: int
    sink: int
    banned: dict[int, str]


@dataclass(frozen=True)
class CutValues:
    """The values of a minimum cut, its cost, and what was banned from recomputation, with the reason."""

    saved: tuple[int, ...]
    cost: int
    banned: dict[int, str]


def cut_values(need: Needs, options: MinCutOptions, allowed: frozenset[int] = frozenset()) -> CutValues:
    """Solve the minimum cut; ``allowed`` values may be recomputed whatever the rules say."""
    network = cut_network(need, options, allowed)
    cut = minimum_cut(network.edges, network.nodes, network.source, network.sink)
    if cut is None:
        raise _contradiction(need, network)
    at_sink = cut.at_sink.tolist()
    saved = [i for i in range(len(need.graph)) if at_sink[2 * i + 1] and not at_sink[2 * i]]
    return CutValues(tuple(saved), cut.capacity, network.banned)


def cut_network(need: Needs, options: MinCutOptions, allowed: frozenset[int] = frozenset()) -> FlowNetwork:
    """Return the network whose minimum cut says what to save.

    Each value is two nodes with an edge of its cost in between. An edge that cannot be cut leads from the
    source to what must not be recomputed, from a value to its readers, and to the sink from what backward
    computes anyway.
    """
    graph, bans = need.graph, Bans(need, options, allowed)
    source, sink = 2 * len(graph), 2 * len(graph) + 1
    edges: list[Edge] = []
    for position, node in enumerate(graph.nodes):
        entry, leave = 2 * position, 2 * position + 1
        if position in need.tangents:
            edges.append((entry, sink, None))
            continue
        if position in need.backward:
            edges.append((leave, sink, None))
        if node.wants_recompute:
            edges.append((entry, sink, None))
            continue
        if node.role in (NodeRole.PRIMAL, NodeRole.SEED):
            bans.ban(position, "input")
        elif position in need.forward:
            reason = bans.reason(position)
            if reason:
                bans.ban(position, reason)
        edges.append((entry, leave, value_cost(bans, position)))
        edges += [(leave, 2 * user, None) for user in graph.users[position]]
    if options.ban_if_used_far_apart:
        bans.ban_used_far_apart()
    if options.ban_if_long_fusible_chains:
        bans.ban_long_fusible_chains()
    edges += [(source, 2 * position, None) for position in bans.banned]
    return FlowNetwork(edges, 2 * len(graph) + 2, source, sink, bans.banned)


def value_cost(bans: Bans, position: int) -> int | None:
    """Return what saving a value costs in the cut, None if it cannot be saved."""
    graph, node = bans.graph, bans.graph.nodes[position]
    if node.kind is NodeKind.SIZE:
        return 1
    if node.kind is NodeKind.OPAQUE:
        return 0
    if node.kind is NodeKind.TUPLE:
        return None
    if bans.options.free_parameters and node.has(Trait.FREE):
        return 0
    if bans.options.recompute_views and node.has(Trait.VIEW):
        return None
    distance = max(min(bans.needs.distance[position], 100), 1)
    cost = int(graph.sizes[position] * GROWTH**distance)
    return cost if bans.written(position) else 2 * cost


def _contradiction(need: Needs, network: FlowNetwork) -> RematerializationError:
    """Describe a path of values that can be neither saved nor recomputed."""
    nexts: dict[int, list[int]] = {}
    for tail, head, capacity in network.edges:
        if capacity is None:
            nexts.setdefault(tail, []).append(head)
    before, stack = {network.source: network.source}, [network.source]
    while stack:
        tail = stack.pop()
        for head in nexts.get(tail, ()):
            if head not in before:
                before[head] = tail
                stack.append(head)
    path: list[int] = []
    place = before[network.sink]
    while place != network.source:
        if not path or path[-1] != place // 2:
            path.append(place // 2)
        place = before[place]
    names = [need.graph.nodes[each].name for each in reversed(path)]
    return RematerializationError(
        f"{names[0]} must not be recomputed ({network.banned.get(path[-1], 'input')}) and the backward pass "
        f"computes {names[-1]}, but none of {', '.join(names)} can be saved; tag {names[-1]} as MUST_SAVE "
        f"or {names[0]} as MUST_RECOMPUTE"
    )
