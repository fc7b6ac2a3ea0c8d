"""The zero-bubble schedule found for given times and memory: ZB-1p, ZB-2p and what lies between.

The heuristic of Qi et al. 2023 ("Zero bubble pipeline parallelism", arXiv 2401.10241, section 3.1), whose
W is the paper's and whose I is the paper's B. Where the paper leaves a choice open, the choice is that of
sail-sg/zero-bubble-pipeline-parallelism at 39f2c186 (scheduler/zb.py), so that the orders are the same.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from distsim.compile import compiled, inner
from distsim.schedule.greedy.list_scheduling import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    UNITS,
    Costs,
    Line,
    arrival,
    behind,
    drain,
    empty_line,
    fill_gap,
    issue,
    longest_span,
    make_costs,
    make_room,
    make_schedule,
)
from distsim.schedule.sizes import check_sizes
from distsim.schedule.table import Schedule


def zb_auto(
    num_ranks: int,
    num_microbatches: int,
    chunks: int = 1,
    *,
    memory_limit: float | Sequence[float] | None = None,
    seconds: Sequence[float] | Sequence[Sequence[float]] = (1.0, 1.0, 1.0),
    send: float = 0.0,
    weight_share: float | Sequence[float] = 1.0,
) -> Schedule:
    """Return the order of F, I and W with the shortest span of a rank that the heuristic finds.

    ZB-1p has the memory of 1F1B, ``p`` activations, and ZB-2p twice that, at which the bubble is zero if F, I
    and W last equally long and there are at least ``2p`` microbatches. As many forwards as fit warm a rank up
    before its first I arrives; from then on each round runs an F and an I, rank ``i``, where memory allows,
    at least one F ahead of rank ``i + 1``. W fills a gap if it fits, and otherwise if the gap would make the
    rank the one that has waited most; W also makes room when the memory is full. Three yes-or-no choices are
    all tried: whether a warm-up forward may delay the first I, whether a rank that is far ahead leaves out
    its F of a round, and whether W fills every gap. Of equal results the first is taken. The bubble rates of
    table 5 are those with the share of W that table 1 gives, 32 h / (34 h + 5 a s) for hidden size h, a
    heads and sequences of s.

    Args:
        num_ranks: Stage ``s`` is on rank ``s``.
        num_microbatches: At least 1.
        chunks: Stages a rank: 1.
        memory_limit: The most activations (of one stage and one microbatch) that a rank holds from F until
            W, for all ranks or one number per rank: at least 1, by default ``p``, ZB-1p.
        seconds: How long F, I and W take, or [stages, 3].
        send: Seconds that a message is on its way between ranks; it occupies nobody.
        weight_share: The share of an activation that W frees, the rest is freed by I; or one per stage.

    Raises:
        ScheduleError: a number is missing or makes no sense.

    >>> print(zb_auto(2, 3))
    zb_auto: 2 stages, 3 microbatches
    rank 0: F0 F1 I0 W0 F2 I1 W1 I2 W2
    rank 1: F0 I0 F1 I1 W0 F2 I2 W1 W2
    """
    check_sizes("zb_auto", num_ranks, num_microbatches, chunks, only=1)
    limit = num_ranks if memory_limit is None else memory_limit
    stages = range(num_ranks)
    return _search(make_costs("zb_auto", num_microbatches, stages, limit, seconds, send, weight_share))


@functools.lru_cache(64)
def _search(costs: Costs) -> Schedule:
    lines: list[Line] = []
    for early, lazy, greedy in itertools.product((True, False), repeat=3):
        lines.append(empty_line(costs))
        schedule_zero_bubble(early, lazy, greedy, lines[-1])
    return make_schedule(costs, min(lines, key=longest_span))


@compiled
def schedule_zero_bubble(early: bool, lazy: bool, greedy: bool, line: Any) -> None:
    """Issue all actions on an empty line.

    Args:
        early: Warm-up forwards end before the first I could start.
        lazy: A rank that is at least two F ahead leaves out its F where that costs nothing.
        greedy: W fills every gap, however short.
    """
    ranks, m = len(line.ranks), line.finish.shape[2]
    warm_up(early, line)
    for _ in range(1, m):
        forwards = next_forwards(lazy, line)
        for rank in range(ranks):
            if forwards[rank]:
                make_room(rank, line)
                issue_filled(FORWARD, rank, greedy, line)
        for rank in range(ranks - 1, -1, -1):
            if rank == 0 and line.done[FORWARD, 0] == m:
                drain(0, line)  # nobody waits for what the first rank does now
            issue_filled(BACKWARD_INPUT, rank, greedy, line)
    for rank in range(ranks):
        drain(rank, line)


@inner
def issue_filled(kind: int, rank: int, greedy: bool, line: Any) -> None:
    """Issue an F or I, and before it the W that fill the gap until its input arrives."""
    least = 0 if greedy else behind(rank, line)
    fill_gap(rank, arrival(kind, rank, line), least, line)
    issue(kind, rank, line)


@inner
def warm_up(early: bool, line: Any) -> None:
    """Issue the forwards before the first I of each rank, and those I."""
    ranks, m = len(line.ranks), line.finish.shape[2]
    for rank in range(ranks):
        issue(FORWARD, rank, line)
    more = np.zeros(ranks, np.int64)
    arrives = 0  # the gradient that the first I of the rank waits for
    for rank in range(ranks - 1, -1, -1):
        clock, forward = line.ranks[rank].clock, line.ticks[FORWARD, rank]
        room = line.ranks[rank].limit // UNITS
        while rank + 1 < ranks and 1 + more[rank] < min(m, room):
            if (clock + forward > arrives) if early else (clock >= arrives):
                break
            clock += forward
            more[rank] += 1
        arrives = max(clock, arrives) + line.ticks[BACKWARD_INPUT, rank] + line.send
    for rank in range(1, ranks):
        if min(more[rank], more[rank - 1]) < m - 1:
            more[rank] = min(more[rank], max(more[rank - 1] - 1, 0))
    for rank in range(ranks):
        for _ in range(more[rank]):
            issue(FORWARD, rank, line)
    for rank in range(ranks - 1, -1, -1):
        issue(BACKWARD_INPUT, rank, line)


@inner
def next_forwards(lazy: bool, line: Any) -> Any:
    """Return which ranks run an F in this round: those that have one left, but for lazy ones.

    Forwards that the next rank leaves out are left out before it as well.
    """
    ranks = len(line.ranks)
    wanted = np.zeros(ranks, np.bool_)
    for rank in range(ranks):
        wanted[rank] = line.done[FORWARD, rank] < line.finish.shape[2]
    for rank in range(ranks - 1):
        if lazy and wanted[rank] and line.done[FORWARD, rank] >= line.done[FORWARD, rank + 1] + 2:
            wanted[rank] = not may_wait(rank, line)
    for rank in range(ranks - 2, -1, -1):
        wanted[rank] = wanted[rank] and wanted[rank + 1]
    return wanted


@inner
def may_wait(place: int, line: Any) -> bool:
    """Whether a rank that leaves out its F has its next I in time, or waits no more than others have."""
    rank = line.ranks[place]
    arrives = line.ranks[place + 1].clock + line.send
    arrives += line.ticks[FORWARD, place + 1] + line.ticks[BACKWARD_INPUT, place + 1]
    if rank.clock >= arrives:
        return True
    end = rank.clock + line.ticks[FORWARD, place]
    excess = rank.held + UNITS - rank.limit
    for _ in range(rank.inputs - rank.weights):  # what must run to make room for the F
        if excess > 0:
            excess -= line.stages[place].share
            end += line.ticks[BACKWARD_WEIGHT, place]
    return end > arrives and arrives - rank.clock <= behind(place, line)
