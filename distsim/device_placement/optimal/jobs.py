"""The scheduling problem behind a partition, as arrays: jobs on machines, with delays between machines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from distsim.compile import inner

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class Jobs(NamedTuple):
    """Jobs in topological order. ``seconds[j]`` is how long j runs, on any machine.

    The edges into j are ``before_start[j]:before_start[j + 1]`` of ``before`` and ``delay_in``: who comes
    before, and how long its result travels when they are on different machines; likewise ``after`` and
    ``delay_out``. ``descends[i, j]``: there is a way from i to j. ``apart[j]`` is the least time from the end
    of j to the start of something that descends from it on another machine. ``tail[j]`` is a lower bound on
    the time from the end of j to the end of all, ``head[j]`` one on when j can start.
    """

    seconds: Floats
    before_start: Ints
    before: Ints
    delay_in: Floats
    after_start: Ints
    after: Ints
    delay_out: Floats
    descends: Flags
    apart: Floats
    tail: Floats
    head: Floats


def make_jobs(
    seconds: Sequence[float], edges: Sequence[tuple[int, int, float]], searched: bool = True
) -> Jobs:
    """Return jobs with edges (from, to, delay), where from < to; heads and tails are 0.

    Who descends from whom is left out (as False) of jobs that are not ``searched``.

    >>> jobs = make_jobs([1.0, 2.0, 3.0], [(0, 1, 0.5), (0, 2, 0.5)])
    >>> jobs.before_start.tolist(), jobs.after[: jobs.after_start[1]].tolist()
    ([0, 0, 1, 2], [1, 2])
    """
    count = len(seconds)
    source = np.array([edge[0] for edge in edges], np.int64)
    target = np.array([edge[1] for edge in edges], np.int64)
    delay = np.array([edge[2] for edge in edges], np.float64)
    by_target, by_source = np.lexsort((source, target)), np.lexsort((target, source))
    places = np.arange(count + 1)
    descends = np.zeros((count, count) if searched else (count, 0), np.bool_)
    after_start = np.searchsorted(source[by_source], places)
    after = target[by_source]
    times, delay_out = np.array(seconds, np.float64), delay[by_source]
    apart = np.full(count, np.inf)
    for job in range(count - 1, -1, -1):
        edges_out = slice(after_start[job], after_start[job + 1])
        following = after[edges_out]
        # It moves at once, or first runs here what comes next.
        later = np.minimum(delay_out[edges_out], times[following] + apart[following])
        apart[job] = later.min(initial=np.inf)
        if searched:
            descends[job, following] = True
            descends[job] |= descends[following].any(axis=0)
    return Jobs(
        times,
        np.searchsorted(target[by_target], places).astype(np.int64),
        source[by_target],
        delay[by_target],
        after_start.astype(np.int64),
        after,
        delay_out,
        descends,
        apart,
        np.zeros(count),
        np.zeros(count),
    )


@inner
def earliest_start(job: int, machine: int, free: float, end: Any, where: Any, jobs: Any) -> float:
    """Return when a job can start on a machine that is free from ``free`` on: once what it reads is there.

    ``end`` and ``where`` say when the jobs before it end, and on which machine.
    """
    start = free
    for k in range(jobs.before_start[job], jobs.before_start[job + 1]):
        source = jobs.before[k]
        arrival = end[source]
        if where[source] != machine:
            arrival += jobs.delay_in[k]
        start = max(start, arrival)
    return start


def edges_of(jobs: Jobs) -> list[tuple[int, int, float]]:
    """Return the edges (from, to, delay), by where they go."""
    target = np.repeat(np.arange(len(jobs.seconds)), np.diff(jobs.before_start))
    return list(zip(jobs.before.tolist(), target.tolist(), jobs.delay_in.tolist(), strict=True))


def reverse(jobs: Jobs) -> Jobs:
    """Return the jobs with time running backwards: a schedule of one is one of the other, mirrored."""
    last = len(jobs.seconds) - 1
    edges = [(last - to, last - origin, delay) for origin, to, delay in edges_of(jobs)]
    turned = make_jobs(jobs.seconds[::-1].tolist(), edges, jobs.descends.size > 0)
    return turned._replace(tail=jobs.head[::-1].copy(), head=jobs.tail[::-1].copy())


def restrict(jobs: Jobs, kept: Sequence[int]) -> Jobs:
    """Return only these jobs, in order, with the edges between them and their tails; heads are 0."""
    place = {job: number for number, job in enumerate(kept)}
    edges = [(place[u], place[v], delay) for u, v, delay in edges_of(jobs) if u in place and v in place]
    made = make_jobs(jobs.seconds[list(kept)].tolist(), edges)
    return made._replace(tail=jobs.tail[list(kept)].copy())
