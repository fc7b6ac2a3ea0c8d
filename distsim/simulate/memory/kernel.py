"""Composing changes of memory over a schedule: the compiled loop behind ``program_memory``.

Every event of a schedule adds a constant to what is in use on one stage, so a round that repeats adds the
same each time: its peak is reached in the first repetition or in the last, and the repetitions between
need not be looked at. Amounts are exact integers, in columns: bytes in all, then (if asked for) by kind.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from distsim.compile import compiled

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

RECEIVED, CALLED = 0, 1
"""What an event is, in the first column of ``when``; 2 is the end of the step, -1 the start."""


@compiled
def run_once(
    level: Ints,
    peak: Ints,
    when: Ints,
    tasks: tuple[Ints, Ints, Ints, Ints, Bools],
    begin: int,
    end: int,
    variants: Ints,
    edges: tuple[Ints, Ints],
    call_net: Ints,
    call_top: Ints,
    sent_net: Ints,
    edge_net: Ints,
    edge_top: Ints,
) -> None:
    """Run tasks begin..end once.

    What an event does is written out where it happens: a function for it makes the loop six times slower.
    """
    stages, phases, microbatches, sorts, ends_step = tasks
    edge_start, edge_target = edges
    columns = level.shape[1]
    count = call_net.shape[0] // (2 * variants.shape[0])
    first = begin
    for task in range(begin, end):
        s = stages[task]
        row = 2 * (s * count + variants[s, sorts[task]]) + phases[task]
        if level[s, 0] + call_top[row, 0] > peak[s, 0]:
            for k in range(columns):
                peak[s, k] = level[s, k] + call_top[row, k]
            when[s, 0], when[s, 1], when[s, 2] = 1, phases[task], microbatches[task]
        for k in range(columns):
            level[s, k] += call_net[row, k]
        if not ends_step[task]:
            continue
        for done in range(first, task + 1):  # the sends of a step follow its calls
            s, sort = stages[done], sorts[done]
            block = 2 * s + phases[done]
            row = 2 * (s * count + variants[s, sort]) + phases[done]
            for k in range(columns):
                level[s, k] += sent_net[row, k]
            for edge in range(edge_start[block], edge_start[block + 1]):
                s = edge_target[edge]
                row = edge * count + variants[s, sort]
                if level[s, 0] + edge_top[row, 0] > peak[s, 0]:
                    for k in range(columns):
                        peak[s, k] = level[s, k] + edge_top[row, k]
                    when[s, 0], when[s, 1], when[s, 2] = 0, edge, microbatches[done]
                for k in range(columns):
                    level[s, k] += edge_net[row, k]
        first = task + 1


@compiled
def compose(
    start: Ints,
    tasks: tuple[Ints, Ints, Ints, Ints, Bools],
    begins: Ints,
    repeats: Ints,
    variants: Ints,
    edges: tuple[Ints, Ints],
    call_net: Ints,
    call_top: Ints,
    sent_net: Ints,
    edge_net: Ints,
    edge_top: Ints,
    step_stage: Ints,
    step_net: Ints,
    step_top: Ints,
) -> tuple[Ints, Ints, Ints]:
    """Return per stage the peak, the end, and when the peak is first reached (what, number, microbatch).

    ``tasks`` are stages, phases, microbatches, sorts of microbatch, and whether a step ends; round ``r``
    are tasks ``begins[r]:begins[r + 1]``, all of whose repetitions are alike. ``variants`` tells for each
    stage and sort of microbatch which rows to take.
    """
    level, peak = start.copy(), start.copy()
    count, columns = level.shape
    when = np.full((count, 3), -1, np.int64)
    before, top, top_when = level.copy(), level.copy(), when.copy()
    tables = (variants, edges, call_net, call_top, sent_net, edge_net, edge_top)
    for r in range(len(repeats)):
        more = repeats[r] - 1
        if more == 0:
            run_once(level, peak, when, tasks, begins[r], begins[r + 1], *tables)
            continue
        before[:] = level
        top[:] = level
        run_once(level, top, top_when, tasks, begins[r], begins[r + 1], *tables)
        for s in range(count):
            grown = level[s, 0] - before[s, 0]
            later = more if grown > 0 else 0
            if top[s, 0] > before[s, 0] and top[s, 0] + later * grown > peak[s, 0]:
                for c in range(columns):
                    peak[s, c] = top[s, c] + later * (level[s, c] - before[s, c])
                when[s, 0], when[s, 1], when[s, 2] = top_when[s, 0], top_when[s, 1], top_when[s, 2] + later
            for c in range(columns):
                level[s, c] += more * (level[s, c] - before[s, c])
    for i in range(len(step_stage)):
        s = step_stage[i]
        if level[s, 0] + step_top[i, 0] > peak[s, 0]:
            for c in range(columns):
                peak[s, c] = level[s, c] + step_top[i, c]
            when[s, 0], when[s, 1], when[s, 2] = 2, i, -1
        for c in range(columns):
            level[s, c] += step_net[i, c]
    return peak, level, when
