"""Strides: a Transpose is another way to read the same memory where what reads it may read it strided.

So it is in torch (``Tensor.permute``): no kernel runs and no memory is taken. A view that joins dimensions, a
product of many matrices, a normalization and a transfer want their operand in order and copy it
(aten/src/ATen/native: ``reshape``, ``matmul``'s folding of batch dimensions, ``layer_norm``'s
``expect_contiguous``): of these the Transpose stays the copy that it is, unless it brings back the order in
which the memory lies. So does one of what a kernel of attention made, which writes [batch, seq, heads, size]
and returns [batch, heads, seq, size] by strides: FlashAttention's ``empty_like(q)`` of such queries
(Dao-AILab 0251105a, csrc/flash_attn/flash_api.cpp: ``mha_fwd``, ``mha_bwd``), between ``transpose(1, 2)`` of
operands and of results in torch (1e07335b, aten/src/ATen/native/transformers/cuda/attention_backward.cu,
``_scaled_dot_product_flash_attention_backward_cuda``), from which ``.transpose(1, 2).contiguous()`` copies
nothing; cuDNN's under Transformer Engine, whose results have the layout of the queries. What works element
by element writes in the order that it reads (torch's TensorIterator), and so does a rotary embedding:
frameworks turn [batch, seq, heads, size] and transpose then, where models here transpose first.

A framework that has sequences first, [sequence, batch, heads, size], can give batch and heads as one
dimension of strides to ``bmm``, and copies nothing for its products of many matrices: Megatron-LM since
51a2e6b0 (September 2020), megatron/model/transformer.py, ``baddbmm(..., query_layer.transpose(0, 1), ...)``;
cuBLAS takes strides between matrices and rows (torch, aten/src/ATen/native,
``prepare_batch_matrix_for_cublas``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from distsim.ir import Op, Tensor, Value
from distsim.ops import signature_of
from distsim.ops.places import shape_of
from distsim.transforms.kernels.policies import is_pointwise

_OF_ATTENTION = frozenset(
    (
        *("Attention", "AttentionGrad", "AttentionPart", "AttentionPartGrad"),
        *("MergeAttention", "WideMergeAttention"),
    )
)
"""Kernels whose results of four dimensions lie as [batch, seq, heads, size]."""
_BACKWARD = frozenset(("AttentionGrad", "AttentionPartGrad"))
_BY_SEQUENCE = (0, 2, 1, 3)

_ALONG_ROWS = frozenset(("Concat", "Slice", "Split"))
"""What moves parts of rows, and takes strides."""
_STRIDED = _ALONG_ROWS | _OF_ATTENTION | {"CopyIn", "Expand", "OptimizationBarrier", "ReduceSum"}
"""Kernels, besides those that work element by element, and what runs none, that take strides."""
_RESHAPES = frozenset(("Reshape", "Squeeze", "Unsqueeze"))
_PRODUCTS = frozenset(("MatMul", "MatMulGrad", "MatMulGradA", "MatMulGradB", "Gemm"))

Order = tuple[int, ...]
"""How a value lies in memory: the permutation that a contiguous tensor is seen under."""

Readers = Mapping[Value, Sequence[Op]]


def strided(ops: Sequence[Op], batches: bool = False, copied: bool = False) -> list[Op]:
    """Return the ops of a function with Transposes as views: where all that reads them there takes strides,
    and where they bring back the order in which what they read lies in memory.

    ``batches``: products of many matrices take strides between these, too. ``copied``: Transposes of four
    dimensions, which are those of queries, keys and values, are copies all the same, and so are those of
    their gradients (nanotron, models/llama.py: ``qkv_states.view(...).permute(2, 1, 0, 3, 4).contiguous()``,
    whose gradient, stacked, ``view`` copies once more). These are three kernels here, where nanotron has one
    for all, or where heads of keys are fewer three forward and none backward.
    """
    readers: dict[Value, list[Op]] = {value: [] for op in ops for value in op.outputs}
    for op in ops:
        for value in op.inputs:
            if value in readers:
                readers[value].append(op)
    orders: dict[Value, Order] = dict.fromkeys(_saved_outputs(ops), _BY_SEQUENCE)
    made: list[Op] = []
    for op in ops:
        if op.op_type != "Transpose":
            made.append(op)
            if not (copied and op.op_type in _BACKWARD):  # as if these lay by heads: what turns them copies
                orders.update(_orders(op, orders, readers))
            continue
        (source,), (result,) = op.inputs, op.outputs
        before = orders.get(source, tuple(range(len(shape_of(source)))))
        order = tuple([before[place] for place in _perm(op)])
        ordered = _is_ordered(order)
        takes = all(_takes_strides(each, result, order, readers, batches) for each in readers[result])
        if copied and len(order) == len(_BY_SEQUENCE):  # but for what a backward pass is given
            takes = takes and all(each.op_type in _BACKWARD for each in readers[result])
        if ordered or takes:
            op = replace(op, op_type="TransposedView")
            if not ordered:
                orders[result] = order
        made.append(op)
    return made


def reshaped_order(order: Order, source: Sequence[int], target: Sequence[int]) -> Order | None:
    """Return how a view of another shape lies, if there is one; None where a reshape copies.

    Dimensions that one is made of must follow each other in memory (at::detail::computeStride).

    >>> reshaped_order((0, 2, 1, 3), (2, 8, 5, 4), (2, 4, 2, 5, 4)), reshaped_order((1, 0), (2, 3), (6,))
    ((0, 2, 3, 1, 4), None)
    """
    if 0 in source:
        return None
    places: list[tuple[int, int]] = []  # of each dimension of the target: where it lies, and its turn there
    start = end = 0
    while start < len(source) or end < len(target):
        first, begin = start, end
        start, end = min(start + 1, len(source)), min(end + 1, len(target))
        while math.prod(source[first:start]) != math.prod(target[begin:end]):
            if math.prod(source[first:start]) < math.prod(target[begin:end]):
                start += 1
            else:
                end += 1
        where = [order[place] for place in range(first, start) if source[place] > 1]
        if where != list(range(min(where, default=0), min(where, default=0) + len(where))):
            return None
        lies = min(where, default=len(order))
        places += [(lies, place) for place in range(begin, end)]
    ranks = {each: rank for rank, each in enumerate(sorted(places))}
    return tuple([ranks[each] for each in places])


def _is_ordered(order: Order) -> bool:
    return order == tuple(range(len(order)))


def _saved_outputs(ops: Sequence[Op]) -> Iterator[Value]:
    """Yield what attention made before, of four dimensions, which its backward pass here reads or what
    output projections read is made of again."""
    makers = {value: op for op in ops for value in op.outputs}
    for op in ops:
        if op.op_type in _BACKWARD:
            value = op.inputs[-3]  # Y, before lse and dY
            for op_type in ("Reshape", "Transpose", "OptimizationBarrier"):
                if value in makers and makers[value].op_type == op_type:
                    value = makers[value].inputs[0]
            if value not in makers and len(shape_of(value)) == len(_BY_SEQUENCE):
                yield value


def _orders(op: Op, orders: Mapping[Value, Order], readers: Readers) -> dict[Value, Order]:
    """Return in which order the results of an op lie, of those that do not lie as their shape says.

    What a product of many matrices reads has been brought into order by whoever made it.
    """
    if op.op_type in _OF_ATTENTION:
        return {value: _BY_SEQUENCE for value in op.outputs if len(shape_of(value)) == len(_BY_SEQUENCE)}
    if not any(value in orders for value in op.inputs):
        return {}
    first = orders.get(op.inputs[0])
    order: Order | None = None
    if op.op_type == "OptimizationBarrier":  # hands on its first operand
        order = first
    elif op.op_type in (*_RESHAPES, "ReduceSum"):
        order = None if first is None else _seen(op, first)
    elif _keeps_order(op):
        rank = max(len(shape_of(value)) for value in op.outputs)
        found = {orders.get(value) for value in op.inputs if len(shape_of(value)) == rank}
        order = found.pop() if len(found) == 1 else None
    if order is None or _is_ordered(order):
        return {}
    return {
        value: order
        for value in op.outputs
        if len(shape_of(value)) == len(order)
        and not any(each.op_type in _PRODUCTS for each in readers[value])
    }


def _seen(op: Op, order: Order) -> Order | None:
    """Return the order of a view of another shape, or of a sum over dimensions, of a value of that order."""
    source, target = shape_of(op.inputs[0]), shape_of(op.outputs[0])
    if op.op_type != "ReduceSum":
        return reshaped_order(order, source, target)
    if len(source) != len(target):  # a sum that keeps its dimensions is one of size 1 in the same place
        return None
    return order


def _keeps_order(op: Op) -> bool:
    if op.subfunctions or not all(isinstance(value.type, Tensor) for value in (*op.inputs, *op.outputs)):
        return False
    return op.op_type in _ALONG_ROWS or is_pointwise(signature_of(op))


def _perm(transpose: Op) -> Order:
    rank = len(shape_of(transpose.outputs[0]))
    return transpose.attributes.get("perm") or tuple(reversed(range(rank)))


def _takes_strides(reader: Op, value: Value, order: Order, readers: Readers, batches: bool) -> bool:
    """Whether an op reads a value of an order where it lies."""
    if reader.op_type in _PRODUCTS:
        if batches and len(order) > 2:  # rows, or columns, lie without gaps
            return len(order) - 1 in order[-2:]
        # Rows and columns may change places, matrices among each other not.
        return order[:-2] == tuple(range(len(order) - 2))
    if reader.op_type in _RESHAPES:
        (result,) = reader.outputs
        seen = reshaped_order(order, shape_of(value), shape_of(result))
        if seen is None or _is_ordered(seen):
            return seen is not None
        # A product joins rows once more, which copies what is not in order.
        return all(
            each.op_type not in _PRODUCTS and _takes_strides(each, result, seen, readers, batches)
            for each in readers[result]
        )
    if reader.subfunctions:
        return False
    return reader.op_type in _STRIDED or is_pointwise(signature_of(reader))
