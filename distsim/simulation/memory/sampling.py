"""Which microbatches say what all do: of each rank one for each order of calls, and the first and last."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from distsim.cache import Cache
from distsim.schedule import IssueOrder
from distsim.schedule.codes import code_of, kind_of, number_of
from distsim.simulation.memory.excerpt import Cells, summing
from distsim.simulation.memory.kernel import Bools, Ints


@dataclass(frozen=True, eq=False)
class Sampling:
    """The microbatches of a rank by labels: ``labels`` [microbatches], ``counts`` [labels] of each.

    ``ordinary`` tells of each label whether its sample may stand for others, ``copies`` of which copy of the
    model that is; ``cells`` are those of the sample, as of a :class:`Sample`. Ranks may share it.
    """

    labels: Ints
    counts: Ints
    ordinary: tuple[bool, ...]
    copies: tuple[int, ...]
    cells: Cells


_SAMPLINGS = Cache[IssueOrder, tuple[Sampling, ...]]("samples of ranks, by special microbatches", 16)


def samplings(order: IssueOrder, latest: Iterable[int], plain: bool) -> tuple[Sampling, ...]:
    """Return the sampling of each rank, kept with the order.

    A microbatch is unlike all others if it is the first or the last of a call: the first makes sums, after
    the last nothing adds to them; so are those in ``latest`` and the very last. If not ``plain``, so is the
    second of a call: it may find the sum in memory that is something else's as well. Others are alike if the
    rank runs the same calls, and pairs, for them in the same order; the last of them goes into the sample.

    A plain sample runs one microbatch after the other if that is the order of each call, so that schedules
    have the same samples.
    """
    special = frozenset(latest)
    return _SAMPLINGS.get(order, (special, plain), lambda: _samplings(order, special, plain))


def _samplings(order: IssueOrder, latest: Iterable[int], plain: bool) -> tuple[Sampling, ...]:
    schedule = order.schedule
    special = np.zeros(schedule.num_microbatches * schedule.copies, np.bool_)
    special[[*latest, *([len(special) - 1] if len(special) else [])]] = True
    local = _LOCAL.get(order, None, lambda: _local_actions(order))
    known: dict[bytes, Sampling] = {}
    found: list[Sampling] = []
    for actions in local:  # those of equal ranks are equal
        key = actions.tobytes()
        if key not in known:
            known[key] = _sampling(actions, schedule.num_microbatches, special.copy(), plain)
        found.append(known[key])
    return tuple(found)


_LOCAL = Cache[IssueOrder, tuple[Ints, ...]]("actions of ranks, by order", 1)


def _local_actions(order: IssueOrder) -> tuple[Ints, ...]:
    """Return per rank its cells in turn, [cells, 2, 2]: the family and the microbatch of each action, -1.

    Families are the codes of i and kind for the i-th stage of a rank, microbatches those of all copies.
    """
    schedule = order.schedule
    on_rank = [0] * schedule.num_ranks
    place: list[int] = []
    for rank in schedule.rank_of:
        place.append(code_of(on_rank[rank], 0))
        on_rank[rank] += 1
    each = np.arange(schedule.num_stages) // max(schedule.chain, 1) * schedule.num_microbatches
    codes, start = schedule.listed
    number, stage = np.divmod(number_of(codes), max(schedule.num_stages, 1))
    family, microbatch = np.array(place, np.int64)[stage] + kind_of(codes), number + each[stage]
    actions = np.where(codes[..., None] < 0, -1, np.stack([family, microbatch], axis=-1))
    return tuple(np.split(actions, start[1:-1]))


def _sampling(actions: Ints, each: int, special: Bools, plain: bool) -> Sampling:
    """Return the sampling of a rank with these actions; ``special`` is filled in."""
    own = actions[..., 0].ravel()
    place = np.flatnonzero(own >= 0)
    families, row = np.unique(own[place], return_inverse=True)
    at, partner = np.full((2, len(families), len(special)), -1, np.int64)
    microbatch = actions[..., 1].ravel()[place]
    at[row, microbatch] = place
    other = actions[:, ::-1, 0].ravel()[place]
    partner[row, microbatch] = np.where(other < 0, -1, 2 * other + place % 2)
    _note_special(at, special, plain)
    members = np.flatnonzero(~special)
    sorts = _sorts(at[:, members], partner[:, members])
    chosen = np.zeros(int(sorts.max(initial=-1)) + 1, np.int64)
    chosen[sorts] = members
    sample = np.sort(np.concatenate([np.flatnonzero(special), chosen]))
    labels = np.zeros(len(special), np.int64)
    labels[sample] = np.arange(len(sample))
    labels[members] = labels[chosen[sorts]]
    counts = np.bincount(labels, minlength=len(sample))
    ordinary: list[bool] = (~special[sample] & (plain | (counts > 1))).tolist()
    copies: list[int] = (sample // max(each, 1)).tolist()
    cells = _cells(at[:, sample], partner[:, sample], families.tolist(), plain)
    return Sampling(labels, counts, tuple(ordinary), tuple(copies), cells)


def _note_special(at: Ints, special: Bools, plain: bool) -> None:
    """Note the first and last microbatch of each family, and the second, if not plain."""
    if not at.size:
        return
    until = np.where(at < 0, at.max() + 1, at)
    first = until.argmin(axis=1)
    special[first] = special[at.argmax(axis=1)] = True
    if not plain:
        until[np.arange(len(at)), first] = at.max() + 1
        special[until.argmin(axis=1)] = True


def _cells(at: Ints, partner: Ints, families: Sequence[int], plain: bool) -> Cells:
    """Return the cells of actions at these places [families, labels], with these partners."""
    which, label = np.nonzero(at >= 0)
    place = at[which, label]
    if plain:
        adding = np.array([summing(family) for family in families], np.int64)[which]
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
