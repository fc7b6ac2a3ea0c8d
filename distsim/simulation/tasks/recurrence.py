"""The max-plus engine on tasks, one by one: a compiled loop over the recurrence."""

from __future__ import annotations

import numpy as np

from distsim.errors import SimulationError
from distsim.simulation.maxplus.kernels import evaluate
from distsim.simulation.tasks.task_table import Tasks
from distsim.simulation.tasks.templates import Floats


def run(tasks: Tasks, seconds: Floats | None = None, clocks: Floats | None = None) -> tuple[Floats, Floats]:
    """Return the start and the end of every task, in seconds.

    A task starts when the task before it on each of its streams has ended and so have those that it
    depends on. ``seconds`` that tasks take, if not their own; ``clocks``: when each stream is free, at first
    and in the end, if not from 0. Raises :class:`SimulationError` naming a task that depends on a later one.
    """
    count = len(tasks)
    start, end = np.empty(count), np.empty(count)
    late = evaluate(
        tasks.durations if seconds is None else seconds,
        tasks.dep_start,
        tasks.deps,
        tasks.stream_start,
        tasks.streams,
        np.empty(0),
        np.zeros(len(tasks.stream_table)) if clocks is None else clocks,
        start,
        end,
    )
    if late >= 0:
        raise SimulationError(
            f"{tasks.function.name}: {tasks.describe(late)} depends on a later task; put its producer first, "
            "or let the event engine find the order"
        )
    return start, end
