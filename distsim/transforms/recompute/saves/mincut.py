"""Min-cut rematerialisation: the least bytes that let backward recompute the rest for almost nothing."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

from distsim.errors import RematerializationError
from distsim.transforms.recompute.saves.default import (
    save_collectives,
    save_for_backward,
    save_region_boundaries,
    wants_recompute,
)
from distsim.transforms.recompute.saves.flow import Edge, minimum_cut
from distsim.transforms.recompute.saves.graph import JointGraph, NodeKind, NodeRole, Saves, Tag, Trait
from distsim.transforms.recompute.saves.split import Needs, needs, split

GROWTH = 1.1
"""How much dearer a value is per op between it and backward, up to 100 ops."""


def save_min_cut(graph: JointGraph, options: MinCutOptions | None = None) -> Saves:
    """Save the values of a minimum cut between what cannot be recomputed and what backward computes.

    The cost of a value is its bytes, times 1.1 per op to the backward pass, twice that if saving is all
    that writes it to memory. Equal subexpressions are to be merged before. Without a backward pass
    the default partitioner answers.

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


@dataclass(frozen=True)
class MinCutOptions:
    """The rules of min-cut rematerialisation, each with PyTorch's name and default.

    ``ban_if_used_far_apart``: a value read both before and after an op that does not fuse is not recomputed
    for the later reader. ``ban_if_long_fusible_chains``: no chain of fusible ops longer than 100 is
    recomputed. ``ban_if_materialized_backward``: what backward must write to memory anyway is not
    recomputed. ``ban_if_not_in_allowlist``: only cheap ops are recomputed; without it, all but random and
    compute-intensive ones. ``ban_if_reduction``: a result four times smaller than its inputs is saved.
    ``recompute_views``: views are never saved. ``free_parameters``: parameters cost nothing to save.
    ``max_distance_from_backward``: ops farther away than this are not recomputed.
    """

    ban_if_used_far_apart: bool = True
    ban_if_long_fusible_chains: bool = True
    ban_if_materialized_backward: bool = True
    ban_if_not_in_allowlist: bool = True
    ban_if_reduction: bool = True
    recompute_views: bool = False
    free_parameters: bool = True
    max_distance_from_backward: int = 1000

    def more_aggressive(self) -> MinCutOptions:
        """Return the rules without those that guess what fuses."""
        return replace(
            self,
            ban_if_used_far_apart=False,
            ban_if_long_fusible_chains=False,
            ban_if_materialized_backward=False,
        )

    def aggressive(self) -> MinCutOptions:
        """Return the rules that are left when any op but random and compute-intensive ones may run again."""
        return replace(self.more_aggressive(), ban_if_not_in_allowlist=False)


