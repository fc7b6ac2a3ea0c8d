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

RECEIVED, CALLED, ENDED = 0, 1, 2
"""What an event is, in the first column of ``when``; -1 there is the start."""


@compiled
def happen(
    level: Ints, peak: Ints, when: Ints, s: int, net: Ints, top: Ints, row: int, what: int, number: int, mb: int
) -> None:
    """Let row ``row`` of (net, top) happen on stage s."""
    columns = level.shape[1]
    if level[s, 0] + top[row, 0] > peak[s, 0]:
        for k in range(columns):
            peak[s, k] = level[s, k] + top[row, k]
        when[s, 0], when[s, 1], when[s, 2] = what, number, mb
    for k in range(columns):
        level[s, k] += net[row, k]


@compiled
def run_round(
    level: Ints,
    peak: Ints,
    when: Ints,
    rounds: tuple[Ints, Ints, Ints, Bools],
    begin: int,
    end: int,
    shift: int,
    special: Ints,
    edges: tuple[Ints, Ints],
    call_net: Ints,
    call_top: Ints,
    sent_net: Ints,
    edge_net: Ints,
    edge_top: Ints,
) -> None:
    """Run tasks begin..end once, with ``shift`` added to their microbatches."""
    stages, phases, microbatches, ends_step = rounds
    edge_start, edge_target = edges
    variants = special.shape[1] + 1
    first = begin
    for task in range(begin, end):
        s, mb = stages[task], microbatches[task] + shift
        row = 2 * (s * variants + variant_of(special, s, mb)) + phases[task]
        happen(level, peak, when, s, call_net, call_top, row, 1, phases[task], mb)
        if not ends_step[task]:
            continue
        for done in range(first, task + 1):  # the sends of a step follow its calls
            s, mb = stages[done], microbatches[done] + shift
            row = 2 * (s * variants + variant_of(special, s, mb)) + phases[done]
            for k in range(level.shape[1]):
                level[s, k] += sent_net[row, k]
            for edge in range(edge_start[2 * s + phases[done]], edge_start[2 * s + phases[done] + 1]):
                target = edge_target[edge]
                row = edge * variants + variant_of(special, target, mb)
                happen(level, peak, when, target, edge_net, edge_top, row, 0, edge, mb)
        first = task + 1


@compiled
def variant_of(special: Ints, s: int, mb: int) -> int:
    """Return the variant of a microbatch on a stage: 0, or which of the special ones it is."""
    for i in range(special.shape[1]):
        if special[s, i] == mb:
            return i + 1
    return 0


@compiled
def quiet(microbatches: Ints, begin: int, end: int, shift: int, repeats: int, special: Ints) -> int:
    """Return how many repetitions from this one on meet no special microbatch."""
    count = repeats - shift
    for task in range(begin, end):
        mb = microbatches[task] + shift
        for s in range(special.shape[0]):
            for i in range(special.shape[1]):
                if mb <= special[s, i] < mb + count:
                    count = special[s, i] - mb
    return count


@compiled
def compose(
    start_level: Ints,
    rounds: tuple[Ints, Ints, Ints, Bools],
    starts: Ints,
    repeats: Ints,
    special: Ints,
    specials: Ints,
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
    """Return per stage the peak, the end, and when the peak is first reached (what, number, microbatch)."""
    level, peak = start_level.copy(), start_level.copy()
    count, columns = level.shape
    when = np.full((count, 3), -1, np.int64)
    before, top, top_when = level.copy(), level.copy(), when.copy()
    tables = call_net, call_top, sent_net, edge_net, edge_top
    for r in range(len(repeats)):
        begin, end, k = starts[r], starts[r + 1], 0
        while k < repeats[r]:
            n = 1
            if repeats[r] > 1:
                n = max(quiet(rounds[2], begin, end, k, repeats[r], specials), 1)
            if n == 1:
                run_round(level, peak, when, rounds, begin, end, k, special, edges, *tables)
                k += 1
                continue
            before[:] = level
            top[:] = level
            top_when[:] = when
            run_round(level, top, top_when, rounds, begin, end, k, special, edges, *tables)
            for s in range(count):
                grown = level[s, 0] - before[s, 0]
                later = n - 1 if grown > 0 else 0
                if top[s, 0] > before[s, 0] and top[s, 0] + later * grown > peak[s, 0]:
                    for c in range(columns):
                        peak[s, c] = top[s, c] + later * (level[s, c] - before[s, c])
                    when[s, 0], when[s, 1], when[s, 2] = top_when[s, 0], top_when[s, 1], top_when[s, 2] + later
                for c in range(columns):
                    level[s, c] += (n - 1) * (level[s, c] - before[s, c])
            k += n
    for i in range(len(step_stage)):
        happen(level, peak, when, step_stage[i], step_net, step_top, i, 2, i, -1)
    return peak, level, when
