"""Values of a layer that are saved by name, as JAX's ``save_only_these_names`` does, found by their part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from distsim.errors import PlanError
from distsim.transforms.recompute.cheap_parts import ForwardPass, between_products
from distsim.transforms.recompute.core_attention import ATTENTION_OPS, core_attention
from distsim.transforms.recompute.saves import JointGraph, NodeKind, Trait


def _inside_attention(search: ForwardPass) -> set[int]:
    return {each for part in core_attention(search.graph) for each in part}


def _context(search: ForwardPass) -> list[int]:
    """What core attention makes: one op's results, statistics among them, or the product that ends it."""
    inside = _inside_attention(search)
    last = search.positions(lambda each: search.node(each).op in ATTENTION_OPS and each not in inside)
    makers = {
        search.graph.nodes[each].inputs[0] for each in last if search.graph.nodes[each].item is not None
    }
    results = {each for maker in makers for each in search.graph.users[maker]}
    written = {user for each in inside - results for user in search.graph.users[each] if user not in inside}
    return sorted(each for each in (results | written) if search.forward(each))


def _queries(search: ForwardPass) -> list[int]:
    """What core attention reads: queries, keys and values as its kernel is given them."""
    attention = {*_inside_attention(search), *_context(search)}
    read = {each for made in attention for each in search.read(made)}
    return [each for each in sorted(read - attention) if search.forward(each)]


def _next_products(search: ForwardPass, starts: Iterable[int]) -> list[int]:
    """Return the products of weights that read values, or what other ops made of these alone."""
    found: dict[int, None] = {}
    todo, seen = list(starts), set[int]()
    while todo:
        for user in search.graph.users[todo.pop()]:
            if user in seen or not search.forward(user):
                continue
            seen.add(user)
            if search.product(user):
                found[_whole(search, user)] = None
            elif len(search.read(user)) == 1:
                todo.append(user)
    return [*found]


def _whole(search: ForwardPass, product: int) -> int:
    """Return what a product becomes with the parts of other ranks and with its bias."""
    while True:
        users = [user for user in search.graph.users[product] if search.forward(user)]
        if len(users) != 1 or len(search.read(users[0])) != 1:
            return product
        node = search.node(users[0])
        if node.op != "Add" and not node.has(Trait.COLLECTIVE):
            return product
        product = users[0]


def _inner(search: ForwardPass) -> list[int]:
    """The products that an activation reads, and those that it gates."""
    between = between_products(search)
    read = [each for made in between for each in search.read(made) if each not in between]
    behind = search.back(read, lambda each: not search.node(each).has(Trait.COMPUTE_INTENSIVE))
    return [_whole(search, each) for each in behind if search.product(each)]


SAVED_NAMES: Mapping[str, Callable[[ForwardPass], list[int]]] = {
    "qkv_proj": _queries,
    "context": _context,
    "out_proj": lambda search: _next_products(search, _context(search)),
    "mlpwi": _inner,
    "mlpwo": lambda search: _next_products(search, between_products(search)),
}
"""The names, and what finds the values."""


def named_values(graph: JointGraph, names: Sequence[str]) -> list[int]:
    """Return the values of the forward pass that have one of the names.

    Raises :class:`PlanError` for a name that no value has, and :class:`KeyError` for one that is none of
    :data:`SAVED_NAMES`.
    """
    search = ForwardPass(graph)
    found = set[int]()
    for name in names:
        own = SAVED_NAMES[name](search)
        if not own:
            raise PlanError(
                f"remat=names:{'+'.join(names)}: a block has no {name}, as attention or a feed-forward with "
                "an activation has; use ops:LIST, matmuls or full"
            )
        found.update(own)
    return sorted(each for each in found if graph.nodes[each].kind is not NodeKind.TUPLE)
