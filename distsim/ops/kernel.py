"""Kernel: several ops that one launch runs. It carries them in a function of its own, as a Call does.

What one kernel does inside stays in registers: it reads what comes in and writes what goes out, once each.
Its work is found when it is made (:func:`kernel_attributes`), since a work rule sees no callee. Kernels are
made of finished functions (:mod:`distsim.transforms.kernels`): they have no gradient and are not divided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from distsim.ir.function import Op
from distsim.ir.type import Tensor, as_tensor
from distsim.ir.value import Attributes, Value
from distsim.ops.grouped import group_matrix
from distsim.ops.operator import (
    Operator,
    Signature,
    Work,
    bytes_of,
    operator,
    read_again,
    register,
    signature_of,
)
from distsim.ops.optimizers import OPTIMIZER_OPS, launches_of
from distsim.ops.rules import work
from distsim.ops.softmax import TRIANGLE, triangle_reads

KERNEL = "Kernel"
ADD = "AccumulateInto"

UPDATED = "updated"
"""The attribute of a kernel of updates that says how many elements all their parameters have."""

MULTI_TENSOR = OPTIMIZER_OPS | {"SquareSum", "ScaleGradient"}
"""The ops of which one kernel runs those of many tensors (:mod:`distsim.transforms.kernels.fusion`)."""


def kernel_attributes(ops: Sequence[Op], one_product: bool = False) -> Attributes:
    """Return the attributes of the kernel that runs ``ops``.

    They are ``ops`` (their types, joined by ``+``; of a kernel for many tensors each once: it is called
    what one op is called), ``flops`` (of all of them) and ``matrix``, whether some run on the matrix
    units. With ``one_product`` the products among them are one: what they make are columns of its result
    (``columns``), and what adds gradients of its operand is a part of it. ``triangle``: it is a softmax
    that reads nothing that a causal mask hides; ``added``: of products that add what they make to sums
    (``AccumulateInto``), the bytes of these, read and written; ``rate``: of products that run at the rate
    of another type, that one; ``groups`` and ``matrices``: of grouped products how many groups there are, and
    the bytes of their matrices, read, written or added to; ``beside``: how many chunks of one product run in
    turn on several streams; ``both``: their operands of 8 bits have scales of blocks. Of updates how many
    elements their parameters have (:data:`UPDATED`), and of those that are several kernels the bytes that
    these move beyond each operand once, and how many they are (``launches``); of ops whose kernels read an
    operand again (:data:`distsim.ops.operator.AGAIN`) these bytes too. Views count for nothing. Raises
    :class:`ValueError` for an op without a work rule.
    """
    summed = one_product and any(op.op_type.endswith("MatMulGradA") for op in ops)
    flops, matrix, names, more = 0.0, False, list[str](), dict[str, float]()
    made = {value: op for op in ops for value in op.outputs}
    for op in ops:
        if operator(op.op_type).view or (summed and op.op_type == "Add"):
            continue
        demand = work(signature_of(op))
        if demand is None:
            raise ValueError(f"{op!r} has no work rule; it cannot be a part of a kernel")
        flops, matrix = flops + demand.flops, matrix or demand.matrix
        names.append(op.op_type)
        if op.op_type in OPTIMIZER_OPS:
            more = _with_passes(more, op, demand)
        if again := read_again(op.attributes, [_in_memory(value, made) for value in op.inputs]):
            more = {**more, "read_more": more.get("read_more", 0.0) + again}
    chained = not all(made.keys().isdisjoint(op.inputs) for op in ops)
    if one_product or not chained or max(Counter(names).values(), default=0) > 3:
        names = list(dict.fromkeys(names))
    label = "+".join(names)
    marks: dict[str, float | str] = {"columns": 1} if one_product and matrix else {}
    added = sum(op.inputs[0].type.nbytes + op.outputs[0].type.nbytes for op in ops if op.op_type == ADD)
    if matrix and added:
        marks["added"] = float(added)
    grouped = {op: found for op in ops if (found := group_matrix(signature_of(op))) is not None}
    if grouped:
        into = {value for op in ops if op.op_type == ADD for value in op.inputs}
        moved = sum(found.nbytes for op, found in grouped.items() if into.isdisjoint(op.outputs))
        marks |= {"groups": next(iter(grouped.values())).shape[0], "matrices": float(moved + added)}
    beside = max([int(op.attributes.get("beside", 1)) for op in ops], default=1)
    if beside > 1:
        marks["beside"] = beside
    if any(op.attributes.get("both", 0) for op in ops if "MatMul" in op.op_type):
        marks["both"] = 1
    rates = {op.attributes["rate"] for op in ops if "rate" in op.attributes}
    if len(rates) == 1:
        marks["rate"] = rates.pop()
    updated = sum(signature_of(op).inputs[0].size for op in ops if op.op_type in OPTIMIZER_OPS)
    if updated:
        marks[UPDATED] = updated
    if any(op.attributes.get(TRIANGLE, 0) for op in ops):
        marks[TRIANGLE] = 1
    return Attributes({"ops": label, "flops": flops, "matrix": matrix, **marks, **more})


def _in_memory(value: Value, made: Mapping[Value, Op]) -> Tensor:
    """Return the type in which a kernel that runs the ops that ``made`` values reads one from memory."""
    while value in made and made[value].op_type == "Cast":
        value = made[value].inputs[0]
    return as_tensor(value.type, value.name)


def _with_passes(more: Mapping[str, float], op: Op, demand: Work) -> dict[str, float]:
    """Return the bytes that kernels of updates move beyond each operand once, and how many they are, with
    those of one more update that they do; nothing more for one kernel."""
    count = launches_of(signature_of(op))
    if count == 1:
        return dict(more)
    signature = signature_of(op)
    return {
        **more,
        "read_more": more.get("read_more", 0.0) + demand.bytes_read - bytes_of(signature.inputs),
        "written_more": more.get("written_more", 0.0) + demand.bytes_written - bytes_of(signature.outputs),
        "launches": count,
    }


def _work(signature: Signature) -> Work:
    return Work(
        signature.attributes["flops"],
        triangle_reads(signature, bytes_of(signature.inputs)) + signature.attributes.get("read_more", 0.0),
        bytes_of(signature.outputs) + signature.attributes.get("written_more", 0.0),
        signature.attributes["matrix"],
    )


def op_label(op: Op | Signature) -> str:
    """Return what an op is called in results: its type; of a kernel, the types of the ops that it runs."""
    return str(op.attributes["ops"]) if op.op_type == KERNEL else op.op_type


register(Operator(KERNEL, work=_work))
