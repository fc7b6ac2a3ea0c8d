"""Parts of a layer that take much to save and little to compute again, found by what they do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from distsim.transforms.recompute.core_attention import core_attention, fixed_nodes
from distsim.transforms.recompute.saves import JointGraph, JointNode, NodeRole, Phase, Trait

_NORMS = ("LayerNormalization", "RMSNormalization")
_KERNELS = ("Attention", "AttentionPart")
_CASTS = ("Cast", "Float8Cast", "Float8Amax")
_ACTIVATIONS = ("Relu", "Gelu", "Swish", "Mish", "HardSwish")


class ForwardPass:
    """Walks the forward pass of a graph."""

    def __init__(self, graph: JointGraph) -> None:
        self.graph, self.fixed = graph, fixed_nodes(graph)

    def node(self, position: int) -> JointNode:
        """Return the node of the op that makes a value: of one of several results the tuple's."""
        node = self.graph.nodes[position]
        return node if node.item is None else self.graph.nodes[node.inputs[0]]

    def read(self, position: int) -> list[int]:
        """Return the activations that the op of a value reads, largest elements beside what they are of."""
        read = [each for each in self.node(position).inputs if each not in self.fixed]
        return [each for each in read if self.node(each).op != "Float8Amax"]

    def forward(self, position: int) -> bool:
        """Whether a value is made by the forward pass, of activations."""
        node = self.node(position)
        return node.role is NodeRole.OP and node.phase is Phase.FORWARD and position not in self.fixed

    def product(self, position: int) -> bool:
        """Whether a value is a product of an activation with a weight."""
        return self.node(position).has(Trait.COMPUTE_INTENSIVE) and len(self.read(position)) == 1

    def back(self, starts: Iterable[int], through: Callable[[int], bool]) -> dict[int, None]:
        """Return the values from some on, against the direction of the ops, as far as they go ``through``."""
        found: dict[int, None] = {}
        todo = list(starts)
        while todo:
            each = todo.pop()
            if each not in found and self.forward(each):
                found[each] = None
                todo += self.read(each) if through(each) else ()
        return found

    def positions(self, wanted: Callable[[int], bool]) -> list[int]:
        """Return the values of the forward pass that are wanted, tuples themselves aside."""
        return [each for each in range(len(self.graph.nodes)) if self.forward(each) and wanted(each)]


def _norms(search: ForwardPass) -> list[int]:
    return search.positions(lambda each: search.node(each).op in _NORMS and not search.graph.nodes[each].item)


def between_products(search: ForwardPass) -> list[int]:
    """What lies between two products: an activation, what it gates, and that times the weights of rows."""

    def thin(each: int) -> bool:
        return not search.node(each).has(Trait.COMPUTE_INTENSIVE) and len(search.read(each)) == 1

    starts = search.positions(lambda each: search.node(each).op in _ACTIVATIONS)
    acts = [each for each in starts if any(map(search.product, search.back(search.read(each), thin)))]
    found, todo = dict.fromkeys(acts), acts
    while todo:
        todo = [u for each in todo for u in search.graph.users[each] if search.node(u).op == "Mul"]
        todo = [each for each in todo if search.forward(each) and each not in found]
        found.update(dict.fromkeys(todo))
    return [each for each in found if search.forward(each) and _leads_to_product(search, each)]


def _leads_to_product(search: ForwardPass, position: int) -> bool:
    """Whether a product reads a value, or what element-wise ops make of it."""
    todo, seen = [position], set[int]()
    while todo:
        for user in search.graph.users[todo.pop()]:
            node = search.node(user)
            if not search.forward(user) or user in seen:
                continue
            seen.add(user)
            if node.has(Trait.COMPUTE_INTENSIVE):
                return True
            if node.op in ("Mul", "Dropout", *_CASTS) or node.has(Trait.VIEW):
                todo.append(user)
    return False


def _up_projections(search: ForwardPass) -> list[int]:
    """What lies between attention and the compressions of its queries, keys and values: products of them too.

    A compression is a product as well, with a norm, splits and casts behind it, so what reads hidden states
    themselves, as the projections of attention without latents do, is none of these.
    """
    kernels = search.positions(lambda each: search.node(each).op in _KERNELS)
    inside: set[int] = {each for part in core_attention(search.graph) for each in part}
    starts = [each for kernel in (*kernels, *inside) for each in search.read(kernel) if each not in inside]

    def thin(each: int) -> bool:
        return not search.node(each).has(Trait.COMPUTE_INTENSIVE) and len(search.read(each)) == 1

    above = search.back(starts, lambda each: not search.product(each))
    ups = {
        each
        for each in above
        if search.product(each) and any(map(search.product, search.back(search.read(each), thin)))
    }
    between = [each for each in above if not search.node(each).has(Trait.COLLECTIVE)]
    return [each for each in between if each in ups or not search.product(each)] if ups else []


def _attention(search: ForwardPass) -> list[int]:
    return sorted({each for part in core_attention(search.graph) for each in part})


PARTS: Mapping[str, Callable[[ForwardPass], list[int]]] = {
    "norms": _norms,
    "activations": between_products,
    "up_projections": _up_projections,
    "attention": _attention,
}
"""The names of the parts, and what finds the values that they make."""


def inside_parts(graph: JointGraph, names: Sequence[str]) -> frozenset[int]:
    """Return the values of the named parts, and what casts and views make of them alone.

    Raises :class:`KeyError` for another name.
    """
    search = ForwardPass(graph)
    found = {each for name in names for each in PARTS[name](search)}
    for position in range(len(graph.nodes)):
        node, read = search.node(position), search.read(position)
        follows = node.op in _CASTS or node.has(Trait.VIEW)
        if follows and read and search.forward(position) and found.issuperset(read):
            found.add(position)
    return frozenset(found)
