"""What the layers of a simulated plan keep a device busy for, and what they save: it bounds other plans.

A layer is a callee of the blocks of a stage. Its tasks are next to each other on the compute stream, which
runs them in order, so from the first start to the last end of one call no other call computes: calls one
after the other take at least the sum of their *spans*. A span is the longest path through the tasks of the
callee that begins and ends on the compute stream, collectives that computation waits for included. Only what
any plan that divides a microbatch alike has in it counts: tasks that depend on the microbatch, and on which a
product of the layer depends. Casts of weights, gathers of parameters, launches, and what computation loses to
collectives count as nothing; sums of gradients are told apart, since not all plans have the same.

Where blocks are not made of calls, a product counts as what it takes, and all else as nothing; but for plans
of the same stages, the span of the whole block counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from distsim.cost.cost_model import CostModel
from distsim.ir import Function, Op, Value
from distsim.ops import operator
from distsim.plan_search.bounds.saved_bytes import saved_bytes
from distsim.plan_search.bounds.spans import LayerSpan, Passage, Spans, is_product
from distsim.program.block import Block
from distsim.program.program import Program
from distsim.schedule import FLUSH
from distsim.simulation.maxplus.block_links import block_links
from distsim.simulation.tasks.program_ranks import program_ranks


class StageWork(NamedTuple):
    """What a microbatch takes of the compute stream on a stage, in ``seconds``; how many ``layers`` the stage
    has, the bytes that it has ``saved`` when backward begins, and those that are ``pending`` between halves
    of a backward pass, 0: not known."""

    seconds: float
    layers: int
    saved: int
    pending: int = 0


class LayerPassage(NamedTuple):
    """What a microbatch takes at least from what a layer receives to what it sends, ``ahead`` in its forward
    pass, ``behind`` in its backward pass; and the most that computes after it has sent a gradient (``late``).
    """

    ahead: float
    behind: float
    late: float


class LayerWork(NamedTuple):
    """``seconds`` for which a microbatch takes the compute stream, those that it is ``computing``, those of
    them in the ``forward`` passes of layers and in the ``products`` of these, those for which forward passes
    of layers are ``waiting`` for collectives, and the bytes that the ``layers``, so many, have ``saved`` when
    backward begins; all summed over the ``stages``.

    ``layer`` are the seconds of one of the layers, forward and backward, and ``head`` those of the products
    outside of layers, if they are those of one operand of one op, and of what a loss makes of that: they are
    on one stage. ``sums`` are those for which a device adds the gradients of a layer to what microbatches
    before have left. 0: not known.
    ``passage`` is the way through a layer, where each takes in what the one before makes, and nothing else
    that differs between microbatches. ``backward`` are the seconds of products in backward passes of layers,
    ``outside`` those of products outside of layers. ``pending`` are bytes of all layers that are held between
    two halves of a backward pass, if it is made in halves.
    """

    seconds: float
    computing: float
    forward: float
    products: float
    waiting: float
    saved: int
    layers: int
    layer: float = 0.0
    head: float = 0.0
    stages: tuple[StageWork, ...] = ()
    passage: LayerPassage | None = None
    sums: float = 0.0
    backward: float = 0.0
    outside: float = 0.0
    pending: int = 0

    @property
    def work(self) -> float:
        """The seconds of all products of a microbatch."""
        return self.products + self.backward + self.outside

    def in_halves(self, waits: bool) -> LayerWork:
        """Return what holds where backward passes are in two halves: all that is computed, in more kernels.

        Collectives of backward may run beside other halves; forward passes are the same, and wait as before
        (``waits``), unless another pass computes meanwhile.
        """
        seconds = self.computing + (self.waiting if waits else 0.0)
        layer = (seconds - self.head) / self.layers if self.layer and self.head and self.layers else 0.0
        passage = self.passage and LayerPassage(self.passage.ahead, 0.0, 0.0)
        head = self.head if layer else 0.0
        work = LayerWork(seconds, self.computing, 0.0, 0.0, 0.0, 0, self.layers)
        return work._replace(layer=layer, head=head, stages=self.stages, passage=passage)

    def of_layers(self, count: int) -> LayerWork:
        """Return what so many of these layers do, each the same, and what is beside them; no stages."""
        most, layers = count / self.layers, self.layers
        beside = self.seconds - layers * self.layer
        return self._replace(
            seconds=count * self.layer + beside,
            computing=most * (self.computing - beside) + beside,
            forward=most * self.forward,
            products=most * self.products,
            waiting=most * self.waiting,
            saved=self.saved * count // layers,
            pending=self.pending * count // layers,
            layers=count,
            backward=most * self.backward,
            stages=(),
        )

    def least(self, other: LayerWork) -> LayerWork:
        """Return what holds of both."""
        return LayerWork(
            min(self.seconds, other.seconds),
            min(self.computing, other.computing),
            min(self.forward, other.forward),
            min(self.products, other.products),
            min(self.waiting, other.waiting),
            min(self.saved, other.saved),
            self.layers,
            min(self.layer, other.layer),
            min(self.head, other.head),
            self.stages or other.stages,
            _least_passage(self.passage, other.passage),
            min(self.sums, other.sums),
            min(self.backward, other.backward),
            min(self.outside, other.outside),
            min(self.pending, other.pending) or max(self.pending, other.pending),
        )


def _least_passage(one: LayerPassage | None, two: LayerPassage | None) -> LayerPassage | None:
    """Return what holds of both; stages of one layer each do not tell."""
    if one is None or two is None:
        return one or two
    return LayerPassage(min(one.ahead, two.ahead), min(one.behind, two.behind), max(one.late, two.late))


def layer_work(program: Program, cost_model: CostModel) -> LayerWork | None:
    """Return that of a program; None where blocks of a rank may run beside each other, weights are updated
    without a flush, or ranks of a stage are not alike."""
    schedule = program.schedule
    if schedule.copies > 1 or schedule.pairs_actions or schedule.splits_backward or schedule.weights != FLUSH:
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
    stages = [
        StageWork(one.of_stage + two.of_stage + loss, one.layers, max(own))
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
        _layer_passage(passes),
        _layer_sums([stage.backward for stage in program.stages], passes, spans),
        behind.products,
        outside,
    )


class _LeastOfCalls(NamedTuple):
    """What calls take at least, be they first or last of their stages: of these more or less depends on the
    microbatch, as where gathers of parameters wait for what is computed before them."""

    seconds: float
    computing: float
    products: float
    waiting: float


def _least_of_calls(blocks: Iterable[_BlockWork]) -> _LeastOfCalls:
    """Return that of blocks: as many calls as each callee has taken to take as the one that takes least."""
    each: dict[Function, list[_LeastOfCalls]] = {}
    for block in blocks:
        for callee, span in block.calls:
            each.setdefault(callee, []).append(_LeastOfCalls(*span, span.seconds - span.computing))
    least = [[len(own) * min(figures) for figures in zip(*own, strict=True)] for own in each.values()]
    return _LeastOfCalls(*[sum(figures) for figures in zip(*least, strict=True)]) if least else _NO_CALLS


_NO_CALLS = _LeastOfCalls(0.0, 0.0, 0.0, 0.0)


def _layer_passage(passes: Sequence[tuple[_BlockWork, _BlockWork]]) -> LayerPassage | None:
    """Return that of a layer; None where layers are not known (:func:`_are_whole`), or are no chain."""
    if not _are_whole(passes):
        return None
    forward = {each.passage for each, _ in passes if each.calls}
    backward = {each.passage for _, each in passes if each.calls}
    if len(forward) != 1 or len(backward) != 1:
        return None
    (ahead,), (behind,) = forward, backward
    if ahead is None or behind is None or not ahead.alone:
        return None
    longest = max(span.seconds for _, each in passes for _, span in each.calls)
    return LayerPassage(ahead.seconds, behind.seconds, longest - behind.lead)


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
            if op.is_call or (_hands_on(op) and not made.isdisjoint(op.inputs)):
                made.update(op.outputs)
        found.append(total / forward.layers)
    return min(found, default=0.0)


def _hands_on(op: Op) -> bool:
    """Whether an op makes of a gradient the same one: of another type, elsewhere, or of another shape."""
    meaning = operator(op.op_type)
    return (
        meaning.view or meaning.communication is not None or op.op_type in ("GradientCast", "Pad", "CopyIn")
    )


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
    whole = LayerSpan(0.0, 0.0, 0.0) if calls else spans.span(function, given)
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