class Bans:
    """The values of a joint graph that are not to be recomputed, in the order in which they were banned.

    ``allowed`` are values that no rule may ban, but for collectives.
    """

    def __init__(self, needs: Needs, options: MinCutOptions, allowed: frozenset[int]) -> None:
        self.needs, self.options, self.allowed = needs, options, allowed
        self.graph: JointGraph = needs.graph
        self.banned: dict[int, str] = {}
        outputs = {each for each in self.graph.outputs if each is not None}
        self._output = [position in outputs for position in range(len(self.graph))]

    def ban(self, position: int, reason: str) -> None:
        """Ban a value from recomputation, unless it is a view, allowed, or to be recomputed by a tag."""
        node = self.graph.nodes[position]
        if node.has(Trait.VIEW) or node.wants_recompute:
            return
        if position in self.allowed and not node.has(Trait.COLLECTIVE | Trait.WAIT):
            return
        self.banned.setdefault(position, reason)

    def fuses(self, first: int, second: int) -> bool:
        """Tell whether the second op can run in the kernel of the first, which it reads."""
        nodes = self.graph.nodes
        if nodes[second].has(Trait.CONCATENATION):
            return True
        return nodes[first].has(Trait.FUSIBLE) and nodes[second].has(Trait.FUSIBLE)

    def written(self, position: int) -> bool:
        """Tell whether the value comes to lie in memory: an input, an output, read by what does not fuse."""
        if self.graph.nodes[position].role not in (NodeRole.OP, NodeRole.CONSTANT) or self._output[position]:
            return True
        return not all(self.fuses(position, user) for user in self.graph.users[position])

    def written_in_backward(self, position: int) -> bool:
        """Tell whether an op of the backward pass that does not fuse reads the value or a view of it."""
        if self.graph.nodes[position].has(Trait.VIEW):
            return False
        stack = [position]
        while stack:
            current = stack.pop()
            if self._output[current]:
                return True
            for user in self.graph.users[current]:
                if user not in self.needs.forward and not self.fuses(current, user):
                    return True
                if self.graph.nodes[user].has(Trait.VIEW):
                    stack.append(user)
        return False

    def reason(self, position: int) -> str | None:
        """Return why the op itself is not recomputed, None if it may be."""
        node, options = self.graph.nodes[position], self.options
        if node.role is not NodeRole.OP or node.item is not None:
            return None
        if node.tag is Tag.MUST_SAVE:
            return "tagged MUST_SAVE"
        if (options.recompute_views and node.has(Trait.VIEW)) or node.has(Trait.COPYABLE):
            return None
        if options.ban_if_not_in_allowlist:
            if not node.has(Trait.ALLOWED):
                return "not in the allow-list"
        elif node.has(Trait.RANDOM):
            return "random"
        elif node.has(Trait.COMPUTE_INTENSIVE):
            return "compute intensive"
        if options.ban_if_materialized_backward and self.written_in_backward(position):
            return "written in backward"
        if options.max_distance_from_backward < self.needs.distance[position] < 1000:
            return "far from backward"
        if options.ban_if_reduction:
            read = node.read_bytes
            if read is None:
                read = sum(self.graph.sizes[each] for each in node.inputs)
            if self.graph.sizes[position] * 4 < read:
                return "reduction"
        return None

    def ban_used_far_apart(self) -> None:
        """Ban readers of a value that come after a reader, or what follows from one, that does not fuse."""
        needs, order = self.needs, self.needs.order
        for position in sorted(needs.forward):
            users = [user for user in self.graph.users[position] if user in needs.forward]
            if not users:
                continue
            first = self._first_unfusible(users)
            for user in users:
                if order[user] > first and self.fuses(position, user):
                    self.ban(user, "used far apart")

    def _first_unfusible(self, users: list[int]) -> int:
        """Return the place of the first forward op that does not fuse after ``users``, or of their last."""
        needs, order = self.needs, self.needs.order
        last = max(order[user] for user in users)
        heap = [(order[user], True, user) for user in users]
        heapq.heapify(heap)
        seen = set(heap)
        while heap:
            place, fusible, position = heapq.heappop(heap)
            if not fusible:
                return place
            for user in self.graph.users[position]:
                if user in needs.forward and order[user] <= last:
                    entry = (order[user], self.fuses(position, user), user)
                    if entry not in seen:
                        seen.add(entry)
                        heapq.heappush(heap, entry)
        return last

    def ban_long_fusible_chains(self) -> None:
        """Ban the op at which a chain of fusible ops has become longer than 100."""
        needs, order = self.needs, self.needs.order
        visited: set[int] = set()
        for start in sorted(needs.forward):
            heap = [(order[start], start)]
            while heap:
                place, position = heapq.heappop(heap)
                if position in visited:
                    continue
                visited.add(position)
                if place > order[start] + 100 and not heap:
                    self.ban(position, "long fusible chain")
                    break
                for user in self.graph.users[position]:
                    if user in needs.forward and self.fuses(position, user) and user not in self.banned:
                        heapq.heappush(heap, (order[user], user))
