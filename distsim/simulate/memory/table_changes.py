"""What the rows of a table do to the memory of the ranks, as arrays, kept with the table."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np

from distsim.program.parts import Parts
from distsim.program.table import SEND, Table
from distsim.simulate.memory.excerpt import Sample
from distsim.simulate.memory.kernel import Amounts, Ints, Levels, Steps, compose
from distsim.simulate.memory.rank_calls import Irregular, Rank, RankCalls, ranks_of
from distsim.simulate.memory.row_changes import NOTHING, Change, RankUse
from distsim.simulate.memory.sampling import Sampling, sampling


@dataclass(frozen=True, eq=False)
class TableChanges:
    """The changes of the rows of a table, in their order.

    Change ``i`` of ``changes`` may occur in many steps. ``row``, ``shift`` and ``round`` [steps] are the row
    of the table, the repetition of it that is the step's first, and the round of the table it is in.
    ``initial`` [ranks, 1 + kinds] is in use before the first row.
    """

    initial: Ints
    steps: Steps
    changes: Sequence[Change]
    row: Ints
    shift: Ints
    round: Ints
    amounts: dict[int, Amounts] = field(default_factory=dict)

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
    """The ranks of some blocks: ``uses`` are, by what a rank does, those of the samples that were asked for."""

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
        found = known[sample]
        if found is None:
            raise Irregular
        return found


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


class _Assembly:
    """Puts together what the rows of one table do.

    Rounds are cut where a repetition does something else than the one before.
    """

    def __init__(self, known: _Ranks, table: Table) -> None:
        self.known, self.table = known, table
        self.samplings: list[Sampling] = []
        self.uses: list[RankUse] = []
        for number in range(len(known.ranks)):
            try:
                self._sample(number, plain=True)
            except Irregular:
                self._sample(number, plain=False)
        self.end = int(table.start[table.tail])
        self.families = {kind: code for code, kind in enumerate("FBIW")}

    def _sample(self, number: int, plain: bool) -> None:
        rank, table = self.known.ranks[number], self.table
        own = sampling(table.order, rank.stages, table.latest.values(), plain)
        latest = [(rank.slots[v], int(own.labels[m])) for v, m in table.latest.items() if v in rank.slots]
        copies: list[int] = (own.sample // max(table.order.schedule.num_microbatches, 1)).tolist()
        ordinary: list[bool] = own.ordinary.tolist()
        sample = Sample(own.cells, tuple(ordinary), tuple(copies), tuple(latest), plain)
        self.uses.append(self.known.use(number, sample))
        self.samplings.append(own)

    def changes(self) -> TableChanges:
        """Return the changes of the table."""
        table, blocks = self.table, self.table.blocks
        rank = np.array([block.rank for block in blocks], np.int64)[table.block]
        target = np.array([block.target for block in blocks], np.int64)[table.block]
        one, two = table.microbatch.T
        # A row has up to two labels: of its microbatches, or, of a transfer, of its microbatch on both ranks.
        pair = two >= 0
        where = (
            (rank, np.where(pair, rank, target)),
            (one, np.where(pair, two, np.where(target >= 0, one, -1))),
        )
        rows, shift, rounds, size, repeats = self._cut(*where)
        labels = self._labels(where[0], where[1], rows, shift, rounds)
        what = np.where(rows < self.end, table.block[rows], len(blocks) + rows - self.end)
        base = 2 + max([len(own.counts) for own in self.samplings], default=0)
        same = (one == two)[rows]
        code = ((what * base + labels[0] + 1) * base + labels[1] + 1) * 2 + same
        _, first, number = np.unique(code, return_index=True, return_inverse=True)
        told: list[Change] = []
        of_rank = np.full((len(first), 2), -1, np.int64)
        of_change = np.full((len(first), 2), -1, np.int64)
        columns = (rows[first].tolist(), labels[0][first].tolist(), labels[1][first].tolist())
        for i, (row, a, b, alike) in enumerate(zip(*columns, same[first].tolist(), strict=True)):
            for side, (on, change) in enumerate(self._row(row, a, b, alike)):
                if change.net != NOTHING or change.peak != NOTHING:
                    of_rank[i, side], of_change[i, side] = on, len(told)
                    told.append(change)
        ranks, changes = of_rank[number.reshape(-1)], of_change[number.reshape(-1)]
        there = ranks >= 0
        step = np.nonzero(there)[0]
        start = np.concatenate([[0], there.sum(axis=1).cumsum()])[np.concatenate([[0], size.cumsum()])]
        steps = Steps(ranks[there], changes[there], start.astype(np.int64), repeats)
        return TableChanges(self._initial(), steps, told, rows[step], shift[step], rounds[step])

    def _labels(
        self, ranks: tuple[Ints, Ints], microbatches: tuple[Ints, Ints], rows: Ints, shift: Ints, rounds: Ints
    ) -> list[Ints]:
        """Return the two labels of rows in some of their repetitions; -1 for none."""
        table = self.table
        labels = np.array([own.labels for own in self.samplings], np.int64)
        if not labels.size:
            return [np.full(len(rows), -1, np.int64)] * 2
        advance = (shift * table.advance[rounds], shift * table.advance[rounds])
        return [
            np.where(m[rows] >= 0, labels[r[rows], np.where(m[rows] >= 0, m[rows] + moved, 0)], -1)
            for r, m, moved in zip(ranks, microbatches, advance, strict=True)
        ]

    def _cut(
        self, ranks: tuple[Ints, Ints], microbatches: tuple[Ints, Ints]
    ) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """Return the rows of the rounds, cut, with their first repetition and their round; and of each round
        that this makes the size and the repetitions."""
        table = self.table
        labels = np.array([own.labels for own in self.samplings], np.int64)
        begins: list[int] = []
        sizes: list[int] = []
        shifts: list[int] = []
        numbers: list[int] = []
        repeats: list[int] = []
        starts: list[int] = table.start.tolist()
        pairs = zip(starts, starts[1:], table.repeats.tolist(), table.advance.tolist(), strict=False)
        for number, (begin, end, times, advance) in enumerate(pairs):
            cuts = [0]
            if times > 1:
                away = np.arange(times) * advance
                changed = np.zeros(times - 1, np.bool_)
                for r, m in zip(ranks, microbatches, strict=True):
                    each = np.unique(np.stack([r[begin:end], m[begin:end]]), axis=1)
                    each = each[:, each[1] >= 0]
                    seen = labels[each[0][:, None], each[1][:, None] + away]
                    changed |= (seen[:, 1:] != seen[:, :-1]).any(axis=0)
                cuts += (np.flatnonzero(changed) + 1).tolist()
            for at, after in zip(cuts, [*cuts[1:], times], strict=True):
                begins.append(begin)
                sizes.append(end - begin)
                shifts.append(at)
                numbers.append(number)
                repeats.append(after - at)
        size = np.array(sizes, np.int64)
        before = size.cumsum() - size
        rows = np.arange(int(size.sum())) + np.repeat(np.array(begins, np.int64) - before, size)
        spread = [np.repeat(np.array(each, np.int64), size) for each in (shifts, numbers)]
        return rows, spread[0], spread[1], size, np.array(repeats, np.int64)

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
        stages = ranks[block.rank].stages
        families = [
            4 * stages.index(stage) + self.families[kind]
            for stage, kind in zip(block.stages, block.kind, strict=True)
        ]
        use = uses[block.rank]
        if not block.pair:
            return [(block.rank, use.call(families[0], one))]
        return [(block.rank, use.pair((families[0], one), (families[1], two), block.callee, same))]

    def _every(self, rank: int, change: Change) -> Change:
        """Return a change with what it does for each of the microbatches of the labels."""
        net = list(change.net)
        for label, amounts in change.each:
            for k, amount in enumerate(amounts):
                net[k] += amount * int(self.samplings[rank].counts[label])
        return change._replace(net=tuple(net), each=())

    def _initial(self) -> Ints:
        """Return [ranks, 1 + kinds]: what is there before the first row."""
        rows: list[Ints] = []
        for use, own in zip(self.uses, self.samplings, strict=True):
            each = np.array(list(use.start_each.values()), np.int64).reshape(-1, len(NOTHING))
            rows.append(np.array(use.start, np.int64) + own.counts @ each)
        return np.array(rows, np.int64).reshape(-1, len(NOTHING))
