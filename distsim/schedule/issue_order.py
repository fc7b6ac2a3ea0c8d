"""The global order of a schedule's cells, with the steps that repeat written once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from distsim.schedule.repeats import find_repeats, note_ends
from distsim.schedule.table import Ints, Schedule

LATER, LAST = 1, 2
"""What a call of a stage's forward, or backward, is in the order of its rank: not its first, its last."""
MOST_CANDIDATES = 64
"""How many ways to repeat are tried at a step: an interleaved schedule repeats every p microbatches."""


@dataclass(frozen=True, eq=False)
class IssueOrder:
    """The cells of :meth:`Schedule.merged`, in rounds of which each is repeated.

    Round ``r`` are the cells ``start[r]:start[r + 1]``, in their order, for its first repetition; in
    repetition ``k`` of ``repeats[r]`` (from 0) every microbatch is ``k * advance[r]`` higher (looped BFS runs
    backward in reverse: -1). ``code`` [cells, 2] are the actions of each cell as of
    :meth:`Schedule.from_codes`, ``step`` [cells] the step of a cell in its round. ``place`` [cells, 2] tells
    of each action whether its stage has run one of its kind before (:data:`LATER`) and whether it runs none
    after it (:data:`LAST`), with B and W as one kind: all repetitions of a round agree in that.

    1F1B warms up, repeats one forward and one backward on every rank, and drains:

    >>> from distsim.schedule import one_f_one_b
    >>> issue_order(one_f_one_b(2, 1000)).repeats.tolist()
    [1, 1, 996, 1, 1]
    """

    schedule: Schedule
    rank: Ints
    code: Ints
    step: Ints
    place: Ints
    start: Ints
    repeats: Ints
    advance: Ints
    latest: Ints

    @cached_property
    def microbatch(self) -> Ints:
        """[cells, 2]: of the first repetition; -1 for no action."""
        return np.where(self.code < 0, -1, self.code // (4 * max(self.schedule.num_stages, 1)))

    @cached_property
    def family(self) -> Ints:
        """[cells, 2]: 4 * stage + kind of each action; -1 for no action."""
        return np.where(self.code < 0, -1, self.code % (4 * max(self.schedule.num_stages, 1)))

    @cached_property
    def calls(self) -> tuple[Ints, Ints]:
        """The distinct cells, [calls, 2], by 4 * family + place of their actions (-1: none), and of each
        cell which it is."""
        none = 16 * self.schedule.num_stages
        actions = np.where(self.family < 0, none, self.family * 4 + self.place)
        pairs, number = np.unique(actions[:, 0] * (none + 1) + actions[:, 1], return_inverse=True)
        calls = np.stack(np.divmod(pairs, none + 1), axis=1)
        return np.where(calls == none, -1, calls), number.reshape(-1)


def issue_order(schedule: Schedule) -> IssueOrder:
    """Return the order of a schedule, kept with it; raises what :meth:`Schedule.merged` raises."""
    found = schedule.__dict__.get("issue_order")  # as a cached property: each refers to the other
    if found is None:
        found = schedule.__dict__["issue_order"] = _folded(schedule)
    return found


def _folded(schedule: Schedule) -> IssueOrder:
    rank, ends_step = schedule.merged()
    code, stages = schedule.codes_in_order, schedule.num_stages
    period = 4 * max(stages, 1)
    steps = np.concatenate([[0], np.flatnonzero(ends_step) + 1]).astype(np.int64)
    parts = np.zeros((2 * len(steps) + 1, 4), np.int64)
    count = find_repeats(rank, code, steps, period, MOST_CANDIDATES, parts)
    first, last = np.full(3 * stages, -1, np.int64), np.full(3 * stages, -1, np.int64)
    latest = np.full((stages, 3), -1, np.int64)
    note_ends(code, max(stages, 1), first, last, latest)
    rounds: list[tuple[int, int, int, int]] = []  # first cell, cells, repetitions, shift
    for step, length, times, shift in parts[:count].tolist():
        begin, size = int(steps[step]), int(steps[step + length] - steps[step])
        cuts = {0, times}
        cuts |= {1} if _among(first, begin, size) else set()
        cuts |= {times - 1} if _among(last, begin + (times - 1) * size, size) else set()
        for k, after in pairwise(sorted(cuts)):
            rounds.append((begin + k * size, size, after - k, shift if after - k > 1 else 0))
    begin, size, repeats, shift = np.array(rounds, np.int64).reshape(-1, 4).T
    start = np.concatenate([[0], size.cumsum()]).astype(np.int64)
    within = np.repeat(np.arange(len(size)), size)
    cells = np.arange(len(within)) - start[within] + begin[within]
    own, ends = code[cells], ends_step[cells]
    step = ends.cumsum() - ends
    which, place = _kind_of(own, stages), 2 * cells[:, None] + np.arange(2)
    there = own >= 0
    later = np.where(there & (first[which] != place), LATER, 0)
    columns = (
        rank[cells],
        own,
        step - step[start[:-1]][within] if len(cells) else cells,
        later + np.where(there & (last[which] == place), LAST, 0),
        start,
        repeats.copy(),
        shift // period,
        latest,
    )
    for column in columns:
        column.setflags(write=False)
    return IssueOrder(schedule, *columns)


def _among(places: Ints, begin: int, size: int) -> bool:
    """Whether one of these places, two to a cell, is in one of so many cells."""
    return bool(((places >= 2 * begin) & (places < 2 * (begin + size))).any())


def _kind_of(code: Ints, num_stages: int) -> Ints:
    """Return 3 * stage + kind of codes, with B and W, which add to the same sums, as one kind; 0 for none."""
    return np.where(code < 0, 0, code // 4 % max(num_stages, 1) * 3 + np.array([0, 1, 2, 1])[code % 4])
