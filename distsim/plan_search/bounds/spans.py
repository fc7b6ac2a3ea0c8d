"""Paths through what a block calls: for how long a call keeps a device, and how long it takes from what comes
in to what goes out."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
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
    these."""

    seconds: float
    computing: float
    products: float


class Passage(NamedTuple):
    """What one call after the other goes through: the ``seconds`` from what comes in to what goes out.

    ``lead`` are those to there from where the call begins to compute. ``follows``: whether it begins, with
    what counts, after what comes in; ``entry`` seconds later at least.
    """

    seconds: float
    lead: float
    entry: float
    follows: bool


class Spans:
    """The spans of callees on the ranks of a program, and passages through them, each made once."""

    def __init__(self, ranks: ProgramRanks, cost_model: CostModel) -> None:
        self._ranks, self._cost_model = ranks, cost_model
        self._known: dict[tuple[Function, tuple[bool, ...]], LayerSpan | None] = {}
        self._passages: dict[tuple[Function, tuple[bool, ...], int, int], Passage | None] = {}
        self._alike: dict[tuple[str, ...], bool] = {}

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

    def _tasks(self, callee: Function) -> BlockTasks:
        return tasks_of(callee, 0, self._ranks, self._cost_model)

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


def _span(tasks: BlockTasks, fixed: tuple[bool, ...]) -> LayerSpan:
    """Return the longest path through the tasks that count, from one that computes to one that does."""
    deps = _lists(tasks.deps, tasks.dep_start)
    before, _ = neighbours(tasks.stream_start, tasks.streams, len(tasks.stream_table))
    counts, computes = _counting(tasks, deps, fixed, _needed(tasks, deps)), _computing(tasks)
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


def _passage(tasks: BlockTasks, fixed: tuple[bool, ...], place: int, result: int) -> Passage | None:
    """Return the passage from an input to a result, on the rank where it is least.

    What the result follows from counts as well: products of the next call follow from it.
    """
    makers: list[int] = tasks.makers[result].tolist()
    if any(task < 0 for task in makers):
        return None
    deps, computes = _lists(tasks.deps, tasks.dep_start), _computing(tasks)
    needed = _needed(tasks, deps, makers)
    counts = _counting(tasks, deps, fixed, needed)
    of_what_comes_in = _counting(tasks, deps, tuple([own != place for own in range(len(fixed))]), needed)
    before, _ = neighbours(tasks.stream_start, tasks.streams, len(tasks.stream_table))
    ahead = _lists(before, tasks.stream_start)
    enters = [-2 - port for port, (own, _) in enumerate(tasks.ports.tolist()) if own == place]
    through, led, first = list[float](), list[float](), -1
    for task, own in enumerate(deps):
        takes = float(tasks.durations[task]) * counts[task]
        came = max(
            [0.0 if other in enters else through[other] for other in own if other >= 0 or other in enters],
            default=-np.inf,
        )
        through.append(came + takes)
        if first < 0 and takes and computes[task]:
            first = task
        begun = max([led[other] for other in (*own, *ahead[task]) if other >= 0], default=-np.inf)
        led.append((0.0 if task == first else begun) + takes)
    seconds, lead = min(through[task] for task in makers), min(led[task] for task in makers)
    if first < 0 or not (seconds > 0 and lead > 0):
        return None
    # All that computes comes after the first task that does, on a stream that runs in order.
    if not of_what_comes_in[first]:
        return Passage(seconds, lead, 0.0, False)
    entry = through[first] - float(tasks.durations[first])
    return Passage(max(seconds, entry + lead), lead, entry, True)


def _computing(tasks: BlockTasks) -> list[bool]:
    """Return of each task whether it is on a compute stream."""
    streams = _lists(tasks.streams, tasks.stream_start)
    return [any(tasks.stream_table[stream].name == "compute" for stream in own) for own in streams]


def _lists(values: Ints, start: Ints) -> list[list[int]]:
    bounds: list[int] = start.tolist()
    return [values[a:b].tolist() for a, b in pairwise(bounds)]


def _counting(
    tasks: BlockTasks, deps: list[list[int]], fixed: tuple[bool, ...], needed: list[bool]
) -> list[bool]:
    """Return of each task whether it counts: it is ``needed``, and reads what is not ``fixed``, as what is of
    a microbatch."""
    given = [not fixed[place] for place, _ in tasks.ports.tolist()]
    once = [_is_apart(op) for op in tasks.op_table]
    found: list[bool] = []
    for task, own in enumerate(deps):
        reads = any(found[other] if other >= 0 else given[-2 - other] for other in own)
        found.append(reads and not once[tasks.op[task]])
    return [own and counts for own, counts in zip(found, needed, strict=True)]


def _needed(tasks: BlockTasks, deps: list[list[int]], makers: Iterable[int] = ()) -> list[bool]:
    """Return of each task whether it is a product or one of ``makers``, or one of these depends on it."""
    products = [is_product(op) for op in tasks.op_table]
    numbers: list[int] = tasks.op.tolist()
    found = [products[op] for op in numbers]
    for task in makers:
        found[task] = True
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
