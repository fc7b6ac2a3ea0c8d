"""The max-plus engine on tasks, one by one: a compiled loop over the recurrence."""

from __future__ import annotations

import numpy as np

from distsim.errors import SimulationError
from distsim.simulation.maxplus.kernels import evaluate, summarize
from distsim.simulation.tasks.task_table import Tasks
from distsim.simulation.tasks.templates import Floats

_MATRIX_CELLS = 1 << 23
"""Ends of tasks that :func:`step_matrix` holds at once: 64 MiB."""


def run(tasks: Tasks) -> tuple[Floats, Floats]:
    """Return the start and the end of every task, in seconds.

    A task starts when the task before it on each of its streams has ended and so have those that it
    depends on. Raises :class:`SimulationError` naming a task that depends on a later one.
    """
    count = len(tasks)
    start, end = np.empty(count), np.empty(count)
    clocks = np.zeros(len(tasks.stream_table))
    late = evaluate(
        tasks.durations,
        tasks.dep_start,
        tasks.deps,
        tasks.stream_start,
        tasks.streams,
        np.empty(0),
        clocks,
        start,
        end,
    )
    if late >= 0:
        raise SimulationError(
            f"{tasks.function.name}: {tasks.describe(late)} depends on a later task; put its producer first, "
            "or let the event engine find the order"
        )
    return start, end


def step_matrix(tasks: Tasks, seconds: Floats) -> Floats:
    """Return [classes, classes]: by how much each rank class, all its streams, ends later than each began all
    of its own, if tasks take so many seconds; -inf where it does not wait for it.
    """
    of = np.array([stream.rank_class for stream in tasks.stream_table], np.int64)
    count = len(tasks.classes.members)
    at_once = max(_MATRIX_CELLS // max(len(tasks), 1), 1)
    columns: list[Floats] = []
    for first in range(0, count, at_once):
        begun = np.arange(first, min(first + at_once, count))
        clocks = np.where(of[:, None] == begun, 0.0, -np.inf)
        ends = np.full((len(tasks), len(begun)), -np.inf)
        none = np.empty(0, np.int64)
        summarize(seconds, tasks.dep_start, tasks.deps, tasks.stream_start, tasks.streams, none, clocks, ends)
        last = np.full((count, len(begun)), -np.inf)
        np.maximum.at(last, of, clocks)
        columns.append(last)
    return np.concatenate(columns, axis=1) if columns else np.zeros((0, 0))
