"""The search: schedules grow job by job, in the order of starts, level by level.

A level holds the states with equally many jobs. What cannot end before the best schedule known is dropped,
and so is a state with the same jobs as another that is nowhere later (*dominance*). A level keeps the
``width`` best; when none was cut off, the search has looked at everything.

A child is made only if its job could not have started before the last one (the other order makes that
schedule). Dominance stays right with that: of the best schedules take the one whose starts, from the last to
the first, are least; replacing its first jobs by the dominating state's moves none of the later starts back
before that state's last start, or it was not the least.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from distsim.compile import compiled
from distsim.device_placement.optimal.bounds import estimate
from distsim.device_placement.optimal.jobs import earliest_start


@compiled
def _fits(state: int, job: int, machine: int, states: Any, memory: Any) -> bool:
    need = states.used[state, machine] + memory.own[job]
    for k in range(memory.read_start[job], memory.read_start[job + 1]):
        if not states.held[state, memory.reads[k]] >> machine & 1:
            need += memory.brought[k]
    return need <= memory.capacity[machine]


@compiled
def _same_as_before(state: int, machine: int, states: Any, memory: Any) -> bool:
    """Return whether an earlier machine is as unused as this one, and has as much memory."""
    if states.free[state, machine] >= 0.0:
        return False
    for other in range(machine):
        if states.free[state, other] < 0.0 and memory.capacity[other] == memory.capacity[machine]:
            return True
    return False


@compiled
def _ready(state: int, job: int, states: Any, jobs: Any) -> bool:
    if states.end[state, job] >= 0.0:
        return False
    for k in range(jobs.before_start[job], jobs.before_start[job + 1]):
        if states.end[state, jobs.before[k]] < 0.0:
            return False
    return True


@compiled
def expand(
    count: int,
    states: Any,
    jobs: Any,
    memory: Any,
    scratch: Any,
    children: Any,
    limits: Any,
) -> tuple[int, float, int]:
    """Fill in the children of ``count`` states whose bound is below the limit; their rank adds to the bound.

    Arguments are the records of :mod:`distsim.device_placement.optimal.states`. Return how many children
    there are, the least bound of one for which there was no room, and how many were looked at.
    """
    machines, limit = states.free.shape[1], limits.limit
    made, lost, looked = 0, math.inf, 0
    for state in range(count):
        last = states.last[state]
        end, where = states.end[state], states.where[state]
        for job in range(len(jobs.seconds)):
            if not _ready(state, job, states, jobs):
                continue
            for machine in range(machines):
                if _same_as_before(state, machine, states, memory):
                    continue
                free = max(states.free[state, machine], 0.0)
                start = earliest_start(job, machine, free, end, where, jobs)
                done = start + jobs.seconds[job]
                if start < last or done + jobs.tail[job] >= limit:
                    continue
                if memory.limited and not _fits(state, job, machine, states, memory):
                    continue
                total = 0.0
                for other in range(machines):
                    scratch.base[other] = done if other == machine else max(states.free[state, other], start)
                    total += scratch.base[other]
                end[job], where[job] = done, machine
                above = states.above[state]
                bound = estimate(end, where, above, job, jobs, scratch, limits)
                end[job] = -1.0
                looked += 1
                bound = max(bound, done + jobs.tail[job])
                if bound >= limit:
                    continue
                if made == len(children.job):
                    lost = min(lost, bound)
                    continue
                children.parent[made], children.job[made], children.machine[made] = state, job, machine
                children.start[made], children.bound[made] = start, bound
                children.rank[made] = bound + limits.weight * total / machines
                made += 1
    return made, lost, looked


@compiled
def _add(
    row: int, child: int, children: Any, states: Any, following: Any, jobs: Any, memory: Any, marks: Any
) -> None:
    """Write a child as row ``row`` of the following level."""
    parent, job = children.parent[child], children.job[child]
    machine, start = children.machine[child], children.start[child]
    for other in range(len(jobs.seconds)):
        following.end[row, other] = states.end[parent, other]
        following.where[row, other] = states.where[parent, other]
        following.above[row, other] = states.above[parent, other]
    for other in range(states.free.shape[1]):
        following.free[row, other] = states.free[parent, other]
    done = start + jobs.seconds[job]
    following.end[row, job], following.where[row, job] = done, machine
    following.free[row, machine], following.last[row] = done, start
    following.mark[row] = states.mark[parent] ^ marks[job]
    for other in range(job + 1, len(jobs.seconds)):
        if jobs.descends[job, other]:
            following.above[row, other] -= jobs.seconds[job]
    if not memory.limited:
        _sort_machines(row, following)
        return
    for other in range(states.free.shape[1]):
        following.used[row, other] = states.used[parent, other]
    for thing in range(states.held.shape[1]):
        following.held[row, thing] = states.held[parent, thing]
    following.used[row, machine] += memory.own[job]
    for k in range(memory.read_start[job], memory.read_start[job + 1]):
        thing = memory.reads[k]
        if not following.held[row, thing] >> machine & 1:
            following.used[row, machine] += memory.brought[k]
            following.held[row, thing] |= 1 << machine
    following.held[row, job] |= 1 << machine


@compiled
def _sort_machines(row: int, states: Any) -> None:
    """Number equal machines by when they are free, so that equal states look equal."""
    free, machines = states.free[row], states.free.shape[1]
    order, place = np.empty(machines, np.int64), np.empty(machines, np.int64)
    for i in range(machines):
        time, k = free[i], i
        while k > 0 and free[k - 1] > time:
            free[k], order[k] = free[k - 1], order[k - 1]
            k -= 1
        free[k], order[k] = time, i
    for i in range(machines):
        place[order[i]] = i
    for job in range(states.end.shape[1]):
        if states.end[row, job] >= 0.0:
            states.where[row, job] = place[states.where[row, job]]


@compiled
def _arrives_no_later(one: int, other: int, job: int, states: Any, jobs: Any) -> bool:
    """Return whether what a job made is, wherever it may be read, no later in state ``one``."""
    here, there = states.where[one, job], states.where[other, job]
    first, second = states.end[one, job], states.end[other, job]
    if here == there and first <= second:
        return True
    machines, last = states.free.shape[1], states.last[other]
    for k in range(jobs.after_start[job], jobs.after_start[job + 1]):
        if states.end[other, jobs.after[k]] >= 0.0:
            continue
        for machine in range(machines):
            arrival = first if machine == here else first + jobs.delay_out[k]
            allowed = second if machine == there else second + jobs.delay_out[k]
            if arrival > max(allowed, states.free[other, machine], last):
                return False
    return True


@compiled
def _dominates(one: int, other: int, states: Any, jobs: Any, memory: Any) -> bool:
    """Return whether state ``one`` is nowhere later than ``other``, which has the same jobs."""
    last, machines = states.last[other], states.free.shape[1]
    if states.mark[one] != states.mark[other] or states.last[one] > last:
        return False
    for machine in range(machines):
        if states.free[one, machine] > max(states.free[other, machine], last):
            return False
    for job in range(len(jobs.seconds)):
        if states.end[one, job] < 0.0:
            if states.end[other, job] >= 0.0:
                return False  # other jobs of the same hash
        elif not _arrives_no_later(one, other, job, states, jobs):
            return False
    if memory.limited:
        for machine in range(machines):
            if states.used[one, machine] > states.used[other, machine]:
                return False
        for thing in range(states.held.shape[1]):
            if states.held[other, thing] & ~states.held[one, thing]:
                return False
    return True


@compiled
def select(
    order: Any,
    width: int,
    children: Any,
    states: Any,
    following: Any,
    jobs: Any,
    memory: Any,
    seen: Any,
) -> tuple[int, float]:
    """Write the first ``width`` children that no other dominates as the following level.

    Return how many there are, and the least bound of those cut off.
    """
    heads, chain = seen.heads, seen.chain
    heads.fill(-1)
    row: Any = np.int64(0)  # a plain 0 has everything below compiled twice, once for row 0
    lost = math.inf
    for child in order:
        if row == width:
            lost = min(lost, children.bound[child])
            continue
        _add(row, child, children, states, following, jobs, memory, seen.marks)
        bucket = following.mark[row] % len(heads)
        other = heads[bucket]
        while other >= 0 and not _dominates(other, row, following, jobs, memory):
            other = chain[other]
        if other < 0:
            chain[row] = heads[bucket]
            heads[bucket] = row
            row += 1
    return row, lost
