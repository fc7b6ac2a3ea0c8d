"""Cutting ops, in order, into contiguous groups of even time that hand few bytes on."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from distsim.cost.cost_model import DeviceCosts
from distsim.errors import PlanError
from distsim.transforms.pipelining.op_graph import Numbered

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
