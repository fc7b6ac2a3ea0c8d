"""The table of calls: what a Program is, as rows in the order in which they are issued.

The rows of a table as numbers: they follow from the order of a schedule and the pattern of its blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from distsim.cache import Cache
from distsim.errors import IRError
from distsim.ir import Function, Value
from distsim.schedule import FLUSH, Action, IssueOrder, Kind
from distsim.schedule.action import UPDATE_LETTER
from distsim.schedule.codes import code_of
from distsim.schedule.table import Ints

FIRST, SECOND, ONCE, LATEST, EVERY = range(5)
"""Of which microbatch a key is: the row's first or second one; of none, there is one value a step; of that
which its maker ran last; of every one (read only). A version of the weights is of the microbatch after which
it was made."""

SEND, CONCAT, UPDATE = "Send", "Concat", UPDATE_LETTER
"""Kinds of blocks besides actions: a transfer, the microbatches of an output put together, an update of
weights or what else runs once."""


class Key(NamedTuple):
    """A value of the joint function on a pipeline rank; ``which`` says of which microbatch."""

    value: Value
    rank: int
    which: int


class RankKeys(dict[Value, Key]):
    """The keys of values on a rank, all of one ``which``, each made when it is first asked for and kept: the
    blocks of a rank name the same ones again and again.

    >>> from distsim.ir.type import Type
    >>> keys, value = RankKeys(3, ONCE), Value("w", Type())
    >>> keys[value] is keys[value], keys[value].rank
    (True, 3)
    """

    def __init__(self, rank: int, which: int) -> None:
        super().__init__()
        self.rank, self.which = rank, which

    def __missing__(self, value: Value) -> Key:
        found = self[value] = Key(value, self.rank, self.which)
        return found


@dataclass(frozen=True, eq=False)
class BoundBlock:
    """What a row calls: a Function on the program's pattern mesh, bound to a rank and keys.

    ``reads`` are the keys of the inputs of ``function``, ``makes`` those of its outputs, none of which it
    reads, but that a sum over microbatches is read as far as it came. ``kind`` says what it is for: the kinds
    of its actions (F, B, I, W; FB for a pair), ``U`` for an update and what runs once a step; or, without a
    function, ``Send``, which brings its key from ``rank`` to ``target``, and ``Concat``, which puts the
    microbatches of its key together along dimension ``dim``. ``stages`` are those of its actions, ``pair``
    the blocks of the two that overlap. ``adds``: it adds to sums that were made before; ``ends``: it is the
    last that does, and goes on with what is made of them; ``begins``: it is the first of its stage, and makes
    what others read of these stages besides (:attr:`Block.place`). Stages that do the same share their
    functions, in which ops have the names of modules alone: ``names`` are those of its ops here.
    """

    kind: str
    rank: int
    reads: tuple[Key, ...]
    makes: tuple[Key, ...]
    function: Function | None = None
    names: tuple[str, ...] = ()
    stages: tuple[int, ...] = ()
    target: int = -1
    dim: int = 0
    pair: tuple[BoundBlock, ...] = ()
    adds: bool = False
    ends: bool = False
    begins: tuple[int, ...] = ()

    @property
    def callee(self) -> Function:
        """The function; raises :class:`IRError` for a transfer and a Concat, which have none."""
        if self.function is None:
            raise IRError(f"a {self.kind} of {self.reads[0].value.name!r} calls no function")
        return self.function

    @property
    def ranks(self) -> tuple[int, ...]:
        """The pipeline ranks that take part: two in a transfer."""
        return (self.rank,) if self.target < 0 else (self.rank, self.target)


@dataclass(frozen=True, eq=False)
class TableCalls:
    """The blocks of a table by number, their pattern and the outputs: tables of many orders share them.

    ``like`` are those that differ in sizes alone, if they are known, and what stands for their values here.
    """

    blocks: tuple[BoundBlock, ...]
    pattern: CallPattern
    outputs: tuple[Key, ...]
    like: tuple[TableCalls, Mapping[Value, Value]] | None = None


@dataclass(frozen=True, eq=False)
class Table:
    """Rows in an order that agrees with every rank's own, with what repeats written once.

    Row ``n`` calls ``blocks[block[n]]`` for the microbatches ``microbatch[n]`` (-1: none; of all copies of
    the model); where weights are updated without a flush, the second is of the version that is read. Round
    ``r`` are the rows ``start[r]:start[r + 1]``, as they are in its first repetition; in repetition ``k`` of
    ``repeats[r]`` every microbatch is ``k * advance[r]`` higher. ``order`` is the order of the schedule that
    was followed, ``tail`` the first round of what follows the last action. ``latest``
    tells of a value that is read :data:`LATEST` which microbatch that is. ``outputs`` are the keys of the
    program's outputs, then of the copies of shared parameters.
    """

    order: IssueOrder
    calls: TableCalls
    columns: TableColumns
    latest: Mapping[tuple[Value, int], int]

    @property
    def blocks(self) -> tuple[BoundBlock, ...]:
        """What rows call."""
        return self.calls.blocks

    @property
    def outputs(self) -> tuple[Key, ...]:
        """The keys of the outputs and of the copies of shared parameters."""
        return self.calls.outputs

    @property
    def block(self) -> Ints:
        """[rows]."""
        return self.columns.block

    @property
    def microbatch(self) -> Ints:
        """[rows, 2]."""
        return self.columns.microbatch

    @property
    def start(self) -> Ints:
        """[rounds + 1]."""
        return self.columns.start

    @property
    def repeats(self) -> Ints:
        """[rounds]."""
        return self.columns.repeats

    @property
    def advance(self) -> Ints:
        """[rounds]."""
        return self.columns.advance

    @property
    def tail(self) -> int:
        """The first round of what follows the last action."""
        return self.columns.tail

    @property
    def microbatches(self) -> int:
        """Microbatches of all copies of the model."""
        schedule = self.order.schedule
        return schedule.num_microbatches * schedule.copies

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return self.order.schedule.num_ranks

    def __len__(self) -> int:
        """Return the number of rows, every repetition counted."""
        return int(((self.start[1:] - self.start[:-1]) * self.repeats).sum())

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """Yield (block, first microbatch, second microbatch) of every row, every repetition written out."""
        block, pairs = self.block.tolist(), self.microbatch.tolist()
        starts: list[int] = self.start.tolist()
        rounds = zip(starts, starts[1:], self.repeats.tolist(), self.advance.tolist(), strict=False)
        for begin, end, repeats, advance in rounds:
            for k in range(repeats):
                moved = k * advance
                for n in range(begin, end):
                    one, two = pairs[n]
                    yield block[n], one + moved if one >= 0 else -1, two + moved if two >= 0 else -1

    def microbatch_of(self, key: Key, first: int, second: int) -> int:
        """Return the microbatch of a key in a row; -1 for a value of which there is one a step.

        Not to be asked for one that is of every microbatch.
        """
        if key.which == ONCE:
            return -1
        return (
            self.latest[key.value, key.rank]
            if key.which == LATEST
            else second
            if key.which == SECOND
            else first
        )

    def name(self, block: BoundBlock, first: int, second: int) -> str:
        """Return the name of a call: ``F3@1``, ``(F3@2;B4@1)``, ``U@1``, or ``U3@1`` after microbatch 3."""
        if not block.kind or block.kind in (SEND, CONCAT):
            return ""
        if block.kind == UPDATE:
            return f"{UPDATE}{first if first >= 0 else ''}@{block.stages[0]}"
        each = self.order.schedule.num_microbatches
        pairs = zip(block.kind, block.stages, (first, second), strict=False)
        names = [str(Action(Kind(kind), stage, own % each)) for kind, stage, own in pairs]
        return names[0] if len(names) == 1 else f"({';'.join(names)})"


@dataclass(frozen=True, eq=False)
class TableColumns:
    """The rows of a :class:`Table` as numbers, as it says; tables of other blocks may share them."""

    block: Ints
    microbatch: Ints
    start: Ints
    repeats: Ints
    advance: Ints
    tail: int


class CallPattern:
    """All of the blocks of a table that its rows depend on, besides the order; blocks are numbers.

    Of each of :attr:`IssueOrder.calls`: ``own``, its block, -1 for none; ``swapped``, whether that is of the
    second action only; ``counts``, how many blocks follow it. ``followed`` [.., 3] are those in turn: the
    block, and which of the columns of a cell (:func:`_microbatches`) its own two microbatches are.
    ``tail`` [.., 3]: block, first microbatch, repetitions of what follows the last action. Stages are in
    chains of ``chain``. ``key`` is the same for equal patterns.
    """

    def __init__(
        self,
        chain: int,
        own: Ints,
        swapped: npt.NDArray[np.bool_],
        counts: Ints,
        followed: Ints,
        tail: Ints,
    ) -> None:
        self.chain = chain
        self.own, self.swapped, self.counts, self.followed, self.tail = own, swapped, counts, followed, tail
        self.key = chain, *[each.tobytes() for each in (own, swapped, counts, followed, tail)]


def columns_of(order: IssueOrder, pattern: CallPattern) -> TableColumns:
    """Return the rows of an order whose calls have a pattern, kept with the order."""
    return _COLUMNS.get(order, pattern.key, lambda: _columns_of(order, pattern))


def _columns_of(order: IssueOrder, pattern: CallPattern) -> TableColumns:
    number, ends = order.calls[1], pattern.tail
    cells = np.flatnonzero(pattern.own[number] >= 0)
    batches = _microbatches(order, pattern)
    often = pattern.counts[number[cells]]
    cell = np.repeat(cells, often)
    first = pattern.counts.cumsum() - pattern.counts
    place = np.arange(len(cell)) + np.repeat(first[number[cells]] - often.cumsum() + often, often)
    block = np.concatenate([pattern.own[number[cells]], pattern.followed[place, 0]])
    batch = np.concatenate([batches[cells, :2], batches[cell[:, None], pattern.followed[place, 1:]]])
    rounds = np.repeat(np.arange(len(order.repeats)), np.diff(order.start))
    # In each step of a round, first the calls, then what they send.
    steps = 2 * (rounds * (order.step.max(initial=0) + 1) + order.step)
    issued = np.concatenate([steps[cells], steps[cell] + 1]).argsort(kind="stable")
    sizes = np.bincount(rounds[np.concatenate([cells, cell])], minlength=len(order.repeats))
    ones = np.ones(len(ends), np.int64)
    columns = (
        np.concatenate([block[issued], ends[:, 0]]),
        np.concatenate([batch[issued], np.stack([ends[:, 1], -ones], axis=1)]),
        np.concatenate([[0], sizes, ones]).cumsum(),
        np.concatenate([order.repeats, ends[:, 2]]),
        np.concatenate([order.advance, ones]),
    )
    for column in columns:
        column.setflags(write=False)
    return TableColumns(*columns, len(order.repeats))


def _microbatches(order: IssueOrder, pattern: CallPattern) -> Ints:
    """Return [cells, columns]: first the two microbatches of each cell's call, and -1 in the last.

    They are those of its actions, numbered over all copies; without a flush the microbatch and the version
    that it reads, then what the update after it makes, and the version that this changes.
    """
    none = np.full(len(order.family), -1, np.int64)
    if order.schedule.weights != FLUSH:
        return np.stack([order.microbatch[:, 0], order.version, order.update, order.before, none], axis=1)
    copy = order.family // code_of(pattern.chain, 0)
    own = order.microbatch + copy * order.schedule.num_microbatches
    found = np.column_stack([np.where(order.family < 0, -1, own), none])
    swaps = pattern.swapped[order.calls[1]]
    found[swaps, :2] = found[swaps, 1::-1]
    return found


_COLUMNS = Cache[IssueOrder, TableColumns]("rows of a table, by order and pattern of its blocks", 16)
