"""What a scan over layers copies: XLA keeps what all turns of a loop save in one array.

``jax.lax.scan`` writes what a layer saves for its backward pass into an array [layers, ...]. A kernel of
elements writes there itself; what a product or a kernel of attention makes, which are calls of libraries, is
copied once it is made: XLA's fusion of such a call with the place where it writes is off
(``xla_gpu_enable_dynamic_slice_fusion``: openxla/xla 713ca258 of June 2024, and still in eed37fb6 of
December; in 831e9cef of February it knows reads alone. Issue 15265 shows the copies in a trace). What
backward reads from there, and the weights, are taken to lie where they are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from distsim.cache import Cache
from distsim.ir.function import Function, Op
from distsim.ir.rewrite import KeptRewrites, substitute
from distsim.ir.value import Value
from distsim.ops import operator, signature_of, work
from distsim.program.block import RewrittenOps, StageBlocks, rewritten_block

_STACKED = Cache[Function, RewrittenOps | None]("forward passes whose layers copy what they save", 1)
_COPIED = KeptRewrites("layers that copy what they save", 1)


def copy_saved(stages: Sequence[StageBlocks], scans: bool) -> tuple[StageBlocks, ...]:
    """Return the blocks of all stages; if a policy ``scans``, forward passes whose layers, called several
    times, copy what products make and backward reads.

    Those that share Functions share them still.
    """
    if not scans:
        return tuple(stages)
    return tuple([(rewritten_block(ahead, _stacked), behind, last) for ahead, behind, last in stages])


def _stacked(function: Function) -> RewrittenOps | None:
    return _STACKED.get(function, None, lambda: _with_copies(function))


def _with_copies(function: Function) -> RewrittenOps | None:
    calls = Counter([op.callee for op in function.ops if op.is_call])
    ops = [_copying(op) if op.is_call and calls[op.callee] > 1 else op for op in function.ops]
    return RewrittenOps.of(function, ops, [(op, place) for place, op in enumerate(ops)])


def _copying(call: Op) -> Op:
    found = _COPIED.of(call.callee, None, lambda: _copied(call.callee))
    return call if found is call.callee else replace(call, subfunctions=(found,))


def _copied(layer: Function) -> Function:
    """Return a layer that returns copies of what its products make, and of views of that."""
    products = set[Value]()
    for op in layer.ops:
        asked = work(signature_of(op))
        views = operator(op.op_type).view and not products.isdisjoint(op.inputs)
        if views or (asked is not None and asked.matrix):
            products.update(op.outputs)
    copies = {v: Value(v.name, v.type) for v in layer.outputs if v in products}
    if not copies:
        return layer
    ops = [*layer.ops, *[Op("CopyIn", (value,), (copy,)) for value, copy in copies.items()]]
    return replace(layer, ops=tuple(ops), outputs=substitute(layer.outputs, copies))
