"""The global order of a schedule's cells, with the steps that repeat written once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from distsim.compile import compiled, inner
from distsim.schedule.action import SENDS_BACK, SUMS_GRADIENTS, Kind, by_code
from distsim.schedule.codes import CODES, code_of, kind_of, number_of
from distsim.schedule.table import Ints, Schedule
from distsim.schedule.weights import FLUSH, VersionsRead, versions_read

LATER, LAST = 1, 2
"""What a call of a stage's forward, or backward, is in the order of its rank: not its first, its last; where
weights are updated without a flush, the first and last backward of each update."""
PLACES = 4
"""How many sums of these there are."""
READS_VERSION, UPDATES_AFTER, UPDATES_VERSION = 4, 2, 1
"""What a cell is to the weights without a flush: it reads a version that an update made, an update follows
it, and that changes a version that an update made."""
_KINDS = len(Kind)
_SUMS = by_code(lambda kind: kind.sums)[:_KINDS]
_SAME = _SUMS[:, None] == _SUMS
"""[kinds, kinds]: whether kinds add to the same sums."""
_LATEST = np.stack([by_code(lambda kind: kind is Kind.FORWARD), SUMS_GRADIENTS, SENDS_BACK])[:, :_KINDS]
"""[columns, kinds]: which kinds :attr:`IssueOrder.latest` is of."""
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
    after it (:data:`LAST`), with kinds that add to the same sums, as B and W, as one: all repetitions of a
    round agree in that. ``latest`` [stages, 3] are the microbatches of the last F of a stage, of its last B
    or W, and of its last B or I; -1 for none.

    ``version`` [cells] is the version of the weights that a cell reads, by the microbatch whose update made
    it, as of :class:`VersionsRead`, and ``update`` [cells] that which the update after the cell makes: -1 for
    the weights at the start, and for no update. Those that are not -1 advance as microbatches do.

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
    version: Ints
    update: Ints

    @cached_property
    def microbatch(self) -> Ints:
        """[cells, 2]: of the first repetition; -1 for no action."""
        return np.where(self.code < 0, -1, self.code // code_of(max(self.schedule.num_stages, 1), 0))

    @cached_property
    def family(self) -> Ints:
        """[cells, 2]: the code of stage and kind of each action; -1 for no action."""
        return np.where(self.code < 0, -1, self.code % code_of(max(self.schedule.num_stages, 1), 0))

    @cached_property
    def before(self) -> Ints:
        """[cells]: the version that the update after a cell changes; -1 for the weights at the start."""
        every = self.schedule.weights.update_every
        return np.where(self.update < every, -1, self.update - every)

    @cached_property
    def calls(self) -> tuple[Ints, Ints]:
        """The distinct cells, [calls, 3], and of each cell which it is.

        Of each: PLACES * family + place of its actions (-1: none), and a sum of :data:`READS_VERSION`,
        :data:`UPDATES_AFTER` and :data:`UPDATES_VERSION`, 0 for all where a step ends with a flush.
        """
        none = PLACES * code_of(self.schedule.num_stages, 0)
        actions = np.where(self.family < 0, none, self.family * PLACES + self.place)
        pairs = actions[:, 0] * (none + 1) + actions[:, 1]
        if self.schedule.weights != FLUSH:
            how = READS_VERSION * (self.version >= 0) + UPDATES_AFTER * (self.update >= 0)
            pairs = pairs + (how + UPDATES_VERSION * (self.before >= 0)) * (none + 1) ** 2
        found, number = np.unique(pairs, return_inverse=True)
        how, found = np.divmod(found, (none + 1) ** 2)
        calls = np.stack([*np.divmod(found, none + 1), how], axis=1)
        calls[:, :2][calls[:, :2] == none] = -1
        return calls, number.reshape(-1)


def issue_order(schedule: Schedule) -> IssueOrder:
    """Return the order of a schedule, kept with it; raises what :meth:`Schedule.merged` raises."""
    found = schedule.__dict__.get("issue_order")  # as a cached property: each refers to the other
    if found is None:
        found = schedule.__dict__["issue_order"] = _folded(schedule)
    return found


def _folded(schedule: Schedule) -> IssueOrder:
    rank, ends_step = schedule.merged()
    code, stages = schedule.codes_in_order, schedule.num_stages
    period = code_of(max(stages, 1), 0)
    steps = np.concatenate([[0], np.flatnonzero(ends_step) + 1]).astype(np.int64)
    parts = np.zeros((2 * len(steps) + 1, 4), np.int64)
    versions = None
    compared = code
    if schedule.weights != FLUSH:
        versions = versions_read(schedule.name, schedule.weights, code[:, 0], stages)
        compared = _with_versions(code[:, 0], schedule, versions)
    count = find_repeats(rank, compared, steps, period, MOST_CANDIDATES, parts)
    first, last, latest = _ends(code, stages)
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
    own, ends_own = code[cells], ends_step[cells]
    step = ends_own.cumsum() - ends_own
    of, place = (number_of(own) % max(stages, 1), kind_of(own)), 2 * cells[:, None] + np.arange(2)
    there = own >= 0
    later, ends = there & (first[of] != place), there & (last[of] == place)
    version = update = np.full(len(cells), -1, np.int64)
    if versions is not None:
        version, update = versions.read[cells], versions.update[cells]
        adds = SUMS_GRADIENTS[kind_of(own[:, 0])]
        later[:, 0] = np.where(adds, ~versions.first[cells], later[:, 0])
        ends[:, 0] = np.where(adds, versions.last[cells], ends[:, 0])
    columns = (
        rank[cells],
        own,
        step - step[start[:-1]][within] if len(cells) else cells,
        np.where(later, LATER, 0) + np.where(ends, LAST, 0),
        start,
        repeats.copy(),
        shift // period,
        latest,
        version,
        update,
    )
    for column in columns:
        column.setflags(write=False)
    return IssueOrder(schedule, *columns)


def _ends(code: Ints, stages: int) -> tuple[Ints, Ints, Ints]:
    """Return the first and the last place, [stages, codes], in which a stage adds to the sums of a kind, and
    :attr:`IssueOrder.latest`."""
    first, last = np.full((2, stages, CODES), -1, np.int64)
    note_ends(code, code_of(max(stages, 1), 0), first.reshape(-1), last.reshape(-1))
    begins, ends = first[:, :_KINDS], last[:, :_KINDS]
    place = np.where(_LATEST, ends[:, None], -1).max(axis=2, initial=-1)
    latest = np.full(place.shape, -1, np.int64)
    latest[place >= 0] = number_of(code.reshape(-1)[place[place >= 0]]) // max(stages, 1)
    begins[:] = np.where(_SAME & (begins >= 0)[:, None], begins[:, None], 2 * len(code)).min(axis=2)
    ends[:] = np.where(_SAME, ends[:, None], -1).max(axis=2)
    return first, last, latest


def _with_versions(code: Ints, schedule: Schedule, versions: VersionsRead) -> Ints:
    """Return codes [cells, 2] that repeat where actions do, and the versions they read and make with them.

    The weights at the start are the same for all: a cell that reads them is unlike one that reads a version.
    """
    stages, every = max(schedule.num_stages, 1), schedule.weights.update_every
    behind = code // code_of(stages, 0) - versions.read
    how = np.stack(
        [
            np.where(versions.read < 0, -1, behind),
            versions.first,
            versions.last,
            (versions.update >= 0) & (versions.update < every),
        ]
    )
    number: Ints = np.unique(how, axis=1, return_inverse=True)[1].reshape(-1)
    return np.stack([code, code + number * code_of(stages * (schedule.num_microbatches + 1), 0)], axis=1)


def _among(places: Ints, begin: int, size: int) -> bool:
    """Whether one of these places, two to a cell, is in one of so many cells."""
    return bool(((places >= 2 * begin) & (places < 2 * (begin + size))).any())


@inner
def _alike(rank: Any, code: Any, steps: Any, one: Any, other: Any, shift: Any) -> bool:
    """Whether two steps run the same cells, those of ``other`` with codes higher by ``shift``."""
    begin, size = steps[one], steps[one + 1] - steps[one]
    away = steps[other] - begin
    if steps[other + 1] - steps[other] != size:
        return False
    for i in range(begin, begin + size):
        if rank[i + away] != rank[i]:
            return False
        for k in range(2):
            if code[i, k] < 0:
                if code[i + away, k] >= 0:
                    return False
            elif code[i + away, k] != code[i, k] + shift:
                return False
    return True


@compiled
def find_repeats(rank: Any, code: Any, steps: Any, period: int, most: int, parts: Any) -> int:
    """Cut steps into parts, each repeated as often as it can be; return how many parts there are.

    Step ``t`` are the cells ``steps[t]:steps[t + 1]``; codes that are equal modulo ``period`` are the same
    action of another microbatch. From left to right, a stretch of steps that is run again right away, every
    code higher by the same shift, becomes a part, in the way, of up to ``most`` that the next calls of its
    first cell suggest, that leaves the fewest steps to write. ``parts`` [.., 4] is filled with the first
    step, the number of steps, the repetitions and the shift from one to the next.
    """
    count = len(steps) - 1
    found = at = single = 0
    while at < count:
        first = steps[at]
        best, length, repeats, shift = 0, 0, 0, 0
        known_length, known_shift = 0, 0
        tried = 0
        for t in range(at + 1, count):
            if tried == most:
                break
            for i in range(steps[t], steps[t + 1]):
                if rank[i] != rank[first] or (code[i, 0] - code[first, 0]) % period:
                    continue
                tried += 1
                n, moved = t - at, code[i, 0] - code[first, 0]
                if known_length and n % known_length == 0 and moved * known_length == known_shift * n:
                    continue  # a multiple of what repeats already
                run = 0
                while t + run < count and _alike(rank, code, steps, at + run, t + run, moved):
                    run += 1
                if run // n * n > best:
                    best, length, repeats, shift = run // n * n, n, run // n + 1, moved
                if run >= n:
                    known_length, known_shift = n, moved
        if not best:
            at += 1
            continue
        if single < at:
            parts[found, 0], parts[found, 1], parts[found, 2], parts[found, 3] = single, at - single, 1, 0
            found += 1
        parts[found, 0], parts[found, 1], parts[found, 2], parts[found, 3] = at, length, repeats, shift
        found += 1
        at += length * repeats
        single = at
    if single < count:
        parts[found, 0], parts[found, 1], parts[found, 2], parts[found, 3] = single, count - single, 1, 0
        found += 1
    return found


@compiled
def note_ends(code: Any, period: int, first: Any, last: Any) -> None:
    """Note where each stage runs each kind of action first and last, in places: two to a cell.

    ``first`` and ``last`` are by codes modulo ``period``, and -1: they stay so where a stage runs none.
    """
    for cell in range(len(code)):
        for k in range(2):
            if code[cell, k] < 0:
                continue
            family = code[cell, k] - code[cell, k] // period * period  # a division takes as long as all else
            if first[family] < 0:
                first[family] = 2 * cell + k
            last[family] = 2 * cell + k
