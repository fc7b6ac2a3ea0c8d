"""What the layers of a simulated plan keep a device busy for, and what they save: it bounds other plans.

A layer is a callee of the blocks of a stage. Its tasks are next to each other on the compute stream, which
runs them in order, so from the first start to the last end of one call no other call computes: calls one
after the other take at least the sum of their *spans*. A span is the longest path through the tasks of the
callee that begins and ends on the compute stream, collectives that computation waits for included. Only what
any plan that divides a microbatch alike has in it counts: tasks that depend on the microbatch, and on which a
product of the layer depends. Casts of weights, gathers of parameters, launches, and what computation loses to
collectives count as nothing; sums of gradients are told apart, since not all plans have the same.

A stage of several layers takes longer than their spans: what the next layer takes in is gathered and added up
after the last product of the one before, and nothing else computes within a block meanwhile. So of two layers
of a stage the second begins when the first has sent, and what it sent was received (``between``).

Where blocks are not made of calls, a product counts as what it takes, and all else as nothing; but for plans
of the same stages, the span of the whole block counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from distsim.cost.cost_model import CostModel
from distsim.ir import Function, Value
from distsim.plan_search.bounds.layer_extras import layer_extras
from distsim.plan_search.bounds.layer_figures import HalfWork, LayerPassage, LayerWork, StageWork
from distsim.plan_search.bounds.saved_bytes import saved_bytes
from distsim.plan_search.bounds.spans import LayerSpan, Passage, Spans, is_product
from distsim.program.block import Block
from distsim.program.program import Program
from distsim.schedule import FLUSH, Kind
from distsim.simulation.maxplus.block_links import block_links
from distsim.simulation.tasks.program_ranks import program_ranks
from distsim.transforms.op_graph import hands_on_gradient


def layer_work(program: Program, cost_model: CostModel) -> LayerWork | None:
    """Return that of a program; None where blocks of a rank may run beside each other, weights are updated
    without a flush, or ranks of a stage are not alike."""
    schedule = program.schedule
    halves = Kind.BACKWARD_INPUT in schedule.kinds
    if schedule.copies > 1 or schedule.pairs_actions or halves or schedule.weights != FLUSH:
        return None
    ranks = program_ranks(program.mesh, block_links(program.table()).communication, cost_model)
    if any(len(part.members) > 1 for part in ranks.slices):
        return None
    spans = Spans(ranks, cost_model)
    once = {key for key, maker in program.makers().items() if maker.once}
    passes: list[tuple[_BlockWork, _BlockWork]] = []
    for stage in program.stages:
        forward = _block_work(stage.forward, once, spans, ahead=True)
        backward = _block_work(stage.backward, once, spans, ahead=False)
        if forward is None or backward is None:
            return None
        passes.append((forward, backward))
    saved = [saved_bytes(stage.forward, stage.backward, once) for stage in program.stages]
    head = _head_seconds(passes)
    losses = [one.around + two.around if head else 0.0 for one, two in passes]
    passage = _layer_passage(passes)
    between = passage.between if passage else 0.0
    stages = [
        StageWork(one.of_stage + two.of_stage + loss + max(one.layers - 1, 0) * between, one.layers, max(own))
        for (one, two), loss, own in zip(passes, losses, saved, strict=True)
    ]
    ahead, behind = (_least_of_calls(each) for each in zip(*passes, strict=True))
    outside = sum(sum(one.products) + sum(two.products) for one, two in passes)
    beside, layers = outside + sum(losses), sum(stage.layers for stage in stages)
    return LayerWork(
        ahead.seconds + behind.seconds + beside,
        ahead.computing + behind.computing + beside,
        ahead.computing,
        ahead.products,
        ahead.waiting,
        sum(own for own, _ in saved),
        layers,
        (ahead.seconds + behind.seconds) / layers if _are_whole(passes) else 0.0,
        head + sum(losses),
        tuple(stages),
        passage,
        _layer_sums([stage.backward for stage in program.stages], passes, spans),
        behind.products,
        outside,
        extras=layer_extras(
            [(stage, forward.layers) for stage, (forward, _) in zip(program.stages, passes, strict=True)],
            (ahead.whole - ahead.seconds + behind.whole - behind.seconds) / layers if layers else 0.0,
        ),
    )


def half_work(program: Program, cost_model: CostModel) -> HalfWork | None:
    """Return what a layer of the last stage takes whose backward pass is in two halves; None where layers are
    not told apart or ranks differ.

    In the first half nothing but products for gradients of inputs is there to be computed while collectives
    run, so it waits for more of them than the same products do in a whole backward pass.
    """
    ranks = program_ranks(program.mesh, block_links(program.table()).communication, cost_model)
    if len(program.stages) < 2 or any(len(part.members) > 1 for part in ranks.slices):
        return None
    spans, once = Spans(ranks, cost_model), {key for key, maker in program.makers().items() if maker.once}
    first, second = program.parts.halves[-1]
    passes: list[_BlockWork] = []
    for block, ahead in ((program.stages[-1].forward, True), (first, False), (second, False)):
        made = _block_work(block, once, spans, ahead)
        if made is None:
            return None
        passes.append(made)
    layers = passes[0].layers
    if not layers or any({*Counter(f for f, _ in one.calls).values()} != {layers} for one in passes):
        return None
    layer = sum(_least_of_calls([one]).seconds for one in passes) / layers
    return HalfWork(layer, _waits_between(passes[0]) + _waits_between(passes[1]))


class _LeastOfCalls(NamedTuple):
    """What calls take at least, be they first or last of their stages: of these more or less depends on the
    microbatch, as where gathers of parameters wait for what is computed before them."""

    seconds: float
    computing: float
    products: float
    whole: float
    waiting: float


def _least_of_calls(blocks: Iterable[_BlockWork]) -> _LeastOfCalls:
    """Return that of blocks: as many calls as each callee has taken to take as the one that takes least."""
    each: dict[Function, list[_LeastOfCalls]] = {}
    for block in blocks:
        for callee, span in block.calls:
            each.setdefault(callee, []).append(_LeastOfCalls(*span, span.seconds - span.computing))
    least = [[len(own) * min(figures) for figures in zip(*own, strict=True)] for own in each.values()]
    return _LeastOfCalls(*[sum(figures) for figures in zip(*least, strict=True)]) if least else _NO_CALLS


_NO_CALLS = _LeastOfCalls(0.0, 0.0, 0.0, 0.0, 0.0)


def _layer_passage(passes: Sequence[tuple[_BlockWork, _BlockWork]]) -> LayerPassage | None:
    """Return that of a layer; None where layers are not known (:func:`_are_whole`), or are no chain."""
    if not _are_whole(passes):
        return None
    forward = {each.passage for each, _ in passes if each.calls}
    backward = {each.passage for _, each in passes if each.calls}
    if len(forward) != 1 or len(backward) != 1:
        return None
    (ahead,), (behind,) = forward, backward
    if ahead is None or behind is None or not ahead.follows:
        return None
    longest = max(span.seconds for _, each in passes for _, span in each.calls)
    waits = [min(_waits_between(each) for each in own if each.calls) for own in zip(*passes, strict=True)]
    return LayerPassage(ahead.seconds, behind.seconds, max(longest - behind.lead, 0.0), *waits)


def _waits_between(block: _BlockWork) -> float:
    """Return by how much later a layer of a block begins than the last product of the one before ends."""
    passage = block.passage
    if passage is None or not passage.follows:
        return 0.0
    return max(passage.entry + passage.lead - max(span.seconds for _, span in block.calls), 0.0)


def _are_whole(passes: Sequence[tuple[_BlockWork, _BlockWork]]) -> bool:
    """Whether each layer is one call forward, and the same calls backward wherever it is, so that a stage has
    whole layers."""
    for stage in passes:
        for one in stage:
            if {*Counter(callee for callee, _ in one.calls).values()} - {stage[0].layers}:
                return False
    callees = _callees(passes)
    return len(callees) == 1 and all(len(forward) == 1 for forward, _ in callees)


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


def _layer_sums(
    blocks: Sequence[Block], passes: Sequence[tuple[_BlockWork, _BlockWork]], spans: Spans
) -> float:
    """Return the seconds for which gradients of a layer are added to sums, the least on any stage.

    They are those that a layer hands on, perhaps cast or moved: what is made of them is another's.
    """
    found: list[float] = []
    for block, (forward, _) in zip(blocks, passes, strict=True):
        if not forward.layers:
            continue
        made, total = set[Value](), 0.0
        for op in () if block.accumulating is None else block.accumulating.ops:
            if op.op_type == "AccumulateInto" and op.inputs[1] in made:
                total += spans.op_seconds(op)
            if op.is_call or (hands_on_gradient(op) and not made.isdisjoint(op.inputs)):
                made.update(op.outputs)
        found.append(total / forward.layers)
    return min(found, default=0.0)


class _BlockWork(NamedTuple):
    """The ``calls`` of a block, each with its span, what its other products take, and what is ``around``
    these, made of them in the forward pass, for them in the backward pass, the span of the ``whole`` where
    there are no calls, and the ``passage`` through each call where all are of one callee, and each
    reads one result of the one before."""

    calls: tuple[tuple[Function, LayerSpan], ...]
    products: tuple[float, ...]
    around: float
    whole: float
    passage: Passage | None

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
    def of_stage(self) -> float:
        """The seconds of the block in any plan of the same stages."""
        return max(self.seconds, self.whole)


def _block_work(block: Block, once: set[Value], spans: Spans, ahead: bool) -> _BlockWork | None:
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
            products.append(spans.op_seconds(op))
    whole = LayerSpan(0.0, 0.0, 0.0, 0.0) if calls else spans.span(function, given)
    if whole is None:
        return None
    around = _seconds_around(function, fixed, spans, ahead)
    return _BlockWork(tuple(calls), tuple(products), around, whole.seconds, _passage(function, fixed, spans))


def _seconds_around(function: Function, fixed: set[Value], spans: Spans, ahead: bool) -> float:
    """Return what the ops of a block take that compute with what its products make, or else for these."""
    linked, total = set[Value](), 0.0
    for op in function.ops if ahead else reversed(function.ops):
        sides = (op.inputs, op.outputs) if ahead else (op.outputs, op.inputs)
        if op.is_call or fixed.issuperset(op.inputs):
            continue
        if is_product(op):
            linked.update(sides[1])
        elif not linked.isdisjoint(sides[0]):
            linked.update(sides[1])
            total += spans.op_seconds(op)
    return total


def _passage(function: Function, fixed: set[Value], spans: Spans) -> Passage | None:
    """Return what is the way through each call of a block, if there is one."""
    made: dict[Value, int] = {}
    found: set[tuple[Function, tuple[bool, ...], int, int]] = set()
    for op in function.ops:
        if not op.is_call:
            continue
        links = [(place, made[value]) for place, value in enumerate(op.inputs) if value in made]
        if made and len(links) != 1:
            return None
        given = tuple([value in fixed for value in op.inputs])
        found.update([(op.callee, given, *link) for link in links])
        made = {value: place for place, value in enumerate(op.outputs)}
    return spans.passage(*found.pop()) if len(found) == 1 else None
