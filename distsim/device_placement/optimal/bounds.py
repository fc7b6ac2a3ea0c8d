"""Lower bounds on what remains to be done: tails of single jobs.

What several results of other machines mean for a job (its *join*) or several readers for a result (its
*fork*): those on the job's own machine run there one after the other, the others pay the delay. The best
choice of who is on the same machine is a prefix of all in the order of what they cost from elsewhere.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from distsim.compile import compiled
from distsim.device_placement.optimal.jobs import Jobs


@compiled
def _fork(job: int, jobs: Any, remote: Any, order: Any) -> float:
    """Return the least time from the end of a job to that of all behind its readers."""
    first = jobs.after_start[job]
    count = jobs.after_start[job + 1] - first
    for i in range(count):
        reader = jobs.after[first + i]
        cost = jobs.delay_out[first + i] + jobs.seconds[reader] + jobs.tail[reader]
        j = i
        while j > 0 and remote[j - 1] < cost:
            remote[j], order[j] = remote[j - 1], order[j - 1]
            j -= 1
        remote[j], order[j] = cost, reader
    best = math.inf
    for here in range(count + 1):
        # The first `here` run on this machine, the longest tail first (which is best for one machine).
        taken = order[:here].copy()
        local, clock = 0.0, 0.0
        for i in range(here):
            k = i
            for j in range(i + 1, here):
                if jobs.tail[taken[j]] > jobs.tail[taken[k]]:
                    k = j
            taken[i], taken[k] = taken[k], taken[i]
            clock += jobs.seconds[taken[i]]
            local = max(local, clock + jobs.tail[taken[i]])
        away = remote[here] if here < count else 0.0
        best = min(best, max(local, away))
        if local >= best:
            break
    return best


@compiled
def _load_behind(job: int, jobs: Any, machines: int, by_tail: Any) -> float:
    """Return the least time for what descends from a job (``by_tail``): the other machines begin later."""
    delay = jobs.apart[job]
    work, best = 0.0, 0.0
    for other in by_tail:
        work += jobs.seconds[other]
        time = min(work, (work + (machines - 1) * delay) / machines)
        best = max(best, time + jobs.tail[other])
    return best


def add_tail(job: int, jobs: Jobs, machines: int) -> None:
    """Raise the tail of a job to what follows from the tails behind it."""
    count = jobs.after_start[job + 1] - jobs.after_start[job]
    if count == 0:
        return
    fork = _fork(job, jobs, np.empty(count), np.empty(count, np.int64))
    behind = np.flatnonzero(jobs.descends[job])
    by_tail = behind[np.argsort(-jobs.tail[behind], kind="stable")]
    jobs.tail[job] = max(jobs.tail[job], fork, _load_behind(job, jobs, machines, by_tail))


def root_bound(jobs: Jobs, machines: int) -> float:
    """Return a lower bound on the makespan: every way, and every window of heads and tails, with its work."""
    by_tail = np.argsort(-jobs.tail, kind="stable")
    seconds, head, tail = jobs.seconds[by_tail], jobs.head[by_tail], jobs.tail[by_tail]
    best = float((head + seconds + tail).max(initial=0.0))
    for begin in np.unique(head):
        late = head >= begin
        work = np.cumsum(seconds[late])
        best = max(best, float((begin + work / machines + tail[late]).max()))
    return best
