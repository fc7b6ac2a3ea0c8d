"""Binding: the passes of a Program's stages become blocks on ranks, and a schedule of them a table."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from weakref import proxy

import numpy as np

from distsim.cache import Cache
from distsim.errors import ScheduleError
from distsim.ir import Value
from distsim.program.block import Block
from distsim.program.overlap_pairs import interleave, interleaved_names
from distsim.program.parts import Parts
from distsim.program.table import (
    FIRST,
    ONCE,
    SECOND,
    SEND,
    BoundBlock,
    Key,
    Table,
    TableCalls,
)
from distsim.program.table_columns import CallPattern, columns_of
from distsim.program.tail import Tail
from distsim.schedule import LATER, IssueOrder, Kind, Schedule, issue_order
from distsim.schedule.table import Ints

_KINDS = tuple(Kind)

Placement = tuple[tuple[int, ...], int]
"""The rank of each stage, and how many copies of the model the stages are."""


def table_of(parts: Parts, schedule: Schedule) -> Table:
    """Return the table of the parts of a program in the order of a schedule, kept with both."""
    placement = (schedule.rank_of, schedule.copies)
    return _BINDERS.get(parts, placement, lambda: Binder(parts, *placement)).table(schedule)


MOST_TABLES = 64
"""Of the parts of a program in one placement: those in the schedules used last."""


class Binder:
    """The blocks of some parts, each made once, with the stages on these ranks.

    Stage ``s`` of copy ``c`` of the model is number ``c * len(parts.blocks) + s``, as in the schedule.
    """

    def __init__(self, parts: Parts, rank_of: tuple[int, ...], copies: int) -> None:
        self.parts: Parts = proxy(parts)  # which are kept by programs, and keep this
        self.rank_of, self.copies = rank_of, copies
        self.chain = len(parts.blocks)
        self.makers = parts.makers()
        self.calls: dict[tuple[int, int], BoundBlock | None] = {}
        self.keys: dict[tuple[int, Kind], tuple[tuple[Key, ...], tuple[Key, ...]]] = {}
        self.pairs: dict[tuple[BoundBlock, BoundBlock], BoundBlock] = {}
        self.transfers: dict[tuple[Value, int, int, int], BoundBlock] = {}
        self.readers = self._readers()
        self.joins = any(output.microbatched for output in parts.outputs)
        self._sends: dict[BoundBlock, tuple[tuple[BoundBlock, int], ...]] = {}
        self._tables: OrderedDict[Schedule, Table] = OrderedDict()
        self._tails: dict[int, Tail] = {}

    def _readers(self) -> dict[Value, tuple[int, ...]]:
        """Return the stages of the chain whose passes over a microbatch read each key."""
        found: dict[Value, dict[int, None]] = {}
        for stage, (forward, backward, _) in enumerate(self.parts.blocks):
            for key in (*forward.inputs, *backward.inputs):
                found.setdefault(key, {})[stage] = None
        return {key: tuple(stages) for key, stages in found.items()}

    def once(self, key: Value) -> bool:
        """Whether there is one value of a key per step; one that only two halves of a pass know has many."""
        maker = self.makers.get(key)
        return maker is not None and maker.once

    # --- calls ----------------------------------------------------------------------------------------

    def part(self, stage: int, kind: Kind) -> Block:
        """Return what an action of a stage runs."""
        forward, backward, _ = self.parts.blocks[stage % self.chain]
        if kind is Kind.FORWARD:
            return forward
        if kind is Kind.BACKWARD:
            return backward
        return self.parts.halves[stage % self.chain][kind is Kind.BACKWARD_WEIGHT]

    def call(self, family: int, place: int) -> BoundBlock | None:
        """Return the block of an action (4 * stage + kind) in its place; None if nobody reads what it makes.

        The place matters where sums are made: the first call makes them, each later one adds to them.
        """
        stage, kind = family // 4, _KINDS[family % 4]
        part = self.part(stage, kind)
        place = place if part.accumulated else 0
        if (family, place) not in self.calls:
            made = self._call(part, stage, kind, place) if part.outputs else None
            self.calls[family, place] = made
        return self.calls[family, place]

    def _call(self, part: Block, stage: int, kind: Kind, place: int) -> BoundBlock:
        rank = self.rank_of[stage]
        found = self.keys.get((stage, kind))
        if found is None:  # calls in other places have the same keys
            sums = set(part.accumulated)
            reads = tuple([Key(v, rank, ONCE if self.once(v) else FIRST) for v in part.inputs])
            makes = tuple([Key(v, rank, ONCE if v in sums else FIRST) for v in part.outputs])
            found = self.keys[stage, kind] = reads, makes
        reads, makes = found
        function, names = part.function, part.names
        if part.accumulated and place & LATER and part.accumulating is not None:
            reads = (*reads, *[Key(v, rank, ONCE) for v in part.accumulated])
            function, names = part.accumulating, part.accumulating_names
        return BoundBlock(kind.value, rank, reads, makes, function, names, (stage,))

    def pair(self, one: BoundBlock, two: BoundBlock) -> BoundBlock:
        """Return the block of two calls that overlap."""
        found = self.pairs.get((one, two))
        if found is None:
            sums = {key for key in one.makes if key.which == ONCE} & {*two.makes}
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

    def sends(self, block: BoundBlock) -> Sequence[tuple[BoundBlock, int]]:
        """Return the transfers that follow a call, and which of its microbatches each is of."""
        found = self._sends.get(block)
        if found is None:
            found = self._sends[block] = tuple(self._sent(block))
        return found

    def _sent(self, block: BoundBlock) -> Iterator[tuple[BoundBlock, int]]:
        for key in block.makes:
            if key.which == ONCE:
                continue
            stage = block.stages[key.which == SECOND]
            first = stage - stage % self.chain
            targets = [self.rank_of[first + reader] for reader in self.readers.get(key.value, ())]
            for target in dict.fromkeys(targets):
                if target != block.rank:
                    yield self.transfer(key.value, block.rank, target, FIRST), key.which

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

    def _table(self, order: IssueOrder) -> Table:
        tail, calls = self._tail(order.schedule), order.calls[0]
        key = tail.each, calls.tobytes()
        bound = _CALLS.get(self, key, lambda: self._bind(calls, tail))
        return Table(order, bound, columns_of(order, bound.pattern), tail.latest(order))

    def _bind(self, calls: Ints, tail: Tail) -> TableCalls:
        """Return the blocks of calls, as of :attr:`IssueOrder.calls`, and of what follows them, by number."""
        blocks, swapped = self._blocks(calls)
        sends = [() if b is None else self.sends(b) for b in blocks]
        numbers: dict[BoundBlock, int] = {}

        def of(block: BoundBlock) -> int:
            return numbers.setdefault(block, len(numbers))

        pattern = CallPattern(
            self.chain,
            np.array([-1 if b is None else of(b) for b in blocks], np.int64),
            np.array(swapped, np.bool_),
            np.array([len(each) for each in sends], np.int64),
            np.array([(of(b), which, 2) for each in sends for b, which in each], np.int64).reshape(-1, 3),
            np.array([(of(b), first, often) for b, first, often in tail.rows], np.int64).reshape(-1, 3),
        )
        return TableCalls(tuple(numbers), pattern, tuple(tail.outputs))

    def _blocks(self, calls: Ints) -> tuple[list[BoundBlock | None], list[bool]]:
        """Return the blocks of calls, and of each whether it is of the second action only."""
        blocks: list[BoundBlock | None] = []
        swapped: list[bool] = []
        for pair in calls.tolist():
            each = [self.call(*divmod(code, 4)) for code in pair if code >= 0]
            made = [block for block in each if block is not None]
            blocks.append(self.pair(*made) if len(made) == 2 else made[0] if made else None)
            swapped.append(len(each) == 2 and each[0] is None)
        return blocks, swapped

    def _tail(self, schedule: Schedule) -> Tail:
        """Return what follows the last action; how many microbatches matters only where they are joined."""
        count = schedule.num_microbatches
        key = count if self.joins else min(count * self.copies, 2)
        found = self._tails.get(key)
        if found is None:
            found = self._tails[key] = Tail(self, count)
        return found


def _second(key: Key) -> Key:
    """Return a key of a row's second microbatch instead of its first."""
    return key._replace(which=SECOND) if key.which == FIRST else key


_BINDERS = Cache[Parts, Binder]("blocks of a program's parts, by the rank of each stage", 8)
_CALLS = Cache[Binder, TableCalls]("blocks of a table, by the calls of its order and the end of a step", 64)
