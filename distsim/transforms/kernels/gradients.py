"""Gradients of products as frameworks launch them: a kernel for each operand, that of the input first.

Autograd makes the gradients of the two operands of a product by a kernel each. Where ranks have to sum the
gradient of the input, or divided sequences to be brought together for it, Megatron-LM starts that collective
at once and makes the gradient of the weight meanwhile (``core/tensor_parallel/layers.py``,
``LinearWithGradAccumulationAndAsyncCommunication``): here the gradients of weights of all products whose
collective it is stand right behind it. Nothing else changes places. Where a framework makes both gradients
first, as autograd does to which a product is one node, that of the weight stands before that of the input.
Where sums of gradients begin as zeros the cast of the first one is an addition to these, and reads them too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from distsim.cache import Cache
from distsim.hardware.rank_axes import over_tensor
from distsim.ir import Function, Op, Value, callees
from distsim.ir.value import Attributes
from distsim.ops import operator, signature_of, work
from distsim.transforms.kernels.policies import Kernels

_APART = Cache[Function, Function | None]("functions with a kernel for each gradient of products", 2)


def gradients_apart(function: Function, kernels: Kernels, beside: bool = True) -> Function:
    """Return what a rank runs with each gradient of a product as an op of its own, in the order of issue.

    ``beside``: the gradients of weights run beside the collectives of those of inputs, else before them. It
    is the function itself for policies that run both as one kernel. Made once per function.
    """
    if not kernels.gradients_apart:
        return function
    zeroed = kernels.zeroed
    return _APART.get(function, (beside, zeroed), lambda: _rewritten(function, beside, zeroed)) or function


def _rewritten(function: Function, beside: bool, zeroed: bool) -> Function | None:
    """Return the function with its gradients apart, or None: what is kept does not hold its key."""
    done: dict[Function, Function] = {}
    for current in (*callees(function), function):
        called = [_onto_zeros(op) if zeroed else op for op in current.ops]
        called = [_with_callees(op, done) for op in called]
        ops = tuple(_issued(called) if beside else _weights_first(called))
        same = len(ops) == len(current.ops) and all(a is b for a, b in zip(ops, current.ops, strict=True))
        done[current] = current if same else replace(current, ops=ops)
    return None if done[function] is function else done[function]


def _onto_zeros(op: Op) -> Op:
    """Return the cast of a gradient as what adds it to zeros; another op as it is."""
    if op.op_type != "GradientCast" or "zeroed" in op.attributes:
        return op
    return replace(op, attributes=Attributes({**op.attributes, "zeroed": 1}))


def _with_callees(op: Op, done: dict[Function, Function]) -> Op:
    called = tuple([done[each] for each in op.subfunctions])
    return op if called == op.subfunctions else replace(op, subfunctions=called)


def _issued(ops: Sequence[Op]) -> Iterator[Op]:
    """Yield the ops, gradients of products apart: of weights after the collectives of those of inputs."""
    readers: dict[Value, list[Op]] = {}
    for op in ops:
        for value in op.inputs:
            readers.setdefault(value, []).append(op)
    waiting: list[tuple[Op, set[Op]]] = []  # gradients of weights, and the collectives before each
    issued: set[Op] = set()
    for op in ops:
        parts = _parts(op)
        found = [_collective(part.outputs[0], readers) for part in parts]
        before = {collective for collective in found if collective is not None}
        if before:
            yield from [part for part, collective in zip(parts, found, strict=True) if collective]
            rest = [part for part, collective in zip(parts, found, strict=True) if collective is None]
            waiting += [(part, before) for part in rest]
            continue
        issued.add(op)
        read = any(value in late.outputs for late, _ in waiting for value in op.inputs)
        if read:
            yield from [late for late, _ in waiting]
            waiting = []
        yield from parts or [op]
        yield from [late for late, collectives in waiting if collectives <= issued]
        waiting = [(late, collectives) for late, collectives in waiting if not collectives <= issued]
    yield from [late for late, _ in waiting]


def _weights_first(ops: Sequence[Op]) -> Iterator[Op]:
    """Yield the ops, gradients of products apart, those of inputs, which are the first, behind the others."""
    for op in ops:
        yield from reversed(_parts(op)) if len(_parts(op)) else [op]


def _parts(op: Op) -> list[Op]:
    """Return the ops that make the outputs of a product's gradient; none for another op."""
    rule = operator(op.op_type).part
    if rule is None or len(op.outputs) < 2:
        return []
    signature = signature_of(op)
    asked = work(signature)
    if asked is None or not asked.matrix:
        return []
    found: list[Op] = []
    for place, value in enumerate(op.outputs):
        part = rule(signature, place)
        inputs = tuple([op.inputs[index] for index in part.inputs])
        found.append(Op(part.op_type, inputs, (value,), part.attributes, name=op.name))
    return found


def _collective(value: Value, readers: Mapping[Value, Sequence[Op]]) -> Op | None:
    """Return the collective over tp that alone reads a value, or the sum of it with others of its kind."""
    while len(readers.get(value, ())) == 1:
        (reader,) = readers[value]
        if operator(reader.op_type).moves and over_tensor(reader.attributes.get("axis", "")):
            return reader
        if reader.op_type != "Add":
            return None
        value = reader.outputs[0]
    return None
