"""A schedule as memory sees it: its rounds, and the microbatches that are not like the others."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from weakref import WeakKeyDictionary

import numpy as np

from distsim.schedule import Schedule
from distsim.schedule.rounds import Rounds
from distsim.simulate.memory.kernel import Bools, Ints
from distsim.simulate.memory.life import Position

ORDINARY = Position((False, False), (False, False), False)


class Positions:
    """Per stage the positions of its microbatches: of all that are not special, then of each that is.

    The first is None where every microbatch is special. Compared by value, hashed once.
    """

    def __init__(self, of: tuple[tuple[Position | None, ...], ...]) -> None:
        self.of = of
        self._hash = hash(of)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Positions) and self.of == other.of)


@dataclass(frozen=True, eq=False)
class Pattern:
    """The rounds of a schedule, with all repetitions of a round alike, and its special microbatches.

    ``tasks`` are stages, phases, microbatches (of the first repetition), their sorts (0, or the place
    among all that are special on any stage, from 1), and whether a step ends. ``variants`` tells which of
    ``positions`` each sort is in on each stage. ``last_ends``: whether the last task of each stage and
    phase is of the last microbatch.
    """

    microbatches: int
    tasks: tuple[Ints, Ints, Ints, Ints, Bools]
    begins: Ints
    repeats: Ints
    specials: tuple[int, ...]
    variants: Ints
    positions: Positions
    last_ends: tuple[tuple[bool, bool], ...]

    def variant(self, stage: int, microbatch: int) -> int:
        """Return which of the stage's positions a microbatch is in."""
        sort = self.specials.index(microbatch) + 1 if microbatch in self.specials else 0
        return int(self.variants[stage, sort])


_PATTERNS: WeakKeyDictionary[Rounds, Pattern] = WeakKeyDictionary()


def pattern_of(schedule: Schedule) -> Pattern:
    """Return the pattern of a schedule, kept with it; raises ``ScheduleError`` as its ``rounds()``."""
    rounds = schedule.rounds()
    found = _PATTERNS.get(rounds)
    if found is None:
        found = _PATTERNS[rounds] = _pattern(rounds, schedule.num_stages, schedule.num_microbatches)
    return found


def _pattern(rounds: Rounds, count: int, m: int) -> Pattern:
    block = 2 * rounds.stage + rounds.phase
    ends = rounds.microbatch + np.repeat(rounds.repeats - 1, np.diff(rounds.start))
    first: list[list[int]] = _first_of(block, rounds.microbatch, 2 * count).reshape(count, 2).tolist()
    last: list[list[int]] = _first_of(block[::-1], ends[::-1], 2 * count).reshape(count, 2).tolist()
    special = [sorted({*first[s], *last[s], m - 1}) for s in range(count)]
    specials = sorted({microbatch for own in special for microbatch in own})
    variants = np.zeros((count, 1 + len(specials)), np.int64)
    of: list[tuple[Position | None, ...]] = []
    for s, own in enumerate(special):
        variants[s, 1 + np.searchsorted(specials, own)] = 1 + np.arange(len(own))
        (f0, b0), (f1, b1) = first[s], last[s]
        positions = [Position((i == f0, i == b0), (i == f1, i == b1), i == m - 1) for i in own]
        of.append((ORDINARY if len(own) < m else None, *positions))
    tasks, begins, repeats = _alike(rounds, np.array(specials, np.int64))
    ends_with_last = tuple([(f == m - 1, b == m - 1) for f, b in last])
    return Pattern(m, tasks, begins, repeats, tuple(specials), variants, Positions(tuple(of)), ends_with_last)


def _first_of(keys: Ints, values: Ints, count: int) -> Ints:
    """Return for each key the first value that it has."""
    found = np.full(count, -1, np.int64)
    found[keys[::-1]] = values[::-1]
    return found


def _alike(rounds: Rounds, specials: Ints) -> tuple[tuple[Ints, Ints, Ints, Ints, Bools], Ints, Ints]:
    """Cut the rounds where a repetition meets a special microbatch; return tasks, begins and repeats."""
    kept: list[Ints] = [np.zeros(0, np.int64)]
    shifts: list[int] = []
    repeats: list[int] = []
    starts: list[int] = rounds.start.tolist()
    for begin, end, count in zip(starts[:-1], starts[1:], rounds.repeats.tolist(), strict=True):
        away = (specials[:, None] - rounds.microbatch[None, begin:end]).ravel()
        met = away[(away >= 0) & (away < count)]
        cuts: list[int] = np.unique(np.concatenate([[0, count], met, met + 1])).tolist()
        for at, after in pairwise(cuts):
            kept.append(np.arange(begin, end))
            shifts.append(at)
            repeats.append(after - at)
    sizes = np.array([0, *map(len, kept[1:])], np.int64)
    tasks = np.concatenate(kept)
    microbatch = rounds.microbatch[tasks] + np.repeat(np.array(shifts, np.int64), sizes[1:])
    sort = np.searchsorted(specials, microbatch)
    sort = np.where(specials[np.minimum(sort, len(specials) - 1)] == microbatch, sort + 1, 0)
    columns = (rounds.stage[tasks], rounds.phase[tasks], microbatch, sort, rounds.ends_step[tasks])
    return columns, sizes.cumsum(), np.array(repeats, np.int64)
