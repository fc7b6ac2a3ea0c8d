"""A first schedule: jobs by their tails, each where it ends first (HEFT; Topcuoglu et al., 2002)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from distsim.compile import compiled
from distsim.device_placement.optimal.jobs import Floats, Ints, Jobs
from distsim.device_placement.optimal.states import Memory


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
            begin = free[machine]
            for k in range(jobs.before_start[job], jobs.before_start[job + 1]):
                source = jobs.before[k]
                delay = 0.0 if where[source] == machine else jobs.delay_in[k]
                begin = max(begin, end[source] + delay)
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
