"""Shorter schedules by simulated annealing: moves of a job to another machine or another place in the order.

After S. Kirkpatrick, C. D. Gelatt and M. P. Vecchi, "Optimization by simulated annealing" (Science, 1983). It
finds what the search cuts off where machines have little idle time, and proves nothing.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from distsim.compile import compiled
from distsim.partition.optimal.jobs import Floats, Ints, Jobs


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


@compiled
def _anneal(
    order: Any, where: Any, jobs: Any, machines: int, cost: float, goal: float, moves: int, draws: Any
) -> float:
    """Change ``order`` and ``where`` to the best found in so many moves; return what it takes."""
    count = len(order)
    free, end, marked = np.zeros(machines), np.zeros(count), np.zeros(count, np.bool_)
    best, best_order, best_where = cost, order.copy(), where.copy()
    for move in range(moves):
        heat = 0.005 * best * (1.0 - move / moves) ** 2
        limit = cost - heat * math.log(max(draws[move, 0], 1e-300))
        place = int(draws[move, 1] * count)
        job = order[place]
        machine = where[job]
        first, last = _room(order, place, jobs, marked)
        target = first + int(draws[move, 2] * (last - first + 1))
        if draws[move, 3] < 0.5:
            where[job] = int(draws[move, 4] * machines)
        _move(order, place, target)
        made = _run(order, where, jobs, free, end, limit)
        if made == math.inf:
            _move(order, target, place)
            where[job] = machine
            continue
        cost = made
        if cost < best:
            best = cost
            for k in range(count):
                best_order[k], best_where[k] = order[k], where[k]
            if best <= goal:
                break
    for k in range(count):
        order[k], where[k] = best_order[k], best_where[k]
    return best


def anneal(
    jobs: Jobs, machines: int, end: Floats, machine: Ints, goal: float, moves: int, seed: int
) -> tuple[Floats, Ints]:
    """Return a schedule that is no longer than this one; ends early when it takes no more than ``goal``."""
    order = np.argsort(end - jobs.seconds / 2, kind="stable")
    where = machine.copy()
    draws = np.random.default_rng(seed).random((moves, 5))
    cost = float(end.max())
    _anneal(order, where, jobs, machines, cost, goal, moves, draws)
    ends = np.zeros(len(end))
    _run(order, where, jobs, np.zeros(machines), ends, math.inf)
    return ends, where
