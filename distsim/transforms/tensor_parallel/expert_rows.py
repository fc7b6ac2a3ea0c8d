"""Rows of tokens in the order of a rank's experts: what an exchange brings lies rank by rank.

Kernels of grouped products read the rows of an expert side by side. A rank of several experts copies what it
received from the others into that order, and what it made back before it sends it, forward and backward:
Megatron-LM's ``sort_chunks_by_idxs`` (``MoEAlltoAllTokenDispatcher.dispatch_postprocess`` and
``combine_preprocess``, megatron/core/transformer/moe/token_dispatcher.py, where ``num_local_experts > 1``),
torchtitan's permutation before its grouped products. Where tensor-parallel ranks bring the rows of a sequence
together in between, what they gather is copied, and what they scatter. An exchange node by node
(``dispatcher=deepep``) brings each token once, and has no such copy: its own kernel lays out the rows.

Where frameworks exchange on the stream of the computation (``Kernels.exchanges_wait``), what comes next waits
though it reads nothing of it: shared experts, forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from distsim.hardware.rank_axes import EXPERT
from distsim.ir import Op, Tensor, Value
from distsim.ir.function import readers_of
from distsim.ops import operator
from distsim.ops.parts import Groups
from distsim.program.block import StageBlocks, kept_rewrite, rewritten_stages
from distsim.transforms.data_parallel.gathers import copied_in, copied_out, over_tensor_ranks
from distsim.transforms.kernels.policies import Kernels


def sort_rows(stages: Sequence[StageBlocks]) -> tuple[StageBlocks, ...]:
    """Return the blocks of all stages, with the copies of experts' rows that were, or will be, sent."""
    return rewritten_stages(stages, _with_copies)


def wait_for_rows(stages: Sequence[StageBlocks], kernels: Kernels) -> tuple[StageBlocks, ...]:
    """Return the blocks of all stages, whose computation waits for exchanges of experts' rows.

    What ``kernels`` does not ask for changes nothing.
    """
    return rewritten_stages(stages, _waiting) if kernels.exchanges_wait else tuple(stages)


def _has_several_experts(ops: Sequence[Op]) -> bool:
    """Whether grouped products read the rows of more than one expert: how many there are of each."""
    counts = [
        value.type
        for op in ops
        if "GroupedMatMul" in op.op_type
        for value in op.inputs
        if isinstance(value.type, Tensor) and value.type.dtype.name == "int64"
    ]
    return any(count.shape[0] > 1 for count in counts)


@kept_rewrite("functions that copy rows into the order of experts")
def _with_copies(given: Sequence[Op], outputs: Sequence[Value]) -> Iterator[tuple[Op, int]]:
    of_several = given if _has_several_experts(given) else ()
    readers = readers_of(of_several)
    makers = {value: op for op in of_several for value in op.outputs}
    arriving, leaving = set[Op](), set[Op]()
    for op in of_several:
        if _brings(op):
            after = readers.get(op.outputs[0], [])
            gathers = len(after) == 1 and over_tensor_ranks(after[0], "MPIAllgather")
            arriving.add(after[0] if gathers else op)
        elif _sends_back(op):
            before = makers.get(op.inputs[0])
            scatters = before is not None and over_tensor_ranks(before, "MPIReduceScatter")
            leaving.add(before if before is not None and scatters else op)
    for place, op in enumerate(given):
        steps = copied_out(op) if op in arriving else copied_in(op, op.inputs) if op in leaving else (op,)
        yield from ((step, place) for step in steps)


@kept_rewrite("functions that wait for rows of experts, by function")
def _waiting(given: Sequence[Op], outputs: Sequence[Value]) -> Iterator[tuple[Op, int]]:
    awaited: Value | None = None
    for place, op in enumerate(given):
        known = operator(op.op_type)
        if awaited is not None and op.inputs and known.computes and not known.view:
            if awaited not in op.inputs:
                late = Value(op.inputs[0].name, op.inputs[0].type)
                yield Op("OptimizationBarrier", (op.inputs[0], awaited), (late,)), place
                op = replace(op, inputs=(late, *op.inputs[1:]))
            awaited = None
        yield op, place
        if op.op_type == "MPIAlltoall" and op.attributes["axis"] == EXPERT:
            (awaited,) = op.outputs


def _exchanges(op: Op) -> bool:
    if op.op_type != "MPIAlltoall" or op.attributes["axis"] != EXPERT:
        return False
    pieces = [op.attributes.get(name) for name in ("split_pieces", "concat_pieces")]
    return not any(isinstance(each, Groups) and each.kind for each in pieces)


def _brings(op: Op) -> bool:
    """Whether an op exchanges samples of all experts for rows, of all samples, of a rank's own experts."""
    return _exchanges(op) and isinstance(op.attributes["split"], int)


def _sends_back(op: Op) -> bool:
    """Whether an op exchanges them back."""
    return _exchanges(op) and isinstance(op.attributes["concat"], int)
