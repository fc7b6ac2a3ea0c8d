"""Who makes what a block reads: the part of a program's wiring that no schedule and no cost changes."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from weakref import WeakValueDictionary

import numpy as np

from distsim.cache import Cache
from distsim.ir import Value
from distsim.program.table import LATEST, ONCE, BoundBlock, Key, Table, TableCalls
from distsim.simulation.tasks.program_ranks import CommunicationPattern, communication
from distsim.simulation.tasks.templates import Ints

Address = tuple[Value, int]
"""A value on a pipeline rank: a key of whichever microbatch."""

Result = tuple[int, int]
"""(block, output)."""

Results = dict[Address, tuple[tuple[int, ...], tuple[Result, ...]]]
"""Of each value the blocks that make it, and which of their outputs it is."""


def address(key: Key) -> Address:
    """Return what a key is a value of."""
    return key.value, key.rank


class BlockLinks:
    """Which blocks make what each block of a set reads.

    ``sources`` [blocks, inputs] are the results that may be what is read: several for a sum, or where
    microbatches differ in who makes them, none for what is there from the start; ``makers`` are their blocks.
    What is read after all of them have run, as one value a step or the latest, is that of the block that ran
    last: ``contested`` are those (reader, makers), and which block that is, a table tells
    (:meth:`last_makers`).
    """

    def __init__(self, blocks: Sequence[BoundBlock], num_ranks: int) -> None:
        self.blocks, self.num_ranks = tuple(blocks), num_ranks
        self.like: BlockLinks | None = None  # of blocks that differ in sizes alone
        self.number = {block: n for n, block in enumerate(self.blocks)}
        results: Results = {}
        several: dict[Address, dict[tuple[int, int], int]] = {}
        for n, block in enumerate(self.blocks):
            alone = (n,)
            for place, key in enumerate(block.makes):
                at = key[:2]
                if at in results:
                    several[at] = {}
                results[at] = alone, ((n, place),)
        if several:
            results |= self._several(several)
        nobody: tuple[tuple[int, ...], tuple[Result, ...]] = ((), ())
        found = [[results.get(key[:2], nobody) for key in block.reads] for block in self.blocks]
        self.makers = [[makers for makers, _ in own] for own in found]
        self.sources = [[sources for _, sources in own] for own in found]
        contested: dict[tuple[int, tuple[int, ...]], None] = {}
        for n, block in enumerate(self.blocks):
            for key, makers in zip(block.reads, self.makers[n], strict=True):
                if len(makers) > 1 and key.which in (ONCE, LATEST):
                    contested[n, makers] = None
        self.contested = tuple(contested)

    def resized(self, blocks: Sequence[BoundBlock], others: Sequence[BoundBlock]) -> BlockLinks:
        """Return the links of others than these blocks, which differ in sizes alone."""
        of, found = dict(zip(blocks, others, strict=True)), copy(self)
        own = tuple([of[block] for block in self.blocks])
        found.like, found.blocks = self, others if own == others and isinstance(others, tuple) else own
        found.number = {block: n for n, block in enumerate(own)}
        found.__dict__.pop("communication", None)
        return found

    def _several(self, made: dict[Address, dict[tuple[int, int], int]]) -> Results:
        """Return the makers and results of values that several blocks make."""
        for n, block in enumerate(self.blocks):
            for place, key in enumerate(block.makes):
                own = made.get(key[:2])
                if own is not None:
                    own[n, key.which] = place  # a pair may make it for both microbatches
        return {
            at: (tuple([n for n, _ in own]), tuple([(n, place) for (n, _), place in own.items()]))
            for at, own in made.items()
        }

    @cached_property
    def communication(self) -> CommunicationPattern:
        """What the blocks move between devices."""
        return communication(self.blocks, self.num_ranks)

    def last_makers(self, table: Table) -> tuple[int, ...]:
        """Return, of each of ``contested``, which maker runs last if all run before the reader, else -1."""
        if not self.contested:
            return ()
        rows = self.numbers(table)
        place = np.arange(len(rows))
        # A block that is repeated runs until the end of its round.
        ends = np.repeat(np.where(table.repeats > 1, table.start[1:] - 1, 0), np.diff(table.start))
        first, last = np.full(len(self.blocks), len(rows)), np.full(len(self.blocks) + 1, -1)
        first[rows[::-1]] = place[::-1]  # of what is written to one place, the last stays
        last[rows] = np.maximum(place, ends)
        reader, makers = self._contested
        until = last[makers]
        latest, one = until.argmax(axis=1), np.arange(len(until))
        end = until[one, latest]
        until[one, latest] = -1
        decided = (end < first[reader]) & (end != until.max(axis=1))
        found: list[int] = np.where(decided, makers[one, latest], -1).tolist()
        return tuple(found)

    @cached_property
    def _contested(self) -> tuple[Ints, Ints]:
        """:attr:`contested` as arrays: [contested], [contested, makers], the number of blocks for none."""
        most = max([len(makers) for _, makers in self.contested])
        none = len(self.blocks)
        padded = [(*makers, *[none] * (most - len(makers))) for _, makers in self.contested]
        return np.array([reader for reader, _ in self.contested]), np.array(padded)

    def numbers(self, table: Table) -> Ints:
        """Return [rows]: the numbers of the blocks that the rows of a table call."""
        if table.blocks is self.blocks:
            return table.block
        return np.array([self.number[block] for block in table.blocks], np.int64)[table.block]

    def key_of(self, block: int, place: int) -> Key:
        """Return the key of an input of a block."""
        return self.blocks[block].reads[place]


_FLOWS: WeakValueDictionary[frozenset[BoundBlock], BlockLinks] = WeakValueDictionary()
_LINKS = Cache[TableCalls, BlockLinks]("who makes what blocks read, by the blocks of tables", 1)


def block_links(table: Table) -> BlockLinks:
    """Return the flow of the blocks of a table; tables of the same blocks share it while one is in use."""
    return _LINKS.get(table.calls, None, lambda: _links(table))


def _links(table: Table) -> BlockLinks:
    return _links_of(table.calls, table.num_ranks)


def _links_of(calls: TableCalls, num_ranks: int) -> BlockLinks:
    key = frozenset(calls.blocks)
    found = _FLOWS.get(key)
    if found is None:
        if calls.like is None:
            found = BlockLinks(calls.blocks, num_ranks)
        else:
            like, _ = calls.like
            other = _LINKS.get(like, None, lambda: _links_of(like, num_ranks))
            found = other.resized(like.blocks, calls.blocks)
        _FLOWS[key] = found
    return found
