"""Fusion: a function in which kernels run several ops.

A policy says of an op and one that reads its result whether one kernel may run both. Groups follow from
data flow: the *level* of an op is the most times that a path to it passes from one kernel to another, and
ops of a level that such pairs connect are one kernel. A path that left a kernel and came back would pass a
pair that is not of one kernel, hence end on a higher level: kernels never wait for each other in a circle.
For the same reason ops of one level, of whatever kernels, may run in one: so multi-tensor kernels do.

Multi-tensor kernels: one launch for many tensors, as optimizers and gradient clipping run.

torch's ``foreach`` and ``fused`` optimizers, ``clip_grad_norm_`` and apex's and Megatron's Adam hand a kernel
lists of tensors, at most so many a launch as their addresses fit into its arguments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import is_

from distsim.cache import Cache
from distsim.ir.function import Function, Op
from distsim.ir.module_names import joined_name
from distsim.ir.rewrite import copy_function, inline
from distsim.ir.type import Tensor
from distsim.ir.value import Attributes, Value
from distsim.ops import operator, signature_of, work
from distsim.ops.kernel import KERNEL, MULTI_TENSOR, kernel_attributes
from distsim.ops.operator import AGAIN
from distsim.ops.softmax import CAUSAL, TRIANGLE
from distsim.ops.training import sums_squares
from distsim.program.block import RewrittenOps, StageBlocks, rewritten_block, rewritten_stages
from distsim.transforms.kernels.policies import Joins, Kernels, fusible, is_epilogue, promotes, sums_rows
from distsim.transforms.kernels.products import in_order, products_of_groups
from distsim.transforms.kernels.rotary import in_float32, in_wide, of_whole_heads, rotations
from distsim.transforms.kernels.strides import strided
from distsim.transforms.kernels.unfused_softmax import in_torch, kernel_takes, runs_in_torch
from distsim.transforms.op_graph import hands_on

_FUSED = Cache[Function, RewrittenOps | None](
    "functions whose ops were joined into kernels, by function and policy", 4
)


def fuse(function: Function, kernels: Kernels) -> RewrittenOps:
    """Return ``function`` with the ops that one kernel runs as one op, ``Kernel``; callees likewise.

    It is the function itself where nothing is joined. Other ops keep their order as far as kernels, which
    run when the last of their inputs is there, allow it. Made once per function and policy.
    """
    every = tuple([(place,) for place in range(len(function.ops))])
    return _known(function, kernels) or RewrittenOps(function, every)


def _known(function: Function, kernels: Kernels) -> RewrittenOps | None:
    return _FUSED.get(function, kernels, lambda: _fused(function, kernels))


def _fused(function: Function, kernels: Kernels) -> RewrittenOps | None:
    """Return the function in which something is joined, or None."""
    if kernels.joins is None:
        return None
    many = {op for op in function.ops if kernels.multi_tensor and is_of_many(op)}
    opened = inline(function, many) if many else function
    source = [n for n, op in enumerate(function.ops) for _ in (op.callee.ops if op in many else (op,))]
    called = [_as_run(op, kernels) for op in opened.ops]
    arranged = products_of_groups(called, opened.outputs, kernels)
    source = [source[place] for place in arranged.places]
    ops = strided(arranged.ops, kernels.strided_batches, kernels.copies_heads)
    groups = kernel_groups(ops, kernels, kernels.joins, arranged.groups)
    unfused = {place for place, op in enumerate(ops) if runs_in_torch(op, kernels.triangles)}
    if not unfused and len(groups) == len(ops) == len(opened.ops) and all(map(is_, ops, opened.ops)):
        return None
    joined = {place for each in arranged.groups for place in each}
    of = {place: number for number, group in enumerate(groups) for place in group}
    readers: dict[Value, set[int]] = {value: {-1} for value in opened.outputs}
    for place, op in enumerate(ops):
        for value in op.inputs:
            readers.setdefault(value, set()).add(of[place])
    turned = rotations(ops) if kernels.rotary == "complex" else []
    turns = {region[-1] for region in turned if not in_wide(ops[region[-1]])}
    made: list[Op] = []
    parts: list[tuple[int, ...]] = []
    late = {op.outputs[0]: op.inputs[0] for op in ops if op.op_type == "OptimizationBarrier"}
    units = [_reading_once([ops[place] for place in group], late) for group in groups]
    for number in in_order(units, [group[-1] for group in groups]):
        group = units[number]
        outside = [v for op in group for v in op.outputs if not readers.get(v, set()) <= {number}]
        part = tuple(dict.fromkeys([source[place] for place in groups[number]]))
        if groups[number][-1] in turns:
            (before, *inside, after) = in_float32(group)
            run = [before, kernel_of(inside, after.inputs), after]
        elif not unfused.isdisjoint(groups[number]):
            run = _apart(in_torch(group, outside, kernels.wide_softmax), outside)
        else:
            one = not joined.isdisjoint(groups[number])
            run = [group[0] if len(group) == 1 else kernel_of(group, outside, one)]
        made += run
        parts += [part] * len(run)
    return RewrittenOps(replace(opened, ops=tuple(made)), tuple(parts))


def _apart(parts: Sequence[Sequence[Op]], outside: Sequence[Value]) -> list[Op]:
    """Return the parts of a kernel as a kernel each."""
    made: list[Op] = []
    for number, part in enumerate(parts):
        read = {*outside, *[v for later in parts[number + 1 :] for op in later for v in op.inputs]}
        kept = [value for op in part for value in op.outputs if value in read]
        made.append(part[0] if len(part) == 1 else kernel_of(part, kept))
    return made


def _reading_once(ops: Sequence[Op], late: Mapping[Value, Value]) -> list[Op]:
    """Return the ops of a kernel, which reads a value behind its barrier alone if it reads both."""
    read = dict.fromkeys([value for op in ops for value in op.inputs])
    behind = {late[value]: value for value in read if value in late}
    if read.keys().isdisjoint(behind):
        return [*ops]
    return [replace(op, inputs=tuple([behind.get(value, value) for value in op.inputs])) for op in ops]


def _as_run(op: Op, kernels: Kernels) -> Op:
    """Return an op with a callee that kernels run, and with how often its kernels read what it reads."""
    callee, marks = fuse(op.callee, kernels).function if op.is_call else None, dict[str, int]()
    times = dict(kernels.rereads).get(op.op_type, 0)
    if times and not (op.op_type == "Float8Cast" and len(op.inputs) > 1):  # its Float8Amax is that kernel
        marks[AGAIN] = times
    if op.attributes.get(CAUSAL, 0) and kernel_takes(op.outputs[0], kernels.triangles):
        marks[TRIANGLE] = 1
    if marks:
        return replace(op, attributes=Attributes({**op.attributes, **marks}))
    return op if callee is None or callee is op.callee else replace(op, subfunctions=(callee,))


def kernel_of(ops: Sequence[Op], outputs: Sequence[Value], one_product: bool = False) -> Op:
    """Return the op that runs ``ops`` and makes ``outputs``; products among them may be ``one_product``."""
    made = {value for op in ops for value in op.outputs}
    inputs = tuple(dict.fromkeys([v for op in ops for v in op.inputs if v not in made]))
    attributes = kernel_attributes(ops, one_product)
    if any(op.attributes.get("in_place") for op in ops):
        attributes = Attributes({**attributes, "in_place": 1})
    # The callee has values of its own: those of a function occur in one place.
    body = copy_function(Function(attributes["ops"], inputs, tuple(ops), tuple(outputs)))
    name = joined_name(op.name for op in ops)
    return Op(KERNEL, inputs, tuple(outputs), attributes, (body,), name=name)


def kernel_groups(
    ops: Sequence[Op], kernels: Kernels, joins: Joins, together: Sequence[Sequence[int]] = ()
) -> list[list[int]]:
    """Return the places of the ops of each kernel, in order; ``joins`` are those of the policy.

    Ops whose places are ``together``, without a gap, are of one kernel in any case.
    """
    maker = {value: place for place, op in enumerate(ops) for value in op.outputs}
    # Nothing else reads what is inside a rotary embedding: it is a kernel as if it were one op, its last.
    regions = [] if kernels.rotary == "ops" else rotations(ops)
    if kernels.rotary == "one":
        regions = [of_whole_heads(ops, region) for region in regions]
    turns = {region[-1]: region for region in regions}
    turned = {place: last for last, region in turns.items() for place in region}
    can = [fusible(op) and place not in turned for place, op in enumerate(ops)]
    before = [sorted({maker[value] for value in op.inputs if value in maker}) for op in ops]
    pairs = {
        (first, place)
        for place, op in enumerate(ops)
        if can[place]
        for first in before[place]
        if can[first] and joins(ops[first], op)
    }
    pairs.update(
        [(first, n) for n, last in turned.items() for first in before[n] if turned.get(first) == last]
    )
    if kernels.promotes:
        reads = Counter([value for op in ops for value in op.inputs])
        pairs.update(
            (first, place)
            for place, op in enumerate(ops)
            for first in before[place]
            if promotes(ops[first], op) and reads[ops[first].outputs[0]] == 1
        )
    if kernels.sums_rows:
        pairs.update(_summed_by_row(ops, maker, {place for _, place in pairs}))
    if kernels.products_add:
        pairs.update(_added_by_products(ops, maker))
    if kernels.multi_tensor:
        sums = sums_of_squares(ops)
        pairs.update([(first, place) for place in sums for first in before[place] if first in sums])
    if kernels.epilogues:
        taken = {first for first, _ in pairs}
        for place, op in enumerate(ops):
            if (
                place not in taken
                and can[place]
                and not any((first, place) in pairs for first in before[place])
            ):
                pairs.update([(f, place) for f in before[place] if can[f] and is_epilogue(ops[f], op)])
    barriers = {place for place, op in enumerate(ops) if op.op_type == "OptimizationBarrier"}
    level, group = _levels(before, pairs, together, turns, barriers)
    if kernels.multi_tensor:
        alone = Counter([_find(group, place) for place in range(len(ops))])
        kinds: dict[Hashable, list[tuple[int, Op]]] = {}
        for place, op in enumerate(ops):
            kind = kind_of(op) if alone[_find(group, place)] == 1 else None
            if kind is not None:  # ops of one level do not wait for each other
                kinds.setdefault((level[place], kind), []).append((place, op))
        for same in kinds.values():
            for first, *others in launches(same):
                for place in others:
                    group[place] = first
    found: dict[int, list[int]] = {}
    for place in range(len(ops)):
        found.setdefault(_find(group, place), []).append(place)
    return list(found.values())


def _summed_by_row(
    ops: Sequence[Op], maker: Mapping[Value, int], joined: Container[int]
) -> Iterator[tuple[int, int]]:
    """Yield the pairs of an op that is ``joined`` to one before it with what alone reads it, a sum by row."""
    reads = Counter([value for op in ops for value in op.inputs])
    for place, op in enumerate(ops):
        if sums_rows(op) and reads[op.inputs[0]] == 1 and maker.get(op.inputs[0], -1) in joined:
            yield maker[op.inputs[0]], place


def _added_by_products(ops: Sequence[Op], maker: Mapping[Value, int]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of a product, and views of what it makes, with what adds that to a sum."""
    reads = Counter([value for op in ops for value in op.inputs])
    for place, op in enumerate(ops):
        if op.op_type != "AccumulateInto":
            continue
        found, reader, part = list[tuple[int, int]](), place, op.inputs[1]
        while reads[part] == 1 and part in maker:
            first = maker[part]
            found.append((first, reader))
            if not operator(ops[first].op_type).view:
                break
            reader, part = first, ops[first].inputs[0]
        asked = work(signature_of(ops[found[-1][0]])) if found else None
        if asked is not None and asked.matrix:
            yield from found


