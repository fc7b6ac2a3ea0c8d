"""Shorter schedules by simulated annealing: moves of a job to another machine or another place in the order.

After S. Kirkpatrick, C. D. Gelatt and M. P. Vecchi, "Optimization by simulated annealing" (Science, 1983). It
finds what the search cuts off where machines have little idle time, and proves nothing.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from distsim.compile import compiled
from distsim.device_placement.optimal.clock import Clock
from distsim.device_placement.optimal.jobs import Floats, Ints, Jobs

_STEPS = 2_000_000
"""Jobs that are looked at between two looks at the clock."""


@compiled
def _run(order: Any, where: Any, jobs: Any, free: Any, end: Any, limit: float) -> float:
    """Write when each job ends that is issued in ``order``; return the last end, infinite above ``limit``."""
    free.fill(0.0)
    last = 0.0
    for job in order:
        machine = where[job]
        begin = free[machine]
        for k in range(jobs.before_start[job], jobs.before_start[job + 1]):
            source = jobs.before[k]
            arrival = end[source]
            if where[source] != machine:
                arrival += jobs.delay_in[k]
            begin = max(begin, arrival)
        end[job] = free[machine] = begin + jobs.seconds[job]
        if end[job] + jobs.tail[job] > limit:
            return math.inf
        last = max(last, end[job])
    return last


@compiled
def _move(order: Any, origin: int, target: int) -> None:
    """Take the job at one place of the order to another; those between close up."""
    job = order[origin]
    step = 1 if target > origin else -1
    for place in range(origin, target, step):
        order[place] = order[place + step]
    order[target] = job


@compiled
def _room(order: Any, place: int, jobs: Any, marked: Any) -> tuple[int, int]:
    """Return the first and the last place to which the job at ``place`` can go: after what it reads."""
    job, first, last = order[place], place, place
    marked.fill(False)
    for k in range(jobs.before_start[job], jobs.before_start[job + 1]):
        marked[jobs.before[k]] = True
    while first > 0 and not marked[order[first - 1]]:
        first -= 1
    for k in range(jobs.after_start[job], jobs.after_start[job + 1]):
        marked[jobs.after[k]] = True
    while last + 1 < len(order) and not marked[order[last + 1]]:
        last += 1
    return first, last


class AnnealState(NamedTuple):
    """Where an annealing is: its order and machines, what they take, and the same of the best so far."""

    order: Ints
    where: Ints
    best_order: Ints
    best_where: Ints
    takes: Floats


@compiled
def _anneal(walk: Any, jobs: Any, machines: int, goal: float, first: int, moves: int, draws: Any) -> None:
    """Make the moves from number ``first`` of ``moves`` on that ``draws`` has rows for."""
    order, where, takes = walk.order, walk.where, walk.takes
    count = len(order)
    free, end, marked = np.zeros(machines), np.zeros(count), np.zeros(count, np.bool_)
    for row in range(len(draws)):
        heat = 0.005 * takes[1] * (1.0 - (first + row) / moves) ** 2
        limit = takes[0] - heat * math.log(max(draws[row, 0], 1e-300))
        place = int(draws[row, 1] * count)
        job = order[place]
        machine = where[job]
        lowest, highest = _room(order, place, jobs, marked)
        target = lowest + int(draws[row, 2] * (highest - lowest + 1))
        if draws[row, 3] < 0.5:
            where[job] = int(draws[row, 4] * machines)
        _move(order, place, target)
        made = _run(order, where, jobs, free, end, limit)
        if made == math.inf:
            _move(order, target, place)
            where[job] = machine
            continue
        takes[0] = made
        if made < takes[1]:
            takes[1] = made
            for k in range(count):
                walk.best_order[k], walk.best_where[k] = order[k], where[k]
            if made <= goal:
                return


def anneal(
    jobs: Jobs,
    machines: int,
    end: Floats,
    machine: Ints,
    goal: float,
    moves: int,
    seed: int,
    clock: Clock,
) -> tuple[Floats, Ints]:
    """Return a schedule that is no longer than this one, after so many moves.

    Ends early when it takes no more than ``goal``, or the time of a clock is up.
    """
    order = np.argsort(end - jobs.seconds / 2, kind="stable")
    walk = AnnealState(order, machine.copy(), order.copy(), machine.copy(), np.full(2, end.max()))
    source = np.random.default_rng(seed)
    piece = max(1, _STEPS // len(order))
    for first in range(0, moves, piece):
        if walk.takes[1] <= goal or clock.over:
            break
        draws = source.random((min(piece, moves - first), 5))
        _anneal(walk, jobs, machines, goal, first, moves, draws)
    ends = np.zeros(len(end))
    _run(walk.best_order, walk.best_where, jobs, np.zeros(machines), ends, math.inf)
    return ends, walk.best_where
