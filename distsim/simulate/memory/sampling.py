"""Which microbatches say what all do: per rank one of each order of calls, and those that sums make special."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from distsim.schedule import IssueOrder
from distsim.simulate.memory.excerpt import Cells
from distsim.simulate.memory.kernel import Ints


@dataclass(frozen=True, eq=False)
class Sampling:
    """The microbatches of a rank by labels: ``labels`` [microbatches], ``counts`` [labels] of each.

    ``sample`` [labels] is the microbatch that stands for each, ``cells`` are theirs, as of a :class:`Sample`.
    """

    labels: Ints
    counts: Ints
    sample: Ints
    cells: Cells


def sampling(order: IssueOrder, stages: Sequence[int], latest: Iterable[int]) -> Sampling:
    """Return the sampling of the rank that holds these stages.

    A microbatch is unlike all others if it is among the first two or the last of a call: the first makes
    sums, the second may find them in memory that is something else's as well, after the last nothing adds to
    them; so are those in ``latest`` and the very last. Others are alike if the rank runs the same calls for
    them in the same order; the last of them goes into the sample.
    """
    calls = _calls(order)
    families = [4 * stage + kind for stage in stages for kind in range(4) if calls.run[4 * stage + kind]]
    places = {4 * stage + kind: 4 * i + kind for i, stage in enumerate(stages) for kind in range(4)}
    at = calls.at[families]
    count = at.shape[1]
    special = np.zeros(count, np.bool_)
    special[[*latest, *([count - 1] if count else []), *calls.ends[families].ravel().tolist()]] = True
    members = np.flatnonzero(~special)
    sorts = _sorts(at[:, members])
    chosen = np.zeros(int(sorts.max(initial=-1)) + 1, np.int64)
    chosen[sorts] = members
    sample = np.sort(np.concatenate([np.flatnonzero(special), chosen]))
    labels = np.zeros(count, np.int64)
    labels[sample] = np.arange(len(sample))
    labels[members] = labels[chosen[sorts]]
    inside = at[:, sample]
    which, label = np.nonzero(inside >= 0)
    when = inside[which, label]
    issued = np.argsort(when)
    cells: list[list[tuple[int, int]]] = []
    before = -1
    rows = zip((when[issued] // 2).tolist(), which[issued].tolist(), label[issued].tolist(), strict=True)
    for cell, number, own in rows:
        if cell != before:
            cells.append([])
            before = cell
        cells[-1].append((places[families[number]], own))
    return Sampling(labels, np.bincount(labels, minlength=len(sample)), sample, tuple(map(tuple, cells)))


@dataclass(frozen=True, eq=False)
class _Calls:
    """``at`` [4 * stages, microbatches of all copies]: the place of each action in the order, 2 * cell, and 1
    for the second of a pair; -1 where there is none. ``run``: whether there is any; ``ends`` [.., 3]: the
    first two microbatches of each row, and the last.
    """

    at: Ints
    run: list[bool]
    ends: Ints


_CALLS: WeakKeyDictionary[IssueOrder, _Calls] = WeakKeyDictionary()


def _calls(order: IssueOrder) -> _Calls:
    known = _CALLS.get(order)
    if known is None:
        known = _CALLS[order] = _find_calls(order)
    return known


def _find_calls(order: IssueOrder) -> _Calls:
    schedule = order.schedule
    stages, each = schedule.num_stages, schedule.num_microbatches
    code = schedule.codes_in_order
    place = np.arange(code.size).reshape(code.shape)[code >= 0]
    number, family = np.divmod(code[code >= 0], 4 * max(stages, 1))
    at = np.full((4 * stages, each * schedule.copies), -1, np.int64)
    at[family, number + family // (4 * max(schedule.chain, 1)) * each] = place
    if not at.size:
        return _Calls(at, [], np.zeros((0, 3), np.int64))
    rows, last = np.arange(len(at)), at.argmax(axis=1)
    until = np.where(at < 0, code.size, at)
    first = until.argmin(axis=1)
    until[rows, first] = code.size
    return _Calls(at, (at[rows, last] >= 0).tolist(), np.stack([first, until.argmin(axis=1), last], axis=1))


def _sorts(at: Ints) -> Ints:
    """Return for each column of places the number of its order, the same for equal orders."""
    if not at.size:
        return np.zeros(at.shape[1], np.int64)
    order = np.concatenate([at.argsort(axis=0, kind="stable"), (at < 0).sum(axis=0)[None]])
    if (order == order[:, :1]).all():
        return np.zeros(at.shape[1], np.int64)
    return np.unique(order, axis=1, return_inverse=True)[1].reshape(-1)
