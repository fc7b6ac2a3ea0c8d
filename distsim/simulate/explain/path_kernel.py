"""The compiled loops behind a critical path: who delayed whom."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from distsim.compile import compiled
from distsim.simulate.maxplus.schedule_loop import place, run_call, run_send, widest

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
    tolerance: float,
    found: Any,
) -> tuple[int, int]:
    """Fill in the tasks from ``task`` back, each after the one that it started after.

    Of those that ended last, within ``tolerance`` seconds, it is the one before on the first stream, else the
    first dependency. ``before`` has the task before on the stream of each use, -1 for none: then the stream
    is free from ``clocks`` on. Return the number of tasks and what the last of them started after: a
    stream s, a port p as -2 - p, or ``NOTHING``.
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
            if (end[before[k]] if before[k] >= 0 else clocks[streams[k]]) >= latest - tolerance:
                if before[k] < 0:
                    return count, streams[k]
                following = before[k]
                break
        if following < 0:
            for k in range(dep_start[task], dep_start[task + 1]):
                if (end[deps[k]] if deps[k] >= 0 else ports[-2 - deps[k]]) >= latest - tolerance:
                    if deps[k] < 0:
                        return count, deps[k]
                    following = deps[k]
                    break
        task = following


@compiled
def trace_writers(
    order: Any,
    wiring: Any,
    record: Any,
    times: Any,
    writer: Any,
    call_after: Any,
    send_after: Any,
    waits: Any,
) -> None:
    """Run what was recorded again, and note who wrote each cell that a call or send reads.

    Calls and sends go by their place in ``record.sequence``, -1 for nobody. ``writer`` ends with the last
    one of each cell. ``call_after`` [calls, entries] and ``send_after`` [sends, 3] have those of what they
    read, ``waits`` [sends, 3] the times of the latter.
    """
    writer[:] = NOTHING
    log = np.zeros(widest(order, wiring))
    for position in range(len(record.sequence)):
        event = record.sequence[position]
        if event >= 0:
            call, batch = record.variant[event], record.microbatch[event]
            first = wiring.in_start[call]
            for j in range(wiring.in_start[call + 1] - first):
                call_after[event, j] = writer[place(wiring.ins[first + j], batch, order, wiring)]
            run_call(call, batch, order, wiring, times, log)
            for i in range(wiring.out_start[call], wiring.out_start[call + 1]):
                writer[place(wiring.outs[i], batch, order, wiring)] = position
        else:
            send, batch = record.send[~event], record.send_microbatch[~event]
            run_send(send, batch, order, wiring, times, log)
            waits[~event, :] = log[:3]
            send_after[~event, 0] = writer[wiring.send_first[send]]
            send_after[~event, 1] = writer[wiring.send_second[send]]
            send_after[~event, 2] = NOTHING
            if wiring.send_source[send] >= 0:
                source = place(wiring.send_source[send], batch, order, wiring)
                send_after[~event, 2] = writer[source]
            else:
                waits[~event, 2] = -math.inf
            writer[wiring.send_first[send]] = position
            writer[wiring.send_second[send]] = position
            writer[place(wiring.send_target[send], batch, order, wiring)] = position
