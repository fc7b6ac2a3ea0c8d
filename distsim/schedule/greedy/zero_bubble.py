"""Zero-bubble schedules found for given times and memory: ZB-1p, ZB-2p and what lies between, and ZB-V.

The heuristics of Qi et al. 2023 ("Zero bubble pipeline parallelism", arXiv 2401.10241, sections 3.1 and 6);
the paper's B is called I here. Where the paper leaves a choice open, the choice is that of sail-sg/
zero-bubble-pipeline-parallelism at 39f2c186 (scheduler/zb.py, zbv.py), so that the orders are the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from distsim.cache import cached
from distsim.compile import compiled, inner
from distsim.errors import ScheduleError
from distsim.schedule.greedy.list_scheduling import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    NEVER,
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
from distsim.schedule.refusals import check_sizes
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


@cached("orders of zb_auto, by costs", 64)
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


# --- ZB-V: rank r of p holds stages r and 2p - 1 - r; forwards run down the ranks and up again, and so do I -


def zb_v_greedy(
    num_ranks: int,
    num_microbatches: int,
    chunks: int = 2,
    *,
    memory_limit: float | Sequence[float] | None = None,
    seconds: Sequence[float] | Sequence[Sequence[float]] = (1.0, 1.0, 1.0),
    send: float = 0.0,
    weight_share: float | Sequence[float] = 1.0,
) -> Schedule:
    """Return the order of F, I and W on a V with the shortest span of a rank that the search finds.

    With F, I and W of equal length and ``m >= 2p`` microbatches no rank waits between its first action and
    its last, as under the fixed order of torch's ZBVZeroBubble; with fewer it waits less than under that.
    After a warm-up each round runs an I and an F on each rank, if they are ready. W fills a gap if it fits,
    and otherwise where a gap would make the rank the one that has waited most; W also makes room when the
    memory is full. All is repeated, each rank allowed to wait as much as it then had waited less than the
    longest, while that makes the span shorter; and all for both answers to whether a gap before an F, and one
    before an I on the way down, may be filled by a W that does not fit. Of equal results the first is taken.

    Args:
        num_ranks: Rank ``r`` holds stages ``r`` and ``2p - 1 - r``.
        num_microbatches: At least 1.
        chunks: Stages a rank: 2.
        memory_limit: The most activations (of one stage and one microbatch) that a rank holds from F until
            W, for all ranks or one number per rank; by default ``2p``, as much as 1F1B with half as many
            stages of twice the size.
        seconds: How long F, I and W of a stage take, or [stages, 3].
        send: Seconds that a message is on its way between ranks; it occupies nobody.
        weight_share: The share of an activation that W frees, the rest is freed by I; or one per stage.

    Raises:
        ScheduleError: a number is missing or makes no sense, or no order was found in this memory.

    >>> schedule = zb_v_greedy(2, 4)
    >>> schedule.in_flight(0), schedule.in_flight(1)
    (4, 4)
    """
    check_sizes("zb_v_greedy", num_ranks, num_microbatches, chunks, only=2)
    rank_of = (*range(num_ranks), *reversed(range(num_ranks)))
    limit = 2 * num_ranks if memory_limit is None else memory_limit
    return _search_v(make_costs("zb_v_greedy", num_microbatches, rank_of, limit, seconds, send, weight_share))


@cached("orders of zb_v_greedy, by costs", 64)
def _search_v(costs: Costs) -> Schedule:
    lines: list[Line] = []
    for fill_input, fill_forward in itertools.product((True, False), repeat=2):
        lines += _improve(fill_input, fill_forward, costs)
    if not lines:
        limit = ", ".join(f"{units / UNITS:g}" for units in dict.fromkeys(costs.limit))
        raise ScheduleError(
            f"zb_v_greedy: no order found in the memory of {limit} activations a rank; "
            f"give more, {len(costs.rank_of)} are the memory of 1F1B"
        )
    return make_schedule(costs, min(lines, key=longest_span))


def _improve(fill_input: bool, fill_forward: bool, costs: Costs) -> list[Line]:
    """Return the lines that are made one after the other, while they get shorter."""
    lines: list[Line] = []
    allowance = np.zeros(len(costs.limit), np.int64)
    while True:
        line = empty_line(costs)
        if not schedule_v(fill_input, fill_forward, allowance, line):
            return lines
        if lines and longest_span(line) >= longest_span(lines[-1]):
            return lines
        lines.append(line)
        allowance = line.ranks["idle"].max() - line.ranks["idle"]


@compiled
def schedule_v(fill_input: bool, fill_forward: bool, allowance: Any, line: Any) -> bool:
    """Issue all actions on an empty line; return whether it was possible.

    Args:
        fill_input: A gap before an I on its way down may be filled by a W that does not fit.
        fill_forward: A gap before an F may.
        allowance: [ranks]: ticks that the rank may have waited in all without a W being put into a gap.
    """
    ranks, last = len(line.ranks), len(line.stages) - 1
    warm_up_v(line)
    up = np.zeros(ranks, np.bool_)
    left = 2 * line.finish[0].size - line.done.sum()  # F and I
    while left > 0:
        before = left
        for rank in range(ranks):
            up[rank] = input_goes_up(rank, line)
        for rank in range(ranks - 1, -1, -1):
            if up[rank]:
                left -= issue_filled_v(BACKWARD_INPUT, rank, True, allowance, line)
        for rank in range(ranks):
            if not up[rank]:
                left -= issue_filled_v(BACKWARD_INPUT, last - rank, fill_input, allowance, line)
        for rank in range(ranks):
            left -= issue_filled_v(FORWARD, next_forward(rank, line), fill_forward, allowance, line)
        if left == before:
            return False
    for rank in range(ranks):
        drain(rank, line)
    return True


@inner
def warm_up_v(line: Any) -> None:
    """Issue the forwards before the first I."""
    ranks, last, m = len(line.ranks), len(line.stages) - 1, line.finish.shape[2]
    for rank in range(ranks):
        issue(FORWARD, rank, line)
    for place in range(ranks - 1, -1, -1):
        # While the first microbatch comes up, forwards that start on the first rank go as far as here.
        rank = line.ranks[place]
        room = rank.limit - (2 + 2 * place) * UNITS
        arrives = arrival(FORWARD, last - place, line)
        issued = 1
        while issued and rank.held <= room and rank.clock + line.ticks[FORWARD, place] <= arrives:
            issued = 0
            for above in range(place + 1 if place < ranks - 1 and line.done[FORWARD, place] < m else 0):
                issued += issue_forward(above, line)
        issue_forward(last - place, line)
    up = False
    for rank in range(1, ranks):
        # Until the rank has as many as the one before, and of what goes up one more: down and up in turn.
        idle = 0
        while idle < 2:
            here, before = line.done[FORWARD, last - rank], line.done[FORWARD, last - rank + 1]
            fewer = here + line.done[FORWARD, rank] < before + line.done[FORWARD, rank - 1]
            if not fewer and not here <= before < m:
                break
            issued = 0
            for below in range(ranks - 1, rank - 1, -1):
                issued += issue_forward(last - below if up else below, line)
            idle = 0 if issued else idle + 1
            up = not up


@inner
def input_goes_up(rank: int, line: Any) -> bool:
    """Whether the next I of a rank is that of its first stage, which the rank before waits for."""
    down, up = line.done[BACKWARD_INPUT, len(line.stages) - 1 - rank], line.done[BACKWARD_INPUT, rank]
    return up < down and (down == line.finish.shape[2] or arrival(BACKWARD_INPUT, rank, line) < NEVER)


@inner
def next_forward(rank: int, line: Any) -> int:
    """Return the stage whose F the rank runs next: what is on its way up goes first, if it is there."""
    last = len(line.stages) - 1 - rank
    down, up = line.done[FORWARD, rank], line.done[FORWARD, last]
    coming = down == line.finish.shape[2] or (up < down and arrival(FORWARD, last, line) < NEVER)
    return last if coming else rank


@inner
def is_ready(kind: int, stage: int, line: Any) -> bool:
    """Whether a microbatch is left, its input is made, and the F of an I has run."""
    if line.done[kind, stage] == line.finish.shape[2] or arrival(kind, stage, line) >= NEVER:
        return False
    return kind == FORWARD or line.done[FORWARD, stage] > line.done[BACKWARD_INPUT, stage]


@inner
def issue_forward(stage: int, line: Any) -> int:
    """Issue an F if it is ready and there is memory for it; return how many, 0 or 1."""
    rank = line.ranks[line.stages[stage].rank]
    if not is_ready(FORWARD, stage, line) or rank.held + UNITS > rank.limit:
        return 0
    issue(FORWARD, stage, line)
    return 1


@inner
def issue_filled_v(kind: int, stage: int, fill: bool, allowance: Any, line: Any) -> int:
    """Issue an F or I if it is ready, before it W to make room and fill the gap; return how many, 0 or 1."""
    if not is_ready(kind, stage, line):
        return 0
    place = line.stages[stage].rank
    rank = line.ranks[place]
    if kind == FORWARD:
        make_room(place, line)
        if rank.held + UNITS > rank.limit:
            return 0
    least = max(behind(place, line), allowance[place] - rank.idle) if fill else NEVER
    fill_gap(place, arrival(kind, stage, line), least, line)
    issue(kind, stage, line)
    return 1
