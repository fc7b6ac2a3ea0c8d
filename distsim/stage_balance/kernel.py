"""The compiled simulation of a pipeline whose stages run one task at a time.

The recurrence is that of the engine: a task starts when its stage is free and what it needs has arrived; a
send starts when its task has ended and the sends before it, to the same stage, have. Each stage is one
stream, each direction between two stages another.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from distsim.compile import compiled

OTHERS = np.dtype(
    [(name, float) for name in ("first", "later", "starts", "paired", "unpaired", "sooner")], align=True
)
"""What bounds the stages that are not known, in seconds.

A microbatch comes back ``first`` (the first) or ``later`` seconds later at the earliest than the one arrived
there that the last stage runs before. Where the order is aligned, ``starts`` lie between the starts of two
microbatches there, ``paired`` between their returns when each stage runs a forward in between, and
``unpaired`` in any case; the second may return ``sooner``.
"""
STREAM = np.dtype([(name, float) for name in ("free", "ahead", "back", "ran")], align=True)
"""When a stage is free (where a rank has several: when the rank of this number is), when its sends to the
next one and back are, and whether it ran a backward."""
MESSAGE = np.dtype([("arrived", float), ("returned", float)], align=True)


class Room(NamedTuple):
    """Working memory of a simulation.

    ``streams`` [stages] of :data:`STREAM`; ``messages`` [stages, microbatches]: when what it waits for is
    there; ``none`` [1]: nothing.
    """

    streams: np.ndarray
    messages: np.ndarray
    none: np.ndarray


def room_for(stages: int, microbatches: int) -> Room:
    """Return the working memory for so many stages and microbatches."""
    return Room(np.zeros(stages, STREAM), np.zeros((stages, microbatches), MESSAGE), np.zeros(1, OTHERS))


@compiled
def makespan(bounds: Any, known: int, others: Any, order: Any, tables: Any, room: Any) -> float:
    """Return when the last of the first ``known`` stages is done; stage s holds ``bounds[s:s + 2]``.

    With all stages known that is the step time. If there are more, ``others``, a record of :data:`OTHERS`,
    bounds what these do.
    """
    streams, messages = room.streams, room.messages
    stages = len(streams)
    for s in range(known):
        stream = streams[s]
        stream.free = stream.ahead = stream.back = stream.ran = 0.0
    started = paired = unpaired = -math.inf
    done = 0
    for n in range(len(order.tasks)):
        task = order.tasks[n]
        s, m = task.stage, task.microbatch
        if s >= known:
            continue
        stream, message = streams[s], messages[s, m]
        j = bounds[s + 1]
        own = tables.stages[bounds[s], j]
        if task.phase == 0:
            end = stream.free + own.lead
            if s > 0:
                end = max(end, message.arrived)
            end += own.forward
            stream.free = end
            if s + 1 == stages:
                continue
            sends = tables.sends[s, j]
            start = max(stream.ahead, end) + sends.ahead
            stream.ahead = start
            if s + 1 < known:
                messages[s + 1, m].arrived = start
            elif not order.aligned:
                stream.back = max(stream.back, start + others.first) + sends.back
                message.returned = stream.back
            else:
                start = max(start, started + others.starts)
                started = start
                for b in range(done, order.due[m]):
                    sooner = others.sooner if b == 1 else 0.0
                    if order.paired[known, b]:
                        paired += others.paired - sooner
                    unpaired += others.unpaired - sooner
                    back = start + (others.first if b == 0 else others.later)
                    paired, unpaired = max(paired, back), max(unpaired, back)
                    stream.back = max(stream.back, max(paired, unpaired)) + sends.back
                    messages[s, b].returned = stream.back
                done = order.due[m]
        else:
            end = stream.free + own.back_lead
            if s + 1 < stages:
                end = max(end, message.returned)
            end += own.backward
            edge = tables.edges[bounds[s]]
            rest = edge.rest
            if stream.ran > 0:
                end += own.more
                rest = edge.rest_more
            stream.ran = 1.0
            stream.free = end
            if s > 0:
                before = streams[s - 1]
                before.back = max(before.back, end - rest) + tables.sends[s - 1, bounds[s]].back
                messages[s - 1, m].returned = before.back
    longest = 0.0
    for s in range(known):
        longest = max(longest, streams[s].free + tables.stages[bounds[s], bounds[s + 1]].tail)
    return longest


@compiled
def replay(bounds: Any, order: Any, tables: Any, room: Any) -> float:
    """Return the step time of stages on any ranks: several on one, backward in halves, copies of the model.

    Stage s holds ``bounds[c:c + 2]``, of the chain of which it is number c. An action starts when its rank
    is free and what it needs has arrived; sends are as in :func:`makespan`.
    """
    streams, messages = room.streams, room.messages
    count, chain = len(streams), len(bounds) - 1
    for s in range(count):
        stream = streams[s]
        stream.free = stream.ahead = stream.back = stream.ran = 0.0
    for n in range(len(order.tasks)):
        task = order.tasks[n]
        s, m, rank = task.stage, task.microbatch, streams[task.rank]
        c = s % chain
        own, stream, message = tables.stages[bounds[c], bounds[c + 1]], streams[s], messages[s, m]
        if task.phase == 0:
            end = rank.free + own.lead
            if c > 0:
                end = max(end, message.arrived)
            end += own.forward
            rank.free = end
            if c + 1 < chain:
                if tables.rank_of[c] != tables.rank_of[c + 1]:
                    end = max(stream.ahead, end) + tables.sends[c, bounds[c + 1]].ahead
                    stream.ahead = end
                messages[s + 1, m].arrived = end
            continue
        end = rank.free
        whole = c == 0 and own.half == 0.0 and task.phase > 1  # I is nothing, W the whole backward
        if whole and task.phase == 2:
            continue
        if task.phase < 3 or whole:
            end += own.back_lead
            if c + 1 < chain:
                end = max(end, message.returned)
        if task.phase == 1:
            end += own.backward
        elif task.phase == 2:
            end += own.half
        else:
            end += own.weight
        rest = 0.0
        if task.phase == 1:
            rest = tables.edges[bounds[c]].rest
        if task.phase != 2:
            if stream.ran > 0:
                end += own.more
                if task.phase == 1:
                    rest = tables.edges[bounds[c]].rest_more
            stream.ran = 1.0
        rank.free = end
        if task.phase < 3 and c > 0:
            leaves = end - rest
            if tables.rank_of[c] != tables.rank_of[c - 1]:
                before = streams[s - 1]
                leaves = max(before.back, leaves) + tables.sends[c - 1, bounds[c]].back
                before.back = leaves
            messages[s - 1, m].returned = leaves
    longest = 0.0
    for s in range(count):
        streams[s].ahead = 0.0
    for s in range(count):  # what follows the last backward, of all stages of a rank
        stream = streams[tables.rank_of[s]]
        stream.ahead += tables.stages[bounds[s % chain], bounds[s % chain + 1]].tail
        longest = max(longest, stream.free + stream.ahead)
    return longest
