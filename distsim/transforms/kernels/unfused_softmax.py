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
_SOFTMAXES = ("Softmax", "SoftmaxGrad")


def kernel_takes(scores: Value, most_keys: int) -> bool:
    """Whether the kernel takes matrices [..., queries, keys] of which a row has at most ``most_keys``.

    megatron/core/fusions/fused_softmax.py, ``is_kernel_available``: of 16 bits; and scaled_masked_softmax.h,
    ``get_batch_per_block``: a block has four warps, each with one matrix, or two of at most 128 keys.

    >>> from distsim.ir import Float16, Tensor
    >>> [kernel_takes(Value("scores", Tensor(Float16(), (1, n, 1024, 1024))), 4096) for n in (2, 3, 4)]
    [False, False, True]
    """
    *batch, queries, keys = shape_of(scores)
    of_a_block = 2 * VECTOR if keys <= 128 else VECTOR
    divides = math.prod(batch) % of_a_block == queries % VECTOR == keys % VECTOR == 0
    return divides and FEWEST_KEYS <= keys <= most_keys and _itemsize(scores) == 2


def runs_in_torch(op: Op, most_keys: int) -> bool:
    """Whether an op is a softmax under a causal mask, or its gradient, that the kernel does not take.

    There is no kernel where ``most_keys`` is 0.
    """
    asked = most_keys > 0 and op.op_type in _SOFTMAXES and bool(op.attributes.get(CAUSAL, 0))
    return asked and not kernel_takes(op.outputs[0], most_keys)


def in_torch(ops: Sequence[Op], outside: Collection[Value], wide: bool) -> list[list[Op]]:
    """Return the ops of such a kernel as the kernels that torch runs (``forward_torch_softmax``).

    ``outside`` are the values that others read. The scores, which their product has scaled, are masked, then
    comes the softmax; in backward its gradient, and what fills that of masked scores with zeros, as which the
    product by the scale counts. ``wide``: scaled by an op, as query-key layer scaling is, masked and summed
    in float32, between casts. Left out is then that torch saves float32 of what a softmax made, where it is
    16 bits here, and the kernel that fills gradients. The mask, which torch has as bits, is added as it is,
    in 16 bits, which the type rule of ``Add`` would refuse.
    """
    place = next(number for number, op in enumerate(ops) if op.op_type in _SOFTMAXES)
    if wide:
        return [[op] for op in _in_float32(ops, ops[place].outputs[0], outside)]
    return [part for part in ([*ops[:place]], [ops[place]], [*ops[place + 1 :]]) if part]


def _in_float32(ops: Sequence[Op], result: Value, outside: Collection[Value]) -> list[Op]:
    made = {value for op in ops for value in op.outputs}
    wide: dict[Value, Value] = {}
    found: list[Op] = []
    for op in ops:
        saved = op.op_type == "SoftmaxGrad"
        for value in op.inputs[1:] if saved else op.inputs:
            if value not in made and value not in wide and _is_narrow(value, result):
                wide[value] = _widened(value)
                found.append(cast_op(value, wide[value]))
        wide |= {value: _widened(value) for value in op.outputs if _is_narrow(value, result)}
        inputs, outputs = (tuple([wide.get(v, v) for v in each]) for each in (op.inputs, op.outputs))
        found.append(replace(op, inputs=inputs, outputs=outputs))
        found += [cast_op(wide[value], value) for value in op.outputs if value in wide and value in outside]
    return found


def _itemsize(value: Value) -> int:
    return as_tensor(value.type, value.name).dtype.itemsize


def _is_narrow(value: Value, like: Value) -> bool:
    return shape_of(value) == shape_of(like) and _itemsize(value) == 2


def _widened(value: Value) -> Value:
    return Value(value.name, replace(as_tensor(value.type, value.name), dtype=Float32()))
