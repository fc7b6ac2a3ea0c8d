"""The compiled loops of the max-plus engine: plain arrays in, plain arrays out.

All of them are the recurrence ``start(i) = max(end of the task before on each of its streams, end of each
task that it waits for)``, ``end(i) = start(i) + duration(i)``: on numbers (:func:`evaluate`), on rows of a
matrix (:func:`summarize`), and on whole blocks at a time (:mod:`distsim.simulation.maxplus.row_loop`). It is
linear in the algebra of max and + (Baccelli, Cohen, Olsder and Quadrat, "Synchronization and Linearity",
1992).
"""

from __future__ import annotations

from typing import Any

from distsim.compile import compiled, inner


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
    holds the rows of the streams, at first each its own entry; entries beyond the streams are ports. ``end``
    is given as -inf.
    """
    width = clocks.shape[1]
    for task in range(len(durations)):
        for k in range(dep_start[task], dep_start[task + 1]):
            source = deps[k]
            if source >= 0:
                for j in range(width):
                    if end[source, j] > end[task, j]:
                        end[task, j] = end[source, j]
            elif columns[-2 - source] >= 0 and end[task, columns[-2 - source]] < 0.0:
                end[task, columns[-2 - source]] = 0.0
        for k in range(stream_start[task], stream_start[task + 1]):
            for j in range(width):
                if clocks[streams[k], j] > end[task, j]:
                    end[task, j] = clocks[streams[k], j]
        for j in range(width):
            end[task, j] += durations[task]
        for k in range(stream_start[task], stream_start[task + 1]):
            for j in range(width):
                clocks[streams[k], j] = end[task, j]


@compiled
def precede(
    dep_start: Any, deps: Any, stream_start: Any, streams: Any, before: Any, after: Any, entered: Any
) -> None:
    """Fill in what follows from the order of a block's tasks alone, whatever they take.

    ``before`` has the task before on the stream of each use, -1 for none. ``after`` [tasks + ports, streams]:
    a stream is never free, after the block, before a task has ended, or what comes in at a port is there; it
    is given as True for the last task of each stream, else False. ``entered`` [tasks + ports, streams]: a
    task, or every one that waits for a port, starts only when the stream was free, when the block was
    entered; it is given as False for tasks, True for ports.
    """
    count, width = len(dep_start) - 1, after.shape[1]
    for task in range(count):
        for k in range(stream_start[task], stream_start[task + 1]):
            entered[task, streams[k]] = True
            join(entered, task, before[k])
        for k in range(dep_start[task], dep_start[task + 1]):
            join(entered, task, deps[k])
        for k in range(dep_start[task], dep_start[task + 1]):
            if deps[k] < 0:
                for s in range(width):
                    entered[count - 2 - deps[k], s] &= entered[task, s]
    for task in range(count - 1, -1, -1):
        for k in range(dep_start[task], dep_start[task + 1]):
            join(after, deps[k] if deps[k] >= 0 else count - 2 - deps[k], task)
        for k in range(stream_start[task], stream_start[task + 1]):
            if before[k] >= 0:
                join(after, before[k], task)


@inner
def join(flags: Any, into: int, other: int) -> None:
    """Add the flags of one row to those of another; of none if its number is negative."""
    if other >= 0:
        for s in range(flags.shape[1]):
            flags[into, s] |= flags[other, s]
