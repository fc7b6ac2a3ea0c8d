"""The rows of a table as numbers: they follow from the order of a schedule and the pattern of its blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from distsim.cache import Cache
from distsim.schedule import IssueOrder
from distsim.schedule.table import Ints


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
    second action only; ``counts``, how many transfers follow it. ``sent`` [.., 3] are those in turn: the
    block, and which of the microbatches of a cell (:func:`_microbatches`) its own two are. ``tail`` [.., 3]:
    block, first microbatch, repetitions of what follows the last action. Stages are in chains of ``chain``.
    ``key`` is the same for equal patterns.
    """

    def __init__(
        self,
        chain: int,
        own: Ints,
        swapped: npt.NDArray[np.bool_],
        counts: Ints,
        sent: Ints,
        tail: Ints,
    ) -> None:
        self.chain = chain
        self.own, self.swapped, self.counts, self.sent, self.tail = own, swapped, counts, sent, tail
        self.key = chain, *[each.tobytes() for each in (own, swapped, counts, sent, tail)]


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
    block = np.concatenate([pattern.own[number[cells]], pattern.sent[place, 0]])
    batch = np.concatenate([batches[cells, :2], batches[cell[:, None], pattern.sent[place, 1:]]])
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
    """Return [cells, 3]: the microbatches of the actions of each cell, numbered over all copies; -1."""
    copy = order.family // (4 * pattern.chain)
    found = np.full((len(order.family), 3), -1, np.int64)
    own = order.microbatch + copy * order.schedule.num_microbatches
    found[:, :2] = np.where(order.family < 0, -1, own)
    swaps = pattern.swapped[order.calls[1]]
    found[swaps, :2] = found[swaps, 1::-1]
    return found


_COLUMNS = Cache[IssueOrder, TableColumns]("rows of a table, by order and pattern of its blocks", 16)
