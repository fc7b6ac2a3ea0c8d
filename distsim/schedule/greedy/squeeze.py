"""Squeezing: what ranks do in ticks of equal length moves to earlier free ticks, within a memory.

The step of Qi et al. 2024 ("Pipeline parallelism with controllable memory", arXiv 2405.15362) that follows
the repetition of a building block; ``distsim.schedule.greedy.controllable_memory`` has the blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from distsim.compile import compiled, inner
from distsim.schedule.codes import code_of

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
