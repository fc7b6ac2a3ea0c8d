"""Binding: the passes of a Program's stages become blocks on ranks, and a schedule of them a table."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import cached_property
from weakref import proxy

import numpy as np

from distsim.cache import Cache, uncollected
from distsim.errors import ScheduleError
from distsim.ir import Value
from distsim.program.block import Block
from distsim.program.links import Maker
from distsim.program.parts import Parts
from distsim.program.passes.joined import beginning, ending
from distsim.program.passes.overlap_pairs import interleave, interleaved_names
from distsim.program.resized_calls import resized_calls
from distsim.program.table import (
    FIRST,
    ONCE,
    SECOND,
    SEND,
    UPDATE,
    BoundBlock,
    CallPattern,
    Key,
    RankKeys,
    Table,
    TableCalls,
    columns_of,
)
from distsim.program.tail import Tail
from distsim.schedule import FLUSH, LAST, LATER, IssueOrder, Kind, Schedule, issue_order
from distsim.schedule.codes import kind_of, number_of
from distsim.schedule.issue_order import PLACES, READS_VERSION, UPDATES_AFTER, UPDATES_VERSION
from distsim.schedule.table import Ints

_KINDS = tuple(Kind)

Placement = tuple[tuple[int, ...], int, bool]
"""The rank of each stage, how many copies of the model the stages are, and whether steps end with a flush."""


def table_of(parts: Parts, schedule: Schedule) -> Table:
    """Return the table of the parts of a program in the order of a schedule, kept with both."""
    placement = (schedule.rank_of, schedule.copies, schedule.weights == FLUSH)
    return _binder(parts, placement).table(schedule)


def _binder(parts: Parts, placement: Placement) -> Binder:
    return _BINDERS.get(parts, placement, lambda: Binder(parts, *placement))


_Follower = tuple[BoundBlock, int, int]
"""What follows a call, and which of the columns of its cell (:class:`CallPattern`) its own two are."""


MOST_TABLES = 64
"""Of the parts of a program in one placement: those in the schedules used last."""


class Binder:
    """The blocks of some parts, each made once, with the stages on these ranks.

    Stage ``s`` of copy ``c`` of the model is number ``c * len(parts.blocks) + s``, as in the schedule.
    """

    def __init__(self, parts: Parts, rank_of: tuple[int, ...], copies: int, flush: bool) -> None:
        self.parts: Parts = proxy(parts)  # which are kept by programs, and keep this
        self.rank_of, self.copies = rank_of, copies
        self.chain = len(parts.blocks)
        self.versions = None if flush else parts.versions
        # Without a flush each forward call makes of its version of the weights what else is made once a step.
        ahead = () if self.versions is None else parts.ahead.values()
        self.anew = frozenset([key for block in ahead for key in block.outputs])
        self.begun = parts.begun(rank_of, self.versions is None)
        # Copies of the model are summed first; versions of the weights have their own sums.
        self.ends_early = flush and copies == 1 and bool(parts.early)
        self.calls: dict[tuple[int, int, bool], BoundBlock | None] = {}
        self.keys: dict[tuple[int, bool], tuple[tuple[Key, ...], tuple[Key, ...]]] = {}
        self.named: dict[tuple[int, int], RankKeys] = {}
        self.pairs: dict[tuple[BoundBlock, BoundBlock], BoundBlock] = {}
        self.transfers: dict[tuple[Value, int, int, int], BoundBlock] = {}
        self.joins = any(output.microbatched for output in parts.outputs)
        self._updates: dict[tuple[int, bool], tuple[BoundBlock, ...]] = {}
        self._sends: dict[BoundBlock, tuple[_Follower, ...]] = {}
        self._tables: OrderedDict[Schedule, Table] = OrderedDict()
        self._tails: dict[int, Tail] = {}

    @property
    def makers(self) -> dict[Value, Maker]:
        """Who makes each key."""
        return self.parts.makers()

    @property
    def readers(self) -> dict[Value, tuple[int, ...]]:
        """The stages of the chain whose passes over a microbatch read each key."""
        return self._readers

    @cached_property
    def _readers(self) -> dict[Value, tuple[int, ...]]:
        found: dict[Value, dict[int, None]] = {}
        for stage, (forward, backward, _) in enumerate(self.parts.blocks):
            for key in (*forward.inputs, *backward.inputs):
                found.setdefault(key, {})[stage] = None
        return {key: tuple(stages) for key, stages in found.items()}

    def once(self, key: Value) -> bool:
        """Whether there is one value of a key per step; one that only two halves of a pass know has many."""
        maker = self.makers.get(key)
        return maker is not None and maker.once and key not in self.anew

    def on(self, rank: int, which: int) -> RankKeys:
        """Return the keys of values on a rank, of which microbatch."""
        found = self.named.get((rank, which))
        if found is None:
            found = self.named[rank, which] = RankKeys(rank, which)
        return found

    # --- calls ----------------------------------------------------------------------------------------

    def part(self, stage: int, kind: Kind) -> Block:
        """Return what an action of a stage runs."""
        return self.parts.part(stage % self.chain, kind)

    def call(self, family: int, place: int, start: bool = True) -> BoundBlock | None:
        """Return the block of an action in its place; None if nobody reads what it makes.

        ``family`` is the code of its stage and kind. The place matters where sums are made: the first call
        makes them, each later one adds to them. It reads the weights of the ``start``, or a version that an
        update made.
        """
        stage, kind = number_of(family), _KINDS[kind_of(family)]
        part = self.part(stage, kind)
        differs = part.accumulated or (kind is Kind.FORWARD and stage in self.begun)
        key = family, place if differs else 0, start
        if key not in self.calls:
            self.calls[key] = self._call(part, *key) if part.outputs else None
        return self.calls[key]

    def _call(self, part: Block, family: int, place: int, start: bool) -> BoundBlock:
        stage, kind = number_of(family), _KINDS[kind_of(family)]
        rank = self.rank_of[stage]
        found = self.keys.get((family, start))
        if found is None:  # calls in other places have the same keys
            sums, once, each = set(part.accumulated), self.on(rank, ONCE), self.on(rank, FIRST)
            reads = self._reads(part.inputs, rank, start)
            makes = tuple([once[v] if v in sums else each[v] for v in part.outputs])
            found = self.keys[family, start] = reads, makes
        reads, makes = found
        function, names = part.function, part.names
        adds = bool(part.accumulated and place & LATER and part.accumulating is not None)
        if adds and part.accumulating is not None:
            reads = (*reads, *map(self.on(rank, ONCE).__getitem__, part.accumulated))
            function, names = part.accumulating, part.accumulating_names
        if kind is Kind.FORWARD and stage in self.begun and (self.versions or not place & LATER):
            behind = 0  # what is gathered already
            for ahead in [self.parts.ahead[other % self.chain] for other in self.begun[stage]]:
                made = {key: at for at, key in enumerate(ahead.outputs)}
                places = tuple([made.get(key.value, -1) for key in reads])
                begin = beginning(function, ahead.function, places, behind, len(self.begun[stage]) == 1)
                behind = 1 + max([at for at, origin in enumerate(begin.origins) if origin and origin[0] == 1])
                reads = (*[key for key, at in zip(reads, places, strict=True) if at < 0],)
                reads += self._reads(ahead.inputs, rank, start)
                makes += tuple([Key(v, rank, ONCE if self.once(v) else FIRST) for v in ahead.outputs])
                function, names = begin.function, begin.names(names, ahead.names)
            begins = tuple([other % self.chain for other in self.begun[stage]])
            return BoundBlock(
                kind.value, rank, reads, makes, function, names, (stage,), adds=adds, begins=begins
            )
        after = self.parts.early.get(stage % self.chain) if self.ends_early and place & LAST else None
        if after is None or not {*after.inputs} <= {*part.accumulated}:
            return BoundBlock(kind.value, rank, reads, makes, function, names, (stage,), adds=adds)
        places = tuple([part.outputs.index(key) for key in after.inputs])
        others = frozenset([p for p in places if part.outputs[p] in self.parts.read_later])
        end = ending(function, after.function, places, others)
        makes = (*[makes[place] for place in end.kept], *map(self.on(rank, ONCE).__getitem__, after.outputs))
        names = end.names(names, after.names)
        return BoundBlock(kind.value, rank, reads, makes, end.function, names, (stage,), adds=adds, ends=True)

    def _reads(self, values: Sequence[Value], rank: int, start: bool) -> tuple[Key, ...]:
        """Return the keys that are read of values."""
        if self.versions and not start:
            return tuple([self._read(value, rank, start) for value in values])
        once, each, makers, anew = self.on(rank, ONCE), self.on(rank, FIRST), self.makers, self.anew
        found = [(value, makers.get(value)) for value in values]
        return tuple([once[v] if m and m.once and v not in anew else each[v] for v, m in found])

    def _read(self, value: Value, rank: int, start: bool) -> Key:
        """Return the key that is read of a value: of weights those of the start, or the row's version."""
        if self.versions and not start and value in self.versions.successor:
            return self.on(rank, SECOND)[self.versions.successor[value]]
        return self.on(rank, ONCE if self.once(value) else FIRST)[value]

    def updates(self, stage: int, start: bool) -> Sequence[BoundBlock]:
        """Return what a stage runs after a batch: of the version before, or the start, it makes the next.

        What it made that stages before it update by is sent to them.
        """
        found = self._updates.get((stage, start))
        if found is None and self.versions:
            sums = [each for each in self.versions.sent[stage] if self.makers[each[0]].phase]
            rest = [each for each in self.versions.sent[stage] if each not in sums]
            made = [self._sent_back(*each, stage) for each in sums]
            made += [self._update(block, stage, start) for block in self.versions.each[stage]]
            made += [self._sent_back(*each, stage) for each in rest]
            found = self._updates[stage, start] = tuple(made)
        return found or ()

    def _update(self, block: Block, stage: int, start: bool) -> BoundBlock:
        rank = self.rank_of[stage]
        new = {*self.versions.successor.values()} if self.versions else set[Value]()
        sent = {key for key in block.inputs if self._made_elsewhere(key, stage)}
        reads = [Key(v, rank, FIRST) if v in sent else self._read(v, rank, start) for v in block.inputs]
        makes = [Key(v, rank, FIRST if v in new else ONCE) for v in block.outputs]
        return BoundBlock(UPDATE, rank, tuple(reads), tuple(makes), block.function, block.names, (stage,))

    def _made_elsewhere(self, key: Value, stage: int) -> bool:
        maker = self.makers[key]
        return maker.place >= 0 and maker.stage != stage

    def _sent_back(self, key: Value, to: int, stage: int) -> BoundBlock:
        """Return the transfer of what is made of a batch: it has arrived before the next one is made."""
        source, target = self.rank_of[stage], self.rank_of[to]
        if source == target:
            raise ScheduleError(
                f"{self.parts.name}: {key.name!r} is made on stage {stage} for an update of stage {to}, both "
                f"on rank {source}, where without a flush the next one would be in its place: use 1f1b, or "
                "cut stages between layers"
            )
        keys = (Key(key, source, ONCE),), (Key(key, target, FIRST),)
        return BoundBlock(SEND, source, *keys, target=target)

    def pair(self, one: BoundBlock, two: BoundBlock) -> BoundBlock:
        """Return the block of two calls that overlap."""
        found = self.pairs.get((one, two))
        if found is None:
            ended = two.reads if two.ends else ()
            sums = {key for key in one.makes if key.which == ONCE} & {*two.makes, *ended}
            if sums:
                raise ScheduleError(
                    f"{one.kind} and {two.kind} of stage {one.stages[0]} are to run together, and both "
                    f"add to {next(iter(sums)).value.name!r}; list them one after the other"
                )
            found = self.pairs[one, two] = BoundBlock(
                one.kind + two.kind,
                one.rank,
                (*one.reads, *map(_second, two.reads)),
                (*one.makes, *map(_second, two.makes)),
                self.parts.overlap(one.callee, two.callee),
                self._names(one, two),
                (*one.stages, *two.stages),
                pair=(one, two),
            )
        return found

    def _names(self, one: BoundBlock, two: BoundBlock) -> tuple[str, ...]:
        if self.parts.overlap is not interleave or not (one.names or two.names):
            return ()
        return interleaved_names(one.callee, two.callee, one.names, two.names)

    def sends(self, block: BoundBlock) -> Sequence[_Follower]:
        """Return the transfers that follow a call."""
        found = self._sends.get(block)
        if found is None:
            found = self._sends[block] = tuple(self._sent(block))
        return found

    def _sent(self, block: BoundBlock) -> Iterator[_Follower]:
        for key in block.makes:
            if key.which == ONCE:
                continue
            stage = block.stages[key.which == SECOND]
            first = stage - stage % self.chain
            targets = [self.rank_of[first + reader] for reader in self.readers.get(key.value, ())]
            for target in dict.fromkeys(targets):
                if target != block.rank:
                    yield self.transfer(key.value, block.rank, target, FIRST), key.which, -1

    def transfer(self, value: Value, source: int, target: int, which: int) -> BoundBlock:
        """Return what brings a value from one rank to another."""
        found = self.transfers.get((value, source, target, which))
        if found is None:
            keys = (Key(value, source, which),), (Key(value, target, which),)
            found = self.transfers[value, source, target, which] = BoundBlock(
                SEND, source, *keys, target=target
            )
        return found

    # --- the table ------------------------------------------------------------------------------------

    def table(self, schedule: Schedule) -> Table:
        """Return the table of a schedule that has this placement."""
        found = self._tables.get(schedule)
        if found is None:
            found = self._tables[schedule] = self._table(issue_order(schedule))
            if len(self._tables) > MOST_TABLES:
                self._tables.popitem(last=False)
        else:
            self._tables.move_to_end(schedule)
        return found

    @uncollected()
    def _table(self, order: IssueOrder) -> Table:
        found = self._resized(order)
        if found is None:
            tail = self._tail(order.schedule)
            found = self._bound(order, tail), tail.latest(order)
        bound, latest = found
        return Table(order, bound, columns_of(order, bound.pattern), latest)

    def _bound(self, order: IssueOrder, tail: Tail) -> TableCalls:
        """Return the blocks of the calls of an order and of what follows them."""
        calls = order.calls[0]
        return _CALLS.get(self, (tail.each, calls.tobytes()), lambda: self._bind(calls, tail))

    def _resized(self, order: IssueOrder) -> tuple[TableCalls, dict[tuple[Value, int], int]] | None:
        """Return the blocks of an order, and what is latest, as they are for parts of other sizes."""
        if self.parts.like is None or self.versions or self.copies > 1:
            return None
        (other, values), schedule = self.parts.like, order.schedule
        binder = _binder(other, (self.rank_of, self.copies, schedule.weights == FLUSH))
        tail = binder._tail(schedule)
        bound = binder._bound(order, tail)
        calls = _RESIZED.get(self, bound, lambda: resized_calls(bound, other, self.parts, self.on))
        if calls is None:
            return None
        latest = tail.latest(order)
        moved = {each: (values[each[0]], each[1]) for each in latest if each[0] in values}
        return calls, {moved.get(each, each): m for each, m in latest.items()} if moved else latest

    def _bind(self, calls: Ints, tail: Tail) -> TableCalls:
        """Return the blocks of calls, as of :attr:`IssueOrder.calls`, and of what follows them, by number."""
        blocks, swapped = self._blocks(calls)
        followed = [self._followed(*each) for each in zip(calls.tolist(), blocks, strict=True)]
        numbers: dict[BoundBlock, int] = {}

        def of(block: BoundBlock) -> int:
            return numbers.setdefault(block, len(numbers))

        pattern = CallPattern(
            self.chain,
            np.array([-1 if b is None else of(b) for b in blocks], np.int64),
            np.array(swapped, np.bool_),
            np.array([len(each) for each in followed], np.int64),
            np.array([(of(b), i, j) for each in followed for b, i, j in each], np.int64).reshape(-1, 3),
            np.array([(of(b), first, often) for b, first, often in tail.rows], np.int64).reshape(-1, 3),
        )
        return TableCalls(tuple(numbers), pattern, tuple(tail.outputs))

    def _blocks(self, calls: Ints) -> tuple[list[BoundBlock | None], list[bool]]:
        """Return the blocks of calls, and of each whether it is of the second action only."""
        blocks: list[BoundBlock | None] = []
        swapped: list[bool] = []
        for one, two, how in calls.tolist():
            start = not how & READS_VERSION
            each = [self.call(code // PLACES, code % PLACES, start) for code in (one, two) if code >= 0]
            made = [block for block in each if block is not None]
            blocks.append(self.pair(*made) if len(made) == 2 else made[0] if made else None)
            swapped.append(len(each) == 2 and each[0] is None)
        return blocks, swapped

    def _followed(self, call: Sequence[int], block: BoundBlock | None) -> Sequence[_Follower]:
        """Return what follows a call: its transfers and, without a flush, the updates after a batch."""
        code, _, how = call
        sends = () if block is None else self.sends(block)
        if not how & UPDATES_AFTER:
            return sends
        updates = self.updates(number_of(code // PLACES), start=not how & UPDATES_VERSION)
        return (*sends, *[_after_batch(each) for each in updates])

    def _tail(self, schedule: Schedule) -> Tail:
        """Return what follows the last action; how many microbatches matters only where they are joined."""
        count = schedule.num_microbatches
        key = count if self.joins else 1
        found = self._tails.get(key)
        if found is None:
            found = self._tails[key] = Tail(self, count)
        return found


def _after_batch(block: BoundBlock) -> _Follower:
    """Return what follows a batch: a transfer, or an update, which reads the version before."""
    return (block, 2, -1) if block.kind == SEND else (block, 2, 3)


def _second(key: Key) -> Key:
    """Return a key of a row's second microbatch instead of its first."""
    return key._replace(which=SECOND) if key.which == FIRST else key


_RESIZED = Cache[Binder, TableCalls | None]("blocks of tables, by those that differ in sizes alone", 64)
_BINDERS = Cache[Parts, Binder]("blocks of a program's parts, by the rank of each stage", 8)
_CALLS = Cache[Binder, TableCalls]("blocks of a table, by the calls of its order and the end of a step", 64)
