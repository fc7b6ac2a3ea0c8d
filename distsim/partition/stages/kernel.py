"""The compiled simulation of a pipeline whose stages run one task at a time.

The recurrence is that of the engine: a task starts when its stage is free and what it needs has arrived; a
send starts when its task has ended and the sends before it, to the same stage, have. Each stage is one
stream, each direction between two stages another.
"""

from __future__ import annotations

import math
from typing import Any

from distsim.compile import compiled

OTHERS = 6
"""How many figures bound the stages that are not known."""


@compiled
def makespan(bounds: Any, known: int, others: Any, order: Any, tables: Any, room: Any) -> float:
    """Return when the last of the first ``known`` stages is done; stage s holds ``bounds[s:s + 2]``.

    With all stages known that is the step time. If there are more, ``others`` (:data:`OTHERS` seconds) bound
    what these do: a microbatch comes back ``others[0]`` (the first) or ``others[1]`` later at the earliest
    than the one arrived there that the last stage runs before. Where the order is aligned, ``others[2]`` lie
    between the starts of two microbatches there, ``others[3]`` between their returns when each stage runs a
    forward in between, and ``others[4]`` in any case; the second may return ``others[5]`` sooner. ``room`` is
    working memory: [4, stages] and [2, stages, microbatches].
    """
    free, channel, reply, seen = room[0]
    arrived, returned = room[1]
    free[:known] = 0.0
    channel[:known] = 0.0
    reply[:known] = 0.0
    seen[:known] = 0.0
    stages = len(free)
    started = paired = unpaired = -math.inf
    done = 0
    for n in range(len(order.stage)):
        s = order.stage[n]
        if s >= known:
            continue
        m = order.microbatch[n]
        i, j = bounds[s], bounds[s + 1]
        if order.phase[n] == 0:
            end = free[s] + tables.lead[i, j]
            if s > 0:
                end = max(end, arrived[s, m])
            end += tables.forward[i, j]
            free[s] = end
            if s + 1 < stages:
                channel[s] = max(channel[s], end) + tables.ahead[s, j]
                if s + 1 < known:
                    arrived[s + 1, m] = channel[s]
                else:
                    start = channel[s]
                    if not order.aligned:
                        reply[s] = max(reply[s], start + others[0]) + tables.back[s, j]
                        returned[s, m] = reply[s]
                        continue
                    start = max(start, started + others[2])
                    started = start
                    for b in range(done, order.due[m]):
                        sooner = others[5] if b == 1 else 0.0
                        paired += others[3] - sooner if order.paired[known, b] else 0.0
                        unpaired += others[4] - sooner
                        back = start + others[min(b, 1)]
                        paired, unpaired = max(paired, back), max(unpaired, back)
                        reply[s] = max(reply[s], max(paired, unpaired)) + tables.back[s, j]
                        returned[s, b] = reply[s]
                    done = order.due[m]
        else:
            begin = free[s] + tables.back_lead[i, j]
            if s + 1 < stages:
                begin = max(begin, returned[s, m])
            end = begin + tables.backward[i, j]
            rest = tables.rest[i]
            if seen[s] > 0:
                end += tables.more[i, j]
                rest = tables.rest_more[i]
            seen[s] = 1.0
            free[s] = end
            if s > 0:
                reply[s - 1] = max(reply[s - 1], end - rest) + tables.back[s - 1, i]
                returned[s - 1, m] = reply[s - 1]
    longest = 0.0
    for s in range(known):
        longest = max(longest, free[s] + tables.tail[bounds[s], bounds[s + 1]])
    return longest
