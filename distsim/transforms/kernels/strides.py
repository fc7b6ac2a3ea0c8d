"""Strides: a Transpose is another way to read the same memory where what reads it may read it strided.

So it is in torch (``Tensor.permute``): no kernel runs and no memory is taken. A view of another shape, a
product of many matrices, a normalization and a transfer want their operand in order and copy it
(aten/src/ATen/native: ``reshape``, ``matmul``'s folding of batch dimensions, ``layer_norm``'s
``expect_contiguous``): of these the Transpose stays the copy that it is. A framework that has sequences
first, [sequence, batch, heads, size], can give batch and heads as one dimension of strides to ``bmm``, and
copies nothing for its products of many matrices: Megatron-LM since 51a2e6b0 (September 2020),
megatron/model/transformer.py, ``baddbmm(..., query_layer.transpose(0, 1), ...)``; cuBLAS takes strides
between matrices and rows (torch, aten/src/ATen/native, ``prepare_batch_matrix_for_cublas``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distsim.ir import Op, Value
from distsim.ops import signature_of
from distsim.ops.places import shape_of
from distsim.transforms.kernels.policies import is_pointwise

_STRIDED = frozenset(
    (
        "Attention",
        "AttentionGrad",
        "AttentionPart",
        "AttentionPartGrad",
        "Concat",
        "CopyIn",
        "ReduceSum",
        "Slice",
        "Split",
    )
)
"""Kernels, besides those that work element by element, that take strides."""
_PRODUCTS = frozenset(("MatMul", "MatMulGrad", "MatMulGradA", "MatMulGradB", "Gemm"))


def strided(ops: Sequence[Op], batches: bool = False) -> list[Op]:
    """Return the ops of a function with Transposes as views where all that reads them there takes strides.

    ``batches``: products of many matrices take them between these, too.
    """
    readers: dict[Value, list[Op]] = {op.outputs[0]: [] for op in ops if op.op_type == "Transpose"}
    for op in ops:
        for value in op.inputs:
            if value in readers:
                readers[value].append(op)
    return [
        replace(op, op_type="TransposedView")
        if op.op_type == "Transpose"
        and all(_takes_strides(each, op, batches) for each in readers[op.outputs[0]])
        else op
        for op in ops
    ]


def _takes_strides(reader: Op, transpose: Op, batches: bool) -> bool:
    """Whether an op reads the result of a Transpose where it lies."""
    if reader.op_type in _PRODUCTS:
        rank = len(shape_of(transpose.outputs[0]))
        perm: tuple[int, ...] = transpose.attributes.get("perm") or tuple(reversed(range(rank)))
        if batches and rank > 2:  # rows, or columns, lie without gaps
            return rank - 1 in perm[-2:]
        # Rows and columns may change places, matrices among each other not.
        return perm[:-2] == tuple(range(rank - 2))
    if reader.subfunctions:
        return False
    return reader.op_type in _STRIDED or is_pointwise(signature_of(reader))
