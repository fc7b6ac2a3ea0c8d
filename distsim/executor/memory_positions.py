"""A schedule as memory sees it: its rounds, and the microbatches that are not like the others."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from distsim.executor.memory_kernel import Bools, Ints
from distsim.executor.memory_life import Position
from distsim.schedule import Phase, Schedule

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
    """The rounds of a schedule as arrays, and its special microbatches.

    ``special`` holds those of each stage in a row (filled up with -1), ``specials`` all of them in one
    row. ``last_ends`` tells per stage and phase whether its last task is of the last microbatch.
    """

    microbatches: int
    tasks: tuple[Ints, Ints, Ints, Bools]
    starts: Ints
    repeats: Ints
    special: Ints
    specials: Ints
    positions: Positions
    last_ends: tuple[tuple[bool, bool], ...]

    def variant(self, stage: int, microbatch: int) -> int:
        """Return which of the stage's positions a microbatch is in."""
        row: list[int] = self.special[stage].tolist()
        return row.index(microbatch) + 1 if microbatch in row else 0


_PATTERNS: WeakKeyDictionary[Schedule, Pattern] = WeakKeyDictionary()


def pattern_of(schedule: Schedule) -> Pattern:
    """Return the pattern of a schedule; raises ``ScheduleError`` as :meth:`Schedule.order`."""
    found = _PATTERNS.get(schedule)
    if found is None:
        found = _PATTERNS[schedule] = _pattern(schedule)
    return found


def _pattern(schedule: Schedule) -> Pattern:
    m, count = schedule.num_microbatches, schedule.num_stages
    steps = schedule.order()
    flat = [task for step in steps for task in step]
    phases = tuple(Phase)
    stage = np.array([task.stage for task in flat], np.int64)
    phase = np.array([phases.index(task.phase) for task in flat], np.int64)
    microbatch = np.array([task.microbatch for task in flat], np.int64)
    ends_step = np.zeros(len(flat), np.bool_)
    ends_step[np.cumsum([len(step) for step in steps]) - 1] = True
    starts, repeats = np.array([0, len(flat)], np.int64), np.array([1], np.int64)
    first = _at(2 * stage + phase, microbatch, 2 * count)
    ends = microbatch + np.repeat(repeats - 1, np.diff(starts))
    last = _at((2 * stage + phase)[::-1], ends[::-1], 2 * count)
    rows = [np.unique([*first[2 * s : 2 * s + 2], *last[2 * s : 2 * s + 2], m - 1]) for s in range(count)]
    special = np.full((count, max(map(len, rows), default=0)), -1, np.int64)
    of: list[tuple[Position | None, ...]] = []
    for s, row in enumerate(rows):
        special[s, : len(row)] = row
        (f0, b0), (f1, b1) = first[2 * s : 2 * s + 2].tolist(), last[2 * s : 2 * s + 2].tolist()
        own = [Position((mb == f0, mb == b0), (mb == f1, mb == b1), mb == m - 1) for mb in row.tolist()]
        of.append((ORDINARY if len(row) < m else None, *own))
    return Pattern(
        m,
        (stage, phase, microbatch, ends_step),
        starts,
        repeats,
        special,
        np.unique(special[special >= 0])[None, :],
        Positions(tuple(of)),
        tuple([(last[2 * s] == m - 1, last[2 * s + 1] == m - 1) for s in range(count)]),
    )


def _at(keys: Ints, values: Ints, count: int) -> npt.NDArray[np.int64]:
    """Return for each key the first value that it has."""
    found = np.full(count, -1, np.int64)
    found[keys[::-1]] = values[::-1]
    return found
