"""Lower bounds on the makespan: tails of single jobs, and what goes on from a state.

What several results of other machines mean for a job (its *join*) or several readers for a result (its
*fork*): those on the job's own machine run there one after the other, the others pay the delay. The best
choice of who is on the same machine is a prefix of all in the order of what they cost from elsewhere.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from distsim.compile import compiled, inner
from distsim.device_placement.optimal.jobs import Jobs


@inner
def _insert(time: float, job: int, count: int, remote: Any, order: Any) -> None:
    """Put a time and its job among the first ``count``, which are in descending order of time."""
    place = count
    while place > 0 and remote[place - 1] < time:
        remote[place], order[place] = remote[place - 1], order[place - 1]
        place -= 1
    remote[place], order[place] = time, job


@compiled
def _fork(job: int, jobs: Any, remote: Any, order: Any) -> float:
    """Return the least time from the end of a job to that of all behind its readers."""
    first = jobs.after_start[job]
    count = jobs.after_start[job + 1] - first
    for i in range(count):
        reader = jobs.after[first + i]
        cost = jobs.delay_out[first + i] + jobs.seconds[reader] + jobs.tail[reader]
        _insert(cost, reader, i, remote, order)
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


@inner
def _level(work: float, ascending: Any) -> float:
    """Return when machines that are free at these times, ascending, have at the earliest done some work."""
    total, level = work, math.inf
    for k in range(len(ascending)):
        total += ascending[k]
        level = min(level, total / (k + 1))
    return level


@compiled
def _load(end: Any, seconds: Any, tail: Any, by_tail: Any, ascending: Any, limit: float) -> float:
    """Return the bound from the work that is left, for each tail: what ends at least that early."""
    work, found = 0.0, 0.0
    for place in range(len(by_tail)):
        job = by_tail[place]
        if end[job] < 0.0:
            work += seconds[job]
            found = max(found, _level(work, ascending) + tail[job])
            if found >= limit:
                break
    return found


@compiled
def _join(
    count: int, machine: int, seconds: Any, earliest: Any, remote: Any, order: Any, taken: Any
) -> float:
    """Return when ``count`` results that are still to be made can be on a machine, at the earliest.

    ``remote`` is when each can come from another machine, descending, ``order`` the job that makes it.
    """
    best = math.inf
    for here in range(count + 1):
        # The first `here` run on this machine one after the other, by when they can start.
        local = 0.0
        for i in range(here):
            source = taken[i]
            local = max(local, earliest[source, machine]) + seconds[source]
        away = remote[here] if here < count else 0.0
        best = min(best, max(local, away))
        if local >= best or here == count:
            break
        source, place = order[here], here
        begin = earliest[source, machine]
        while place > 0 and earliest[taken[place - 1], machine] > begin:
            taken[place] = taken[place - 1]
            place -= 1
        taken[place] = source
    return best


@compiled
def _begin(job: int, floor: float, end: Any, where: Any, jobs: Any, scratch: Any) -> float:
    """Write when a job can start on each machine; return the least."""
    seconds, before, delay = jobs.seconds, jobs.before, jobs.delay_in
    base, earliest, first, second = scratch.base, scratch.earliest, scratch.first, scratch.second
    at, remote, order, taken = scratch.at, scratch.remote, scratch.order, scratch.taken
    least, next_least, least_at = math.inf, math.inf, -1
    begin, stop = jobs.before_start[job], jobs.before_start[job + 1]
    for machine in range(len(base)):
        # A plain 0 has _join compiled twice, once for a count of 0.
        ready = max(floor, base[machine])
        count: Any = np.int64(0)
        for k in range(begin, stop):
            source = before[k]
            if end[source] >= 0.0:
                arrival = end[source]
                if where[source] != machine:
                    arrival += delay[k]
                ready = max(ready, arrival)
            else:
                other = first[source] if at[source] != machine else second[source]
                arrival = other + seconds[source] + delay[k]
                _insert(arrival, source, count, remote, order)
                count += 1
        if count == 1:
            source = order[0]
            ready = max(ready, min(remote[0], earliest[source, machine] + seconds[source]))
        elif count > 1 and remote[0] > ready:
            ready = max(ready, _join(count, machine, seconds, earliest, remote, order, taken))
        earliest[job, machine] = ready
        if ready < least:
            least, next_least, least_at = ready, least, machine
        elif ready < next_least:
            next_least = ready
    first[job], second[job], at[job] = least, next_least, least_at
    return least


@compiled
def estimate(
    end: Any,
    where: Any,
    above: Any,
    added: int,
    jobs: Any,
    scratch: Any,
    limits: Any,
) -> float:
    """Return a lower bound on the makespan of what goes on from a schedule; from the limit on any will do.

    No job starts on a machine before ``scratch.base``. ``added`` was put into the schedule after ``above``,
    the work above each job, was taken. Looks at the next ``limits.horizon`` jobs one by one: when each can
    start on each machine, given where its inputs are or may be at the earliest.
    """
    seconds, tail, head, descends = jobs.seconds, jobs.tail, jobs.head, jobs.descends
    base, ascending, limit = scratch.base, scratch.ascending, limits.limit
    machines = len(base)
    for i in range(machines):
        place = i
        while place > 0 and ascending[place - 1] > base[i]:
            ascending[place] = ascending[place - 1]
            place -= 1
        ascending[place] = base[i]
    found = _load(end, seconds, tail, scratch.by_tail, ascending, limit)
    if found >= limit:
        return found
    looked = 0
    for job in range(len(end)):
        if end[job] >= 0.0:
            continue
        looked += 1
        if looked > limits.horizon:
            break
        work = above[job] - (seconds[added] if descends[added, job] else 0.0)
        floor = head[job]
        if work > 1e-9 * limit:  # rounding leaves something of a sum whose terms were all taken away
            floor = max(floor, _level(work, ascending))
        least = _begin(job, floor, end, where, jobs, scratch)
        found = max(found, least + seconds[job] + tail[job])
        if found >= limit:
            break
    return found
