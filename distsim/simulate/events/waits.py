"""Who waits for whom: dependencies, and the order on the streams."""

from __future__ import annotations

import numpy as np

from distsim.simulate.tasks.task_table import Ints, Tasks


def waits(tasks: Tasks) -> tuple[Ints, Ints]:
    """Return (task, source), one entry per wait: what a task needs, and the task before on each stream."""
    numbers = np.arange(len(tasks))
    dependent = np.repeat(numbers, np.diff(tasks.dep_start))
    on_stream = np.repeat(numbers, np.diff(tasks.stream_start))
    order = np.argsort(tasks.streams, kind="stable")
    ordered, streams = on_stream[order], tasks.streams[order]
    same = streams[1:] == streams[:-1]
    task = np.concatenate([dependent, ordered[1:][same]])
    return task, np.concatenate([tasks.deps, ordered[:-1][same]])
