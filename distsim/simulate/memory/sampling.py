"""Which microbatches say what all do: of each rank one for each order of calls, and the first and last."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from distsim.cache import Cache
from distsim.schedule import IssueOrder
from distsim.simulate.memory.excerpt import SUMMED_BY, Cells
from distsim.simulate.memory.kernel import Bools, Ints


@dataclass(frozen=True, eq=False)
class Sampling:
    """The microbatches of a rank by labels: ``labels`` [microbatches], ``counts`` [labels] of each.

    ``sample`` [labels] is the microbatch that stands for each, ``ordinary`` tells whether it may stand for
    others; ``cells`` are those of the sample, as of a :class:`Sample`.
    """

    labels: Ints
    counts: Ints
    sample: Ints
    ordinary: Bools
    cells: Cells


_SAMPLINGS = Cache[IssueOrder, Sampling]("samples of a rank, by its stages and special microbatches", 512)


def sampling(order: IssueOrder, stages: Sequence[int], latest: Iterable[int], plain: bool) -> Sampling:
    """Return the sampling of the rank that holds these stages, kept with the order.

    A microbatch is unlike all others if it is the first or the last of a call: the first makes sums, after
    the last nothing adds to them; so are those in ``latest`` and the very last. If not ``plain``, so is the
    second of a call: it may find the sum in memory that is something else's as well. Others are alike if the
    rank runs the same calls, and pairs, for them in the same order; the last of them goes into the sample.

    A plain sample runs one microbatch after the other if that is the order of each call, so that schedules
    have the same samples.
    """
    special = frozenset(latest)
    key = (tuple(stages), special, plain)
    return _SAMPLINGS.get(order, key, lambda: _sampling(order, stages, special, plain))


def _sampling(order: IssueOrder, stages: Sequence[int], latest: Iterable[int], plain: bool) -> Sampling:
    calls = _calls(order)
    families = [4 * stage + kind for stage in stages for kind in range(4) if calls.run[4 * stage + kind]]
    places = {4 * stage + kind: 4 * i + kind for i, stage in enumerate(stages) for kind in range(4)}
    at = calls.at[families]
    count = at.shape[1]
    special = np.zeros(count, np.bool_)
    ends = calls.ends[families][:, : 2 if plain else 3]
    special[[*latest, *([count - 1] if count else []), *ends.ravel().tolist()]] = True
    members = np.flatnonzero(~special)
    partner = calls.partner[families]
    sorts = _sorts(at[:, members], partner[:, members])
    chosen = np.zeros(int(sorts.max(initial=-1)) + 1, np.int64)
    chosen[sorts] = members
    sample = np.sort(np.concatenate([np.flatnonzero(special), chosen]))
    labels = np.zeros(count, np.int64)
    labels[sample] = np.arange(len(sample))
    labels[members] = labels[chosen[sorts]]
    local = np.array([places.get(family, -1) for family in range(len(calls.at))], np.int64)
    both = partner[:, sample]
    both[both >= 0] = 2 * local[both[both >= 0] // 2] + both[both >= 0] % 2
    cells = _cells(at[:, sample], both, [places[family] for family in families], plain)
    counts = np.bincount(labels, minlength=len(sample))
    return Sampling(labels, counts, sample, ~special[sample] & (plain | (counts > 1)), cells)


def _cells(at: Ints, partner: Ints, families: Sequence[int], plain: bool) -> Cells:
    """Return the cells of actions at these places [families, labels], with these partners."""
    which, label = np.nonzero(at >= 0)
    place = at[which, label]
    if plain:
        adding = np.array([4 * (family // 4) + SUMMED_BY[family % 4] for family in families], np.int64)[which]
        issued = np.lexsort((place, adding))
        same = adding[issued][1:] == adding[issued][:-1]
        plain = not (same & (np.diff(label[issued]) < 0)).any()
    issued = np.lexsort((place, label)) if plain else place.argsort()
    cells: list[list[tuple[int, int, int]]] = []
    before = (-1, -1)
    columns = np.stack([place // 2, which, label, partner[which, label]], axis=1)
    rows: list[list[int]] = columns[issued].tolist()
    for cell, number, of, other in rows:
        if before != (cell, of if plain else -1):
            before = (cell, of if plain else -1)
            cells.append([])
        cells[-1].append((families[number], of, other))
    return tuple(map(tuple, cells))


@dataclass(frozen=True, eq=False)
class _Calls:
    """Where actions are in the order: rows are 4 * stage + kind, columns the microbatches of all copies.

    ``at``: 2 * cell, + 1 for the second of a pair; -1 where there is no action. ``partner``: that of a pair,
    2 * its row, + 1 if it comes first; -1 where there is none. Of each row: ``run``, whether it has any
    action, and ``ends`` [rows, 3], its first microbatch, the last, and the second.
    """

    at: Ints
    partner: Ints
    run: list[bool]
    ends: Ints


_CALLS = Cache[IssueOrder, _Calls]("places of actions, by order", 1)


def _calls(order: IssueOrder) -> _Calls:
    return _CALLS.get(order, None, lambda: _find_calls(order))


def _find_calls(order: IssueOrder) -> _Calls:
    schedule = order.schedule
    stages, each = schedule.num_stages, schedule.num_microbatches
    code = schedule.codes_in_order
    place = np.arange(code.size).reshape(code.shape)[code >= 0]
    number, family = np.divmod(code[code >= 0], 4 * max(stages, 1))
    at = np.full((4 * stages, each * schedule.copies), -1, np.int64)
    microbatch = number + family // (4 * max(schedule.chain, 1)) * each
    at[family, microbatch] = place
    partner = np.full_like(at, -1)
    other = code[:, ::-1] % (4 * max(stages, 1)) * 2 + np.arange(2)
    other[code[:, 1] < 0] = -1
    partner[family, microbatch] = other[code >= 0]
    if not at.size:
        return _Calls(at, partner, [], np.zeros((0, 3), np.int64))
    rows, last = np.arange(len(at)), at.argmax(axis=1)
    until = np.where(at < 0, code.size, at)
    first = until.argmin(axis=1)
    until[rows, first] = code.size
    ends = np.stack([first, last, until.argmin(axis=1)], axis=1)
    return _Calls(at, partner, (at[rows, last] >= 0).tolist(), ends)


def _sorts(at: Ints, partner: Ints) -> Ints:
    """Return for each column of places the number of its order, the same for equal orders and partners."""
    same = np.zeros(len(at.T), np.int64)
    if not at.size:
        return same
    order: Ints = np.concatenate([at.argsort(axis=0, kind="stable"), (at < 0).sum(axis=0)[None], partner])
    if (order == order[:, :1]).all():
        return same
    number: Ints = np.unique(order, axis=1, return_inverse=True)[1].reshape(-1)
    return number
