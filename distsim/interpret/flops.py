"""The floating-point operations of a function."""

from __future__ import annotations

from distsim.ir import Function, all_ops, trim
from distsim.ops import signature_of, work


def count_flops(function: Function) -> float:
    """Return the FLOPs that the outputs of ``function`` take on one device that does all of it.

    A multiply-add is two. Of a joint function before it is parallelised these are the model's FLOPs, the
    numerator of MFU (Chowdhery et al. 2022, PaLM, appendix B); unlike there, element-wise work and the
    optimizer count as well. Ops without a work rule, and those that no output needs, count nothing.

    >>> from distsim.models import mlp
    >>> count_flops(mlp(layers=1, width=4, batch=2)) >= 2 * 2 * 4 * 4
    True
    """
    demands = [work(signature_of(op)) for op in all_ops(trim(function).function)]
    return sum(demand.flops for demand in demands if demand is not None)
