"""Products as frameworks launch them: those of one weight as one, and a kernel for each gradient.

Models are written here with a weight for queries, one for keys, one for values, one for a gate and one for
what it gates. Where a framework has them as one (Megatron-LM's ``query_key_value`` and ``linear_fc1``,
llm-foundry's ``Wqkv``, nanotron's ``qkv_proj`` and ``gate_up_proj``), one kernel multiplies by all of them,
one makes the gradients of all of these weights, and one the gradient of what they multiply: no sum of
gradients of parts is left to be made (:func:`products_of_groups`). So it is in 8 bits (Transformer Engine's
``LayerNormColumnParallelLinear``), where one kernel casts the gradients of all parts too, and of experts,
whose ``weight1`` has gate and up (Megatron-LM core 0.12, core/transformer/moe/experts.py, ``GroupedMLP``).
What these kernels read has to lie side by side. Where torch split the result, the gradients of its parts are
copied so, before they are cast (``SplitBackward0``, which is
``torch.cat``: ``Kernels.products`` is ``copied``); kernels that read or write with strides need none.

Autograd makes the gradients of the two operands of a product by a kernel each. Where ranks have to sum the
gradient of the input, or divided sequences to be brought together for it, Megatron-LM starts that collective
at once and makes the gradient of the weight meanwhile (``core/tensor_parallel/layers.py``,
``LinearWithGradAccumulationAndAsyncCommunication``): here the gradients of weights of all products whose
collective it is stand right behind it, those of 8 bits too, which are a kernel each from the start
(Transformer Engine's pytorch/module/layernorm_linear.py). Nothing else changes places. Where a framework
makes both gradients first, as autograd does to which a product is one node, that of the weight stands before
that of the input.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import is_

from distsim.hardware.rank_axes import over_tensor
from distsim.ir import Function, Op, Tensor, Value, rewrite_all
from distsim.ir.function import readers_of
from distsim.ir.rewrite import KeptRewrites
from distsim.ops import operator, signature_of, work
from distsim.ops.conversion import ONCE
from distsim.ops.matmul import GROUP
from distsim.ops.places import shape_of
from distsim.transforms.kernels.policies import Kernels

_APART = KeptRewrites("functions with a kernel for each gradient of products", 2)


def gradients_apart(function: Function, kernels: Kernels, beside: bool = True) -> Function:
    """Return what a rank runs with each gradient of a product as an op of its own, in the order of issue.

    ``beside``: the gradients of weights run beside the collectives of those of inputs, else before them. It
    is the function itself for policies that run both as one kernel. Made once per function.
    """
    if not kernels.gradients_apart:
        return function
    return _APART.of(function, beside, lambda: rewrite_all(function, partial(_apart, beside=beside)))


def _apart(_: Function, current: Function, beside: bool) -> Function:
    ops = tuple(_issued(current.ops) if beside else _weights_first(current.ops))
    same = len(ops) == len(current.ops) and all(map(is_, ops, current.ops))
    return current if same else replace(current, ops=ops)


def _issued(ops: Sequence[Op]) -> Iterator[Op]:
    """Yield the ops, gradients of products apart: of weights after the collectives of those of inputs."""
    readers = readers_of(ops)
    waiting: list[tuple[Op, set[Op]]] = []  # gradients of weights, and the collectives before each
    issued: set[Op] = set()
    beside = _beside(ops, readers)
    for op in ops:
        if op in beside and beside[op] not in issued:
            waiting.append((op, {beside[op]}))
            continue
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


def _beside(ops: Sequence[Op], readers: Mapping[Value, Sequence[Op]]) -> dict[Op, Op]:
    """Return the collective of the gradient of the input by each gradient of a weight of 8 bits.

    Both gradients of a product read that of its result, cast once.
    """
    found = {
        op.inputs[1]: _collective(op.outputs[0], readers) for op in ops if op.op_type == "Float8MatMulGradA"
    }
    halves = [(op, found.get(op.inputs[1])) for op in ops if op.op_type == "Float8MatMulGradB"]
    return {op: collective for op, collective in halves if collective is not None}


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


# --- products of one group --------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpsWithGroups:
    """Ops in an order in which each of ``groups``, places of ops that one kernel runs, is without a gap.

    ``places`` says per op where it was before; of a copy that was added, where what it is for was.
    """

    ops: tuple[Op, ...]
    places: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...] = ()


def products_of_groups(ops: Sequence[Op], outputs: Sequence[Value], kernels: Kernels) -> OpsWithGroups:
    """Return the ops of a function that returns ``outputs``, products of one group next to each other.

    Groups are products, and gradients of weights, of one operand, and gradients of that operand with the
    additions that sum them; and what casts their other operands to 8 bits. As given where the policy leaves
    products apart.
    """
    plain = OpsWithGroups(tuple(ops), tuple(range(len(ops))))
    if kernels.products == "apart":
        return plain
    groups = _groups(ops, outputs)
    if not groups:
        return plain
    units: list[_Together] = [_Together(tuple([ops[n] for n in group]), group) for group in groups]
    changed: dict[int, Op] = {}
    if kernels.products == "copied":
        units += _copies(ops, units, changed)
    inside = {place for group in groups for place in group}
    units += [_Together((op,), (place,)) for place, op in enumerate(ops) if place not in inside]
    current = [replace(u, ops=_changed(u, changed)) for u in units]
    return _arranged(current) or plain


@dataclass(frozen=True)
class _Together:
    """Ops that stay together, and their places; of an added copy that of the last op that it reads."""

    ops: tuple[Op, ...]
    places: tuple[int, ...]
    added: bool = False


def _groups(ops: Sequence[Op], outputs: Sequence[Value]) -> list[tuple[int, ...]]:
    """Return the places of the ops of each group of at least two products."""
    alike: dict[Hashable, list[int]] = {}
    for place, op in enumerate(ops):
        if _kind(op) in ("MatMul", "MatMulGradB") and _multiplies_weight(op):
            alike.setdefault((op.op_type, op.inputs[0], op.attributes[GROUP]), []).append(place)
    found = [tuple(each) for each in (*alike.values(), *_summed(ops, outputs)) if len(each) > 1]
    inside = {place for group in found for place in group}
    for casts in _casts(ops, tuple(found)):
        if inside.isdisjoint(casts):  # both gradients of a product read them
            found.append(casts)
            inside.update(casts)
    return found


_CASTS = ("Float8Amax", "Float8Cast", "Float8Turn")
"""What makes operands of 8 bits as products read them."""


def _kind(op: Op) -> str:
    """Return what an op is called if its operands had 16 bits, and one matrix each."""
    return op.op_type.removeprefix("Float8").removeprefix("Grouped")


def _multiplies_weight(op: Op) -> bool:
    """Whether an op is a product, or its gradient, of a group and a weight: a matrix, or one an expert."""
    if GROUP not in op.attributes or len(op.inputs) < 2:
        return False
    weight = {"MatMul": op.inputs[1], "MatMulGradA": op.inputs[0]}.get(_kind(op), op.outputs[0])
    return len(shape_of(weight)) == (3 if "Grouped" in op.op_type else 2)


def _casts(ops: Sequence[Op], groups: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """Yield the places of the casts of operands of each group, if there are several for a place of operands,
    and of what these read."""
    maker = {value: place for place, op in enumerate(ops) for value in op.outputs}
    for group in groups:
        inputs = [ops[place].inputs for place in group if ops[place].op_type != "Add"]
        for values in zip(*inputs, strict=True):
            places = tuple(sorted({maker.get(value, -1) for value in values}))
            kinds = {ops[place].op_type if place >= 0 else "" for place in places}
            if len(places) > 1 and len(kinds) == 1 and kinds <= {*_CASTS}:
                yield places
                yield from _casts(ops, [places])


def _summed(ops: Sequence[Op], outputs: Sequence[Value]) -> list[list[int]]:
    """Return the places of gradients of one operand by products of one group, and of what adds them."""
    count = Counter([*outputs, *(value for op in ops for value in op.inputs)])
    sums: dict[Value, tuple[Hashable, list[int]]] = {}
    for place, op in enumerate(ops):
        if _kind(op) == "MatMulGradA" and _multiplies_weight(op):
            sums[op.outputs[0]] = (op.op_type, op.attributes[GROUP]), [place]
        elif op.op_type == "Add" and len(op.inputs) == 2 and all(count[v] == 1 for v in op.inputs):
            one, other = (sums.get(value) for value in op.inputs)
            if one is not None and other is not None and one[0] == other[0]:
                del sums[op.inputs[0]], sums[op.inputs[1]]
                sums[op.outputs[0]] = one[0], sorted([*one[1], *other[1], place])
    return [places for _, places in sums.values()]


def _copies(ops: Sequence[Op], units: Sequence[_Together], changed: dict[int, Op]) -> list[_Together]:
    """Return copies of the gradients that groups read, side by side; note ops that then read these.

    What was made with other strides is copied from where it lies. Casts write side by side.
    """
    maker = {value: place for place, op in enumerate(ops) for value in op.outputs}
    made: dict[tuple[Value, ...], dict[Value, Value]] = {}
    copies: list[_Together] = []
    for unit in units:
        readers = [(n, op) for n, op in zip(unit.places, unit.ops, strict=True) if op.op_type != "Add"]
        at = _place_of_gradient(readers[0][1])
        if at is None:
            continue
        read = tuple(dict.fromkeys([op.inputs[at] for _, op in sorted(readers, key=lambda each: each[0])]))
        key = tuple(sorted(read, key=lambda value: maker.get(value, -1)))
        if len({value.type.dtype for value in key if isinstance(value.type, Tensor)}) > 1:
            continue
        if key not in made:
            sources = [_lying(value, ops, maker) for value in key]
            beside = tuple([Value(source.name, source.type) for source in sources])
            last = max([maker.get(source, 0) for source in sources])
            copies.append(_Together((Op("CopyIn", tuple(sources), beside),), (last,), added=True))
            made[key] = {}
            for value, source, copy in zip(key, sources, beside, strict=True):
                if value is source:
                    made[key][value] = copy
                else:
                    view = ops[maker[value]]
                    changed[maker[value]] = replace(view, inputs=(copy, *view.inputs[1:]))
        for place, op in readers:
            there = made[key].get(op.inputs[at], op.inputs[at])
            changed[place] = replace(op, inputs=(*op.inputs[:at], there, *op.inputs[at + 1 :]))
    return copies


def _place_of_gradient(op: Op) -> int | None:
    """Return which input of an op of a group is a gradient that a split makes; None where it has none."""
    if op.op_type in ("Float8Amax", "Float8Cast"):
        return None if op.attributes.get(ONCE, 0) else 0
    return {"MatMulGradA": 1, "MatMulGradB": 1, "GroupedMatMulGradA": 2, "GroupedMatMulGradB": 2}.get(
        op.op_type
    )


def _lying(value: Value, ops: Sequence[Op], maker: Mapping[Value, int]) -> Value:
    """Return what a gradient was before a view gave it another shape, where that has other strides."""
    made = ops[maker[value]] if value in maker else None
    if made is None or made.op_type != "Reshape" or made.inputs[0] not in maker:
        return value
    return made.inputs[0] if ops[maker[made.inputs[0]]].op_type == "Transpose" else value


def _changed(unit: _Together, changed: Mapping[int, Op]) -> tuple[Op, ...]:
    if unit.added:
        return unit.ops
    return tuple([changed.get(place, op) for place, op in zip(unit.places, unit.ops, strict=True)])


def _arranged(units: Sequence[_Together]) -> OpsWithGroups | None:
    """Return the ops of units, each unit after all that it reads, else by their last places.

    None where units would wait for each other.
    """
    order = in_order([unit.ops for unit in units], [unit.places[-1] for unit in units])
    if len(order) < len(units):
        return None
    ops: list[Op] = []
    places: list[int] = []
    groups: list[tuple[int, ...]] = []
    for number in order:
        unit = units[number]
        if len(unit.ops) > 1:
            groups.append(tuple(range(len(ops), len(ops) + len(unit.ops))))
        ops += unit.ops
        places += unit.places
    return OpsWithGroups(tuple(ops), tuple(places), tuple(groups))


def in_order(units: Sequence[Sequence[Op]], last: Sequence[int]) -> list[int]:
    """Return the units, of ops each, in an order in which each comes after all that it reads; otherwise by
    their ``last`` places. Those that wait for each other are left out."""
    maker = {value: number for number, unit in enumerate(units) for op in unit for value in op.outputs}
    needs = [
        {maker[value] for op in unit for value in op.inputs if value in maker} - {number}
        for number, unit in enumerate(units)
    ]
    waiting = [len(each) for each in needs]
    after: list[list[int]] = [[] for _ in units]
    for number, each in enumerate(needs):
        for first in each:
            after[first].append(number)
    ready = [(last[number], number) for number, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, number = heapq.heappop(ready)
        order.append(number)
        for other in after[number]:
            waiting[other] -= 1
            if not waiting[other]:
                heapq.heappush(ready, (last[other], other))
    return order
