"""The states of the search: schedules of the first so many jobs, in the order of their starts.

And when a search ends: its time, and how near is near enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from threading import Event
from time import perf_counter
from typing import NamedTuple

import numpy as np

from distsim.device_placement.optimal.jobs import Floats, Ints, Jobs

UNUSED = -1.0
"""When a machine is free that has run nothing: machines of equal memory that have not are the same."""


class Memory(NamedTuple):
    """What jobs hold on a machine, in bytes. ``limited``: all of it may be too much for some machine.

    Things are numbered: what job j makes is j, then come the inputs from outside. Job j adds ``own[j]`` and
    every thing it reads, ``reads[read_start[j]:read_start[j + 1]]``, that is not there yet, at ``brought``.
    """

    limited: bool
    capacity: Floats
    own: Floats
    read_start: Ints
    reads: Ints
    brought: Floats
    things: int
    outside: float


class States(NamedTuple):
    """One row per state.

    ``end[s, j]`` is when job j ends, negative if it is not in the schedule yet, and ``where`` its machine;
    ``free`` is when each machine is free, ``last`` the latest start so far, ``mark`` a hash of the set of
    jobs, ``above[s, j]`` the seconds of what is above j and not done. ``used`` and ``held`` (a bit per
    machine for each thing) are the memory, if it is limited.
    """

    end: Floats
    where: Ints
    free: Floats
    last: Floats
    mark: Ints
    above: Floats
    used: Floats
    held: Ints


class Children(NamedTuple):
    """Ways to go on from states: the parent, the job, its machine and start; a bound and a rank."""

    parent: Ints
    job: Ints
    machine: Ints
    start: Floats
    bound: Floats
    rank: Floats


class Limits(NamedTuple):
    """How far a search looks: ``horizon`` jobs ahead, for what takes less than ``limit``.

    ``weight`` is what the mean time at which machines are free counts in the rank of a child.
    """

    horizon: int
    limit: float
    weight: float


class SeenSets(NamedTuple):
    """A hash table of the states of a level by the set of their jobs: ``marks`` is the hash of each job."""

    marks: Ints
    heads: Ints
    chain: Ints


class Scratch(NamedTuple):
    """Room for :func:`~distsim.device_placement.optimal.bounds.estimate`.

    ``by_tail`` are the jobs, those of the longest tails first.
    """

    by_tail: Ints

    earliest: Floats
    first: Floats
    second: Floats
    at: Ints
    base: Floats
    ascending: Floats
    remote: Floats
    order: Ints
    taken: Ints


def no_limit(count: int, machines: int) -> Memory:
    """Return memory that is never full."""
    none = np.zeros(0, np.int64)
    return Memory(
        False,
        np.full(machines, np.inf),
        np.zeros(count),
        np.zeros(count + 1, np.int64),
        none,
        np.zeros(0),
        0,
        0.0,
    )


def make_states(rows: int, count: int, machines: int, things: int) -> States:
    """Return room for so many states; the first is the empty schedule, but for ``above``."""
    return States(
        np.full((rows, count), -1.0),
        np.zeros((rows, count), np.int64),
        np.full((rows, machines), UNUSED),
        np.zeros(rows),
        np.zeros(rows, np.int64),
        np.zeros((rows, count)),
        np.zeros((rows, machines)),
        np.zeros((rows, things), np.int64),
    )


def make_children(rows: int) -> Children:
    """Return room for so many children."""
    ints = [np.empty(rows, np.int64) for _ in range(3)]
    floats = [np.empty(rows) for _ in range(3)]
    return Children(ints[0], ints[1], ints[2], floats[0], floats[1], floats[2])


def make_seen(count: int, width: int) -> SeenSets:
    """Return an empty table for ``width`` states of ``count`` jobs."""
    marks = np.random.default_rng(0).integers(0, 2**62, count)
    return SeenSets(marks, np.empty(4 * width + 7, np.int64), np.empty(width + 1, np.int64))


def make_scratch(jobs: Jobs, machines: int) -> Scratch:
    """Return room for the estimates of one search."""
    count = len(jobs.seconds)
    widest = int(np.diff(jobs.before_start).max(initial=0)) + 1
    return Scratch(
        np.argsort(-jobs.tail, kind="stable"),
        np.empty((count, machines)),
        np.empty(count),
        np.empty(count),
        np.empty(count, np.int64),
        np.empty(machines),
        np.empty(machines),
        np.empty(widest),
        np.empty(widest, np.int64),
        np.empty(widest, np.int64),
    )


@dataclass(frozen=True, slots=True)
class Clock:
    """When to stop, and how near is near enough; all times are multiples of ``step``, unless it is 0."""

    deadline: float
    tolerance: float
    step: float
    stopped: Event = field(default_factory=Event)

    @property
    def over(self) -> bool:
        """Whether the time is up, or the search was stopped."""
        return self.stopped.is_set() or perf_counter() >= self.deadline

    def margin(self, upper: float) -> float:
        """Return by how much a schedule must be better than one that takes ``upper`` to be looked for."""
        return max(self.tolerance * upper, self.step * (1 - 1e-6))

    def rounded(self, bound: float) -> float:
        """Return a lower bound, raised to a multiple of the step."""
        return math.ceil(bound / self.step - 5e-7) * self.step if self.step else bound

    def close(self, lower: float, upper: float) -> bool:
        """Return whether these bounds prove a schedule."""
        return upper < math.inf and upper - lower <= self.tolerance * upper + 1e-12 * upper
