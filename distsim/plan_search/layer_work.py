"""What the layers of a simulated plan keep a device busy for, and what they save: it bounds other plans.

A layer is a callee of the blocks of a stage. Its tasks are next to each other on the compute stream, which
runs them in order, so from the first start to the last end of one call no other call computes: calls one
after the other take at least the sum of their *spans*. A span is the longest path through the tasks of the
callee that begins and ends on the compute stream, collectives that computation waits for included. Only what
any plan that divides a microbatch alike has in it counts: tasks that depend on the microbatch, and on which a
product of the layer depends. Sums of gradients, casts of weights, gathers of parameters, launches, and what
computation loses to collectives count as nothing.

Where blocks are not made of calls, a product counts as what it takes, and all else as nothing; but for plans
of the same stages, the span of the whole block counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
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
from distsim.simulation.maxplus.engine import tasks_of
from distsim.simulation.tasks.block_matrix import BlockTasks, StageRanks, neighbours
from distsim.simulation.tasks.program_ranks import ProgramRanks, program_ranks, used_axes
from distsim.simulation.tasks.templates import Ints


class StageWork(NamedTuple):
    """What a microbatch takes of the compute stream on a stage, in ``seconds``; how many ``layers`` the stage
    has, and the bytes that it has ``saved`` when backward begins."""

    seconds: float
    layers: int
    saved: int


class LayerWork(NamedTuple):
    """``seconds`` for which a microbatch takes the compute stream, those that it is ``computing``, those of
    them in the ``forward`` passes of layers and in the ``products`` of these, and the bytes that the layers
    have ``saved`` when backward begins; all summed over the ``stages``.

    ``layer`` are the seconds of one of the layers, forward and backward, and ``head`` those of the products
    outside of layers, if they are those of one operand of one op: they are on one stage. 0: not known.
    """

    seconds: float
    computing: float
    forward: float
    products: float
    saved: int
    layer: float = 0.0
    head: float = 0.0
    stages: tuple[StageWork, ...] = ()

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return sum(stage.layers for stage in self.stages)

    def least(self, other: LayerWork) -> LayerWork:
        """Return what holds of both."""
        return LayerWork(
            min(self.seconds, other.seconds),
            min(self.computing, other.computing),
            min(self.forward, other.forward),
            min(self.products, other.products),
            min(self.saved, other.saved),
            min(self.layer, other.layer),
            min(self.head, other.head),
            self.stages,
        )


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
    passes: list[tuple[_BlockWork, _BlockWork]] = []
    for stage in program.stages:
        forward, backward = _block_work(stage.forward, once, spans), _block_work(stage.backward, once, spans)
        if forward is None or backward is None:
            return None
        passes.append((forward, backward))
    saved = [_saved_bytes(stage.forward, stage.backward, once) for stage in program.stages]
    stages = [
        StageWork(one.of_stage + two.of_stage, one.layers, max(own))
        for (one, two), own in zip(passes, saved, strict=True)
    ]
    return LayerWork(
        sum(one.seconds + two.seconds for one, two in passes),
        sum(one.computing + two.computing for one, two in passes),
        sum(span.computing for forward, _ in passes for _, span in forward.calls),
        sum(span.products for forward, _ in passes for _, span in forward.calls),
        sum(own for own, _ in saved),
        _layer_seconds(passes),
        _head_seconds(passes),
        tuple(stages),
    )


def _layer_seconds(passes: Sequence[tuple[_BlockWork, _BlockWork]]) -> float:
    """Return the seconds of a layer; 0 unless each is one call forward, and the same calls backward wherever
    it is, so that a stage has whole layers."""
    least: dict[tuple[bool, Function], float] = {}
    for stage in passes:
        for ahead, one in zip((True, False), stage, strict=True):
            if {*Counter(callee for callee, _ in one.calls).values()} - {stage[0].layers}:
                return 0.0
            for callee, span in one.calls:
                least[ahead, callee] = min(span.seconds, least.get((ahead, callee), span.seconds))
    callees = _callees(passes)
    whole = len(callees) == 1 and all(len(forward) == 1 for forward, _ in callees)
    return sum(least.values()) if whole else 0.0


def _callees(
    passes: Sequence[tuple[_BlockWork, _BlockWork]],
) -> set[tuple[frozenset[Function], frozenset[Function]]]:
    """Return what the layers of each stage call forward and backward: one thing where all are equal."""
    return {
        (frozenset([f for f, _ in forward.calls]), frozenset([f for f, _ in backward.calls]))
        for forward, backward in passes
        if forward.calls or backward.calls
    }


def _head_seconds(passes: Sequence[tuple[_BlockWork, _BlockWork]]) -> float:
    """Return the seconds of the products outside of layers; 0 unless they are of one product."""
    forward = [(stage, seconds) for stage, (one, _) in enumerate(passes) for seconds in one.products]
    backward = [(stage, seconds) for stage, (_, two) in enumerate(passes) for seconds in two.products]
    every = forward + backward
    alone = len(forward) == 1 and len(backward) <= 2 and len({stage for stage, _ in every}) == 1
    return sum(seconds for _, seconds in every) if alone else 0.0


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


class LayerSpan(NamedTuple):
    """The ``seconds`` of a span, and for which the tasks in it that count are ``computing``, ``products`` of
    these."""

    seconds: float
    computing: float
    products: float


class _Spans:
    """The spans of callees on the ranks of a program, each made once."""

    def __init__(self, ranks: ProgramRanks, cost_model: CostModel) -> None:
        self._ranks, self._cost_model = ranks, cost_model
        self._known: dict[tuple[Function, tuple[bool, ...]], LayerSpan | None] = {}
        self._alike: dict[tuple[str, ...], bool] = {}

    def product_seconds(self, op: Op) -> float:
        """Return the seconds of an op that is none but a product."""
        return self._cost_model.seconds(signature_of(op), self._part.members[0][:1])

    def span(self, callee: Function, fixed: tuple[bool, ...]) -> LayerSpan | None:
        """Return the span of a callee, of whose inputs some are ``fixed``: the same for every microbatch.

        None if it takes longer on some stages than on others.
        """
        key = callee, fixed
        if key not in self._known:
            alike = self._are_alike(used_axes(callee))
            tasks = tasks_of(callee, 0, self._ranks, self._cost_model) if alike else None
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


class _BlockWork(NamedTuple):
    """The ``calls`` of a block, each with its span, what its other products take, and the span of the
    ``whole`` where there are no calls."""

    calls: tuple[tuple[Function, LayerSpan], ...]
    products: tuple[float, ...]
    whole: float

    @property
    def layers(self) -> int:
        """The layers of the block, if each is called as often."""
        return max(Counter(callee for callee, _ in self.calls).values(), default=0)

    @property
    def in_layers(self) -> float:
        """The seconds of the layers."""
        return sum(span.seconds for _, span in self.calls)

    @property
    def seconds(self) -> float:
        """The seconds of layers and products, wherever stages begin."""
        return self.in_layers + sum(self.products)

    @property
    def computing(self) -> float:
        """Those of them for which it computes."""
        return sum(span.computing for _, span in self.calls) + sum(self.products)

    @property
    def of_stage(self) -> float:
        """The seconds of the block in any plan of the same stages."""
        return max(self.seconds, self.whole)


def _block_work(block: Block, once: set[Value], spans: _Spans) -> _BlockWork | None:
    """Return that of a block; None if it differs between stages."""
    function = block.function
    given = tuple([key in once for key in block.inputs])
    fixed = {v for v, held in zip(function.inputs, given, strict=True) if held}
    calls: list[tuple[Function, LayerSpan]] = []
    products: list[float] = []
    for op in function.ops:
        if fixed.issuperset(op.inputs):
            fixed.update(op.outputs)
        if op.is_call:
            span = spans.span(op.callee, tuple([value in fixed for value in op.inputs]))
            if span is None:
                return None
            if span.seconds:
                calls.append((op.callee, span))
        elif is_product(op):
            products.append(spans.product_seconds(op))
    whole = LayerSpan(0.0, 0.0, 0.0) if calls else spans.span(function, given)
    return None if whole is None else _BlockWork(tuple(calls), tuple(products), whole.seconds)


def _span(tasks: BlockTasks, fixed: tuple[bool, ...]) -> LayerSpan:
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
    seconds = max([end for end, computing in zip(reached, computes, strict=True) if computing], default=0.0)
    own = np.where(np.array(counts, np.bool_), tasks.durations, 0.0)
    products = np.array([is_product(op) for op in tasks.op_table], np.bool_)[tasks.op]
    return LayerSpan(
        float(seconds), float(own[np.array(computes, np.bool_)].sum()), float(own[products].sum())
    )


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


def _saved_bytes(forward: Block, backward: Block, once: set[Value]) -> tuple[int, int]:
    """Return the bytes of what the calls of a forward block read and make that backward reads, and of all
    that the block makes for it.

    Of the first, what one call alone reads counts with it, and what it makes for backward alone: so every
    layer has as much, wherever stages begin. Views count as what they show.
    """
    function, kept = forward.function, set(backward.inputs) - once
    given = zip(function.inputs, forward.inputs, strict=True)
    handed = zip(function.outputs, forward.outputs, strict=True)
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
    ends = [shown.get(value, value) for value, key in handed if key in kept]
    saved = dict.fromkeys([*(shown.get(value, value) for value, key in given if key in kept), *ends])
    layers = [v for v in saved if readers.get(v) == [True] or (v in made and v not in readers)]
    own = dict.fromkeys(ends).keys() - {*function.inputs}
    return sum(_nbytes(value) for value in layers), sum(_nbytes(value) for value in own)


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