def _levels(
    before: Sequence[Sequence[int]],
    pairs: Container[tuple[int, int]],
    together: Sequence[Sequence[int]],
    turns: Mapping[int, Sequence[int]],
    barriers: Container[int],
) -> tuple[list[int], list[int]]:
    """Return the level of each op, and the first op of its kernel, or one that leads there.

    A barrier, which is no kernel, is on the level of the last that it waits for; what reads it is above.
    """
    level: list[int] = []
    group = list(range(len(before)))
    united = {place: tuple(places) for places in together for place in places}
    for place in range(len(before)):
        members = united.get(place, (place,))
        if place == members[0]:
            outside = [(first, each) for each in members for first in before[each] if first < place]
            free = [each in barriers or (first, each) in pairs for first, each in outside]
            reached = max([level[f] + 1 - at for (f, _), at in zip(outside, free, strict=True)], default=0)
            level += [reached] * len(members)
        group[_find(group, place)] = _find(group, members[0])
        for first in before[place]:
            if (first, place) in pairs and level[first] == level[place]:
                group[_find(group, place)] = _find(group, first)
        for part in turns.get(place, ()):
            level[part] = level[place]
            group[_find(group, part)] = _find(group, place)
    return level, group


def _find(group: Sequence[int], place: int) -> int:
    """Return the first op of the kernel of an op."""
    while group[place] != place:
        place = group[place]
    return place


def fuse_stages(stages: Sequence[StageBlocks], kernels: Kernels) -> tuple[StageBlocks, ...]:
    """Return the blocks of all stages, run by kernels; those that share Functions share them still."""
    run = partial(_known, kernels=kernels)
    return tuple(
        [
            (ahead, behind, tuple([(number, rewritten_block(block, run)) for number, block in updates]))
            for ahead, behind, updates in rewritten_stages(stages, run)
        ]
    )


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
