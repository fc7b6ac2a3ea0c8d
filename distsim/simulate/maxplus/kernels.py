"""The compiled loops of the max-plus engine: plain arrays in, plain arrays out.

All of them are the recurrence ``start(i) = max(end of the task before on each of its streams, end of each
task that it waits for)``, ``end(i) = start(i) + duration(i)``: on numbers (:func:`evaluate`), on rows of a
matrix (:func:`summarize`), and on whole blocks at a time (:func:`run_rounds`). It is linear in the algebra
of max and + (Baccelli, Cohen, Olsder and Quadrat, "Synchronization and Linearity", 1992).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from distsim.compile import compiled

PERIOD_TOLERANCE = 1e-13
"""Two increments are equal when they differ by less than this share of the time at which they occur."""


@compiled
def evaluate(
    durations: Any,
    dep_start: Any,
    deps: Any,
    stream_start: Any,
    streams: Any,
    ports: Any,
    clocks: Any,
    start: Any,
    end: Any,
) -> int:
    """Fill in start and end of every task; ``clocks`` (when each stream is free) moves on.

    A dependency d < 0 is port -2 - d. Return the first task that waits for a later one, or -1.
    """
    for task in range(len(durations)):
        time = 0.0
        for k in range(dep_start[task], dep_start[task + 1]):
            source = deps[k]
            if source >= task:
                return task
            there = end[source] if source >= 0 else ports[-2 - source]
            time = max(time, there)
        for k in range(stream_start[task], stream_start[task + 1]):
            time = max(time, clocks[streams[k]])
        start[task] = time
        time += durations[task]
        end[task] = time
        for k in range(stream_start[task], stream_start[task + 1]):
            clocks[streams[k]] = time
    return -1


@compiled
def summarize(
    durations: Any,
    dep_start: Any,
    deps: Any,
    stream_start: Any,
    streams: Any,
    columns: Any,
    clocks: Any,
    end: Any,
) -> None:
    """Fill in the matrix of a block: row ``end[i]`` tells by how much task i ends after each entry.

    ``columns[p]`` is the entry of port p, -1 for a port that never decides. ``clocks`` [streams, entries]
    holds the rows of the streams, at first each its own entry; entries beyond the streams are ports.
    """
    width = clocks.shape[1]
    row = np.empty(width)
    for task in range(len(durations)):
        row[:] = -math.inf
        for k in range(dep_start[task], dep_start[task + 1]):
            source = deps[k]
            if source >= 0:
                for j in range(width):
                    row[j] = max(row[j], end[source, j])
            elif columns[-2 - source] >= 0:
                j = columns[-2 - source]
                row[j] = max(row[j], 0.0)
        for k in range(stream_start[task], stream_start[task + 1]):
            for j in range(width):
                row[j] = max(row[j], clocks[streams[k], j])
        for j in range(width):
            end[task, j] = row[j] + durations[task]
        for k in range(stream_start[task], stream_start[task + 1]):
            for j in range(width):
                clocks[streams[k], j] = end[task, j]
