"""Core attention in a joint graph: what lies between queries, keys and values and what they become."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet

from distsim.transforms.recompute.saves import JointGraph, NodeKind, NodeRole, Phase, Trait


def core_attention(graph: JointGraph) -> list[frozenset[int]]:
    """Return, per attention of the forward pass, the values that it makes before its result.

    Of the op ``Attention`` these are its statistics; of ranks that have parts of a sequence, all that the
    steps make and send before the last, and keys and values that are brought together for it: what is saved
    is what a rank has of its own (TransformerEngine's AttnFuncWithCPAndKVAllGather, which is part of the
    attention that Megatron-LM checkpoints, gathers in forward and again in backward). Written out they are
    all from the product of two activations on which a softmax depends (the scores) up to the product of two
    activations that depends on it (the result, which is none of them): masks, softcaps, dropout and its mask
    lie between. A softmax without these products, as that of a router, is no attention.

    This is what Megatron-LM checkpoints as ``core_attn`` (``recompute_granularity=selective``; Korthikanti et
    al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 5).
    """
    found: list[frozenset[int]] = []
    search = _CoreSearch(graph)
    for position, node in enumerate(graph.nodes):
        if node.phase is not Phase.FORWARD or node.item is not None:
            continue
        if node.op in ATTENTION_OPS and not search.is_a_step(position):
            found.append(search.steps(position))
        elif node.op == "Softmax":
            inside = search.around(position)
            if inside and not any(inside & other for other in found):
                found.append(inside)
    return [each for each in found if each]


def fixed_nodes(graph: JointGraph) -> set[int]:
    """Return the nodes that follow from parameters and constants alone."""
    fixed = set[int]()
    for position, node in enumerate(graph.nodes):
        held = node.role is NodeRole.CONSTANT or (node.role is NodeRole.PRIMAL and node.has(Trait.FREE))
        if held or (node.role is NodeRole.OP and fixed.issuperset(node.inputs)):
            fixed.add(position)
    return fixed


_MERGES = ("MergeAttention", "WideMergeAttention")
ATTENTION_OPS = ("Attention", "AttentionPart", *_MERGES)
_STEPS = (*ATTENTION_OPS, "MPIShift", "MPIAllgather", "CopyIn", "LocalPlaces")


class _CoreSearch:
    """Walks from a softmax to the products around it."""

    def __init__(self, graph: JointGraph) -> None:
        self.graph, self.fixed = graph, fixed_nodes(graph)

    def items(self, position: int) -> frozenset[int]:
        """Return the values that the op of a node makes."""
        if self.graph.nodes[position].kind is not NodeKind.TUPLE:
            return frozenset((position,))
        return frozenset(self.graph.users[position])

    def is_a_step(self, position: int) -> bool:
        """Whether another step of the same attention reads what a kernel makes."""
        users = [user for each in self.items(position) for user in self.graph.users[each]]
        return any(self.graph.nodes[user].op in _MERGES for user in users)

    def steps(self, last: int) -> frozenset[int]:
        """Return the values made by an attention's steps up to the last, of which all but the result."""
        nodes = self.graph.nodes
        found = {each for each in self.items(last) if nodes[each].item}
        visited, todo = {last}, list(nodes[last].inputs)
        while todo:
            each = todo.pop()
            node = nodes[each]
            maker = node if node.item is None else nodes[node.inputs[0]]
            if each in visited or maker.op not in _STEPS or node.phase is not Phase.FORWARD:
                continue
            visited.add(each)
            if node.kind is not NodeKind.TUPLE:
                found.add(each)
            todo += node.inputs
        return frozenset(found)

    def multiplies(self, position: int) -> bool:
        """Whether a node is on the matrix units, of activations or of weights."""
        return self.graph.nodes[position].has(Trait.COMPUTE_INTENSIVE)

    def activations(self, position: int) -> bool:
        """Whether a node is a product of two activations."""
        inputs = self.graph.nodes[position].inputs
        return self.multiplies(position) and sum(each not in self.fixed for each in inputs) > 1

    def forward(self, positions: Iterable[int]) -> list[int]:
        """Return those of the nodes that the forward pass computes from activations."""
        nodes = self.graph.nodes
        return [
            each
            for each in positions
            if nodes[each].role is NodeRole.OP
            and nodes[each].phase is Phase.FORWARD
            and each not in self.fixed
        ]

    def reach(self, start: int, step: Callable[[int], Sequence[int]]) -> tuple[set[int], set[int]]:
        """Return the nodes from one on, up to the products; and those products that are of activations."""
        seen, ends, todo = {start}, set[int](), [start]
        while todo:
            for other in self.forward(step(todo.pop())):
                if self.multiplies(other):
                    ends |= {other} if self.activations(other) else set()
                elif other not in seen:
                    seen.add(other)
                    todo.append(other)
        return seen, ends

    def around(self, softmax: int) -> frozenset[int]:
        """Return the values inside the attention of a softmax; nothing if it is of none."""
        above, scores = self.reach(softmax, lambda each: self.graph.nodes[each].inputs)
        below, results = self.reach(softmax, lambda each: self.graph.users[each])
        if not scores or not results:
            return frozenset()
        made = self._on_the_way(above | scores, scores)
        read = self._leading(below, results)
        return frozenset[int]().union(*[self.items(each) for each in made | read])

    def _on_the_way(self, nodes: AbstractSet[int], first: AbstractSet[int]) -> set[int]:
        """Return those of the nodes that follow from the first."""
        found = set(first)
        for each in sorted(nodes):
            if not found.isdisjoint(self.graph.nodes[each].inputs):
                found.add(each)
        return found

    def _leading(self, nodes: AbstractSet[int], last: AbstractSet[int]) -> set[int]:
        """Return those of the nodes from which the last follow."""
        found = set(last)
        for each in sorted(nodes, reverse=True):
            if not found.isdisjoint(self.graph.users[each]):
                found.add(each)
        return found - last
