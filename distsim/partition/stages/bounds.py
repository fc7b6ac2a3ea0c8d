"""The compiled dynamic programs: what the stages that are not chosen yet cost at least."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from distsim.compile import compiled


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


@compiled
def own_seconds(i: int, j: int, count: int, tables: Any) -> float:
    """Return how long a stage is busy from its first arrival on, over ``count`` microbatches."""
    forward, lead = tables.forward[i, j], tables.lead[i, j]
    busy = forward + (count - 1) * (lead + forward) + (count - 1) * tables.more[i, j]
    return busy + count * (tables.back_lead[i, j] + tables.backward[i, j])


@compiled
def return_seconds(i: int, j: int, aligned: bool, tables: Any) -> float:
    """Return the seconds from the gradient that a stage receives last to the one that it sends."""
    if aligned:
        return tables.backward[i, j] + tables.more[i, j] - tables.rest_more[i]
    return tables.backward[i, j] - tables.rest[i]


@compiled
def fill_suffix(count: int, aligned: bool, tables: Any, suffix: Any) -> None:
    """Fill in ``suffix``, which comes filled with infinity (the splits with zeros)."""
    trip, finish, others, splits = suffix
    stages, blocks = len(trip) - 1, trip.shape[1] - 1
    trip[stages, blocks] = finish[stages, blocks] = 0.0
    others[stages, blocks] = 0.0
    for k in range(stages - 1, -1, -1):
        for i in range(blocks - (stages - k), k - 1, -1):
            for j in range(i + 1, blocks - (stages - k - 1) + 1):
                if not tables.allowed[k, i, j] or trip[k + 1, j] == np.inf:
                    continue
                own = own_seconds(i, j, count, tables)
                ahead = tables.forward[i, j] + tables.ahead[k, j]
                back = tables.back[k, j] + return_seconds(i, j, aligned, tables)
                here = own - (tables.rest_more[i] if aligned else tables.rest[i])
                if k + 1 < stages:
                    here = max(here, ahead + trip[k + 1, j] + back)
                if here < trip[k, i]:
                    trip[k, i] = here
                    splits[0, k, i] = j
                finish[k, i] = min(finish[k, i], max(own + tables.tail[i, j], ahead + finish[k + 1, j]))
                add_others(k, i, j, tables, others, splits)
    add_work(aligned, tables, others)


@compiled
def add_others(k: int, i: int, j: int, tables: Any, others: Any, splits: Any) -> None:
    """Lower the figures of the stages from k on by a stage of blocks i up to j."""
    sends = tables.ahead[k, j] + tables.back[k, j]
    after, own = others[k + 1, j], others[k, i]
    start = tables.lead[i, j] + tables.forward[i, j]
    returned = tables.back_lead[i, j] + tables.backward[i, j] + tables.more[i, j]
    own[0] = min(own[0], after[0] + sends - tables.rest[i])
    own[1] = min(own[1], after[1] + sends - tables.rest_more[i])
    own[2] = min(own[2], max(after[2], start))
    period = max(after[3], start + returned)
    if period < own[3]:
        own[3] = period
        splits[1, k, i] = j
    own[4] = min(own[4], max(after[4], returned))


@compiled
def add_work(aligned: bool, tables: Any, others: Any) -> None:
    """Complete the figures that are sums over all blocks that are left, and the slack."""
    stages, blocks = others.shape[0] - 1, others.shape[1] - 1
    slack = 0.0
    for i in range(blocks - 1, -1, -1):
        slack = max(slack, tables.rest_more[i] - tables.rest[i])
        work = tables.forward[i, blocks] + tables.backward[i, blocks]
        for k in range(stages):
            own = others[k, i]
            own[0] += work
            own[1] += work + tables.more[i, blocks]
            own[5] = slack
            if not aligned:
                own[1] = own[0]
