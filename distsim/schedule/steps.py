"""The compiled loop over a schedule: its ranks run step by step."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from distsim.compile import compiled, inner
from distsim.schedule.action import WAYS, by_code, sum_of
from distsim.schedule.codes import CODES, kind_of, number_of


class Listing(NamedTuple):
    """The codes of rank r are ``cells[start[r]:start[r + 1]]``, [cells, 2]; ``rank_of`` [stages] is where the
    stages are, in chains of ``chain``: see :class:`distsim.schedule.Schedule`."""

    cells: Any
    start: Any
    rank_of: Any
    chain: int


class Rules(NamedTuple):
    """What the lines of :class:`Kind` say, in sums of kinds as of :func:`way_of`.

    ``ways`` tells of each sum whether it is all of a way; ``own``, ``before`` and ``after`` are what each
    kind, by its code, waits for: see :class:`distsim.schedule.action.WaitsFor`.
    """

    ways: Any
    own: Any
    before: Any
    after: Any


SUM_OF_KINDS = np.min_scalar_type((1 << CODES) - 1)
"""The smallest integers that hold a sum of kinds: of many microbatches they are looked at all the time."""
_ARE_A_WAY = np.zeros(1 << CODES, np.bool_)
_ARE_A_WAY[[sum_of(letters) for letters in WAYS]] = True
RULES = Rules(
    _ARE_A_WAY,
    by_code(lambda kind: sum_of(kind.waits.own)),
    by_code(lambda kind: sum_of(kind.waits.before)),
    by_code(lambda kind: sum_of(kind.waits.after)),
)


@inner
def _listed_once(rows: Any, rules: Any, left: Any) -> bool:
    """Whether every action is there once, on its rank, and pairs are of two kinds; all are left then."""
    cells, start, rank_of = rows.cells, rows.start, rows.rank_of
    for rank in range(len(start) - 1):
        for at in range(start[rank], start[rank + 1]):
            for place in range(2):
                code = cells[at, place]
                if place == 1 and code == -1:
                    continue
                number, bit = number_of(code), 1 << kind_of(code)
                if code < 0 or number >= len(left) - 1 or left[number] & bit:
                    return False
                if rank_of[number % len(rank_of)] != rank or (
                    place == 1 and kind_of(code ^ cells[at, 0]) == 0
                ):
                    return False
                left[number] |= bit
    return rules.ways[left[:-1]].all()


@compiled
def run_steps(rows: Any, rules: Any, left: Any, order: Any, ends_step: Any, position: Any) -> int:
    """Run the cells in steps; return how many of them ran, fewer than all if the ranks wait for each other.

    ``left`` is a zero for each stage of each microbatch, by :func:`number_of`, and one more: the kinds that
    are still to run are summed there. Returns -1 if an action is missing, repeated, foreign or on a wrong
    rank. In each step every rank, by increasing rank, runs its next cell if what its actions wait for ran in
    an earlier step. Filled in: the cells in the order of the steps, whether one is the last of its step, and
    how many cells each rank has run.
    """
    if not _listed_once(rows, rules, left):
        return -1
    cells, start, chain = rows.cells, rows.start, rows.chain
    ran = 0
    while ran < len(cells):
        before = ran
        for rank in range(len(position)):
            at = start[rank] + position[rank]
            if at == start[rank + 1]:
                continue
            ready = True
            for place in range(2):
                code = cells[at, place]
                if code < 0 or not ready:
                    continue
                # At an end of a chain the neighbour by number is another microbatch's and may say no: whether
                # this is an end takes longest and is asked last. A call for each action would take ten times.
                number, kind = number_of(code), kind_of(code)
                ready = not (
                    rules.own[kind] & left[number]
                    or (rules.before[kind] & left[number - 1] and number % chain)
                    or (rules.after[kind] & left[number + 1] and (number + 1) % chain)
                )
            if ready:
                position[rank] += 1
                order[ran] = at
                ran += 1
        if ran == before:
            break
        for done in range(before, ran):
            for place in range(2):
                code = cells[order[done], place]
                if code >= 0:
                    left[number_of(code)] ^= 1 << kind_of(code)
        ends_step[ran - 1] = True
    return ran
