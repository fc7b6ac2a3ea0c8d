"""What the layers of a simulated plan keep a device busy for, and what they save: it bounds other plans.

A layer is a callee of the blocks of a stage. Its tasks are next to each other on the compute stream, which
runs them in order, so from the first start to the last end of one call no other call computes: calls one
after the other take at least the sum of their *spans*. A span is the longest path through the tasks of the
callee that begins and ends on the compute stream, collectives that computation waits for included. Only what
any plan that divides a microbatch alike has in it counts: tasks that depend on the microbatch, and on which a
product of the layer depends. Sums of gradients, casts of weights, gathers of parameters, launches, and what
computation loses to collectives count as nothing.

Where blocks are not made of calls, a product counts as what it takes, and all else as nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from distsim.cache import cached
from distsim.cost.cost_model import CostModel
from distsim.ir import Function, Op, Tensor, Value
from distsim.ops import Signature, operator, signature_of, work
from distsim.ops.conversion import ONCE
from distsim.program.block import Block
from distsim.program.program import Program
from distsim.schedule import FLUSH
from distsim.simulation.maxplus.block_links import block_links
from distsim.simulation.tasks.block_matrix import BlockTasks, StageRanks, block_tasks, neighbours
from distsim.simulation.tasks.program_ranks import ProgramRanks, program_ranks, used_axes
from distsim.simulation.tasks.templates import Ints


class LayerWork(NamedTuple):
    """``seconds`` for which a microbatch takes the compute stream, those of them of the ``forward`` passes of
    layers, and the bytes that the layers have ``saved`` when backward begins; all summed over the stages."""

    seconds: float
    forward: float
    saved: int

    def least(self, other: LayerWork) -> LayerWork:
        """Return what holds of both."""
        seconds, forward = min(self.seconds, other.seconds), min(self.forward, other.forward)
        return LayerWork(seconds, forward, min(self.saved, other.saved))


def layer_work(program: Program, cost_model: CostModel) -> LayerWork | None:
    """Return that of a program; None where blocks of a rank may run beside each other, weights are updated
    without a flush, or ranks of a stage are not alike."""
    schedule = program.schedule
    if schedule.copies > 1 or schedule.pairs_actions or schedule.splits_backward or schedule.weights != FLUSH:
        return None
    ranks = program_ranks(program.mesh, block_links(program.table()).communication, cost_model)
    if any(len(part.members) > 1 for part in ranks.slices):
        return None
    spans = _Spans(ranks, cost_model)
    once = {key for key, maker in program.makers().items() if maker.once}
    seconds = forward = 0.0
    for stage in program.stages:
        for block in (stage.forward, stage.backward):
            part = _block_seconds(block, once, spans)
            if part is None:
                return None
            seconds += sum(part)
            forward += part.layers if block is stage.forward else 0.0
    saved = sum(_saved_bytes(stage.forward, stage.backward, once) for stage in program.stages)
    return LayerWork(seconds, forward, saved)


def is_product(op: Op) -> bool:
    """Whether an op is a product of matrices, or attention, on the compute units of a device."""
    meaning = operator(op.op_type)
    if meaning.communication is not None or meaning.view or not meaning.computes:
        return False
    return _is_product(signature_of(op))


@cached("whether ops are products, by signature", 4096)
def _is_product(signature: Signature) -> bool:
    demand = work(signature)
    return demand is not None and demand.matrix


class _Spans:
    """The spans of callees on the ranks of a program, each made once."""

    def __init__(self, ranks: ProgramRanks, cost_model: CostModel) -> None:
        self._ranks, self._cost_model = ranks, cost_model
        self._known: dict[tuple[Function, tuple[bool, ...]], float | None] = {}
        self._alike: dict[tuple[str, ...], bool] = {}

    def product_seconds(self, op: Op) -> float:
        """Return the seconds of an op that is none but a product."""
        return self._cost_model.seconds(signature_of(op), self._part.members[0][:1])

    def span(self, callee: Function, fixed: tuple[bool, ...]) -> float | None:
        """Return the span of a callee, of whose inputs some are ``fixed``: the same for every microbatch.

        None if it takes longer on some stages than on others.
        """
        key = callee, fixed
        if key not in self._known:
            alike = self._are_alike(used_axes(callee))
            tasks = block_tasks(callee, self._part, self._cost_model, True) if alike else None
            self._known[key] = None if tasks is None else _span(tasks, fixed)
        return self._known[key]

    @property
    def _part(self) -> StageRanks:
        return self._ranks.slices[0]

    def _are_alike(self, axes: tuple[str, ...]) -> bool:
        if axes not in self._alike:
            first, *others = [
                (about["spec"], *[about.get(axis) for axis in axes]) for about in self._ranks.context
            ]
            self._alike[axes] = all(each == first for each in others)
        return self._alike[axes]


class _BlockSeconds(NamedTuple):
    """The spans of the layers of a block, and what its other products take."""

    layers: float
    products: float


def _block_seconds(block: Block, once: set[Value], spans: _Spans) -> _BlockSeconds | None:
    """Return those of a block; None if they differ between stages."""
    function = block.function
    fixed = {v for v, key in zip(function.inputs, block.inputs, strict=True) if key in once}
    layers = products = 0.0
    for op in function.ops:
        if fixed.issuperset(op.inputs):
            fixed.update(op.outputs)
        if op.is_call:
            span = spans.span(op.callee, tuple([value in fixed for value in op.inputs]))
            if span is None:
                return None
            layers += span
        elif is_product(op):
            products += spans.product_seconds(op)
    return _BlockSeconds(layers, products)


def _span(tasks: BlockTasks, fixed: tuple[bool, ...]) -> float:
    """Return the longest path through the tasks that count, from one that computes to one that does."""
    deps, streams = _lists(tasks.deps, tasks.dep_start), _lists(tasks.streams, tasks.stream_start)
    before, _ = neighbours(tasks.stream_start, tasks.streams, len(tasks.stream_table))
    of_microbatch = _of_microbatch(tasks, deps, fixed)
    counts = [a and b for a, b in zip(of_microbatch, _before_products(tasks, deps), strict=True)]
    computes = [any(tasks.stream_table[stream].name == "compute" for stream in own) for own in streams]
    ahead = _lists(before, tasks.stream_start)
    reached: list[float] = []
    for task, (own, computing) in enumerate(zip(deps, computes, strict=True)):
        earlier = [reached[other] for other in (*own, *ahead[task]) if other >= 0]
        start = max(earlier, default=-np.inf)
        start = max(start, 0.0) if computing else start
        reached.append(start + float(tasks.durations[task]) * counts[task])
    return max([end for end, computing in zip(reached, computes, strict=True) if computing], default=0.0)


def _lists(values: Ints, start: Ints) -> list[list[int]]:
    bounds: list[int] = start.tolist()
    return [values[a:b].tolist() for a, b in pairwise(bounds)]


def _of_microbatch(tasks: BlockTasks, deps: list[list[int]], fixed: tuple[bool, ...]) -> list[bool]:
    """Return of each task whether it reads what differs between microbatches."""
    given = [not fixed[place] for place, _ in tasks.ports.tolist()]
    once = [_is_apart(op) for op in tasks.op_table]
    found: list[bool] = []
    for task, own in enumerate(deps):
        reads = any(found[other] if other >= 0 else given[-2 - other] for other in own)
        found.append(reads and not once[tasks.op[task]])
    return found


def _before_products(tasks: BlockTasks, deps: list[list[int]]) -> list[bool]:
    """Return of each task whether it is a product, or one depends on it."""
    products = [is_product(op) for op in tasks.op_table]
    numbers: list[int] = tasks.op.tolist()
    found = [products[op] for op in numbers]
    for task in reversed(range(len(tasks))):
        if found[task]:
            for other in deps[task]:
                if other >= 0:
                    found[other] = True
    return found


def _is_apart(op: Op) -> bool:
    """Whether an op, or one in its kernel, runs once a step, or is no work of its own."""
    meaning = operator(op.op_type)
    if meaning.issues or meaning.stalls or op.attributes.get(ONCE):
        return True
    return any(_is_apart(inner) for function in op.subfunctions for inner in function.ops)


def _saved_bytes(forward: Block, backward: Block, once: set[Value]) -> int:
    """Return the bytes of what the calls of a forward block read and make that backward reads.

    What one call alone reads counts with it, and what it makes for backward alone: so every layer has as
    much, wherever stages begin. Views count as what they show.
    """
    function, kept = forward.function, set(backward.inputs) - once
    ends = [
        *zip(function.inputs, forward.inputs, strict=True),
        *zip(function.outputs, forward.outputs, strict=True),
    ]
    shown: dict[Value, Value] = {}
    readers: dict[Value, list[bool]] = {}
    made: dict[Value, None] = {}
    for op in function.ops:
        for value in op.inputs:
            readers.setdefault(shown.get(value, value), []).append(op.is_call)
        if operator(op.op_type).view:
            readers[shown.get(op.inputs[0], op.inputs[0])].pop()
            shown[op.outputs[0]] = shown.get(op.inputs[0], op.inputs[0])
        elif op.is_call:
            shown.update(_shown(op))
            made.update(dict.fromkeys(shown.get(value, value) for value in op.outputs))
    saved = dict.fromkeys(shown.get(value, value) for value, key in ends if key in kept)
    whole = [v for v in saved if readers.get(v) == [True] or (v in made and v not in readers)]
    return sum(_nbytes(value) for value in whole)


def _shown(call: Op) -> Iterator[tuple[Value, Value]]:
    """Yield the outputs of a call in whose memory another one lies, or an input, with that."""
    makers = {value: op for op in call.callee.ops for value in op.outputs}
    given = dict(zip(call.callee.inputs, call.inputs, strict=True))
    first: dict[Value, Value] = {}
    for outer, value in zip(call.outputs, call.callee.outputs, strict=True):
        while value in makers and operator(makers[value].op_type).view:
            value = makers[value].inputs[0]
        yield outer, given.get(value) or first.setdefault(value, outer)


def _nbytes(value: Value) -> int:
    return value.type.nbytes if isinstance(value.type, Tensor) and not value.type.on_host else 0
