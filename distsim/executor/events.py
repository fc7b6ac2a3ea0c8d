"""The event engine: SimPy runs the tasks, one event each.

No process per op: a task counts what it still waits for, and whoever brings the count to zero starts
it. The order in which equal times are handled is SimPy's own, hence deterministic.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from simpy import Environment
from simpy.events import Timeout

from distsim.errors import SimulationError
from distsim.executor.tasks import Floats, Ints, Tasks


def run(tasks: Tasks) -> tuple[Floats, Floats]:
    """Return the start and the end of every task, in seconds.

    A task starts when the task before it on each of its streams has ended and so have those that it
    depends on. Raises :class:`SimulationError` naming ops that wait for each other.
    """
    count = len(tasks)
    task, source = _waits(tasks)
    missing: list[int] = np.bincount(task, minlength=count).tolist()
    order = np.argsort(source, kind="stable")
    followers: list[int] = task[order].tolist()
    first: list[int] = np.searchsorted(source[order], np.arange(count + 1)).tolist()
    durations: list[float] = tasks.durations.tolist()
    start, end = [0.0] * count, [-1.0] * count
    environment = Environment()

    def launch(number: int) -> None:
        start[number] = environment.now
        Timeout(environment, durations[number], number).callbacks.append(finish)  # pyright: ignore

    def finish(event: Any) -> None:
        number: int = event.value
        end[number] = environment.now
        for follower in followers[first[number] : first[number + 1]]:
            missing[follower] -= 1
            if not missing[follower]:
                launch(follower)

    for number in [i for i, waits in enumerate(missing) if not waits]:
        launch(number)
    environment.run()
    stuck = [number for number, time in enumerate(end) if time < 0]
    if stuck:
        names = "; ".join(tasks.describe(number) for number in stuck[:3])
        raise SimulationError(
            f"{tasks.function.name} deadlocks: {len(stuck)} of {count} tasks wait for each other, among "
            f"them {names}; make the order on the streams agree with the dependencies"
        )
    return np.array(start), np.array(end)


def _waits(tasks: Tasks) -> tuple[Ints, Ints]:
    """Return who waits for whom, (task, source): dependencies, and the task before on each stream."""
    numbers = np.arange(len(tasks))
    dependent = np.repeat(numbers, np.diff(tasks.dep_start))
    on_stream = np.repeat(numbers, np.diff(tasks.stream_start))
    order = np.argsort(tasks.streams, kind="stable")
    ordered, streams = on_stream[order], tasks.streams[order]
    same = streams[1:] == streams[:-1]
    task = np.concatenate([dependent, ordered[1:][same]])
    return task, np.concatenate([tasks.deps, ordered[:-1][same]])
