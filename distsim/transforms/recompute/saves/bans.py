"""Which values must not be recomputed, and the named rules that say so."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

from distsim.transforms.recompute.saves.graph import JointGraph, NodeRole, Tag, Trait
from distsim.transforms.recompute.saves.needs import Needs


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
