"""Multi-tensor kernels: one launch for many tensors, as optimizers and gradient clipping run.

torch's ``foreach`` and ``fused`` optimizers, ``clip_grad_norm_`` and apex's and Megatron's Adam hand a kernel
lists of tensors, at most so many a launch as their addresses fit into its arguments.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from distsim.ir.function import Op
from distsim.ir.type import Tensor
from distsim.ir.value import Value
from distsim.ops import operator
from distsim.ops.clipping import sums_squares
from distsim.ops.kernel import MULTI_TENSOR
from distsim.transforms.op_graph import hands_on

_MOST_TENSORS = (110, 64, 48, 36, 30)
"""Tensors a launch, by the number of lists: aten/src/ATen/native/cuda/MultiTensorApply.cuh,
``depth_to_max_tensors``, and apex's csrc/multi_tensor_apply.cuh (a torch built for CUDA 13 takes seven times
as many). A launch over many elements is cut further; its time is that of their bytes in any case."""


def is_of_many(op: Op) -> bool:
    """Whether a Call does nothing between gradients and new parameters but what one launch does for many."""
    if not op.is_call or not any(map(kind_of, op.callee.ops)):
        return False
    return sums_squares(op) or all(part.op_type in MULTI_TENSOR for part in op.callee.ops)


def kind_of(op: Op) -> Hashable:
    """Return what ops of one multi-tensor kernel have in common: all but their shapes. None: it is in none.

    An optimizer with ``kernel="single"`` launches a kernel a parameter.
    """
    if op.op_type not in MULTI_TENSOR:
        return None
    if op.attributes.get("kernel") == "single":
        return None
    types = [value.type for value in (*op.inputs, *op.outputs)]
    return op.op_type, op.attributes, tuple([(t.dtype, t.device) for t in types if isinstance(t, Tensor)])


def launches(ops: Sequence[tuple[int, Op]]) -> Iterator[Sequence[int]]:
    """Yield which of the numbered ops of one kind each launch runs."""
    if not ops:
        return
    _, first = ops[0]
    written = [v for place, v in enumerate(first.outputs) if place not in operator(first.op_type).in_place]
    lists = sum(_is_list(value) for value in (*first.inputs, *written))
    most = _MOST_TENSORS[min(max(lists, 1), len(_MOST_TENSORS)) - 1]
    for start in range(0, len(ops), most):
        yield [number for number, _ in ops[start : start + most]]


def _is_list(value: Value) -> bool:
    """Whether each op has a tensor of its own there; numbers are the same one, or gathered."""
    return isinstance(value.type, Tensor) and value.type.rank > 0


def sums_of_squares(ops: Sequence[Op]) -> set[int]:
    """Return the places of the additions that make one sum of squares of all: one kernel sums the list.

    They are the additions of numbers that are made of squares of gradients, of which a rank may take its
    share first (``Mul``), and those of any numbers where nothing but gradients is summed, scaled and moved.
    """
    adds = {place for place, op in enumerate(ops) if op.op_type in ("Add", "Mul") and _is_number(op)}
    if all(place in adds or _is_of_step(op) for place, op in enumerate(ops)):
        return adds
    sums, numbers = set[int](), set[Value]()
    for place, op in enumerate(ops):
        if place in adds and not numbers.isdisjoint(op.inputs):
            sums.add(place)
        elif op.op_type != "SquareSum" and (numbers.isdisjoint(op.inputs) or not hands_on(op)):
            continue
        numbers.update(op.outputs)
    return sums


def _is_number(op: Op) -> bool:
    """Whether an op makes one number of numbers."""
    return not any(map(_is_list, (*op.inputs, *op.outputs)))


def _is_of_step(op: Op) -> bool:
    """Whether an op may stand between the gradients and the new parameters."""
    if op.is_call:
        return all(part.op_type in MULTI_TENSOR for part in op.callee.ops)
    return op.op_type in MULTI_TENSOR or op.op_type == "GradientFactor" or hands_on(op)
