"""Which pipeline stage each op of a joint function belongs to.

The forward ops (those that the loss depends on) are cut, in order, into contiguous stages of least
bottleneck. A backward op lives where its forward op lives: on the last stage on which everything is
at hand that it reads, going down from the stage that its gradients come from.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from distsim.errors import PlanError
from distsim.executor.cost_model import RooflineRules, runs_kernel
from distsim.ir import Device, Function, Op, Role, Tensor, Value, all_ops
from distsim.ops import operator, signature_of, work
from distsim.ops.operator import memory_bound

Numbers = npt.NDArray[Any]

_RULES = RooflineRules()

SLACK = 0.02
"""How much more work than the least bottleneck a stage may have, to send less."""
SEND_WEIGHT = 0.01
"""Weight of the bytes sent at a cut, over the mean of all cuts, beside the squared shares of work."""
COARSE = 1.25
"""How much more than its share the heaviest stage may have before Calls are written out."""


@dataclass(frozen=True)
class StageMap:
    """The stage of every per-microbatch op, and which of them are forward ops.

    ``loose`` ops make constants: they belong to no stage, each stage that reads one makes it itself.
    ``homes`` are the stages that read a parameter or constant in forward (the first one updates it).
    ``step_ops`` run once per step, after the sums over microbatches.
    """

    stage: Mapping[Op, int]
    forward: frozenset[Op]
    step_ops: frozenset[Op]
    homes: Mapping[Value, tuple[int, ...]]
    loose: frozenset[Op]


def assign_stages(function: Function, num_stages: int, device: Device) -> StageMap:
    """Cut a (sharded, joint) function into ``num_stages`` stages of even time on ``device``.

    Raises :class:`PlanError` when there are fewer forward ops than stages.
    """
    producer = {value: op for op in function.ops for value in op.outputs}
    step_ops = _step_ops(function, producer)
    loose = _loose_ops(function)
    forward = _forward_ops(function, producer, step_ops) - loose
    stage = _forward_stages(function, forward, num_stages, _Costs(device))
    held = {v for v in function.inputs if v.role is not Role.INPUT}
    homes = _homes(function, stage, held)
    reach = _reach(function, stage, held)
    rest = [op for op in function.ops if op not in forward and op not in step_ops and op not in loose]
    for op in rest:
        bound = num_stages - 1
        for value in op.inputs:
            made = producer.get(value)
            if made in loose:
                continue
            if made is not None and made not in forward:
                bound = min(bound, stage[made])
            elif value in held:
                bound = min(bound, homes.get(value, (bound,))[-1])
            elif made is not None:
                bound = min(bound, reach[value])
        stage[op] = bound
    late: dict[Value, int] = {}
    for op in rest:
        for value in held.intersection(op.inputs):
            late[value] = min(late.get(value, num_stages), stage[op])
    homes = {value: (place,) for value, place in late.items()} | homes  # read in backward only
    _sink(function, rest, forward, stage, step_ops, homes)
    return StageMap(stage, forward, step_ops, homes, loose)


def _loose_ops(function: Function) -> frozenset[Op]:
    """Return the ops that depend on no input of the function."""
    made: set[Value] = set()
    found: list[Op] = []
    for op in function.ops:
        if all(value in made for value in op.inputs):
            found.append(op)
            made.update(op.outputs)
    returned = set(function.outputs)
    return frozenset(op for op in found if not returned.intersection(op.outputs))


def _step_ops(function: Function, producer: Mapping[Value, Op]) -> frozenset[Op]:
    """Return the ops that come after a sum over microbatches."""
    found: set[Op] = set()
    for op in function.ops:
        if any(producer.get(v) in found or is_sum(producer.get(v)) for v in op.inputs):
            found.add(op)
    return frozenset(found)


def early_sums(function: Function) -> dict[Op, Op]:
    """Return the sums over microbatches on which work within a microbatch depends, and one such op each.

    A loss that is divided by the number of tokens in the batch, before its backward pass, is an example.
    What comes after a sum may read sums and what is the same for every microbatch, nothing else.
    """
    sums: dict[Value, frozenset[Op]] = {}
    fixed = {v for v in function.inputs if v.role is not Role.INPUT}
    early: dict[Op, Op] = {}
    place = {op: i for i, op in enumerate(function.ops)}
    none = frozenset[Op]()
    for op in function.ops:
        before = frozenset(sum_ for v in op.inputs for sum_ in sums.get(v, none) if sum_ not in early)
        if is_sum(op):
            before = frozenset((op,))
        elif before and any(v not in fixed and not (sums.get(v, none) - early.keys()) for v in op.inputs):
            early |= dict.fromkeys(sorted(before, key=place.__getitem__), op)
            before = none
        elif not before and all(v in fixed for v in op.inputs):
            fixed.update(op.outputs)
        sums.update(dict.fromkeys(op.outputs, before))
    return early


def is_sum(op: Op | None) -> bool:
    """Whether an op marks the sum over microbatches."""
    return op is not None and op.op_type == "Accumulate"


def _forward_ops(function: Function, producer: Mapping[Value, Op], step: frozenset[Op]) -> frozenset[Op]:
    """Ancestors of the loss, the first scalar output; every op when there is no such output."""
    losses = [v for v in function.outputs if isinstance(v.type, Tensor) and v.type.shape == ()]
    if not losses:
        return frozenset(op for op in function.ops if op not in step)
    found: set[Op] = set()
    todo = [losses[0]]
    while todo:
        op = producer.get(todo.pop())
        if op is not None and op not in found:
            found.add(op)
            todo.extend(op.inputs)
    return frozenset(found - step)


def seconds_of(op: Op, device: Device) -> float:
    """Return how long an op, or all ops of a Call, keep ``device`` busy; communication does not."""
    total = 0.0
    for inner in all_ops(op.callee) if op.op_type == "Call" else (op,):
        if operator(inner.op_type).communication is None and runs_kernel(inner.op_type):
            signature = signature_of(inner)
            total += _RULES.compute(signature, work(signature) or memory_bound(signature), device)
    return total


class _Costs:
    """Seconds of ops, with each callee looked at once."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._callees: dict[int, float] = {}

    def __getitem__(self, op: Op) -> float:
        if op.op_type != "Call":
            return seconds_of(op, self.device)
        if id(op.callee) not in self._callees:
            self._callees[id(op.callee)] = seconds_of(op, self.device)
        return self._callees[id(op.callee)]


