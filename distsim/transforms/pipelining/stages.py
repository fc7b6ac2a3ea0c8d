"""Which pipeline stage each op of a joint function belongs to.

The forward ops (those that the loss depends on) are cut, in order, into contiguous stages of least
bottleneck. A backward op lives where its forward op lives: on the last stage on which everything is
at hand that it reads, going down from the stage that its gradients come from. What backward computes again
is computed where it was the first time. A gather is where it is read first: its operand is less to send.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from distsim.cost.cost_model import DeviceCosts
from distsim.errors import PlanError
from distsim.ops import operator
from distsim.transforms.op_graph import ChosenMap, Numbered, Numbers, StageMap, is_gather


def assign_stages(
    function: Numbered, num_stages: int, costs: DeviceCosts, starts: Sequence[int] | None = None
) -> StageMap:
    """Cut a (sharded, joint) function into ``num_stages`` stages of even time by ``costs``.

    ``starts`` says where they begin instead: places among the forward ops that take time.
    Raises :class:`PlanError` when there are fewer forward ops than stages.
    """
    stage = _forward_stages(function, num_stages, costs, starts)
    known = function.stage_maps.setdefault(
        (num_stages, tuple(stage), tuple(function.copies.items())), list[ChosenMap]()
    )
    for smaller, assigned in known:
        if all((function.nbytes(a) < function.nbytes(b)) == less for a, b, less in smaller):
            return assigned
    homes = _homes(function, stage)
    rest = _place_rest(function, stage, homes, num_stages)
    late: dict[int, int] = {}
    for op in rest:
        for value in function.reads[op]:
            if function.held[value]:
                late[value] = min(late.get(value, num_stages), stage[op])
    for value, place in late.items():  # read in backward only, or there on another stage too
        homes[value] = tuple(sorted({place, *homes.get(value, ())}))
    sink = _Sink(function, rest, stage, homes)
    sink.run()
    known.append(ChosenMap(tuple(sink.smaller), StageMap(stage, homes)))
    return known[-1].assigned


def _forward_stages(
    function: Numbered, num_stages: int, costs: DeviceCosts, starts: Sequence[int] | None
) -> list[int]:
    """Cut the forward ops that take time; what takes none (a view, a sum's mark) follows its operands, but a
    gather goes ahead to its first reader."""
    seconds = function.seconds(costs)
    timed = [op for op, cost in seconds.items() if cost > 0]
    if starts is not None:  # perhaps one of thousands that a search tries
        own = {op: bisect_right(starts, place) - 1 for place, op in enumerate(timed)}
        return _followed(function, own, list(seconds), num_stages)
    own = cut(function, timed, seconds, num_stages)
    key = num_stages, tuple(own.items())
    found = function.forward_stages.get(key)
    if found is None:
        found = function.forward_stages[key] = _followed(function, own, list(seconds), num_stages)
    return found.copy()


def _followed(function: Numbered, own: Mapping[int, int], ops: Sequence[int], num_stages: int) -> list[int]:
    """Return the stage of each of these forward ops, -1 for others, if some have their ``own``."""
    stage = [-1] * len(function.ops)
    made = [-1] * len(function.values)
    for op in ops:
        stage[op] = own.get(op, max([made[value] for value in function.reads[op]], default=-1))
        for value in function.makes[op]:
            made[value] = stage[op]
    first: dict[int, int] = {}  # the first stage that reads each value
    for op in reversed(ops):
        readers = [first[value] for value in function.makes[op] if value in first]
        if stage[op] < 0:  # goes where it is read; for the end of the step, where backward begins
            stage[op] = min(readers, default=num_stages - 1)
        elif op not in own and readers and is_gather(function.ops[op]):  # its operand is less to send
            stage[op] = min(readers)
        for value in function.reads[op]:
            first[value] = min(first.get(value, num_stages), stage[op])
    return stage


def _homes(function: Numbered, stage: Sequence[int]) -> dict[int, tuple[int, ...]]:
    found: dict[int, dict[int, None]] = {}
    for op, read in enumerate(function.reads):
        if stage[op] >= 0:
            for value in read:
                if function.held[value]:
                    found.setdefault(value, {})[stage[op]] = None
    return {value: tuple(sorted(stages)) for value, stages in found.items()}


def _place_rest(
    function: Numbered, stage: list[int], homes: Mapping[int, tuple[int, ...]], num_stages: int
) -> list[int]:
    """Place the backward ops, each as far up as what it reads is at hand; return them.

    What is at hand anywhere, such as the gather of a parameter that forward does not read, is made where it
    is read, on the stage whose backward pass runs first.
    """
    reach = _reach(function, stage)
    weights = _weights(function)
    rest: list[int] = []
    handed: dict[int, int] = {}  # what barriers make -> what they hand on
    again = function.regathered
    producer, forward, loose, held = function.producer, function.forward, function.loose, function.held
    for op, read in enumerate(function.reads):
        if forward[op] or loose[op] or function.steps[op]:
            continue
        original = function.copies.get(op)
        if original is not None:
            stage[op] = stage[original]
            rest.append(op)
            continue
        if operator(function.ops[op].op_type).waits:  # it is where what it hands on is read
            first = read[0]
            handed |= dict.fromkeys(function.makes[op], handed.get(first, first))
            rest.append(op)
            continue
        bounds: list[int] = []
        for value in [again[value] for value in function.makes[op] if value in again] or read:
            value = handed.get(value, value)
            value = function.originals.get(value, value)
            value = again.get(value, value)
            value = weights.get(value, value)
            made = producer[value]
            if made < 0:
                if held[value] and value in homes:
                    bounds.append(homes[value][-1])
            elif forward[made]:
                bounds.append(reach[value])
            elif not loose[made] and stage[made] >= 0:
                bounds.append(stage[made])
        stage[op] = min(bounds, default=-1)
        rest.append(op)
    last: dict[int, int] = {}  # the last stage that reads each value
    for op in reversed(rest):
        if stage[op] < 0:
            stage[op] = max([last[v] for v in function.makes[op] if v in last], default=num_stages - 1)
        for value in function.reads[op]:
            last[value] = max(last.get(value, 0), stage[op])
    return rest


def _weights(function: Numbered) -> dict[int, int]:
    """Return what forward makes of parameters by gathers, casts and views, and of which.

    Several stages may read a parameter, each gathers it: a backward op that reads one of these values goes
    where it would go if it read the parameter.
    """
    found: dict[int, int] = {}
    for op, read in enumerate(function.reads):
        if len(read) != 1 or not function.forward[op]:
            continue
        source = found.get(read[0], read[0])
        meaning = operator(function.ops[op].op_type)
        passes = meaning.view or meaning.communication is not None or function.ops[op].op_type == "Cast"
        if passes and function.producer[source] < 0 and function.held[source]:
            found |= dict.fromkeys(function.makes[op], source)
    return found


def _reach(function: Numbered, stage: Sequence[int]) -> dict[int, int]:
    """Return the last stage on which each forward value is at hand: made or received there."""
    reach: dict[int, int] = {}
    for op, own in enumerate(stage):
        if own >= 0:
            for value in (*function.makes[op], *function.reads[op]):
                if own > reach.get(value, -1):
                    reach[value] = own
    return reach


class _Sink:
    """Moves ops that read gradients, and data at most, down to where their result is used, if fewer bytes
    travel so.

    The gradient of a bias is the example: its forward op is on the stage below the cut, to which the
    gradient that it sums up is sent anyway. That of an embedding is another.
    """

    def __init__(
        self,
        function: Numbered,
        rest: Sequence[int],
        stage: list[int],
        homes: Mapping[int, tuple[int, ...]],
    ) -> None:
        self.function, self.rest, self.stage, self.homes = function, rest, stage, homes
        self.smaller: list[tuple[Numbers, Numbers, bool]] = []  # as of :class:`ChosenMap`
        self.late = [False] * len(function.values)
        for op in rest:
            if op not in function.copies:
                for value in function.makes[op]:
                    self.late[value] = True

    def run(self) -> None:
        function, stage = self.function, self.stage
        for op in reversed(self.rest):
            read = function.reads[op]
            if op in function.copies or not self._movable(read):
                continue
            if function.sums[op] and function.uses[read[0]] == 1:
                continue  # as many bytes before it as after it
            users = [user for value in function.makes[op] for user in self._users(value)]
            places = [self._place(user) for user in users]
            known = [place for place in places if place is not None]
            target = max(known, default=stage[op])
            if len(known) < len(places) or target >= stage[op]:
                continue
            late = [value for value in read if self.late[value]]
            sent = tuple([value for value in late if not self._at_hand(value, op, target)])
            fewer = function.nbytes(sent) < function.nbytes(function.makes[op])
            self.smaller.append((sent, function.makes[op], fewer))
            if fewer:
                stage[op] = target
                for value in function.makes[op]:
                    for user in function.readers.get(value, ()):
                        if function.sums[user]:
                            stage[user] = target

    def _movable(self, read: Sequence[int]) -> bool:
        """Whether an op reads gradients, and else only what was given with the microbatch."""
        function = self.function
        given = [function.producer[value] < 0 and not function.held[value] for value in read]
        late = [self.late[value] for value in read]
        return any(late) and all(a or b for a, b in zip(late, given, strict=True))

    def _users(self, value: int) -> list[int]:
        """Return the ops that read a value, looking through its sum over microbatches and over ranks."""
        function, found = self.function, list[int]()
        for op in function.readers.get(value, ()):
            summed = function.sums[op] or (
                function.steps[op] and operator(function.ops[op].op_type).communication is not None
            )
            if summed:
                found.extend(self._users(function.makes[op][0]))
            else:
                found.append(op)
        return found

    def _place(self, op: int) -> int | None:
        if not self.function.steps[op]:
            return self.stage[op]
        homes = self.homes
        return min([homes[value][0] for value in self.function.reads[op] if value in homes], default=None)

    def _at_hand(self, value: int, op: int, stage: int) -> bool:
        """Whether another backward op reads the value on a stage."""
        function = self.function
        return any(
            self.stage[other] == stage and other != op and not function.forward[other]
            for other in function.readers.get(value, ())
        )


# --- contiguous groups of even time that hand few bytes on -------------------------------------------

Array = npt.NDArray[Any]

SLACK = 0.02
"""How much more work than the least bottleneck a stage may have, to send less."""
SEND_WEIGHT = 0.01
"""Weight of the bytes sent at a cut, over the mean of all cuts, beside the squared shares of work."""
COARSE = 1.25
"""How much more than its share the heaviest stage may have before Calls are written out."""
MAX_CUTS = 2000
"""Longer functions are cut at places evenly spread by work."""


def cut(
    function: Numbered, ops: Sequence[int], seconds: Mapping[int, float], num_stages: int
) -> dict[int, int]:
    """Return the stage of each of ``ops``, which take time and lie in order.

    Contiguous stages of least bottleneck in work (within SLACK), then of even work and few bytes sent.
    Raises :class:`PlanError` when there are fewer ops than stages.
    """
    if len(ops) < num_stages:
        raise PlanError(
            f"pp={num_stages}, but {function.name} has only {len(ops)} forward ops that take time; use pp "
            f"of at most {max(len(ops), 1)}"
        )
    prefix = _prefix([seconds[op] for op in ops])
    cuts = _cut_points(len(ops), prefix, num_stages)
    done = prefix[cuts]
    limit = _bottleneck(done, num_stages) * (1 + SLACK)
    sends = _crossing(function, ops)[cuts]
    sends = SEND_WEIGHT * sends / max(float(sends.mean()), 1.0)
    works = done[:, None] - done[None, :]  # [end, start] of one stage
    even = np.where(np.tril(works <= limit, -1), (works * (num_stages / prefix[-1])) ** 2, np.inf)
    best = even[:, 0] + sends
    choice: list[Array] = []
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


def _prefix(seconds: Sequence[float]) -> Array:
    return np.concatenate([[0.0], np.cumsum(seconds)])


def _bottleneck(done: Array, num_stages: int) -> float:
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


def coarse(function: Numbered, num_stages: int, costs: DeviceCosts) -> bool:
    """Return whether Calls are too large to make balanced stages: the heaviest is COARSE over its share."""
    if num_stages == 1 or not any(op.is_call for op in function.ops):
        return False
    seconds = [cost for cost in function.seconds(costs).values() if cost > 0]
    if len(seconds) < num_stages:
        return True
    prefix = _prefix(seconds)
    done = prefix[_cut_points(len(seconds), prefix, num_stages)]
    return _bottleneck(done, num_stages) > COARSE * prefix[-1] / num_stages


def _cut_points(count: int, prefix: Array, num_stages: int) -> Array:
    """Return the places where a cut may be: all, or for very long functions evenly spread by work."""
    if count <= MAX_CUTS:
        return np.arange(count + 1)
    targets = np.linspace(0.0, float(prefix[-1]), max(MAX_CUTS, 4 * num_stages))
    places = np.searchsorted(prefix, targets).tolist()
    return np.array(sorted({0, count, *places}))


def _crossing(function: Numbered, ops: Sequence[int]) -> Array:
    """Return, per cut before op i of ``ops``, the bytes made before it and read at or after it."""
    made = {value: i for i, op in enumerate(ops) for value in function.makes[op]}
    last = {value: i for i, op in enumerate(ops) for value in function.reads[op]}
    change = np.zeros(len(ops) + 2)
    for value, i in made.items():
        if value in last:
            nbytes = function.values[value].type.nbytes
            change[i + 1] += nbytes
            change[last[value] + 1] -= nbytes
    return np.cumsum(change)[: len(ops) + 1]
