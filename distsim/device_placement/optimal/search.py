"""Searching for the shortest schedule, with a proof or with a stated gap.

Tails make the search: the time that must pass after a job. They come from searching small parts first
(*Russian dolls*; Verfaillie, Lemaître and Schiex, AAAI 1996): for each job, from the last to the first, the
schedule of it and of all that descends from it is itself searched, and what that takes is its tail. The same
is done with time running backwards, which gives heads and a second search.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from distsim.device_placement.optimal.beam import expand, select
from distsim.device_placement.optimal.bounds import add_tail, root_bound
from distsim.device_placement.optimal.heuristics import anneal, greedy
from distsim.device_placement.optimal.jobs import Floats, Ints, Jobs, make_jobs, restrict, reverse
from distsim.device_placement.optimal.states import (
    Clock,
    Limits,
    Memory,
    make_children,
    make_scratch,
    make_seen,
    make_states,
    no_limit,
)

_HORIZON = 16
"""Jobs ahead of a state that its bound looks at one by one."""

_FIRST_WIDTH = 16
"""States that a level keeps in the first round; each round keeps four times as many."""

_MOVES = 12_500
"""Moves that a round tries in the best schedule, for each state that its levels keep."""

_MOST_MOVES = 800_000


@dataclass(frozen=True, slots=True)
class Found:
    """The best schedule that one search found (none: no better one); no other ends before ``floor``."""

    end: Floats | None
    machine: Ints | None
    floor: float


def beam(
    jobs: Jobs, machines: int, memory: Memory, width: int, upper: float, clock: Clock, weight: float = 0.0
) -> Found:
    """Search for a schedule that takes less than ``upper``, with ``width`` states a level."""
    count = len(jobs.seconds)
    limits = Limits(_HORIZON, upper - clock.margin(upper), weight)
    scratch, seen = make_scratch(jobs, machines), make_seen(count, width)
    children = make_children(16 * width + 4096)
    here, there = (make_states(width + 1, count, machines, memory.things) for _ in range(2))
    here.above[0] = (jobs.descends * jobs.seconds[:, None]).sum(0)
    states, floor = 1, limits.limit
    for _ in range(count):
        made, lost, _ = expand(states, here, jobs, memory, scratch, children, limits)
        floor = min(floor, lost)
        if not made:
            return Found(None, None, floor)
        if clock.over:
            return Found(None, None, 0.0)
        order = np.argsort(children.rank[:made], kind="stable")
        states, lost = select(order, width, children, here, there, jobs, memory, seen)
        floor = min(floor, lost)
        here, there = there, here
    ends = here.end[:states].max(axis=1)
    best = int(np.argmin(ends))
    return Found(here.end[best].copy(), here.where[best].copy(), min(floor, float(ends[best])))


class Dolls:
    """The tails of jobs, from searches of what descends from each; made better in rounds."""

    def __init__(self, jobs: Jobs, machines: int) -> None:
        self.jobs, self.machines = jobs, machines
        count = len(jobs.seconds)
        self.exact = [False] * count
        self.upper = [math.inf] * count

    def improve(self, width: int, clock: Clock) -> None:
        """Raise tails by searches with ``width`` states a level, as far as the time goes."""
        jobs = self.jobs
        for job in range(len(jobs.seconds) - 1, -1, -1):
            add_tail(job, jobs, self.machines)
            if self.exact[job]:
                continue
            if clock.over:
                return
            behind = np.nonzero(jobs.descends[job])[0].tolist()
            doll = restrict(jobs, [job, *behind])
            lower = self._search(job, doll, width, clock)
            jobs.tail[job] = max(jobs.tail[job], lower - jobs.seconds[job])

    def _search(self, job: int, doll: Jobs, width: int, clock: Clock) -> float:
        """Return a lower bound on the time that a doll takes; its first job has to come first."""
        lower = float(doll.seconds[0] + doll.tail[0])
        upper = min(self.upper[job], float(doll.seconds.sum()))
        memory = no_limit(len(doll.seconds), self.machines)
        while upper - lower > clock.margin(upper) and not self.exact[job]:
            found = beam(doll, self.machines, memory, width, upper, clock)
            if found.end is None:
                lower = max(lower, _floor(found, upper, clock))
                break
            lower, upper = max(lower, clock.rounded(found.floor)), float(found.end.max())
        self.upper[job] = upper
        self.exact[job] = upper - lower <= clock.margin(upper)
        return lower


def _floor(found: Found, upper: float, clock: Clock) -> float:
    """Return the lower bound that a search which found nothing proves."""
    return min(upper, clock.rounded(found.floor))


class Search:
    """A search in rounds, each wider than the one before, until the proof or the end of the time.

    What looks forward and what looks backward run in two threads, and are joined in that order: the result
    does not depend on which is first.

    ``upper`` is what the best schedule takes, infinite if there is none yet; a search that ends with none
    has proven that the memory allows none.
    """

    def __init__(
        self,
        jobs: Jobs,
        machines: int,
        memory: Memory,
        clock: Clock,
        progress: Callable[[float, float], None] | None = None,
    ) -> None:
        self.machines, self.memory, self.clock, self.progress = machines, memory, clock, progress
        self.forward = jobs
        for job in range(len(jobs.seconds) - 1, -1, -1):
            add_tail(job, jobs, machines)
        self.backward = reverse(jobs)
        for job in range(len(jobs.seconds) - 1, -1, -1):
            add_tail(job, self.backward, machines)
        self._share_tails()
        self.end, self.machine = greedy(jobs, machines, memory)
        self.upper = math.inf if self.end is None else float(self.end.max())
        self.impossible = False
        self._tried = 0
        self._dolls = [Dolls(self.forward, machines), Dolls(self.backward, machines)]

    def offer(self, end: Floats, machine: Ints) -> None:
        """Take a schedule to begin with, if it is shorter than what there is."""
        if end.max() < self.upper:
            self.end, self.machine, self.upper = end, machine, float(end.max())

    def run(self) -> None:
        """Search."""
        for _ in self._rounds():
            if self.progress is not None:
                self.progress(self.lower, self.upper)
            if self.impossible or self.clock.over or self.clock.close(self.lower, self.upper):
                return

    def _rounds(self) -> Iterator[None]:
        yield
        for weight in (0.0, 0.3):
            self._look(_FIRST_WIDTH, weight)
            yield
        width = _FIRST_WIDTH // 2
        self._anneal(_MOVES * width)
        yield
        with self._threads() as pool:
            while True:
                improved = [pool.submit(dolls.improve, width, self.clock) for dolls in self._dolls]
                for each in improved:
                    each.result()
                self._share_tails()
                yield
                width *= 4
                self._anneal(_MOVES * width)
                yield
                self._look(width, 0.0)
                yield

    def _anneal(self, moves: int) -> None:
        """Change the best schedule move by move. What moves are possible knows nothing of memory."""
        if self.memory.limited or self.end is None or self.machine is None:
            return
        goal = self.lower * (1.0 + self.clock.tolerance)
        self._tried += 1
        moves = min(moves, _MOST_MOVES)
        found = anneal(
            self.forward, self.machines, self.end, self.machine, goal, moves, self._tried, self.clock
        )
        self.offer(*found)

    @contextmanager
    def _threads(self) -> Generator[ThreadPoolExecutor, None, None]:
        """Yield two threads. What ends their use, such as Ctrl-C, ends their work at the next level."""
        with ThreadPoolExecutor(2) as pool:
            try:
                yield pool
            except BaseException:
                self.clock.stopped.set()
                raise

    def _share_tails(self) -> None:
        self.backward.head[:] = np.maximum(self.backward.head, self.forward.tail[::-1])
        self.forward.head[:] = np.maximum(self.forward.head, self.backward.tail[::-1])
        bound = root_bound(self.forward, self.machines)
        self.lower = max(getattr(self, "lower", 0.0), self.clock.rounded(bound))

    def _look(self, width: int, weight: float) -> None:
        """Search both ways at once; only forward where memory is limited, as that fills with time."""
        ways = (self.forward,) if self.memory.limited else (self.forward, self.backward)
        seconds, delays = self.forward.seconds.sum(), self.forward.delay_in.sum()
        upper = self.upper if self.upper < math.inf else 2.0 * float(seconds + delays)
        with self._threads() as pool:
            running = [
                pool.submit(beam, jobs, self.machines, self.memory, width, upper, self.clock, weight)
                for jobs in ways
            ]
            found = [each.result() for each in running]
        for jobs, each in zip(ways, found, strict=True):
            self.lower = max(self.lower, _floor(each, upper, self.clock))
            if each.end is None or each.machine is None:
                proven = each.floor >= upper - self.clock.margin(upper)
                self.impossible = self.impossible or (self.upper == math.inf and proven)
            elif jobs is self.forward:
                self.offer(each.end, each.machine)
            else:
                self.offer((each.end.max() - each.end + jobs.seconds)[::-1].copy(), each.machine[::-1].copy())


@functools.cache
def compile_search() -> None:
    """Compile the loops, if that has not been done, so that it takes no time of a search to come."""
    tiny, clock = make_jobs([1.0, 1.0], [(0, 1, 1.0)]), Clock(math.inf, 0.0, 0.0)
    Search(tiny, 2, no_limit(2, 2), clock).run()
    beam(tiny, 2, no_limit(2, 2), 2, 4.0, clock)
    anneal(tiny, 2, np.array([1.0, 2.0]), np.zeros(2, np.int64), 0.0, 2, 0, clock)
