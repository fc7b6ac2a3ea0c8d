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
    index = np.zeros(schedule.num_stages, np.int64)
    for stage, rank in enumerate(schedule.rank_of):
        index[stage] = on_rank[rank]
        on_rank[rank] += 1
    unlike = np.zeros(count, np.bool_)
    unlike[[*special, *([count - 1] if count else [])]] = True
    codes = np.concatenate([np.zeros((0, 2), np.int64), *schedule.codes])
    start = np.array([0, *map(len, schedule.codes)], np.int64).cumsum()
    told = Actions(
        labels=np.zeros((ranks, count), np.int64),
        sample=np.zeros((ranks, count), np.int64),
        special=np.zeros((ranks, count), np.bool_),
        sizes=np.zeros((ranks, 2), np.int64),
        rows=np.empty((codes.size, 4), np.int64),
    )
    families = 4 * max([1, *on_rank])
    stages = Stages(index, max(schedule.chain, 1), each, families, np.array(SUMMED_BY, np.int64))
    sample_ranks(codes, start, stages, unlike, plain, told)
    known: dict[bytes, Sampling] = {}
    return tuple([_sampling(told, rank, int(2 * start[rank]), each, plain, known) for rank in range(ranks)])


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
    """How codes of a schedule are numbers on a rank: a stage is the ``index[stage]``-th of its rank.

    ``chain`` are the stages of a copy of the model, ``each`` its microbatches, ``families`` 4 for each stage
    of the rank that has most; ``summed_by`` as :data:`SUMMED_BY`.
    """

    index: Any
    chain: int
    each: int
    families: int
    summed_by: Any


class Actions(NamedTuple):
    """What is found: ``labels`` [ranks, microbatches], and per rank the microbatch and what is special of
    each label. ``sizes`` [ranks, 2]: labels, actions of the sample. ``rows`` [.., 4] are those, of each rank
    from twice its first cell on: whether a cell begins, family, label, partner as of :data:`Cells`.
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

    ``found`` [families, microbatches, 2] is filled with 2 * cell, + 1 for the second of a pair, and the
    partner, or -1; ``ran`` [.., 2] with the family and microbatch of each action in turn. Returns how many.
    """
    for family in range(len(found)):
        for microbatch in range(len(marks)):
            found[family, microbatch, 0] = found[family, microbatch, 1] = -1
    seen, last = np.zeros(len(found), np.int64), np.zeros(len(found), np.int64)
    actions = 0
    for cell in range(start[rank], start[rank + 1]):
        for k in range(2):
            code, other = codes[cell, k], codes[cell, 1 - k]
            if code < 0:
                continue
            stage, number = (code >> 2) % len(stages.index), (code >> 2) // len(stages.index)
            family = 4 * stages.index[stage] + (code & 3)
            microbatch = number + stage // stages.chain * stages.each
            found[family, microbatch, 0] = 2 * cell + k
            if other >= 0:
                beside = 4 * stages.index[(other >> 2) % len(stages.index)] + (other & 3)
                found[family, microbatch, 1] = 2 * beside + k
            if seen[family] == 0 or (seen[family] == 1 and not plain):
                marks[microbatch] = True
            seen[family] += 1
            last[family] = microbatch
            ran[actions, 0], ran[actions, 1] = family, microbatch
            actions += 1
    for family in range(len(found)):
        if seen[family]:
            marks[last[family]] = True
    return actions


@inner
def _sort_families(found: Any, microbatch: int, order: Any) -> int:
    """Put the families that run a microbatch into ``order``, as they run; return how many there are."""
    count = 0
    for family in range(len(found)):
        place = found[family, microbatch, 0]
        if place < 0:
            continue
        at = count
        while at and found[order[at - 1], microbatch, 0] > place:
            order[at] = order[at - 1]
            at -= 1
        order[at] = family
        count += 1
    return count


@inner
def _alike(found: Any, one: int, other: int, order: Any, count: int) -> bool:
    """Whether a microbatch runs the families of ``order``, those of another one, so, with its partners."""
    running = 0
    for family in range(len(found)):
        running += found[family, one, 0] >= 0
    if running != count:
        return False
    before = -1
    for i in range(count):
        place = found[order[i], one, 0]
        if place <= before or found[order[i], one, 1] != found[order[i], other, 1]:
            return False
        before = place
    return True


@inner
def _label(found: Any, marks: Any, rank: int, told: Any) -> int:
    """Label the microbatches of a rank; return how many labels there are."""
    count = len(marks)
    sort, newest = np.zeros(count, np.int64), np.zeros(count, np.int64)
    orders, sizes = np.zeros((count, len(found)), np.int64), np.zeros(count, np.int64)
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
    found = np.zeros((stages.families, count, 2), np.int64)
    order, ran = np.zeros(stages.families, np.int64), np.zeros((2 * len(codes), 2), np.int64)
    for rank in range(len(start) - 1):
        marks = unlike.copy()
        actions = _note_places(codes, start, rank, stages, plain, marks, found, ran)
        size = _label(found, marks, rank, told)
        labels, sample = told.labels[rank], told.sample[rank]
        row = first = 2 * start[rank]
        if plain and not _reversed(ran[:actions], labels, sample, stages):
            for label in range(size):
                cell = np.int64(-1)
                for i in range(_sort_families(found, sample[label], order)):
                    place, partner = found[order[i], sample[label], 0], found[order[i], sample[label], 1]
                    _write(row, place // 2 != cell, label, order[i], partner, told.rows)
                    cell = place // 2
                    row += 1
        else:
            cell = np.int64(-1)
            for i in range(actions):
                family, microbatch = ran[i, 0], ran[i, 1]
                label = labels[microbatch]
                if sample[label] == microbatch:
                    place, partner = found[family, microbatch, 0], found[family, microbatch, 1]
                    _write(row, place // 2 != cell, label, family, partner, told.rows)
                    cell = place // 2
                    row += 1
        told.sizes[rank, 0], told.sizes[rank, 1] = size, row - first
