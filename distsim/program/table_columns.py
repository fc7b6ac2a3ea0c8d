"""The rows of a table as numbers: they follow from the order of a schedule and the pattern of its blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from distsim.cache import Cache
from distsim.schedule import FLUSH, IssueOrder
from distsim.schedule.codes import code_of
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
