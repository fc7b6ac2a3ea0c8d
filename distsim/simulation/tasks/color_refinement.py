"""Colour refinement: the fewest classes of devices whose members meet the same classes at the same cost.

A partition is *stable* (equitable) when any two members of a class are in equally many groups of every
cost with members of the same classes. Refining until that holds gives the coarsest stable partition
(Weisfeiler and Leman 1968; Paige and Tarjan, "Three partition refinement algorithms", 1987).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Relation:
    """Groups of devices that meet: ``groups[g]`` are the numbers of the devices of group ``g``.

    ``cost[g]`` numbers the kind of the group: groups of one kind cost the same. ``ordered``: the place in
    the group matters, as for the sender and the receiver of a pair.
    """

    groups: Ints
    cost: Ints
    ordered: bool


def refine(colours: Ints, relations: Sequence[Relation]) -> Ints:
    """Return the coarsest stable partition that refines ``colours``, one number per device, from 0.

    Four devices in a ring of pairs, of which one differs; its two neighbours are alike:

    >>> ring = Relation(np.array([[0, 1], [1, 2], [2, 3], [3, 0]]), np.zeros(4, np.int64), ordered=False)
    >>> refine(np.array([1, 0, 0, 0]), [ring]).tolist()
    [2, 1, 0, 1]
    """
    colours = _numbered(colours)
    sweep = [_Incidence(relation) for relation in relations if relation.groups.size]
    done = False
    while not done:
        done = True
        for incidence in sweep:
            split = incidence.split(colours)
            if split is not None:
                colours, done = split, False
        # What one relation splits, splits its neighbours in the chain of stages: go up and down in turn.
        sweep.reverse()
    return colours


class _Incidence:
    """A relation, made ready: who is in which group."""

    def __init__(self, relation: Relation) -> None:
        self.relation = relation
        members = relation.groups.ravel()
        self.order = np.argsort(members, kind="stable")
        ordered = members[self.order]
        first = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        times = np.diff(first, append=len(members))
        self.devices = ordered[first]
        self.row = np.repeat(np.arange(len(self.devices)), times)
        self.slot = np.arange(len(members)) - np.repeat(first, times)

    def split(self, colours: Ints) -> Ints | None:
        """Return the colours that tell apart members who meet different classes; None if all agree."""
        relation, own = self.relation, colours[self.devices]
        count, width = relation.groups.shape
        met = colours[relation.groups]
        if not relation.ordered:
            met.sort(axis=1)
        group = np.repeat(_rows_numbered(np.column_stack([relation.cost, met])), width)
        if relation.ordered:
            group = group * width + np.tile(np.arange(int(width)), int(count))
        # Per device: its colour, then its groups, sorted; -1 where it is in fewer than others.
        seen = np.full((len(self.devices), 1 + int(self.slot.max())), -1)
        seen[self.row, self.slot] = group[self.order]
        seen.sort(axis=1)
        new = _rows_numbered(np.column_stack([own, seen]))
        sizes, here = np.bincount(colours), np.bincount(own, minlength=int(colours.max()) + 1)
        # A class of which only some members are in this relation is split as well.
        if new.max() + 1 + ((here > 0) & (here < sizes)).sum() == (here > 0).sum():
            return None
        refined = colours.copy()
        refined[self.devices] = len(sizes) + new
        return _numbered(refined)


def _numbered(values: Ints) -> Ints:
    """Return the values as numbers from 0, in their order."""
    return np.unique(values, return_inverse=True)[1].reshape(-1)


def _rows_numbered(rows: Ints) -> Ints:
    """Return a number for each row, from 0; equal rows have equal numbers."""
    if (rows == rows[0]).all():  # a symmetric mesh: nothing to sort
        return np.zeros(len(rows), np.int64)
    order = np.lexsort(rows.T)
    differs = (rows[order[1:]] != rows[order[:-1]]).any(axis=1)
    numbers = np.empty(len(rows), np.int64)
    numbers[order] = np.concatenate([[0], differs.cumsum()])
    return numbers
