"""What the rows of a table do to the memory of the ranks, as arrays, kept with the table.

What rows do depends on the blocks and on the samples of the ranks; which rows do the same, on neither: of
that an outline is kept with the rows, for all tables that have them (:class:`_Outline`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np

from distsim.cache import Cache, uncollected
from distsim.program.parts import Parts
from distsim.program.table import SEND, Table, TableColumns
from distsim.simulation.memory.excerpt import Sample
from distsim.simulation.memory.kernel import (
    Amounts,
    Ints,
    Levels,
    Steps,
    check_bytes,
    check_sums,
    compose,
    counted,
)
from distsim.simulation.memory.rank_calls import Irregular, Rank, RankCalls, families, ranks_of, resized_ranks
from distsim.simulation.memory.row_changes import NOTHING, Change, RankUse
from distsim.simulation.memory.sampling import Sampling, samplings


@dataclass(frozen=True, eq=False)
class TableChanges:
    """The changes of the rows of a table, in their order.

    ``initial`` [ranks, 1 + kinds] is in use before the first row. A change may be that of many steps.
    ``row``, ``shift`` and ``round`` [steps] are the row of the table, which of its repetitions is the first
    one of the step, and the round of the table. ``amounts`` are those of the changes by number of columns,
    made when asked for.
    """

    initial: Ints
    steps: Steps
    changes: Sequence[Change]
    row: Ints
    shift: Ints
    round: Ints
    amounts: dict[int, Amounts]

    def levels(self, columns: int) -> Levels:
        """Return what is in use at the peaks, and after the last row: in all (one column), or by kind too."""
        known = self.amounts.get(columns)
        if known is None:
            known = Amounts(
                counted([change.net for change in self.changes], columns),
                counted([change.peak for change in self.changes], columns),
            )
            check_sums(self.initial, self.steps, known)
            self.amounts[columns] = known
        return compose(np.ascontiguousarray(self.initial[:, :columns]), self.steps, known)


_CHANGES: WeakKeyDictionary[Table, TableChanges | None] = WeakKeyDictionary()


def changes_of(parts: Parts, table: Table) -> TableChanges | None:
    """Return the changes of a table of these parts; None where a program has to be written out for them."""
    with suppress(KeyError):
        return _CHANGES[table]
    changes = None
    with suppress(Irregular):
        changes = _table_changes(parts, table)
    _CHANGES[table] = changes
    return changes


@uncollected()
def _table_changes(parts: Parts, table: Table) -> TableChanges:
    known = _ranks_of(parts, table)
    sampled, uses = known.told(table)
    key = (known.sides, sampled)
    outline = _OUTLINES.get(table.columns, key, lambda: _Outline(known, sampled, table))
    changes = known.changes(outline, uses)
    rank, number = changes.rank, changes.number
    steps, row, shift, number_of = outline.steps(rank, number)
    each, amounts = changes.each, changes.amounts
    if any(change.each for change in each):
        ranks: list[int] = rank[rank >= 0].tolist()
        each = [_every(change, sampled[own].counts) for change, own in zip(each, ranks, strict=True)]
        amounts = {}
    return TableChanges(uses.initial(sampled), steps, each, row, shift, number_of, amounts)


def _every(change: Change, counts: Ints) -> Change:
    """Return a change with what it does for each of the microbatches of the labels."""
    net = change.net
    for label, amounts in change.each:
        count = int(counts[label])
        net = tuple([a + count * b for a, b in zip(net, amounts, strict=True)])
    return change._replace(net=net, each=())


# --- kept with the parts ------------------------------------------------------------------------------


class _Uses:
    """What the rows of samples do on each rank."""

    def __init__(self, ranks: Sequence[RankUse]) -> None:
        self.ranks = ranks
        each = [list(use.start_each.values()) for use in ranks]
        self._end = np.array([0, *map(len, each)], np.int64).cumsum()
        self._start = counted([use.start for use in ranks], len(NOTHING))
        self._each = counted([amounts for own in each for amounts in own], len(NOTHING))

    def initial(self, sampled: Sequence[Sampling]) -> Ints:
        """Return [ranks, 1 + kinds]: what is there before the first row."""
        counts = np.concatenate([np.zeros(0, np.int64), *[own.counts for own in sampled]])
        check_bytes(float((counts * self._each[:, 0].astype(np.float64)).sum()))
        until = np.zeros((len(counts) + 1, len(NOTHING)), np.int64)
        np.cumsum(counts[:, None] * self._each, axis=0, out=until[1:])
        return self._start + until[self._end[1:]] - until[self._end[:-1]]


class _RowChanges(NamedTuple):
    """What distinct rows do: [rows, 2], on which rank and which of the changes, -1 for nothing.

    ``each`` are the changes, ``amounts`` as of :class:`TableChanges`.
    """

    rank: Ints
    number: Ints
    each: Sequence[Change]
    amounts: dict[int, Amounts]


class _TableRanks:
    """The ranks of some blocks; what they do in samples is kept by what a rank does, and the sample.

    ``sides`` are the ranks of the blocks and the targets, as bytes, ``tail`` the blocks of the rows after the
    last action.
    """

    def __init__(self, ranks: tuple[Rank, ...], table: Table, like: _TableRanks | None = None) -> None:
        self.like = like  # those of blocks that differ in sizes alone
        number: dict[RankCalls, int] = {}
        self.ranks, self.blocks = ranks, table.blocks
        self.alike = [number.setdefault(rank.calls, len(number)) for rank in ranks]
        self.side = np.array([(block.rank, block.target) for block in table.blocks], np.int64).reshape(-1, 2)
        self.sides = self.side.tobytes()
        self.tail: list[int] = table.block[table.start[table.tail] :].tolist()
        self._samples: dict[tuple[int, Sample], RankUse | None] = {}
        self._uses: dict[tuple[RankUse, ...], _Uses] = {}

    def told(self, table: Table) -> tuple[tuple[Sampling, ...], _Uses]:
        """Return the sampling of each rank, plain where that says enough, and what its rows do."""
        latest = tuple(table.latest.values())
        return _TOLD.get(self, (table.order, latest), lambda: self._told(table))

    def _told(self, table: Table) -> tuple[tuple[Sampling, ...], _Uses]:
        found: list[Sampling] = []
        uses: list[RankUse] = []
        latest: list[list[tuple[int, int]]] = [[] for _ in self.ranks]
        for (value, place), microbatch in table.latest.items():
            if value in self.ranks[place].slots:
                latest[place].append((self.ranks[place].slots[value], microbatch))
        seen: dict[tuple[object, ...], RankUse | None] = {}
        for rank, read in enumerate(latest):
            for plain in (True, False):
                sampled = samplings(table.order, table.latest.values(), plain)[rank]
                labels = tuple([(slot, int(sampled.labels[m])) for slot, m in read])
                key = self.alike[rank], sampled, labels
                if key not in seen:
                    sample = Sample(sampled.cells, sampled.ordinary, sampled.copies, labels, plain)
                    seen[key] = self._use(rank, sample)
                use = seen[key]
                if use is not None:
                    found.append(sampled)
                    uses.append(use)
                    break
            else:
                raise Irregular
        own = tuple(uses)
        return tuple(found), self._uses.setdefault(own, _Uses(own))

    def _use(self, rank: int, sample: Sample) -> RankUse | None:
        """Return what the rows of a sample do on a rank, None if it does not speak for the others."""
        key = self.alike[rank], sample
        if key not in self._samples:
            self._samples[key] = None
            with suppress(Irregular):
                self._samples[key] = self._resized(rank, sample) or _use_of(self.ranks[rank].calls, sample)
        return self._samples[key]

    def _resized(self, rank: int, sample: Sample) -> RankUse | None:
        """Return what the rows of a sample do if that follows from what they do with other sizes."""
        use = None if self.like is None else self.like._use(rank, sample)
        if use is not None:
            with suppress(Irregular):
                return use.resized(self.ranks[rank].calls)
        return None

    def changes(self, outline: _Outline, uses: _Uses) -> _RowChanges:
        """Return what the distinct rows of an outline do."""
        key = uses, outline.distinct.tobytes()
        return _ROW_CHANGES.get(self, key, lambda: self._changes(outline.distinct, uses.ranks))

    def _changes(self, distinct: Ints, uses: Sequence[RankUse]) -> _RowChanges:
        rank, number = np.full((2, len(distinct), 2), -1, np.int64)
        changes: list[Change] = []
        rows: list[list[int]] = distinct.tolist()
        for i, row in enumerate(rows):
            for side, (own, each) in enumerate(self._row(row, uses)):
                if each.net != NOTHING or each.peak != NOTHING or each.each:
                    rank[i, side], number[i, side] = own, len(changes)
                    changes.append(each)
        return _RowChanges(rank, number, changes, {})

    def _row(self, row: Sequence[int], uses: Sequence[RankUse]) -> list[tuple[int, Change]]:
        """Return what a row does, by rank."""
        what, one, two, same = row
        ranks, place = self.ranks, what - len(self.blocks)
        block = self.blocks[what if place < 0 else self.tail[place]]
        if place >= 0:
            labels = dict(zip(block.ranks, (one, two), strict=False))
            return [(rank, uses[rank].tail(ranks[rank].tail[place], own)) for rank, own in labels.items()]
        if block.kind == SEND:
            source, target = block.ranks
            return [
                (source, uses[source].sent(ranks[source].sent[what], one)),
                (target, uses[target].brought(ranks[target].brought[what], two)),
            ]
        use, own = uses[block.rank], families(block, ranks[block.rank].stages)
        if not block.pair:
            return [(block.rank, use.call(own[0], one))]
        return [(block.rank, use.pair((own[0], one), (own[1], two), block.callee, bool(same)))]


def _use_of(calls: RankCalls, sample: Sample) -> RankUse:
    """Return what the rows of a sample do on a rank, by what they do on one of other functions and sizes if
    these are called in the same way."""
    key = calls.outline, sample
    first = _FIRST.get(key)
    if first is not None:
        with suppress(Irregular):
            return first.resized(calls)
    use = RankUse(calls, sample)
    _FIRST.setdefault(key, use)
    return use


_FIRST: WeakValueDictionary[tuple[object, ...], RankUse] = WeakValueDictionary()
_TOLD = Cache[_TableRanks, tuple[tuple[Sampling, ...], _Uses]](
    "samples and their use, by order and latest", 64
)
_ROW_CHANGES = Cache[_TableRanks, _RowChanges]("what distinct rows do, by the use of ranks and the rows", 64)
_RANKS = Cache[Parts, _TableRanks]("what ranks do in memory, by blocks and what follows the last action", 16)


FEWEST_SHARED = 3
"""Fewer microbatches are called as no other number is: of one batch no other plan is like such a one."""


def _ranks_of(parts: Parts, table: Table) -> _TableRanks:
    """Return the ranks of a table, kept with the parts for all tables of the same blocks."""

    def made() -> _TableRanks:
        few = table.microbatches < FEWEST_SHARED
        alike = parts.like is not None and parts.like[0].held == parts.held
        if few or parts.like is None or not alike or table.calls.like is None:
            return _TableRanks(ranks_of(table, parts.inputs, parts.held), table)
        other, (calls, _) = parts.like[0], table.calls.like
        like = _ranks_of(other, Table(table.order, calls, table.columns, {}))
        return _TableRanks(resized_ranks(like.ranks, table.calls), table, like)

    return _RANKS.get(parts, table.calls, made)


# --- kept with the rows -------------------------------------------------------------------------------


class _DistinctRows(NamedTuple):
    """Rows in order, repetitions that do the same as the one before left out.

    Of each: the row of the table, the repetition of its round (``shift``), the number of the round. Of each
    round: how many rows, how many repetitions.
    """

    row: Ints
    shift: Ints
    round: Ints
    size: Ints
    repeats: Ints


class _Outline:
    """Which rows do the same: rows of one block and of the same labels; those after the last action differ.

    ``distinct`` [.., 4]: the block, or how many blocks there are + the place after the last action; the label
    of each side, -1 for none; whether they are of the same microbatch. The two sides of a transfer are its
    two ranks, those of a pair its two microbatches.
    """

    def __init__(self, known: _TableRanks, sampled: Sequence[Sampling], table: Table) -> None:
        columns = table.columns
        first, second = columns.microbatch[:, 0], columns.microbatch[:, 1]
        side = known.side[columns.block]
        sent = side[:, 1] >= 0
        rank = np.stack([side[:, 0], np.where(sent, side[:, 1], side[:, 0])], axis=1)
        microbatch = np.stack([first, np.where(sent, first, second)], axis=1)
        all_labels = np.array([own.labels for own in sampled], np.int64)
        cut = self.cut = _cut(columns, rank, microbatch, all_labels)
        own, end = microbatch[cut.row], int(columns.start[columns.tail])
        labels = np.full(own.shape, -1, np.int64)
        if all_labels.size:
            moved = np.where(own < 0, 0, own + (cut.shift * columns.advance[cut.round])[:, None])
            labels = np.where(own < 0, -1, all_labels[rank[cut.row], moved])
        what = np.where(cut.row < end, columns.block[cut.row], len(table.blocks) + cut.row - end)
        same = own[:, 0] == own[:, 1]
        base = 2 + int(all_labels.max(initial=0))
        code = ((what * base + labels[:, 0] + 1) * base + labels[:, 1] + 1) * 2 + same
        _, some, number = np.unique(code, return_index=True, return_inverse=True)
        self.distinct = np.stack([what[some], *labels[some].T, same[some]], axis=1)
        self._number = number.reshape(-1)
        self._steps: dict[bytes, tuple[Steps, Ints, Ints, Ints]] = {}

    def steps(self, rank: Ints, number: Ints) -> tuple[Steps, Ints, Ints, Ints]:
        """Return the steps, with their rows, shifts and rounds, if distinct rows do this."""
        key = rank.tobytes() + number.tobytes()
        found = self._steps.get(key)
        if found is None:
            cut, ranks, numbers = self.cut, rank[self._number], number[self._number]
            there = ranks >= 0
            step = np.nonzero(there)[0]
            ends = np.concatenate([[0], there.sum(axis=1).cumsum()])
            start = ends[np.concatenate([[0], cut.size.cumsum()])]
            steps = Steps(ranks[there], numbers[there], start, cut.repeats)
            found = self._steps[key] = steps, cut.row[step], cut.shift[step], cut.round[step]
        return found


_OUTLINES = Cache[TableColumns, _Outline]("which rows do the same, by rows, sides and samples", 8)


def _cut(columns: TableColumns, sides: Ints, microbatches: Ints, labels: Ints) -> _DistinctRows:
    """Return the rows of the rounds, cut where a repetition does something else than the one before.

    ``sides`` and ``microbatches`` [rows, 2] are those of rows, ``labels`` [ranks, microbatches].
    """
    rounds: list[tuple[int, int, int, int, int]] = []
    starts: list[int] = columns.start.tolist()
    repeats: list[int] = columns.repeats.tolist()
    pairs = zip(starts, starts[1:], repeats, columns.advance.tolist(), strict=False)
    for number, (begin, end, times, advance) in enumerate(pairs):
        cuts = [0]
        if times > 1:
            count = labels.shape[1]
            own = microbatches[begin:end]
            rank, microbatch = np.divmod(np.unique((sides[begin:end] * count + own)[own >= 0]), count)
            steps: Ints = np.arange(times, dtype=np.int64) * int(advance)
            each = labels[rank[:, None], microbatch[:, None] + steps]
            changed = (each[:, 1:] != each[:, :-1]).any(axis=0)
            cuts += (np.flatnonzero(changed) + 1).tolist()
        for shift, after in zip(cuts, [*cuts[1:], times], strict=True):
            rounds.append((begin, end - begin, shift, number, after - shift))
    begins, size, shift, number, repeats_of = np.array(rounds, np.int64).reshape(-1, 5).T
    row = np.arange(int(size.sum())) + np.repeat(begins - size.cumsum() + size, size)
    return _DistinctRows(row, np.repeat(shift, size), np.repeat(number, size), size, repeats_of.copy())