def _forward_stages(
    function: Function, forward: frozenset[Op], num_stages: int, costs: _Costs
) -> dict[Op, int]:
    """Cut the forward ops that take time; what takes none (a view, a sum's mark) follows its operands."""
    ordered = [op for op in function.ops if op in forward]
    works = {op: costs[op] for op in ordered}
    cut = _cut([op for op in ordered if works[op] > 0], works, num_stages, function.name)
    stage: dict[Op, int] = {}
    made: dict[Value, int] = {}
    for op in ordered:
        own = cut.get(op)
        stage[op] = max((made.get(v, -1) for v in op.inputs), default=-1) if own is None else own
        made.update(dict.fromkeys(op.outputs, stage[op]))
    first: dict[Value, int] = {}  # the first stage that reads each value
    for op in reversed(ordered):
        if stage[op] < 0:  # what follows data only goes where it is read
            stage[op] = min((first[v] for v in op.outputs if v in first), default=0)
        first.update((v, min(first.get(v, num_stages), stage[op])) for v in op.inputs)
    return stage


def _cut(ops: Sequence[Op], seconds: Mapping[Op, float], num_stages: int, name: str) -> dict[Op, int]:
    """Contiguous stages of least bottleneck in work (within SLACK), then of even work and few bytes sent."""
    if len(ops) < num_stages:
        raise PlanError(
            f"pp={num_stages}, but {name} has only {len(ops)} forward ops that take time; use pp of at "
            f"most {max(len(ops), 1)}"
        )
    prefix = _prefix([seconds[op] for op in ops])
    cuts = _cut_points(len(ops), prefix, num_stages)
    done = prefix[cuts]
    limit = _bottleneck(done, num_stages) * (1 + SLACK)
    sends = _crossing(ops)[cuts]
    sends = SEND_WEIGHT * sends / max(float(sends.mean()), 1.0)
    works = done[:, None] - done[None, :]  # [end, start] of one stage
    even = np.where(np.tril(works <= limit, -1), (works * (num_stages / prefix[-1])) ** 2, np.inf)
    best = even[:, 0] + sends
    choice: list[Numbers] = []
    for _ in range(1, num_stages):
        costs = even + best[None, :]
        # The later of equal cuts: a cheap op stays with the op it follows.
        pick = len(cuts) - 1 - np.argmin(costs[:, ::-1], axis=1)
        best = costs[np.arange(len(cuts)), pick] + sends
        choice.append(pick)
    ends = [len(cuts) - 1]
    for pick in reversed(choice):
        ends.append(int(pick[ends[-1]]))
    bounds = [int(cuts[i]) for i in reversed(ends)]
    return {op: int(np.searchsorted(bounds, i, side="right")) for i, op in enumerate(ops)}


def _prefix(seconds: Sequence[float]) -> Numbers:
    return np.concatenate([[0.0], np.cumsum(seconds)])


