"""The repeating rounds of a schedule: its global order, with what repeats written once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from distsim.schedule.steps import count_repeated

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

LONGEST = 4
"""The most steps that one repetition of a round has when it is found."""


@dataclass(frozen=True, eq=False)
class Rounds:
    """The steps of :meth:`Schedule.order`, in rounds of which each is repeated.

    Round ``r`` are the actions ``start[r]:start[r + 1]``, in their order, for its first repetition; in
    repetition ``k`` of ``repeats[r]`` (from 0) every microbatch is ``k`` higher. ``phase`` is 0 for a
    forward and 1 for a backward; ``ends_step`` tells whether an action is the last of its step.

    1F1B warms up, repeats one forward and one backward on every rank, and drains:

    >>> from distsim.schedule import one_f_one_b
    >>> one_f_one_b(2, 1000).rounds().repeats.tolist()
    [1, 998, 1]
    """

    stage: Ints
    phase: Ints
    microbatch: Ints
    ends_step: Bools
    start: Ints
    repeats: Ints


def find_rounds(stage: Ints, code: Ints, ends_step: Bools) -> Rounds:
    """Compress actions in the order of their steps; ``code`` is 2 * microbatch + phase.

    Where the next one to ``LONGEST`` steps (the fewest) are run again right away, with every microbatch
    one higher, they are a round, repeated as often as that holds. What lies between is run once.
    """
    steps = _starts(ends_step)
    counted = np.zeros((LONGEST, len(steps)), np.int64)
    count_repeated(stage, code, steps, counted)
    runs: list[list[int]] = counted.tolist()
    parts: list[tuple[int, int, int]] = []  # (first step, step after the last, repeats)
    at, single = 0, 0
    while at < len(steps) - 1:
        length = next((n for n, run in enumerate(runs, 1) if run[at] >= n), 0)
        if not length:
            at += 1
            continue
        repeats = runs[length - 1][at] // length + 1
        parts += [(single, at, 1)] if single < at else []
        parts.append((at, at + length, repeats))
        single = at = at + length * repeats
    parts += [(single, at, 1)] if single < at else []
    kept: list[Ints] = [np.arange(int(steps[first]), int(steps[end])) for first, end, _ in parts]
    actions = np.concatenate([np.zeros(0, np.int64), *kept])
    sizes = np.array([0, *map(len, kept)], np.int64)
    repeats_of = np.array([repeats for _, _, repeats in parts], np.int64)
    stage, code, ends_step = stage[actions], code[actions], ends_step[actions]
    columns = (stage, code % 2, code // 2, ends_step, sizes.cumsum(), repeats_of)
    for column in columns:
        column.setflags(write=False)
    return Rounds(*columns)


def _starts(ends_step: Bools) -> Ints:
    """Return the first action of each step, and the number of actions."""
    return np.concatenate([[0], np.flatnonzero(ends_step) + 1]).astype(np.int64)
