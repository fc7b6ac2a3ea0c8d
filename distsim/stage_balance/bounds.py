"""The compiled dynamic programs: what the stages that are not chosen yet cost at least."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from distsim.compile import compiled, inner


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
