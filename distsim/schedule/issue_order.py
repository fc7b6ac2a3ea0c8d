"""The global order of a schedule's cells, with the steps that repeat written once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from weakref import WeakKeyDictionary

import numpy as np

from distsim.schedule.repeats import find_repeats
from distsim.schedule.table import Bools, Ints, Schedule

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
    [1, 1, 997, 1]
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


_ORDERS: WeakKeyDictionary[Schedule, IssueOrder] = WeakKeyDictionary()


def issue_order(schedule: Schedule) -> IssueOrder:
    """Return the order of a schedule, kept with it; raises what :meth:`Schedule.merged` raises."""
    found = _ORDERS.get(schedule)
    if found is None:
        found = _ORDERS[schedule] = _folded(schedule)
    return found


def _folded(schedule: Schedule) -> IssueOrder:
    rank, ends_step = schedule.merged()
    code = schedule.codes_in_order
    period = 4 * max(schedule.num_stages, 1)
    steps = np.concatenate([[0], np.flatnonzero(ends_step) + 1]).astype(np.int64)
    parts = np.zeros((2 * len(steps) + 1, 4), np.int64)
    count = find_repeats(rank, code, steps, period, MOST_CANDIDATES, parts)
    first, last = _ends(code, schedule.num_stages)
    begins: list[int] = []
    sizes: list[int] = []
    repeats: list[int] = []
    shifts: list[int] = []
    for begin, length, times, shift in parts[:count].tolist():
        at, end = int(steps[begin]), int(steps[begin + length])
        size = end - at
        final = at + (times - 1) * size
        cuts = {
            0,
            times,
            *([1] if first[at:end].any() else []),
            *([times - 1] if last[final : final + size].any() else []),
        }
        for k, after in pairwise(sorted(cuts)):
            begins.append(at + k * size)
            sizes.append(size)
            repeats.append(after - k)
            shifts.append(shift if after - k > 1 else 0)
    width = np.array(sizes, np.int64)
    within = np.repeat(np.arange(len(width)), width)
    start = np.concatenate([[0], width.cumsum()]).astype(np.int64)
    begin = np.array(begins, np.int64)
    cells = np.arange(len(within)) - start[within] + begin[within]
    step = np.cumsum(ends_step) - ends_step
    place = np.where(first[cells], 0, LATER) + np.where(last[cells], LAST, 0)
    columns = (
        rank[cells],
        code[cells],
        step[cells] - step[begin][within] if len(cells) else cells,
        place,
        start,
        np.array(repeats, np.int64),
        np.array(shifts, np.int64) // period,
        _latest(code, schedule.num_stages),
    )
    for column in columns:
        column.setflags(write=False)
    return IssueOrder(schedule, *columns)


def _ends(code: Ints, num_stages: int) -> tuple[Bools, Bools]:
    """Return [cells, 2]: whether an action is the first, and the last, of its stage and kind."""
    kind = np.array([0, 1, 2, 1])[code % 4]  # B and W add to the same sums
    which = np.where(code < 0, 3 * num_stages, code // 4 % max(num_stages, 1) * 3 + kind).ravel()
    place = np.arange(len(which))
    first, last = np.zeros(3 * num_stages + 1, np.int64), np.zeros(3 * num_stages + 1, np.int64)
    first[which[::-1]] = place[::-1]
    last[which] = place
    real = which < 3 * num_stages
    is_first, is_last = (first[which] == place) & real, (last[which] == place) & real
    return is_first.reshape(-1, 2), is_last.reshape(-1, 2)


def _latest(code: Ints, num_stages: int) -> Ints:
    """Return [stages, 3]: the last microbatch of F, of B or W, of B or I."""
    code = code[code >= 0]
    kind, number = code % 4, code // 4
    found = np.full((num_stages, 3), -1, np.int64)
    for side, kinds in enumerate(((0, 0), (1, 3), (1, 2))):
        own = number[(kind == kinds[0]) | (kind == kinds[1])]
        found[own % max(num_stages, 1), side] = own // max(num_stages, 1)
    return found
