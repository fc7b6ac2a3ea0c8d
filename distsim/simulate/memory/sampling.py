"""Which microbatches say what all do: of each rank one for each order of calls, and the first and last."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from distsim.cache import Cache
from distsim.compile import compiled, inner
from distsim.schedule import IssueOrder
from distsim.simulate.memory.excerpt import SUMMED_BY, Cells
from distsim.simulate.memory.kernel import Ints


@dataclass(frozen=True, eq=False)
class Sampling:
    """The microbatches of a rank by labels: ``labels`` [microbatches], ``counts`` [labels] of each.

    ``ordinary`` tells of each label whether its sample may stand for others, ``copies`` of which copy of the
    model that is; ``cells`` are those of the sample, as of a :class:`Sample`. Ranks may share it.
    """

    labels: Ints
    counts: Ints
    ordinary: tuple[bool, ...]
    copies: tuple[int, ...]
    cells: Cells


_SAMPLINGS = Cache[IssueOrder, tuple[Sampling, ...]]("samples of ranks, by special microbatches", 16)


def samplings(order: IssueOrder, latest: Iterable[int], plain: bool) -> tuple[Sampling, ...]:
    """Return the sampling of each rank, kept with the order.

    A microbatch is unlike all others if it is the first or the last of a call: the first makes sums, after
    the last nothing adds to them; so are those in ``latest`` and the very last. If not ``plain``, so is the
    second of a call: it may find the sum in memory that is something else's as well. Others are alike if the
    rank runs the same calls, and pairs, for them in the same order; the last of them goes into the sample.

    A plain sample runs one microbatch after the other if that is the order of each call, so that schedules
    have the same samples.
    """
    special = frozenset(latest)
    return _SAMPLINGS.get(order, (special, plain), lambda: _samplings(order, special, plain))


def _samplings(order: IssueOrder, special: Iterable[int], plain: bool) -> tuple[Sampling, ...]:
    schedule = order.schedule
    ranks, each = schedule.num_ranks, schedule.num_microbatches
    count = each * schedule.copies
    on_rank = [0] * ranks
    places: list[tuple[int, int]] = []
    for stage, rank in enumerate(schedule.rank_of):
        places.append((4 * on_rank[rank], stage // max(schedule.chain, 1) * each))
        on_rank[rank] += 1
    unlike = np.zeros(count, np.bool_)
    unlike[[*special, *([count - 1] if count else [])]] = True
    codes, start = schedule.listed
    told = Actions(
        labels=np.zeros((ranks, count), np.int64),
        sample=np.zeros((ranks, count), np.int64),
        special=np.zeros((ranks, count), np.bool_),
        sizes=np.zeros((ranks, 2), np.int64),
        rows=np.empty((codes.size, 4), np.int64),
    )
    families = 4 * max([1, *on_rank])
    placed = np.array(places, np.int64).reshape(-1, 2)
    stages = Stages(placed, families, np.array(SUMMED_BY, np.int64))
    sample_ranks(codes, start, stages, unlike, plain, told)
    known: dict[bytes, Sampling] = {}
    firsts: list[int] = (told.sizes[:, 1].cumsum() - told.sizes[:, 1]).tolist()
    return tuple([_sampling(told, rank, first, each, plain, known) for rank, first in enumerate(firsts)])


def _sampling(
    told: Actions, rank: int, first: int, each: int, plain: bool, known: dict[bytes, Sampling]
) -> Sampling:
    """Return the sampling of a rank, whose actions in the sample are from ``first`` on."""
    size, actions = told.sizes[rank].tolist()
    labels, special = told.labels[rank], told.special[rank, :size]
    rows = told.rows[first : first + actions]
    key = labels.tobytes() + special.tobytes() + rows.tobytes()
    found = known.get(key)
    if found is None:
        counts = np.bincount(labels, minlength=size)
        ordinary: list[bool] = (~special & (plain | (counts > 1))).tolist()
        copies: list[int] = (told.sample[rank, :size] // max(each, 1)).tolist()
        cells: list[list[tuple[int, int, int]]] = []
        for begins, family, label, partner in rows.tolist():
            if begins:
                cells.append([])
            cells[-1].append((family, label, partner))
        found = Sampling(labels, counts, tuple(ordinary), tuple(copies), tuple(map(tuple, cells)))
        known[key] = found
    return found


# --- the compiled loop --------------------------------------------------------------------------------


class Stages(NamedTuple):
    """What codes of a schedule are on a rank: families are 4 * i + kind for its i-th stage.

    ``places`` [stages, 2]: 4 * i, and how many microbatches the copies of the model before the stage's have.
    There are at most ``families`` on a rank; ``summed_by`` as :data:`SUMMED_BY`.
    """

    places: Any
    families: int
    summed_by: Any


class Actions(NamedTuple):
    """What is found: ``labels`` [ranks, microbatches], and per rank the microbatch and what is special of
    each label. ``sizes`` [ranks, 2]: labels, actions of the sample. ``rows`` [.., 4] are those, rank by rank:
    whether a cell begins, family, label, partner as of :data:`Cells`.
    """

    labels: Any
    sample: Any
    special: Any
    sizes: Any
    rows: Any


@inner
def _note_places(
    codes: Any, start: Any, rank: int, stages: Any, plain: bool, marks: Any, found: Any, ran: Any
) -> int:
    """Note where each family of a rank runs each microbatch, with which partner; mark the special ones.

    ``found`` [microbatches, families, 2] is filled with 2 * cell, + 1 for the second of a pair, and the
    partner, or -1; ``ran`` [.., 2] with the family and microbatch of each action in turn. Returns how many.
    """
    for microbatch in range(len(marks)):
        for family in range(stages.families):
            found[microbatch, family, 0] = found[microbatch, family, 1] = -1
    seen, last = np.zeros(stages.families, np.int64), np.zeros(stages.families, np.int64)
    actions = 0
    for cell in range(start[rank], start[rank + 1]):
        for k in range(2):
            code, other = codes[cell, k], codes[cell, 1 - k]
            if code < 0:
                continue
            number = (code >> 2) // len(stages.places)  # a division takes as long as all else here
            stage = (code >> 2) - number * len(stages.places)
            family = stages.places[stage, 0] + (code & 3)
            microbatch = number + stages.places[stage, 1]
            found[microbatch, family, 0] = 2 * cell + k
            if other >= 0:
                beside = stages.places[(other >> 2) % len(stages.places), 0] + (other & 3)
                found[microbatch, family, 1] = 2 * beside + k
            if seen[family] == 0 or (seen[family] == 1 and not plain):
                marks[microbatch] = True
            seen[family] += 1
            last[family] = microbatch
            ran[actions, 0], ran[actions, 1] = family, microbatch
            actions += 1
    for family in range(stages.families):
        if seen[family]:
            marks[last[family]] = True
    return actions


@inner
def _sort_families(found: Any, microbatch: int, order: Any) -> int:
    """Put the families that run a microbatch into ``order``, as they run; return how many there are."""
    count = 0
    for family in range(len(order)):
        place = found[microbatch, family, 0]
        if place < 0:
            continue
        at = count
        while at and found[microbatch, order[at - 1], 0] > place:
            order[at] = order[at - 1]
            at -= 1
        order[at] = family
        count += 1
    return count


@inner
def _alike(found: Any, one: int, other: int, order: Any, count: int) -> bool:
    """Whether a microbatch runs the families of ``order``, those of another one, so, with its partners."""
    running = 0
    for family in range(len(order)):
        running += found[one, family, 0] >= 0
    if running != count:
        return False
    before = -1
    for i in range(count):
        place = found[one, order[i], 0]
        if place <= before or found[one, order[i], 1] != found[other, order[i], 1]:
            return False
        before = place
    return True


@inner
def _label(found: Any, marks: Any, rank: int, told: Any) -> int:
    """Label the microbatches of a rank; return how many labels there are."""
    count = len(marks)
    sort, newest = np.zeros(count, np.int64), np.zeros(count, np.int64)
    orders, sizes = np.zeros((count, found.shape[1]), np.int64), np.zeros(count, np.int64)
    sorts = 0
    for microbatch in range(count):
        if marks[microbatch]:
            continue
        one = 0
        while one < sorts and not _alike(found, microbatch, newest[one], orders[one], sizes[one]):
            one += 1
        if one == sorts:
            sizes[one] = _sort_families(found, microbatch, orders[one])
            sorts += 1
        sort[microbatch], newest[one] = one, microbatch
    size = 0
    for microbatch in range(count):
        if marks[microbatch] or newest[sort[microbatch]] == microbatch:
            told.labels[rank, microbatch] = size
            told.sample[rank, size] = microbatch
            told.special[rank, size] = marks[microbatch]
            size += 1
    for microbatch in range(count):
        if not marks[microbatch]:
            told.labels[rank, microbatch] = told.labels[rank, newest[sort[microbatch]]]
    return size


@inner
def _reversed(ran: Any, labels: Any, sample: Any, stages: Any) -> bool:
    """Whether some calls that add to the same sums run a later label of the sample before an earlier one."""
    latest = np.zeros(stages.families, np.int64)
    for i in range(len(ran)):
        label = labels[ran[i, 1]]
        if sample[label] == ran[i, 1]:
            group = ran[i, 0] // 4 * 4 + stages.summed_by[ran[i, 0] % 4]
            if label < latest[group]:
                return True
            latest[group] = label
    return False


@inner
def _write(row: int, begins: bool, label: int, family: int, partner: int, rows: Any) -> None:
    rows[row, 0], rows[row, 1], rows[row, 2], rows[row, 3] = begins, family, label, partner


@compiled
def sample_ranks(codes: Any, start: Any, stages: Any, unlike: Any, plain: bool, told: Any) -> None:
    """Fill in ``told`` for all ranks; ``unlike`` are the microbatches that are special on each.

    ``codes[start[r]:start[r + 1]]`` are the cells of rank r, as of :meth:`Schedule.from_codes`.
    """
    count = len(unlike)
    found = np.zeros((count, stages.families, 2), np.int64)
    order, longest = np.zeros(stages.families, np.int64), 0
    for rank in range(len(start) - 1):
        longest = max(longest, start[rank + 1] - start[rank])
    ran = np.zeros((2 * longest, 2), np.int64)
    row: Any = np.int64(0)
    for rank in range(len(start) - 1):
        marks = unlike.copy()
        actions = _note_places(codes, start, rank, stages, plain, marks, found, ran)
        size = _label(found, marks, rank, told)
        labels, sample = told.labels[rank], told.sample[rank]
        first = row
        if plain and not _reversed(ran[:actions], labels, sample, stages):
            for label in range(size):
                cell = np.int64(-1)
                for i in range(_sort_families(found, sample[label], order)):
                    place, partner = found[sample[label], order[i], 0], found[sample[label], order[i], 1]
                    _write(row, place // 2 != cell, label, order[i], partner, told.rows)
                    cell = place // 2
                    row += 1
        else:
            cell = np.int64(-1)
            for i in range(actions):
                family, microbatch = ran[i, 0], ran[i, 1]
                label = labels[microbatch]
                if sample[label] == microbatch:
                    place, partner = found[microbatch, family, 0], found[microbatch, family, 1]
                    _write(row, place // 2 != cell, label, family, partner, told.rows)
                    cell = place // 2
                    row += 1
        told.sizes[rank, 0], told.sizes[rank, 1] = size, row - first
