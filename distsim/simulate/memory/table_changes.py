"""What the rows of a table do to the memory of the ranks, as arrays, kept with the table."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from distsim.program.parts import Parts
from distsim.program.table import SEND, Table
from distsim.schedule import Kind
from distsim.simulate.memory.excerpt import Sample
from distsim.simulate.memory.kernel import Amounts, Ints, Levels, Steps, compose
from distsim.simulate.memory.rank_calls import Irregular, Rank, RankCalls, ranks_of
from distsim.simulate.memory.row_changes import NOTHING, Change, RankUse
from distsim.simulate.memory.sampling import Sampling, sampling


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
                _array([change.net for change in self.changes], columns),
                _array([change.peak for change in self.changes], columns),
            )
            self.amounts[columns] = known
        return compose(np.ascontiguousarray(self.initial[:, :columns]), self.steps, known)


def _array(amounts: Sequence[Sequence[int]], columns: int) -> Ints:
    return np.array([row[:columns] for row in amounts], np.int64).reshape(len(amounts), columns)


_CHANGES: WeakKeyDictionary[Table, TableChanges | None] = WeakKeyDictionary()


def changes_of(parts: Parts, table: Table) -> TableChanges | None:
    """Return the changes of a table of these parts; None where a program has to be written out for them."""
    if table not in _CHANGES:
        changes = None
        with suppress(Irregular):
            changes = _Assembly(_ranks_of(parts, table), table).changes()
        _CHANGES[table] = changes
    return _CHANGES[table]


# --- kept with the parts ------------------------------------------------------------------------------


class _Ranks:
    """The ranks of some blocks: ``uses`` are, by what a rank does, those of the samples asked for."""

    def __init__(self, ranks: tuple[Rank, ...]) -> None:
        number: dict[RankCalls, int] = {}
        self.ranks = ranks
        self.alike = [number.setdefault(rank.calls, len(number)) for rank in ranks]
        self.uses: list[dict[Sample, RankUse | None]] = [{} for _ in number]

    def use(self, rank: int, sample: Sample) -> RankUse:
        """Return what the rows of a sample do on a rank."""
        known = self.uses[self.alike[rank]]
        if sample not in known:
            known[sample] = None
            with suppress(Irregular):
                known[sample] = RankUse(self.ranks[rank].calls, sample)
        use = known[sample]
        if use is None:
            raise Irregular
        return use


_RANKS: WeakKeyDictionary[Parts, dict[tuple[object, ...], _Ranks]] = WeakKeyDictionary()


def _ranks_of(parts: Parts, table: Table) -> _Ranks:
    """Return the ranks of a table, kept with the parts for all tables of the same blocks."""
    known = _RANKS.setdefault(parts, {})
    schedule = table.order.schedule
    tail = table.block[table.start[table.tail] :].tobytes()
    key = (schedule.rank_of, schedule.copies, table.blocks, tail, table.outputs)
    if key not in known:
        known[key] = _Ranks(ranks_of(table, parts.inputs))
    return known[key]


# --- a table ------------------------------------------------------------------------------------------


class _Sides(NamedTuple):
    """[rows, 2]: the ranks on which a row does something, and of which microbatch there; -1 for none.

    The two sides of a transfer are its two ranks, those of a pair its two microbatches.
    """

    rank: Ints
    microbatch: Ints


class _Cut(NamedTuple):
    """Rows in order, repetitions that do the same as the one before left out.

    Of each: the row of the table, the repetition of its round (``shift``), the number of the round. Of each
    round: how many rows, how many repetitions.
    """

    row: Ints
    shift: Ints
    round: Ints
    size: Ints
    repeats: Ints


class _Assembly:
    """Puts together what the rows of one table do."""

    def __init__(self, known: _Ranks, table: Table) -> None:
        self.known, self.table = known, table
        self.samplings: list[Sampling] = []
        self.uses: list[RankUse] = []
        for number in range(len(known.ranks)):
            try:
                self._sample(number, plain=True)
            except Irregular:
                self._sample(number, plain=False)
        self.labels = np.array([sample.labels for sample in self.samplings], np.int64)
        self.end = int(table.start[table.tail])

    def _sample(self, number: int, plain: bool) -> None:
        rank, table = self.known.ranks[number], self.table
        sampled = sampling(table.order, rank.stages, table.latest.values(), plain)
        labels: list[int] = sampled.labels.tolist()
        latest = [
            (rank.slots[value], labels[m])
            for (value, place), m in table.latest.items()
            if place == number and value in rank.slots
        ]
        copies: list[int] = (sampled.sample // max(table.order.schedule.num_microbatches, 1)).tolist()
        ordinary: list[bool] = sampled.ordinary.tolist()
        sample = Sample(sampled.cells, tuple(ordinary), tuple(copies), tuple(latest), plain)
        self.uses.append(self.known.use(number, sample))
        self.samplings.append(sampled)

    def changes(self) -> TableChanges:
        """Return the changes of the table."""
        table = self.table
        sides = self._sides()
        cut = self._cut(sides)
        labels = self._labels(sides, cut)
        same = sides.microbatch[cut.row, 0] == sides.microbatch[cut.row, 1]
        # Rows of one block and of the same labels do the same; those after the last action occur once.
        what = np.where(cut.row < self.end, table.block[cut.row], len(table.blocks) + cut.row - self.end)
        base = 2 + int(self.labels.max(initial=0))
        code = ((what * base + labels[:, 0] + 1) * base + labels[:, 1] + 1) * 2 + same
        _, first, number = np.unique(code, return_index=True, return_inverse=True)
        changes: list[Change] = []
        rank = np.full((len(first), 2), -1, np.int64)
        change = np.full((len(first), 2), -1, np.int64)
        distinct = zip(cut.row[first].tolist(), labels[first].tolist(), same[first].tolist(), strict=True)
        for i, (row, (one, two), alike) in enumerate(distinct):
            for side, (number_of, each) in enumerate(self._row(row, one, two, alike)):
                if each.net != NOTHING or each.peak != NOTHING:
                    rank[i, side], change[i, side] = number_of, len(changes)
                    changes.append(each)
        ranks, numbers = rank[number.reshape(-1)], change[number.reshape(-1)]
        step = np.nonzero(ranks >= 0)[0]
        ends = np.concatenate([[0], (ranks >= 0).sum(axis=1).cumsum()]).astype(np.int64)
        start = ends[np.concatenate([[0], cut.size.cumsum()])]
        steps = Steps(ranks[ranks >= 0], numbers[ranks >= 0], start, cut.repeats)
        return TableChanges(
            self._initial(), steps, changes, cut.row[step], cut.shift[step], cut.round[step], {}
        )

    def _sides(self) -> _Sides:
        table = self.table
        rank = np.array([block.rank for block in table.blocks], np.int64)[table.block]
        target = np.array([block.target for block in table.blocks], np.int64)[table.block]
        first, second = table.microbatch[:, 0], table.microbatch[:, 1]
        other = np.where(target >= 0, first, second)
        return _Sides(
            np.stack([rank, np.where(target >= 0, target, rank)], axis=1), np.stack([first, other], axis=1)
        )

    def _labels(self, sides: _Sides, cut: _Cut) -> Ints:
        """Return [rows, 2]: the label of each side; -1 for none."""
        microbatch = sides.microbatch[cut.row]
        moved = microbatch + (cut.shift * self.table.advance[cut.round])[:, None]
        if not self.labels.size:
            return np.full(moved.shape, -1, np.int64)
        return np.where(
            microbatch < 0, -1, self.labels[sides.rank[cut.row], np.where(microbatch < 0, 0, moved)]
        )

    def _cut(self, sides: _Sides) -> _Cut:
        """Return the rows of the rounds, cut where a repetition does something else than the one before."""
        table = self.table
        rounds: list[tuple[int, int, int, int, int]] = []
        count = table.microbatches
        starts: list[int] = table.start.tolist()
        pairs = zip(starts, starts[1:], table.repeats.tolist(), table.advance.tolist(), strict=False)
        for number, (begin, end, times, advance) in enumerate(pairs):
            cuts = [0]
            if times > 1:
                code = sides.rank[begin:end] * count + sides.microbatch[begin:end]
                rank, microbatch = np.divmod(np.unique(code[sides.microbatch[begin:end] >= 0]), count)
                steps: Ints = np.arange(times, dtype=np.int64) * int(advance)
                labels = self.labels[rank[:, None], microbatch[:, None] + steps]
                changed = (labels[:, 1:] != labels[:, :-1]).any(axis=0)
                cuts += (np.flatnonzero(changed) + 1).tolist()
            for shift, after in zip(cuts, [*cuts[1:], times], strict=True):
                rounds.append((begin, end - begin, shift, number, after - shift))
        begins, size, shift, number, repeats = np.array(rounds, np.int64).reshape(-1, 5).T
        row = np.arange(int(size.sum())) + np.repeat(begins - size.cumsum() + size, size)
        return _Cut(row, np.repeat(shift, size), np.repeat(number, size), size, repeats.copy())

    def _row(self, row: int, one: int, two: int, same: bool) -> list[tuple[int, Change]]:
        """Return what a row does, by rank; ``one`` and ``two`` are its labels."""
        number = int(self.table.block[row])
        block = self.table.blocks[number]
        uses, ranks = self.uses, self.known.ranks
        labels = dict(zip(block.ranks, (one, two), strict=False))
        if row >= self.end:
            place = row - self.end
            return [
                (rank, self._every(rank, uses[rank].tail(ranks[rank].tail[place], label)))
                for rank, label in labels.items()
            ]
        if block.kind == SEND:
            source, target = block.ranks
            return [
                (source, uses[source].sent(ranks[source].sent[number], one)),
                (target, uses[target].brought(ranks[target].brought[number], two)),
            ]
        stages, use = ranks[block.rank].stages, uses[block.rank]
        pairs = zip(block.stages, block.kind, strict=True)
        families = [4 * stages.index(stage) + Kind(kind).code for stage, kind in pairs]
        if not block.pair:
            return [(block.rank, use.call(families[0], one))]
        return [(block.rank, use.pair((families[0], one), (families[1], two), block.callee, same))]

    def _every(self, rank: int, change: Change) -> Change:
        """Return a change with what it does for each of the microbatches of the labels."""
        net = change.net
        for label, amounts in change.each:
            count = int(self.samplings[rank].counts[label])
            net = tuple([a + count * b for a, b in zip(net, amounts, strict=True)])
        return change._replace(net=net, each=())

    def _initial(self) -> Ints:
        """Return [ranks, 1 + kinds]: what is there before the first row."""
        rows: list[Ints] = []
        for use, sampled in zip(self.uses, self.samplings, strict=True):
            each = np.array(list(use.start_each.values()), np.int64).reshape(-1, len(NOTHING))
            rows.append(np.array(use.start, np.int64) + sampled.counts @ each)
        return np.array(rows, np.int64).reshape(-1, len(NOTHING))