def _bottleneck(done: Numbers, num_stages: int) -> float:
    """Return the least work of the heaviest of ``num_stages`` contiguous, non-empty stages."""

    works: list[float] = done.tolist()

    def fits(limit: float) -> bool:
        at = 0
        for stage in range(num_stages):
            last = len(works) - (num_stages - stage)  # leaves a cut for every later stage
            at = min(bisect_right(works, works[at] + limit) - 1, last)
        return at == len(works) - 1

    low, high = max(b - a for a, b in pairwise(works)), works[-1]
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def coarse(function: Function, num_stages: int, device: Device) -> bool:
    """Return whether Calls are too large to make balanced stages: the heaviest is COARSE over its share."""
    if num_stages == 1 or not any(op.op_type == "Call" for op in function.ops):
        return False
    producer = {value: op for op in function.ops for value in op.outputs}
    forward = _forward_ops(function, producer, frozenset())
    costs = _Costs(device)
    seconds = [s for s in (costs[op] for op in function.ops if op in forward) if s > 0]
    if len(seconds) < num_stages:
        return True
    prefix = _prefix(seconds)
    done = prefix[_cut_points(len(seconds), prefix, num_stages)]
    return _bottleneck(done, num_stages) > COARSE * prefix[-1] / num_stages


MAX_CUTS = 2000


def _cut_points(count: int, prefix: Numbers, num_stages: int) -> Numbers:
    """Return the places where a cut may be: all, or for very long functions evenly spread by work."""
    if count <= MAX_CUTS:
        return np.arange(count + 1)
    targets = np.linspace(0.0, float(prefix[-1]), max(MAX_CUTS, 4 * num_stages))
    places = np.searchsorted(prefix, targets).tolist()
    return np.array(sorted({0, count, *places}))


def _crossing(ops: Sequence[Op]) -> Numbers:
    """Return, per cut before op i, the bytes made before it and read at or after it."""
    place = {op: i for i, op in enumerate(ops)}
    made = {value: i for op, i in place.items() for value in op.outputs}
    last: dict[Value, int] = {}
    for op, i in place.items():
        for value in op.inputs:
            last[value] = i
    change = np.zeros(len(ops) + 2)
    for value, i in made.items():
        if value in last:
            change[i + 1] += value.type.nbytes
            change[last[value] + 1] -= value.type.nbytes
    return np.cumsum(change)[: len(ops) + 1]


def _homes(function: Function, stage: Mapping[Op, int], held: set[Value]) -> dict[Value, tuple[int, ...]]:
    found: dict[Value, set[int]] = {}
    for op in function.ops:
        for value in op.inputs:
            if value in held and op in stage:
                found.setdefault(value, set()).add(stage[op])
    return {value: tuple(sorted(stages)) for value, stages in found.items()}


def _reach(function: Function, stage: Mapping[Op, int], held: set[Value]) -> dict[Value, int]:
    """Return the last stage on which each forward value is at hand: made or received there."""
    reach: dict[Value, int] = {}
    for op in function.ops:
        if op in stage:
            for value in (*op.outputs, *(v for v in op.inputs if v not in held)):
                reach[value] = max(reach.get(value, 0), stage[op])
    return reach


def _sink(
    function: Function,
    rest: Sequence[Op],
    forward: frozenset[Op],
    stage: dict[Op, int],
    step: frozenset[Op],
    homes: Mapping[Value, tuple[int, ...]],
) -> None:
    """Move an op that reads gradients only down to where its result is used, if fewer bytes travel so.

    The gradient of a bias is the example: its forward op is on the stage below the cut, to which the
    gradient that it sums up is sent anyway.
    """
    readers: dict[Value, list[Op]] = {}
    for op in function.ops:
        for value in op.inputs:
            readers.setdefault(value, []).append(op)
    held = set(homes)
    made_late = {value for op in rest for value in op.outputs}
    for op in reversed(rest):
        if not op.inputs or not all(v in made_late for v in op.inputs):
            continue
        users = [u for v in op.outputs for u in _users(v, readers, step)]
        places = [_place(u, stage, step, homes, held) for u in users]
        known = [p for p in places if p is not None]
        target = max(known, default=stage[op])
        if len(known) < len(places) or target >= stage[op]:
            continue
        extra = sum(
            v.type.nbytes
            for v in op.inputs
            if not any(stage.get(u) == target for u in readers[v] if u is not op and u not in forward)
        )
        if extra < sum(v.type.nbytes for v in op.outputs):
            stage[op] = target
            sums = (u for v in op.outputs for u in readers.get(v, ()) if is_sum(u))
            stage.update(dict.fromkeys(sums, target))


def _users(value: Value, readers: Mapping[Value, list[Op]], step: frozenset[Op]) -> list[Op]:
    """Return the ops that read a value, looking through its sum over microbatches and over ranks."""
    found: list[Op] = []
    for op in readers.get(value, ()):
        summed = is_sum(op) or (op in step and operator(op.op_type).communication is not None)
        found.extend(_users(op.outputs[0], readers, step) if summed else [op])
    return found


def _place(
    op: Op,
    stage: Mapping[Op, int],
    step: frozenset[Op],
    homes: Mapping[Value, tuple[int, ...]],
    held: set[Value],
) -> int | None:
    if op not in step:
        return stage[op]
    owned = [homes[v][0] for v in op.inputs if v in held]
    return min(owned) if owned else None
