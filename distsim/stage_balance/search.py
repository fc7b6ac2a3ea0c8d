"""The compiled search for the best split: bounds, climbing, then branch and bound."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from distsim.compile import compiled, inner
from distsim.stage_balance.kernel import makespan, replay


class Suffix(NamedTuple):
    """Least figures of the stages k, k + 1, ... when they hold the blocks from i on, each [k, i].

    ``trip``: seconds from the arrival of the first microbatch to the last gradient that leaves them;
    ``finish``: to the end of what follows their last backward; ``others`` [k, i]: what :func:`makespan` takes
    for them. ``splits`` [k, i]: the ends of stage k in the splits of least ``trip`` and of least period.
    Infinite where nothing fits in memory.

    Each is the least over all splits on its own: together they bound every split from below.
    """

    trip: np.ndarray
    finish: np.ndarray
    others: np.ndarray
    splits: np.ndarray


@inner
def own_seconds(i: int, j: int, count: int, tables: Any) -> float:
    """Return how long a stage is busy from its first arrival on, over ``count`` microbatches."""
    own = tables.stages[i, j]
    busy = own.forward + (count - 1) * (own.lead + own.forward + own.more)
    return busy + count * (own.back_lead + own.backward)


@inner
def return_seconds(i: int, j: int, aligned: bool, tables: Any) -> float:
    """Return the seconds from the gradient that a stage receives last to the one that it sends."""
    own, edge = tables.stages[i, j], tables.edges[i]
    if aligned:
        return own.backward + own.more - edge.rest_more
    return own.backward - edge.rest


@compiled
def fill_suffix(count: int, aligned: bool, tables: Any, suffix: Any) -> None:
    """Fill in ``suffix``, which comes filled with infinity (the splits with zeros)."""
    trip, finish, others, splits = suffix
    stages, blocks = len(trip) - 1, trip.shape[1] - 1
    trip[stages, blocks] = finish[stages, blocks] = 0.0
    last = others[stages, blocks]
    last.first = last.later = last.starts = last.paired = last.unpaired = 0.0
    for k in range(stages - 1, -1, -1):
        for i in range(blocks - (stages - k), k - 1, -1):
            for j in range(i + 1, blocks - (stages - k - 1) + 1):
                if not tables.allowed[k, i, j] or trip[k + 1, j] == np.inf:
                    continue
                own = own_seconds(i, j, count, tables)
                ahead = tables.stages[i, j].forward + tables.sends[k, j].ahead
                back = tables.sends[k, j].back + return_seconds(i, j, aligned, tables)
                here = own - (tables.edges[i].rest_more if aligned else tables.edges[i].rest)
                if k + 1 < stages:
                    here = max(here, ahead + trip[k + 1, j] + back)
                if here < trip[k, i]:
                    trip[k, i] = here
                    splits[0, k, i] = j
                finish[k, i] = min(
                    finish[k, i], max(own + tables.stages[i, j].tail, ahead + finish[k + 1, j])
                )
                add_others(k, i, j, tables, others, splits)
    add_work(aligned, tables, others)


@inner
def add_others(k: int, i: int, j: int, tables: Any, others: Any, splits: Any) -> None:
    """Lower the figures of the stages from k on by a stage of blocks i up to j."""
    own, edge, sends = tables.stages[i, j], tables.edges[i], tables.sends[k, j]
    after, found = others[k + 1, j], others[k, i]
    start = own.lead + own.forward
    returned = own.back_lead + own.backward + own.more
    found.first = min(found.first, after.first + sends.ahead + sends.back - edge.rest)
    found.later = min(found.later, after.later + sends.ahead + sends.back - edge.rest_more)
    found.starts = min(found.starts, max(after.starts, start))
    period = max(after.paired, start + returned)
    if period < found.paired:
        found.paired = period
        splits[1, k, i] = j
    found.unpaired = min(found.unpaired, max(after.unpaired, returned))


@inner
def add_work(aligned: bool, tables: Any, others: Any) -> None:
    """Complete the figures that are sums over all blocks that are left, and the slack."""
    stages, blocks = others.shape[0] - 1, others.shape[1] - 1
    slack = 0.0
    for i in range(blocks - 1, -1, -1):
        slack = max(slack, tables.edges[i].rest_more - tables.edges[i].rest)
        rest = tables.stages[i, blocks]
        for k in range(stages):
            found = others[k, i]
            found.first += rest.forward + rest.backward
            found.later += rest.forward + rest.backward + rest.more
            found.sooner = slack
            if not aligned:
                found.later = found.first


NOTHING_BETTER = 1e-12
"""The least share by which a split must be better than the best so far."""


@inner
def fits(bounds: Any, tables: Any) -> bool:
    """Whether every stage holds a block, and what is on each rank fits in its memory."""
    stages = len(bounds) - 1
    for s in range(stages):
        if bounds[s + 1] <= bounds[s] or not tables.allowed[s, bounds[s], bounds[s + 1]]:
            return False
    if len(tables.rank_of) > len(tables.limits):  # several stages on a rank
        used = np.zeros(len(tables.limits))
        for s in range(len(tables.rank_of)):
            used[tables.rank_of[s]] += tables.bytes[s % stages, bounds[s % stages], bounds[s % stages + 1]]
        return bool((used <= tables.limits).all())
    return True


@inner
def exact(bounds: Any, order: Any, tables: Any, room: Any) -> float:
    """Return the step time of a split, infinite if it does not fit in memory."""
    if not fits(bounds, tables):
        return np.inf
    if not order.plain:
        return replay(bounds, order, tables, room)
    return makespan(bounds, len(bounds) - 1, room.none[0], order, tables, room)


@inner
def copy(source: Any, target: Any) -> None:
    """Copy element by element."""
    for i in range(len(source)):
        target[i] = source[i]


@compiled
def climb(bounds: Any, order: Any, tables: Any, room: Any) -> tuple[float, int]:
    """Move one or two blocks between any two stages while that is faster; ``bounds`` become the best found.

    Return its step time and how many splits were simulated.
    """
    stages = len(bounds) - 1
    best, tried = exact(bounds, order, tables, room), 1
    trial, found = np.zeros(stages + 1, np.int64), np.zeros(stages + 1, np.int64)
    copy(bounds, found)
    better = True
    while better:
        better = False
        for first in range(1, max(stages, 2)):
            for last in range(first, max(stages, 2)):
                for step in range(5):
                    move = step - 2
                    for s in range(stages + 1):
                        trial[s] = bounds[s] + (move if first <= s <= last and s < stages else 0)
                    if move == 0:
                        continue
                    time = exact(trial, order, tables, room)
                    tried += 1
                    if time < best * (1 - NOTHING_BETTER):
                        best, better = time, True
                        copy(trial, found)
        copy(found, bounds)
    return best, tried


@compiled
def exhaust(best: Any, time: float, order: Any, tables: Any, room: Any) -> tuple[float, int]:
    """Try every split; ``best``, of this ``time``, becomes the fastest. Return its time and the effort."""
    stages, blocks = len(best) - 1, best[len(best) - 1]
    bounds = np.arange(stages + 1)
    bounds[stages] = blocks
    tried, moved = 0, 1
    while moved > 0:
        found = exact(bounds, order, tables, room)
        tried += 1
        if found < time * (1 - NOTHING_BETTER):
            time = found
            copy(bounds, best)
        moved = stages - 1  # the last stage that can begin one block later, and those after it right behind
        while moved > 0 and bounds[moved] + 1 > blocks - (stages - moved):
            moved -= 1
        if moved > 0:
            bounds[moved] += 1
            for s in range(moved + 1, stages):
                bounds[s] = bounds[s - 1] + 1
    return time, tried


@inner
def bound_of(
    k: int, j: int, bounds: Any, count: int, order: Any, tables: Any, suffix: Any, sums: Any
) -> float:
    """Return a bound on the step time when stage k ends before block j, from sums over the stages before.

    ``sums[0, k]``: seconds to stage k; ``sums[1, k]``: back from it to the end of the step.
    """
    i = bounds[k]
    own = own_seconds(i, j, count, tables)
    stage, sends = tables.stages[i, j], tables.sends[k, j]
    leaves = tables.edges[i].rest_more if order.aligned else tables.edges[i].rest
    back = sums[1, k] if k > 0 else leaves + stage.tail
    ahead = sums[0, k] + stage.forward + sends.ahead
    least = max(sums[0, k] + own + stage.tail, sums[0, k] + own - leaves + back)
    last = k + 2 == len(bounds)
    if not last:
        returned = sends.back + return_seconds(i, j, order.aligned, tables)
        least = max(least, ahead + suffix.trip[k + 1, j] + returned + back, ahead + suffix.finish[k + 1, j])
    return least


@inner
def choices(
    k: int, bounds: Any, best: Any, time: float, count: int, state: Any, sums: Any, ends: Any, least: Any
) -> tuple[int, float, int]:
    """Find the ends of stage k after which a split may still be faster, the most promising first.

    Fill in ``ends`` and the bounds ``least``; return how many they are, the time of the best split so far and
    the effort. When one stage is left, splits are complete: the best goes to ``best``.
    """
    order, tables, suffix, room = state
    stages, blocks = len(best) - 1, best[len(best) - 1]
    i = bounds[k]
    width = tried = 0
    for j in range(i + 1, blocks - (stages - k - 1) + 1):
        if not tables.allowed[k, i, j] or suffix.trip[k + 1, j] == np.inf:
            continue
        bound = bound_of(k, j, bounds, count, order, tables, suffix, sums)
        if bound >= time * (1 - NOTHING_BETTER):
            continue
        bounds[k + 1] = j
        tried += 1
        if k + 2 >= stages:
            bounds[stages] = blocks
            found = exact(bounds, order, tables, room)
            if found < time * (1 - NOTHING_BETTER):
                time = found
                copy(bounds, best)
            continue
        bound = max(bound, makespan(bounds, k + 1, suffix.others[k + 1, j], order, tables, room))
        if bound >= time * (1 - NOTHING_BETTER):
            continue
        place = width
        while place > 0 and least[place - 1] > bound:
            least[place], ends[place] = least[place - 1], ends[place - 1]
            place -= 1
        least[place], ends[place] = bound, j
        width += 1
    return width, time, tried


@compiled
def search(best: Any, time: float, count: int, limit: int, state: Any) -> tuple[float, float, int]:
    """Find a better split than ``best``, which takes ``time``; return its time, a bound, and the effort.

    Depth first, one stage after the other; a choice of the first stages is dropped when no split that begins
    with it can be better. After ``limit`` simulations the bound is that of what is still open. ``state``:
    order, tables, suffix and room, as elsewhere.
    """
    order, tables = state[0], state[1]
    stages, blocks = len(best) - 1, best[len(best) - 1]
    bounds = np.zeros(stages + 1, np.int64)
    sums = np.zeros((2, stages + 1))
    ends = np.zeros((stages, blocks + 1), np.int64)
    least = np.zeros((stages, blocks + 1))
    width, at = np.zeros(stages, np.int64), np.zeros(stages, np.int64)
    k = int(at[0])  # 0, but not the literal, for which `choices` would be compiled once more
    width[0], time, tried = choices(k, bounds, best, time, count, state, sums, ends[k], least[k])
    while k >= 0:
        if at[k] == width[k] or least[k, at[k]] >= time * (1 - NOTHING_BETTER):
            k -= 1
            continue
        if tried >= limit:
            lowest = time
            for level in range(k + 1):
                if at[level] < width[level]:
                    lowest = min(lowest, least[level, at[level]])
            return time, lowest, tried
        i, j = bounds[k], ends[k, at[k]]
        at[k] += 1
        stage, sends = tables.stages[i, j], tables.sends[k, j]
        leaves = tables.edges[i].rest_more if order.aligned else tables.edges[i].rest
        back = sums[1, k] if k > 0 else leaves + stage.tail
        bounds[k + 1] = j
        sums[0, k + 1] = sums[0, k] + stage.forward + sends.ahead
        sums[1, k + 1] = back + sends.back + return_seconds(i, j, order.aligned, tables)
        k += 1
        at[k] = 0
        width[k], time, more = choices(k, bounds, best, time, count, state, sums, ends[k], least[k])
        tried += more
    return time, time, tried
