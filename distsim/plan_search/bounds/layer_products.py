"""What the products of equal layers take at least, before any plan is built, and the way through them.

Each product at the best rate of its kind and type. Where each layer takes in what the one before makes, and
all of its products follow from that, a microbatch goes through the forward products of a layer before the
next begins. Backward the gradient of what a layer takes in needs those of what each of its products takes in:
half of the operations of the gradients of products with weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

from distsim.ir import Function, Op, Value, all_ops
from distsim.plan_search.bounds.layer_figures import LayerPassage, LayerWork
from distsim.plan_search.bounds.spans import is_product
from distsim.transforms.op_graph import numbered


@dataclass(frozen=True)
class LayerProducts:
    """Seconds on one device of the products of one layer: ``forward`` and ``backward``, of the latter those
    that gradients of what the layer takes in need (``behind``); and of those that follow from the last layer,
    ``head``."""

    forward: float
    backward: float
    behind: float
    head: float

    def work(self, ranks: int, layers: int) -> LayerWork:
        """Return what a microbatch takes of so many ranks among which each layer is divided; ``ranks``
        counts the microbatches."""
        layer, head = (self.forward + self.backward) / ranks, self.head / ranks
        ahead, behind = self.forward / ranks, self.behind / ranks
        passage = LayerPassage(ahead, behind, layer - ahead - behind)
        total = layers * layer + head
        return LayerWork(total, total, 0.0, 0.0, 0.0, 0, layers, layer, head, passage=passage)


def layer_products(function: Function, layers: int, seconds: Callable[[Op], float]) -> LayerProducts | None:
    """Return those of the layers of a joint function; None where these are no chain of equal Calls.

    ``seconds`` are those of a product at the best rate. Layers are Calls of one callee forward, and of one
    callee backward.
    """
    forward = numbered(function).forward
    ahead = [op for op, own in zip(function.ops, forward, strict=True) if own and op.is_call]
    behind = [op for op, own in zip(function.ops, forward, strict=True) if not own and op.is_call]
    behind = [op for op in behind if any(map(is_product, all_ops(op.callee)))]
    if len(ahead) != layers or len({op.callee for op in ahead}) != 1 or not _is_chain(ahead):
        return None
    if len(behind) != layers or len({op.callee for op in behind}) != 1:
        return None
    one, two = ([op for op in all_ops(ops[0].callee) if is_product(op)] for ops in (ahead, behind))
    linear = [op for op in two if not op.op_type.startswith("Attention")]
    late = _following(function.ops, ahead[-1].outputs)
    after = _following(function.ops, [value for op in behind for value in op.outputs])
    head = [op for op in function.ops if op in late and op not in after and not op.is_call and is_product(op)]
    ahead_of, backward, weighted, after_all = (sum(map(seconds, ops)) for ops in (one, two, linear, head))
    return LayerProducts(ahead_of, backward, weighted / 2, after_all)


def _is_chain(calls: list[Op]) -> bool:
    """Whether each Call reads one result of the one before, from which all of its products follow."""
    for before, call in pairwise(calls):
        read = [place for place, value in enumerate(call.inputs) if value in before.outputs]
        if len(read) != 1:
            return False
        following = _following(call.callee.ops, [call.callee.inputs[read[0]]])
        if not all(op in following for op in call.callee.ops if op.is_call or is_product(op)):
            return False
    return True


def _following(ops: Iterable[Op], values: Iterable[Value]) -> set[Op]:
    """Return the ops that follow from values."""
    made, found = set(values), set[Op]()
    for op in ops:
        if not made.isdisjoint(op.inputs):
            found.add(op)
            made.update(op.outputs)
    return found
