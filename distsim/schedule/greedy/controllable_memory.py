"""V-Half, V-Min and 1F1B-V: a building block is repeated, then squeezed within the memory that it needs.

Qi et al. 2024 ("Pipeline parallelism with controllable memory", arXiv 2405.15362). A microbatch goes down the
ranks and up again, rank ``r`` holding stages ``r`` and ``2p - 1 - r``, with F and then with I: four passes.
The block says at which tick each pass reaches each rank; microbatch ``j`` runs ``6 j`` ticks later, since F,
I and W of two stages last six ticks. How long a rank keeps an activation within the block sets the memory.
Ticks in which ranks idle before all are busy, and when they run empty, are then squeezed out, in the ways of
sail-sg/zero-bubble-pipeline-parallelism at 39f2c186 (scheduler/zbv_greedy.py, v1f1b.py). The orders come from
ticks of equal length: they do not depend on times.

Squeezing: what ranks do in ticks of equal length moves to earlier free ticks, within a memory.

The step of Qi et al. 2024 ("Pipeline parallelism with controllable memory", arXiv 2405.15362) that follows
the repetition of a building block; ``distsim.schedule.greedy.controllable_memory`` has the blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from distsim.cache import cached
from distsim.compile import compiled, inner
from distsim.schedule.codes import code_of
from distsim.schedule.refusals import check_sizes
from distsim.schedule.table import Schedule

PERIOD = 6
"""Ticks from one microbatch to the next: F, I and W of two stages."""


def v_half(num_ranks: int, num_microbatches: int, chunks: int = 2) -> Schedule:
    """V-Half: half the memory of 1F1B, and about half its bubble.

    Holds ``2 ((p + 2) // 2)`` activations of a stage on a rank; with F, I and W of equal length the bubble is
    1, 5, 17, 41 units for ``p`` of 2, 4, 8, 16, from ``m = 2p`` on. With fewer microbatches
    the ranks never are all busy, and less is squeezed out than could be (29 of the 34 units of p = m = 4 were
    enough), as in sail-sg's code, whose orders some of these are shorter than.

    Raises:
        ScheduleError: a size is not an integer of at least 1, or chunks is not 2.

    >>> print(v_half(1, 2))
    v_half: 2 stages on 1 rank, 2 microbatches
    rank 0: F0@0 F0@1 I0@1 W0@1 I0@0 W0@0 F1@0 F1@1 I1@1 I1@0 W1@1 W1@0
    """
    check_sizes("v_half", num_ranks, num_microbatches, chunks, only=2)
    return _split_backward("v_half", num_ranks, num_microbatches)


def v_min(num_ranks: int, num_microbatches: int, chunks: int = 2) -> Schedule:
    """V-Min: a third of the memory of 1F1B, and about two thirds of its bubble.

    Holds ``2 ((p + 4) // 3)`` activations of a stage on a rank; with F, I and W of equal length the bubble is
    3, 11, 27, 59 units for ``p`` of 2, 4, 8, 16, from ``m = 2p`` on. With other times a rank
    waits in each microbatch. With fewer microbatches it is as for :func:`v_half`.

    Raises:
        ScheduleError: a size is not an integer of at least 1, or chunks is not 2.

    >>> max(map(v_min(8, 16).in_flight, range(8))), max(map(v_half(8, 16).in_flight, range(8)))
    (8, 10)
    """
    check_sizes("v_min", num_ranks, num_microbatches, chunks, only=2)
    return _split_backward("v_min", num_ranks, num_microbatches)


def one_f_one_b_v(num_ranks: int, num_microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B-V: two thirds of the memory of 1F1B, with whole backwards.

    Holds about ``4p / 3`` activations of a stage on a rank; if a backward lasts as long as two forwards the
    bubble is 4, 15, 33, 75 units for ``p`` of 2, 4, 8, 16, from ``m = 2p`` on.

    Raises:
        ScheduleError: a size is not an integer of at least 1, or chunks is not 2.

    >>> print(one_f_one_b_v(1, 2))
    1f1b_v: 2 stages on 1 rank, 2 microbatches
    rank 0: F0@0 F0@1 B0@1 B0@0 F1@0 F1@1 B1@1 B1@0
    """
    check_sizes("1f1b_v", num_ranks, num_microbatches, chunks, only=2)
    return _whole_backward(num_ranks, num_microbatches)


def v_half_block(num_ranks: int) -> Ints:
    """Return the ticks [ranks, 4 passes] of the first microbatch: down two ticks a rank, up one."""
    steps = np.tile(np.array([[2], [1], [2], [1]]), num_ranks)
    steps[2, 0] = 4 if num_ranks % 2 == 0 else 1
    steps[3, 0] = 2
    return _block(steps)


def v_min_block(num_ranks: int) -> Ints:
    """Return the ticks [ranks, 4 passes] of the first microbatch: a tick a rank."""
    steps = np.ones((4, num_ranks), np.int64)
    steps[2, 0] = 3 if num_ranks % 3 == 0 else 1
    return _block(steps)


def one_f_one_b_v_block(num_ranks: int) -> Ints:
    """Return the ticks [ranks, 4 passes] of the first microbatch: a tick for F, two for B, and gaps for F."""
    steps = np.ones((4, num_ranks), np.int64)
    backward = steps[2:].reshape(-1)
    backward[1:] = 2
    backward[1:][np.arange(1, 2 * num_ranks) % 3 == (num_ranks - 1) % 3] = 5
    backward[0] = 4 if num_ranks % 3 == 0 else 1
    return _block(steps)


def _block(steps: Ints) -> Ints:
    """Return the ticks [ranks, 4] of passes from the ticks between one stop and the next, [4, stops]."""
    ticks = (np.cumsum(steps) - steps[0, 0]).reshape(steps.shape)
    ticks[1::2] = ticks[1::2, ::-1].copy()
    return ticks.T


@cached("orders of v_half and v_min, by name and sizes", 256)
def _split_backward(name: str, num_ranks: int, num_microbatches: int) -> Schedule:
    block = {"v_half": v_half_block, "v_min": v_min_block}[name](num_ranks)
    m = num_microbatches
    board = make_board(block[:, :, None] + PERIOD * np.arange(m))
    put_weights(board)
    # The ranks fill up until the first rank is done with the I of a microbatch.
    squeeze(board, 0, num_ranks * int(board.ticks[0, 3, 0]), 1, False)
    board = make_board(run_eagerly(board)[:, :4, :m])
    # They run empty once a rank has no F of a first stage left.
    steady = num_ranks * int(board.ticks[0, 3, 0])
    last = num_ranks * board.ticks[:, 0, m - 1] + np.arange(num_ranks)
    empties = last[last >= steady]
    if empties.size:
        squeeze(board, int(empties.min()) + 1, UNLIMITED, 1, True)
    return _schedule(name, board, num_ranks, m, 6)


@cached("orders of 1f1b_v, by sizes", 256)
def _whole_backward(num_ranks: int, num_microbatches: int) -> Schedule:
    block = one_f_one_b_v_block(num_ranks)
    board = make_board(block[:, :, None] + PERIOD * np.arange(num_microbatches))
    ends = board.ticks[:, 2:4, :num_microbatches].reshape(num_ranks, -1) + 1
    np.put_along_axis(board.slots, ends, WEIGHTS, axis=1)
    squeeze(board, 0, UNLIMITED, 2, False)
    return _schedule("1f1b_v", board, num_ranks, num_microbatches, 4)


def _schedule(name: str, board: Board, num_ranks: int, num_microbatches: int, actions: int) -> Schedule:
    """Return the order of a board, with W, if backward is split, in the ticks that are free."""
    codes = np.full((num_ranks, actions * num_microbatches, 2), -1, np.int64)
    list_codes(board, actions == 6, codes)
    rank_of = (*range(num_ranks), *reversed(range(num_ranks)))
    return Schedule.from_codes(name, 2 * num_ranks, num_microbatches, list(codes), rank_of)


Ints = npt.NDArray[np.int64]

FREE = -1
WEIGHTS = 4
"""In slots, beside the passes 0 to 3 (F down, F up, I down, I up): nothing, and a W."""

UNLIMITED = 2**62


class Board(NamedTuple):
    """Which rank does what in which tick, as compiled loops read and write it."""

    ticks: Ints
    """[ranks, 5, 2 * microbatches]: when a pass starts, in half of its row, or a W."""
    slots: Ints
    """[ranks, ticks]: FREE, a pass, or WEIGHTS."""
    held: Ints
    """[ranks, ticks]: activations after the tick: each F makes one, each W frees one."""
    pending: Ints
    """[ranks, ticks]: how many I have run without their W."""


def make_board(ticks: Ints) -> Board:
    """Return a board with passes only, that start at ``ticks`` [ranks, 4, microbatches]."""
    ranks, _, m = ticks.shape
    shape = (ranks, int(ticks.max()) + 2 + 2 * m)  # all W may follow the last pass
    board = Board(
        ticks=np.zeros((ranks, 5, 2 * m), np.int64),
        slots=np.full(shape, FREE, np.int64),
        held=np.zeros(shape, np.int64),
        pending=np.zeros(shape, np.int64),
    )
    board.ticks[:, :4, :m] = ticks
    for number in range(4):
        np.put_along_axis(board.slots, ticks[:, number], number, axis=1)
    return board


@compiled
def put_weights(board: Any) -> None:
    """Put W, as soon as an I has run without one, into the ticks that are free."""
    ranks, width = board.slots.shape
    for rank in range(ranks):
        pending = done = 0
        for tick in range(width):
            if board.slots[rank, tick] >= 2:
                pending += 1
            elif board.slots[rank, tick] == FREE and pending > 0:
                board.slots[rank, tick] = WEIGHTS
                board.ticks[rank, WEIGHTS, done] = tick
                pending -= 1
                done += 1


@compiled
def squeeze(board: Any, begin: int, end: int, length: int, implicit: bool) -> None:
    """Move what starts at ``begin`` to ``end`` to the earliest free ticks that memory allows.

    Positions count ticks and, within one, ranks: tick * ranks + rank. In this order each action moves to
    before where it is, after its inputs, if no rank then holds more than the one that held most at first.

    Args:
        board: With W in its slots, unless ``implicit``.
        begin: The first position.
        end: Past the last position.
        length: Ticks of an I: 2 if its W comes with it.
        implicit: W are not on the board; they run in free ticks as soon as they can.
    """
    ranks, width = board.slots.shape
    limit = 0
    for rank in range(ranks):
        fits(board, rank, 0, width, UNLIMITED, implicit)
        for tick in range(width):
            limit = max(limit, board.held[rank, tick])
    done = np.zeros((ranks, 5), np.int64)
    for tick in range(width):
        for rank in range(ranks):
            number = board.slots[rank, tick]
            if number == FREE or (number == WEIGHTS and length == 2):
                continue
            index = done[rank, number]
            done[rank, number] += 1
            if begin <= tick * ranks + rank < end:
                span = length if 2 <= number < WEIGHTS else 1
                for earlier in range(earliest(board, rank, number, index, length), tick - span + 1):
                    if is_free(board, rank, earlier, span):
                        move(board, rank, tick, earlier, span)
                        if fits(board, rank, earlier, tick + span, limit, implicit):
                            board.ticks[rank, number, index] = earlier
                            break
                        move(board, rank, earlier, tick, span)
                        fits(board, rank, earlier, tick + span, UNLIMITED, implicit)


@inner
def is_free(board: Any, rank: int, tick: int, span: int) -> bool:
    """Whether a rank does nothing in ``span`` ticks."""
    free = True
    for offset in range(span):
        free = free and board.slots[rank, tick + offset] == FREE
    return free


@inner
def move(board: Any, rank: int, source: int, target: int, span: int) -> None:
    """Move ``span`` slots of a rank to slots that are free."""
    for offset in range(span):
        board.slots[rank, target + offset] = board.slots[rank, source + offset]
        board.slots[rank, source + offset] = FREE


@inner
def earliest(board: Any, rank: int, number: int, index: int, length: int) -> int:
    """Return the first tick after what an action of a rank waits for."""
    ticks = board.ticks
    ranks, last = len(ticks), -1
    if number == WEIGHTS:
        last = nth_input(ticks[rank], index)
    else:
        span = length if number >= 2 else 1
        neighbour = rank - 1 if number % 2 == 0 else rank + 1
        if 0 <= neighbour < ranks:
            last = ticks[neighbour, number, index] + span - 1
        if number > 0:
            last = max(last, ticks[rank, number - 1, index] + (length - 1 if number == 3 else 0))
    if index > 0:
        last = max(last, ticks[rank, number, index - 1])
    return last + 1


@inner
def nth_input(ticks: Any, index: int) -> int:
    """Return when the I with this number, of both stages of a rank, runs."""
    down = up = tick = 0
    m = ticks.shape[1] // 2
    while down + up <= index:
        if up == m or (down < m and ticks[2, down] < ticks[3, up]):
            tick = ticks[2, down]
            down += 1
        else:
            tick = ticks[3, up]
            up += 1
    return tick


@inner
def fits(board: Any, rank: int, begin: int, end: int, limit: int, implicit: bool) -> bool:
    """Count what a rank holds whose slots changed from ``begin`` to ``end``: whether ``limit`` at most."""
    held = pending = 0
    if begin > 0:
        held, pending = board.held[rank, begin - 1], board.pending[rank, begin - 1]
    for tick in range(begin, board.slots.shape[1]):
        number = board.slots[rank, tick]
        if number == FREE:
            if implicit and pending > 0:
                held -= 1
                pending -= 1
        elif number < 2:
            held += 1
        elif number == WEIGHTS:
            held -= 1
        else:
            pending += 1
        if held > limit:
            return False
        if tick >= end and held == board.held[rank, tick] and pending == board.pending[rank, tick]:
            return True
        board.held[rank, tick] = held
        board.pending[rank, tick] = pending
    return True


@compiled
def run_eagerly(board: Any) -> Any:
    """Return the ticks if each action, in the order of its rank, runs as soon as it can."""
    ranks, width = board.slots.shape
    ticks = np.zeros_like(board.ticks)
    clock = np.zeros(ranks, np.int64)
    done = np.zeros((ranks, 5), np.int64)
    for tick in range(width):
        for rank in range(ranks):
            number = board.slots[rank, tick]
            if number == FREE:
                continue
            index = done[rank, number]
            done[rank, number] += 1
            start = clock[rank]
            neighbour = rank - 1 if number % 2 == 0 else rank + 1
            if number != WEIGHTS and 0 <= neighbour < ranks:
                start = max(start, ticks[neighbour, number, index] + 1)
            ticks[rank, number, index] = start
            clock[rank] = start + 1
    return ticks


@compiled
def list_codes(board: Any, split: bool, codes: Any) -> None:
    """Fill in the codes of a schedule, [ranks, actions, 2]; if backward is split, with W in free ticks."""
    ranks, width = board.slots.shape
    for rank in range(ranks):
        listed = 0
        done = np.zeros(6, np.int64)  # of passes, and the W of the second stage and of the first
        for tick in range(width):
            number = board.slots[rank, tick]
            kind = 0 if number < 2 else 2 if split else 1
            if number == FREE and split:
                number = 4 if done[4] < done[2] else 5 if done[5] < done[3] else FREE
                kind = 3
            elif number == WEIGHTS:
                continue
            if number != FREE:
                stage = rank if number in (0, 3, 5) else 2 * ranks - 1 - rank
                codes[rank, listed, 0] = code_of(done[number] * 2 * ranks + stage, kind)
                done[number] += 1
                listed += 1
