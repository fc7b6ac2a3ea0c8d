"""Paths through what a block calls: for how long a call keeps a device, and how long it takes from what comes
in to what goes out."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from distsim.cache import cached
from distsim.cost.cost_model import CostModel
from distsim.ir import Function, Op
from distsim.ops import Signature, operator, signature_of, work
from distsim.ops.conversion import ONCE
from distsim.simulation.maxplus.engine import tasks_of
from distsim.simulation.tasks.block_matrix import BlockTasks, StageRanks, neighbours
from distsim.simulation.tasks.program_ranks import ProgramRanks, used_axes
from distsim.simulation.tasks.templates import Ints


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
    these; and the seconds of a ``whole`` call, in which all tasks count."""

    seconds: float
    computing: float
    products: float
    whole: float


class Passage(NamedTuple):
    """What one call after the other goes through: the ``seconds`` from what comes in to what goes out.

    ``lead`` are those to there from where the call begins to compute. ``follows``: whether it begins, with
    what counts, after what comes in; ``entry`` seconds later at least.
    """

    seconds: float
    lead: float
    entry: float
    follows: bool


class _CalleeTasks:
    """The tasks of a callee, and what of them does not depend on which inputs are fixed, made once."""

    def __init__(self, tasks: BlockTasks) -> None:
        self.tasks = tasks
        self.deps = _lists(tasks.deps, tasks.dep_start)
        self.op: list[int] = tasks.op.tolist()
        self.durations: list[float] = tasks.durations.tolist()

    @cached_property
    def ahead(self) -> list[list[int]]:
        """The tasks before each on its streams."""
        tasks = self.tasks
        before, _ = neighbours(tasks.stream_start, tasks.streams, len(tasks.stream_table))
        return _lists(before, tasks.stream_start)

    @cached_property
    def computes(self) -> list[bool]:
        """Whether each is on a compute stream."""
        tasks = self.tasks
        computing = [stream.name == "compute" for stream in tasks.stream_table]
        streams = _lists(tasks.streams, tasks.stream_start)
        return [any(computing[stream] for stream in own) for own in streams]

    @cached_property
    def products(self) -> list[bool]:
        """Whether each is a product."""
        ops = [is_product(op) for op in self.tasks.op_table]
        return [ops[op] for op in self.op]

    @cached_property
    def apart(self) -> list[bool]:
        """Whether each runs once a step, or is no work of its own."""
        ops = [_is_apart(op) for op in self.tasks.op_table]
        return [ops[op] for op in self.op]

    @cached_property
    def leads_to_products(self) -> list[bool]:
        """Whether each is a product, or one depends on it."""
        return self.needed(())

    def needed(self, makers: Iterable[int]) -> list[bool]:
        """Return of each task whether it is a product or one of ``makers``, or one of these depends on it."""
        found = list(self.products)
        for task in makers:
            found[task] = True
        for task in reversed(range(len(found))):
            if found[task]:
                for other in self.deps[task]:
                    if other >= 0:
                        found[other] = True
        return found

    def counting(self, fixed: tuple[bool, ...], needed: list[bool]) -> list[bool]:
        """Return of each task whether it counts: it is ``needed``, and reads what is not ``fixed``, as what
        is of a microbatch."""
        given = [not fixed[place] for place, _ in self.tasks.ports.tolist()]
        found: list[bool] = []
        for own, apart in zip(self.deps, self.apart, strict=True):
            reads = any(found[other] if other >= 0 else given[-2 - other] for other in own)
            found.append(reads and not apart)
        return [own and counts for own, counts in zip(found, needed, strict=True)]


