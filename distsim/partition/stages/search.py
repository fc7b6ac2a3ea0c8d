"""The compiled search for the best split: climbing first, then branch and bound."""

from __future__ import annotations

from typing import Any

import numpy as np

from distsim.compile import compiled
from distsim.partition.stages.bounds import own_seconds, return_seconds
from distsim.partition.stages.kernel import OTHERS, makespan

NOTHING_BETTER = 1e-12
"""The least share by which a split must be better than the best so far."""


@compiled
def fits(bounds: Any, tables: Any) -> bool:
    """Whether every stage holds a block and fits in memory."""
    for s in range(len(bounds) - 1):
        if bounds[s + 1] <= bounds[s] or not tables.allowed[s, bounds[s], bounds[s + 1]]:
            return False
    return True


@compiled
def climb(bounds: Any, order: Any, tables: Any, room: Any) -> tuple[float, int]:
    """Move one or two blocks between any two stages while that is faster; ``bounds`` become the best found.

    Return its step time and how many splits were simulated.
    """
    stages = len(bounds) - 1
    none = np.zeros(OTHERS)
    best = makespan(bounds, stages, none, order, tables, room)
    tried = 1
    found = bounds.copy()
    better = True
    while better:
        better = False
        start = bounds.copy()
        for first in range(1, stages):
            for last in range(first, stages):
                for move in (-1, 1, -2, 2):
                    trial = start.copy()
                    trial[first : last + 1] += move
                    if trial[first] <= 0 or trial[last] >= trial[stages] or not fits(trial, tables):
                        continue
                    time = makespan(trial, stages, none, order, tables, room)
                    tried += 1
                    if time < best * (1 - NOTHING_BETTER):
                        best, better = time, True
                        found[:] = trial
        bounds[:] = found
    return best, tried


@compiled
def bound_of(
    k: int, j: int, bounds: Any, count: int, order: Any, tables: Any, suffix: Any, sums: Any
) -> float:
    """Return a bound on the step time when stage k ends before block j, from sums over the stages before.

    ``sums[0, k]``: seconds to stage k; ``sums[1, k]``: back from it to the end of the step.
    """
    i = bounds[k]
    own = own_seconds(i, j, count, tables)
    leaves = tables.rest_more[i] if order.aligned else tables.rest[i]
    back = sums[1, k] if k > 0 else leaves + tables.tail[i, j]
    ahead = sums[0, k] + tables.forward[i, j] + tables.ahead[k, j]
    least = max(sums[0, k] + own + tables.tail[i, j], sums[0, k] + own - leaves + back)
    last = k + 2 == len(bounds)
    if not last:
        returned = tables.back[k, j] + return_seconds(i, j, order.aligned, tables)
        least = max(least, ahead + suffix.trip[k + 1, j] + returned + back, ahead + suffix.finish[k + 1, j])
    return least


@compiled
def search(
    best: Any, time: float, count: int, limit: int, order: Any, tables: Any, suffix: Any, room: Any
) -> tuple[float, float, int]:
    """Find a better split than ``best``, which takes ``time``; return its time, a bound, and the effort.

    Depth first, one stage after the other; a choice of the first stages is dropped when no split that begins
    with it can be better. After ``limit`` simulations the bound is that of what is still open.
    """
    stages, blocks = len(best) - 1, best[len(best) - 1]
    bounds = np.zeros(stages + 1, np.int64)
    sums = np.zeros((2, stages + 1))
    ends = np.zeros((stages, blocks + 1), np.int64)
    least = np.zeros((stages, blocks + 1))
    width, at = np.zeros(stages, np.int64), np.zeros(stages, np.int64)
    none = np.zeros(OTHERS)
    tried, k = 0, 0
    fresh = True
    lowest = time
    while k >= 0:
        i = bounds[k]
        if fresh:  # the choices for stage k, the most promising first
            width[k], at[k] = 0, 0
            for j in range(i + 1, blocks - (stages - k - 1) + 1):
                if not tables.allowed[k, i, j] or suffix.trip[k + 1, j] == np.inf:
                    continue
                bound = bound_of(k, j, bounds, count, order, tables, suffix, sums)
                if bound >= time * (1 - NOTHING_BETTER):
                    continue
                bounds[k + 1] = j
                if k + 2 >= stages:
                    bounds[stages] = blocks
                    exact = stages == 1 or tables.allowed[stages - 1, bounds[stages - 1], blocks]
                    tried += 1
                    if exact:
                        found = makespan(bounds, stages, none, order, tables, room)
                        if found < time * (1 - NOTHING_BETTER):
                            time = found
                            best[:] = bounds
                    continue
                relaxed = makespan(bounds, k + 1, suffix.others[k + 1, j], order, tables, room)
                tried += 1
                bound = max(bound, relaxed)
                if bound >= time * (1 - NOTHING_BETTER):
                    continue
                place = width[k]
                while place > 0 and least[k, place - 1] > bound:
                    least[k, place] = least[k, place - 1]
                    ends[k, place] = ends[k, place - 1]
                    place -= 1
                least[k, place] = bound
                ends[k, place] = j
                width[k] += 1
            fresh = False
        if at[k] == width[k] or least[k, at[k]] >= time * (1 - NOTHING_BETTER):
            k -= 1
            continue
        if tried >= limit:
            for level in range(k + 1):
                if at[level] < width[level]:
                    lowest = min(lowest, least[level, at[level]])
            return time, min(lowest, time), tried
        j = ends[k, at[k]]
        at[k] += 1
        leaves = tables.rest_more[i] if order.aligned else tables.rest[i]
        back = sums[1, k] if k > 0 else leaves + tables.tail[i, j]
        bounds[k + 1] = j
        sums[0, k + 1] = sums[0, k] + tables.forward[i, j] + tables.ahead[k, j]
        sums[1, k + 1] = back + tables.back[k, j] + return_seconds(i, j, order.aligned, tables)
        k += 1
        fresh = True
    return time, time, tried
