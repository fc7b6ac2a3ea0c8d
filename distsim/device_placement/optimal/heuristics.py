"""Schedules that prove nothing: one to begin with, and shorter ones by moves.

The first is a list schedule: jobs by their tails, each where it ends first (HEFT; Topcuoglu et al., 2002).
Moves of a job to another machine or another place in the order are annealed, after S. Kirkpatrick,
C. D. Gelatt and M. P. Vecchi, "Optimization by simulated annealing" (Science, 1983): that finds what the
search cuts off where machines have little idle time.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from distsim.compile import compiled
from distsim.device_placement.optimal.jobs import Floats, Ints, Jobs, earliest_start
from distsim.device_placement.optimal.states import Clock, Memory


def greedy(jobs: Jobs, machines: int, memory: Memory) -> tuple[Floats | None, Ints | None]:
    """Return when each job ends and on which machine, None when it ends where no memory is left.

    Also tried, and taken if it is shorter: everything on the machine with the most memory.
    """
    # A job's tail and its own time are more than a successor's, so this order is a topological one.
    order = np.argsort(-(jobs.seconds + jobs.tail), kind="stable")
    end, where = np.zeros(len(jobs.seconds)), np.zeros(len(jobs.seconds), np.int64)
    done = place(order, jobs, machines, memory, end, where)
    alone = int(np.argmax(memory.capacity))
    total = memory.own.sum() + memory.outside
    if total <= memory.capacity[alone] and not (done and end.max() <= jobs.seconds.sum()):
        return np.cumsum(jobs.seconds), np.full(len(where), alone)
    return (end, where) if done else (None, None)


@compiled
def place(order: Any, jobs: Any, machines: int, memory: Any, end: Any, where: Any) -> bool:
    """Put each job, in order, where it ends first and fits; return whether all found a place."""
    free, used = np.zeros(machines), np.zeros(machines)
    held = np.zeros((memory.things, machines), np.bool_)
    for job in order:
        best, chosen, need_there = math.inf, -1, 0.0
        for machine in range(machines):
            begin = earliest_start(job, machine, free[machine], end, where, jobs)
            need = memory.own[job]
            for k in range(memory.read_start[job], memory.read_start[job + 1]):
                if not held[memory.reads[k], machine]:
                    need += memory.brought[k]
            fits = not memory.limited or used[machine] + need <= memory.capacity[machine]
            if fits and begin + jobs.seconds[job] < best:
                best, chosen, need_there = begin + jobs.seconds[job], machine, need
        if chosen < 0:
            return False
        end[job], where[job], free[chosen] = best, chosen, best
        if memory.limited:
            used[chosen] += need_there
            held[job, chosen] = True
            for k in range(memory.read_start[job], memory.read_start[job + 1]):
                held[memory.reads[k], chosen] = True
    return True


_STEPS = 2_000_000
"""Jobs that are looked at between two looks at the clock."""


@compiled
def _run(order: Any, where: Any, jobs: Any, free: Any, end: Any, limit: float) -> float:
    """Write when each job ends that is issued in ``order``; return the last end, infinite above ``limit``."""
    free.fill(0.0)
    last = 0.0
    for job in order:
        machine = where[job]
        begin = earliest_start(job, machine, free[machine], end, where, jobs)
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
