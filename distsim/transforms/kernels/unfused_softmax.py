"""What torch runs where Megatron-LM's kernel of scale, mask and softmax does not take a rank's shapes."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from distsim.ir import Float32, Op, Value
from distsim.ir.type import as_tensor
from distsim.ops.places import shape_of
from distsim.ops.softmax import CAUSAL
from distsim.transforms.kernels.rotary import cast_op

FEWEST_KEYS = 17
VECTOR = 4
"""Queries, keys, and matrices of a rank come in so many at least."""


def kernel_takes(shape: Sequence[int], most_keys: int) -> bool:
    """Whether the kernel takes matrices [..., queries, keys] of which a row has at most ``most_keys``.

    megatron/core/fusions/fused_softmax.py, ``is_kernel_available``, and ``get_batch_per_block`` of
    scaled_masked_softmax.h: a block has four warps, each with one matrix, or two of at most 128 keys.

    >>> kernel_takes((1, 4, 1024, 1024), 4096), kernel_takes((1, 2, 1024, 1024), 4096)
    (True, False)
    """
    *batch, queries, keys = shape
    of_a_block = 2 * VECTOR if keys <= 128 else VECTOR
    divides = math.prod(batch) % of_a_block == queries % VECTOR == keys % VECTOR == 0
    return divides and FEWEST_KEYS <= keys <= most_keys


def runs_in_torch(op: Op, most_keys: int) -> bool:
    """Whether an op is a softmax under a causal mask, or its gradient, that the kernel does not take."""
    return (
        op.op_type in ("Softmax", "SoftmaxGrad")
        and bool(op.attributes.get(CAUSAL, 0))
        and not kernel_takes(shape_of(op.outputs[0]), most_keys)
    )


def in_torch(ops: Sequence[Op], outside: Collection[Value]) -> list[Op]:
    """Return the ops of such a kernel one by one, in float32, between casts (``forward_torch_softmax``).

    ``outside`` are the values that others read. Two things are left out: what a softmax made is saved in 16
    bits, where torch saves float32, and the gradients of masked scores are filled with zeros by no kernel.
    """
    result = next(op for op in ops if op.op_type in ("Softmax", "SoftmaxGrad")).outputs[0]
    made = {value for op in ops for value in op.outputs}
    wide: dict[Value, Value] = {}
    found: list[Op] = []
    for op in ops:
        gradient = op.op_type == "SoftmaxGrad"
        for value in op.inputs[:1] if gradient else op.inputs:
            if value not in made and value not in wide and _is_narrow(value, result):
                wide[value] = _widened(value)
                found.append(cast_op(value, wide[value]))
        wide |= {value: _widened(value) for value in op.outputs if _is_narrow(value, result)}
        inputs, outputs = (tuple([wide.get(v, v) for v in each]) for each in (op.inputs, op.outputs))
        found.append(replace(op, inputs=inputs, outputs=outputs))
        found += [cast_op(wide[value], value) for value in op.outputs if value in wide and value in outside]
    return found


def _is_narrow(value: Value, like: Value) -> bool:
    return shape_of(value) == shape_of(like) and as_tensor(value.type, value.name).dtype.itemsize < 4


def _widened(value: Value) -> Value:
    return Value(value.name, replace(as_tensor(value.type, value.name), dtype=Float32()))
