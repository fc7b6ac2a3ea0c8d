"""Explaining a deadlock: the cycle of tasks that wait for each other, and why each waits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distsim.errors import SimulationError
from distsim.simulation.tasks.task_table import Ints, Tasks
from distsim.simulation.tasks.templates import tasks_of_uses


def waits(tasks: Tasks) -> tuple[Ints, Ints]:
    """Return (task, source), one entry per wait: what a task needs, and the task before on each stream."""
    dependent = np.repeat(np.arange(len(tasks)), np.diff(tasks.dep_start))
    on_stream = tasks_of_uses(tasks.stream_start)
    order = np.argsort(tasks.streams, kind="stable")
    ordered, streams = on_stream[order], tasks.streams[order]
    same = streams[1:] == streams[:-1]
    task = np.concatenate([dependent, ordered[1:][same]])
    return task, np.concatenate([tasks.deps, ordered[:-1][same]])


_NAMED = 8
"""A longer cycle is shortened in the middle."""


def deadlock_error(tasks: Tasks, stuck: Sequence[int]) -> SimulationError:
    """Return the error that names a cycle among tasks that can never start."""
    cycle = find_cycle(tasks, stuck)
    lines = [
        f"{tasks.describe(task)} waits for {tasks.describe(source)} ({_reason(tasks, task, source)})"
        for task, source in zip(cycle, [*cycle[1:], cycle[0]], strict=True)
    ]
    if len(lines) > _NAMED:
        lines = [*lines[: _NAMED - 1], f"... {len(lines) - _NAMED} more ...", lines[-1]]
    return SimulationError(
        f"{tasks.function.name} deadlocks: {len(stuck)} of {len(tasks)} tasks wait for each other in a "
        f"cycle: {'; '.join(lines)}; make the order on the streams agree with the dependencies"
    )


def find_cycle(tasks: Tasks, stuck: Sequence[int]) -> list[int]:
    """Return tasks each of which waits for the next, and the last for the first.

    ``stuck`` are the tasks that never start: each of them waits for another one.
    """
    among = set(stuck)
    waited: dict[int, int] = {}
    task, source = waits(tasks)
    for waiting, other in zip(task.tolist(), source.tolist(), strict=True):
        if waiting in among and other in among:
            waited.setdefault(waiting, other)
    place: dict[int, int] = {}
    current = stuck[0]
    while current not in place:
        place[current] = len(place)
        current = waited[current]
    return [number for number, position in place.items() if position >= place[current]]


def _reason(tasks: Tasks, task: int, source: int) -> str:
    if source in tasks.deps[tasks.dep_start[task] : tasks.dep_start[task + 1]]:
        made = tasks.op_of(source).outputs
        read = [value for value in made if value in tasks.op_of(task).inputs] or made
        return "for its " + ", ".join(value.name for value in read)
    streams = tasks.streams_of(source)
    shared = next(stream for stream in tasks.streams_of(task) if stream in streams)
    device = tasks.classes.members[shared.rank_class][0]
    return f"before it on stream {shared.name!r} of {device}"
