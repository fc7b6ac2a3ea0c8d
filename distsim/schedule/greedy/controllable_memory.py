"""V-Half, V-Min and 1F1B-V: a building block is repeated, then squeezed within the memory that it needs.

Qi et al. 2024 ("Pipeline parallelism with controllable memory", arXiv 2405.15362). A microbatch goes down the
ranks and up again, rank ``r`` holding stages ``r`` and ``2p - 1 - r``, with F and then with I: four passes.
The block says at which tick each pass reaches each rank; microbatch ``j`` runs ``6 j`` ticks later, since F,
I and W of two stages last six ticks. How long a rank keeps an activation within the block sets the memory.
Ticks in which ranks idle before all are busy, and when they run empty, are then squeezed out, in the ways of
sail-sg/zero-bubble-pipeline-parallelism at 39f2c186 (scheduler/zbv_greedy.py, v1f1b.py). The orders come from
ticks of equal length: they do not depend on times.
"""

from __future__ import annotations

import numpy as np

from distsim.cache import cached
from distsim.schedule.greedy.squeeze import (
    UNLIMITED,
    WEIGHTS,
    Board,
    Ints,
    list_codes,
    make_board,
    put_weights,
    run_eagerly,
    squeeze,
)
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
