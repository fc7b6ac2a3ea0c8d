"""The floating-point operations of a function: those that it runs, and those that its model stands for."""

from __future__ import annotations

from collections.abc import Iterator

from distsim.ir import Function, all_ops, trim
from distsim.ops import signature_of, work
from distsim.ops.operator import Work


def count_flops(function: Function) -> float:
    """Return the FLOPs that the outputs of ``function`` take on one device that does all of it.

    A multiply-add is two. All ops count, with what their kernels do: element by element, the optimizer,
    of attention under a causal mask half of the pairs, and what its backward pass computes again. Ops without
    a work rule, and those that no output needs, count nothing.

    >>> from distsim.models import mlp
    >>> count_flops(mlp(layers=1, width=4, batch=2)) >= 2 * 2 * 4 * 4
    True
    """
    return sum(demand.flops for demand in _demands(function))


def count_model_flops(function: Function) -> float:
    """Return the FLOPs of the model that a function computes, before it is parallelised: MFU's numerator.

    As Chowdhery et al. 2022 count them (PaLM, appendix B), and with them Megatron-LM, torchtitan, nanotron
    and llm-foundry: products only, those of attention over all pairs of query and key, also those that a
    causal mask hides, and nothing that is computed again. Of a decoder's step that is 6 N + 12 L h s a token,
    N being the weights of its products (of experts those that a token chooses, whatever their capacity), and
    12 L h (2 w - w^2 / s) where it attends to w keys of s at most (written out, to all): however attention
    runs, in whatever precision and kernels. Rows by which a vocabulary is padded are among them, as in
    Megatron-LM (``num_floating_point_operations`` of megatron/training/training.py takes
    ``args.padded_vocab_size``).

    >>> from distsim.models import mlp
    >>> count_model_flops(mlp(layers=1, width=4, batch=2))
    64.0
    """
    products = [demand for demand in _demands(function) if demand.matrix]
    return sum(each.flops if each.model_flops is None else each.model_flops for each in products)


def _demands(function: Function) -> Iterator[Work]:
    for op in all_ops(trim(function).function):
        demand = work(signature_of(op))
        if demand is not None:
            yield demand
