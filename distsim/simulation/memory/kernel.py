"""Composing changes of memory over rows: the compiled loop behind ``program_memory``.

Every change adds a constant to what is in use on one rank, so a round that repeats adds the same each time:
its peak is reached in the first repetition or in the last, and the repetitions between need not be looked
at. Amounts are exact integers, in columns: bytes in all, then (if asked for) by kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from distsim.compile import compiled, inner
from distsim.errors import SimulationError

MAX_BYTES = 2**62
"""Of a rank: what is counted in 64 bits, and far more than any machine's memory holds."""

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Steps(NamedTuple):
    """Changes in order: of which rank, and which.

    Round ``r`` are ``start[r]:start[r + 1]``, ``repeats[r]`` times.
    """

    rank: Ints
    change: Ints
    start: Ints
    repeats: Ints


class Amounts(NamedTuple):
    """[changes, columns]: what each adds in the end, and at its own peak."""

    net: Ints
    peak: Ints


class Levels(NamedTuple):
    """[ranks, columns]: in use now, and at the peak.

    ``when`` [ranks, 2]: the step of the peak (-1: before the first) and its repetition.
    """

    level: Ints
    peak: Ints
    when: Ints


@inner
def run_once(levels: Levels, steps: Steps, amounts: Amounts, begin: int, end: int) -> None:
    """Run steps begin..end once."""
    level, peak, when = levels.level, levels.peak, levels.when
    rank, change, net, top = steps.rank, steps.change, amounts.net, amounts.peak
    columns = level.shape[1]
    for n in range(begin, end):
        r, c = rank[n], change[n]
        if level[r, 0] + top[c, 0] > peak[r, 0]:
            for k in range(columns):
                peak[r, k] = level[r, k] + top[c, k]
            when[r, 0] = n
            when[r, 1] = 0
        for k in range(columns):
            level[r, k] += net[c, k]


@compiled
def run_repeated(levels: Levels, first: Levels, before: Ints, steps: Steps, amounts: Amounts) -> None:
    """Run all steps; ``before`` [ranks, columns], and ``first`` but for its level, are working memory."""
    level, peak, when = levels.level, levels.peak, levels.when
    ranks, columns = before.shape
    for r in range(len(steps.repeats)):
        begin, end, later = steps.start[r], steps.start[r + 1], steps.repeats[r] - 1
        if later == 0:
            run_once(levels, steps, amounts, begin, end)
            continue
        for s in range(ranks):  # an assignment to a slice takes seconds to compile, for its error message
            for c in range(columns):
                before[s, c] = first.peak[s, c] = level[s, c]
        run_once(first, steps, amounts, begin, end)
        for s in range(ranks):
            grown = level[s, 0] - before[s, 0]
            times = later if grown > 0 else 0
            if first.peak[s, 0] > before[s, 0] and first.peak[s, 0] + times * grown > peak[s, 0]:
                for c in range(columns):
                    peak[s, c] = first.peak[s, c] + times * (level[s, c] - before[s, c])
                when[s, 0] = first.when[s, 0]
                when[s, 1] = times
            for c in range(columns):
                level[s, c] += later * (level[s, c] - before[s, c])


def counted(amounts: Sequence[Sequence[int]], columns: int) -> Ints:
    """Return [amounts, columns], bytes; raise :class:`SimulationError` for more than ``MAX_BYTES``."""
    try:
        found = np.array([row[:columns] for row in amounts], np.int64).reshape(len(amounts), columns)
    except OverflowError:
        check_bytes(max([abs(number) for row in amounts for number in row[:columns]]))
        raise
    check_bytes(float(np.abs(found).max(initial=0)))
    return found


def check_bytes(most: float) -> None:
    """Raise :class:`SimulationError` for so many bytes on a rank if they are more than ``MAX_BYTES``."""
    if most > MAX_BYTES:
        raise SimulationError(
            f"a rank may have up to {most:.3g} bytes in its memory during the step, and no more than 2^62 "
            "are counted; make the batch or the model smaller"
        )


def check_sums(initial: Ints, steps: Steps, amounts: Amounts) -> None:
    """Raise :class:`SimulationError` where what is in use on a rank may be more than ``MAX_BYTES``."""
    if not initial.size:
        return
    times = np.repeat(steps.repeats, np.diff(steps.start))
    grown = np.maximum(amounts.net[steps.change, 0], 0).astype(np.float64) * times
    total = np.bincount(steps.rank, grown, len(initial)) + initial[:, 0]
    check_bytes(float(total.max()) + float(amounts.peak[:, 0].max(initial=0)))


def compose(initial: Ints, steps: Steps, amounts: Amounts) -> Levels:
    """Return what is in use after all steps, from ``initial`` [ranks, columns] on, and at the peaks.

    No sum may be more than ``MAX_BYTES`` (:func:`check_sums`).
    """
    when = np.full((len(initial), 2), -1, np.int64)
    levels = Levels(initial.copy(), initial.copy(), when)
    first = Levels(levels.level, np.empty_like(initial), when.copy())
    run_repeated(levels, first, np.empty_like(initial), steps, amounts)
    return levels
