"""The compiled loop behind a critical path: who delayed whom."""

from __future__ import annotations

import math
from typing import Any

from distsim.compile import compiled

NOTHING = -1
"""What a task starts after that waits for nothing."""


@compiled
def walk_back(
    task: int,
    end: Any,
    dep_start: Any,
    deps: Any,
    stream_start: Any,
    streams: Any,
    before: Any,
    ports: Any,
    clocks: Any,
    found: Any,
) -> tuple[int, int]:
    """Fill in the tasks from ``task`` back, each after the one that it started after.

    Of those that ended last it is the one before on the first stream, else the first dependency. ``before``
    has the task before on the stream of each use, -1 for none: then the stream is free from ``clocks`` on.
    Return the number of tasks and what the last of them started after: a stream s, a port p as -2 - p, or
    ``NOTHING``.
    """
    count = 0
    while True:
        found[count] = task
        count += 1
        latest = -math.inf
        for k in range(stream_start[task], stream_start[task + 1]):
            latest = max(latest, end[before[k]] if before[k] >= 0 else clocks[streams[k]])
        for k in range(dep_start[task], dep_start[task + 1]):
            latest = max(latest, end[deps[k]] if deps[k] >= 0 else ports[-2 - deps[k]])
        if latest == -math.inf:
            return count, NOTHING
        following = -1
        for k in range(stream_start[task], stream_start[task + 1]):
            if (end[before[k]] if before[k] >= 0 else clocks[streams[k]]) >= latest:
                if before[k] < 0:
                    return count, streams[k]
                following = before[k]
                break
        if following < 0:
            for k in range(dep_start[task], dep_start[task + 1]):
                if (end[deps[k]] if deps[k] >= 0 else ports[-2 - deps[k]]) >= latest:
                    if deps[k] < 0:
                        return count, deps[k]
                    following = deps[k]
                    break
        task = following