class Spans:
    """The spans of callees on the ranks of a program, and passages through them, each made once."""

    def __init__(self, ranks: ProgramRanks, cost_model: CostModel) -> None:
        self._ranks, self._cost_model = ranks, cost_model
        self._known: dict[tuple[Function, tuple[bool, ...]], LayerSpan | None] = {}
        self._passages: dict[tuple[Function, tuple[bool, ...], int, int], Passage | None] = {}
        self._alike: dict[tuple[str, ...], bool] = {}
        self._callees: dict[Function, _CalleeTasks] = {}

    def op_seconds(self, op: Op) -> float:
        """Return for how long an op that is no Call computes."""
        meaning = operator(op.op_type)
        if meaning.communication is not None or meaning.view or not meaning.computes or _is_apart(op):
            return 0.0
        return self._cost_model.seconds(signature_of(op), self._part.members[0][:1])

    def span(self, callee: Function, fixed: tuple[bool, ...]) -> LayerSpan | None:
        """Return the span of a callee, of whose inputs some are ``fixed``: the same for every microbatch.

        None if it takes longer on some stages than on others.
        """
        key = callee, fixed
        if key not in self._known:
            alike = self._are_alike(used_axes(callee))
            self._known[key] = _span(self._tasks(callee), fixed) if alike else None
        return self._known[key]

    def passage(self, callee: Function, fixed: tuple[bool, ...], place: int, result: int) -> Passage | None:
        """Return that from an input of a callee, by its place, to one of its results; None if there is none.

        For callees that have a span.
        """
        key = callee, fixed, place, result
        if key not in self._passages:
            self._passages[key] = _passage(self._tasks(callee), fixed, place, result)
        return self._passages[key]

    def _tasks(self, callee: Function) -> _CalleeTasks:
        if callee not in self._callees:
            self._callees[callee] = _CalleeTasks(tasks_of(callee, 0, self._ranks, self._cost_model))
        return self._callees[callee]

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


def _span(callee: _CalleeTasks, fixed: tuple[bool, ...]) -> LayerSpan:
    """Return the longest path through the tasks that count, from one that computes to one that does."""
    counts = callee.counting(fixed, callee.leads_to_products)
    own = np.where(np.array(counts, np.bool_), callee.tasks.durations, 0.0)
    computing, products = np.array(callee.computes, np.bool_), np.array(callee.products, np.bool_)
    sums = float(own[computing].sum()), float(own[products].sum())
    return LayerSpan(_longest(callee, counts), *sums, _longest(callee, [not own for own in callee.apart]))


def _longest(callee: _CalleeTasks, counts: list[bool]) -> float:
    """Return the seconds from the first task that computes to the last one, by those that count."""
    computes, durations = callee.computes, callee.durations
    reached: list[float] = []
    seconds = 0.0
    for task, (own, ahead) in enumerate(zip(callee.deps, callee.ahead, strict=True)):
        start = max([reached[other] for other in (*own, *ahead) if other >= 0], default=-inf)
        start = max(start, 0.0) if computes[task] else start
        reached.append(start + durations[task] * counts[task])
        if computes[task]:
            seconds = max(seconds, reached[task])
    return seconds


def _passage(callee: _CalleeTasks, fixed: tuple[bool, ...], place: int, result: int) -> Passage | None:
    """Return the passage from an input to a result, on the rank where it is least.

    What the result follows from counts as well: products of the next call follow from it.
    """
    tasks, durations, computes = callee.tasks, callee.durations, callee.computes
    makers: list[int] = tasks.makers[result].tolist()
    if any(task < 0 for task in makers):
        return None
    needed = callee.needed(makers)
    counts = callee.counting(fixed, needed)
    of_what_comes_in = callee.counting(tuple([own != place for own in range(len(fixed))]), needed)
    enters = [-2 - port for port, (own, _) in enumerate(tasks.ports.tolist()) if own == place]
    through, led, first = list[float](), list[float](), -1
    for task, (own, ahead) in enumerate(zip(callee.deps, callee.ahead, strict=True)):
        takes = durations[task] * counts[task]
        came = max(
            [0.0 if other in enters else through[other] for other in own if other >= 0 or other in enters],
            default=-inf,
        )
        through.append(came + takes)
        if first < 0 and takes and computes[task]:
            first = task
        begun = max([led[other] for other in (*own, *ahead) if other >= 0], default=-inf)
        led.append((0.0 if task == first else begun) + takes)
    seconds, lead = min(through[task] for task in makers), min(led[task] for task in makers)
    if first < 0 or not (seconds > 0 and lead > 0):
        return None
    # All that computes comes after the first task that does, on a stream that runs in order.
    if not of_what_comes_in[first]:
        return Passage(seconds, lead, 0.0, False)
    entry = through[first] - durations[first]
    return Passage(max(seconds, entry + lead), lead, entry, True)


def _lists(values: Ints, start: Ints) -> list[list[int]]:
    bounds: list[int] = start.tolist()
    return [values[a:b].tolist() for a, b in pairwise(bounds)]


def _is_apart(op: Op) -> bool:
    """Whether an op, or one in its kernel, runs once a step, or is no work of its own."""
    meaning = operator(op.op_type)
    if meaning.issues or meaning.stalls or op.attributes.get(ONCE):
        return True
    return any(_is_apart(inner) for function in op.subfunctions for inner in function.ops)
