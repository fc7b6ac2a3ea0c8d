"""The compiled loop over the rows of a table: one max-plus product per call, repetitions in closed form.

Exact, without a tolerance, where times are sums of durations on the grid that a float64 holds: to 8,192 s.

Repetitions. Let x(k) be all that repetition k of a round writes, and q a number of repetitions. What it
writes follows from what it reads: from what the last d repetitions wrote (d is how far back the round
reads), and from what was there before the round. Each time written is a maximum of times read plus
constants. So along a line, all that is read being y + n v, it is a convex function of n. Say x(i) - x(i -
q) = x(i - q) - x(i - 2 q) holds for the last max(q, d) repetitions i up to k, and what was there before
grows evenly as well. Then what is read for each x(i + n q) lies on a line from n = -2 on, and x(i + n q)
itself lies on one at n = -1 and 0. If, computed from what the line says n periods ahead, it is on that line
there too, it is on the line all along, as it is convex: the jump is exact. A time that grows more slowly
takes part like any other. The period q is the number of microbatches on the critical circuit, in
repetitions: one when a rank is the bottleneck, and up to the number of ranks when sends are, as under 1F1B
the circuit then goes down the pipeline and back (Baccelli, Cohen, Olsder and Quadrat, "Synchronization and
Linearity", 1992, chapter 3).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from distsim.compile import compiled, inner


class CallArrays(NamedTuple):
    """The calls of products that the rows of a table are, in order: CSR over rounds, then over calls.

    Round r are the calls ``start[r]:start[r + 1]``, ``repeats[r]`` times. Call c multiplies its ins, from
    ``in_start[c]`` to ``in_start[c + 1]``, by its matrix, [outs, ins] row by row from ``matrix_start[c]``,
    into its outs. In repetition k an in or out is the cell ``cell + k * step``.
    """

    start: Any
    repeats: Any
    in_start: Any
    in_cell: Any
    in_step: Any
    out_start: Any
    out_cell: Any
    out_step: Any
    matrix_start: Any
    matrix: Any


class Reach(NamedTuple):
    """How far back each round reads, and what it reads that was there before.

    ``lag[r]`` repetitions. ``periods[r]`` is the longest period that is looked for, 0 for none. Cells
    ``before[before_start[r]:..]`` are read in the first repetition, in the others those ``step[r]`` further
    on.
    """

    lag: Any
    periods: Any
    step: Any
    before_start: Any
    before: Any


class LoopState(NamedTuple):
    """Working memory: ``times`` of all cells, ``x`` [the most ins of a call], and of repetitions of a round
    what they wrote, ``logs`` [repetitions + 1, the most outs of a round], and ``latest`` [repetitions] of it.

    The last row of ``logs`` is for a repetition that is tried.
    """

    times: Any
    x: Any
    logs: Any
    latest: Any


@inner
def run_calls(begin: int, end: int, k: int, calls: CallArrays, state: LoopState, into: int) -> float:
    """Run calls as in repetition k; log what they write in a row of the logs; return the latest of it.

    Nothing is logged if ``into`` is negative.
    """
    times, x, logs = state.times, state.x, state.logs
    in_start, in_cell, in_step = calls.in_start, calls.in_cell, calls.in_step
    out_start, out_cell, out_step = calls.out_start, calls.out_cell, calls.out_step
    matrix_start, matrix = calls.matrix_start, calls.matrix
    latest = 0.0
    for c in range(begin, end):
        entry = in_start[c]
        width = in_start[c + 1] - entry
        for j in range(width):
            x[j] = times[in_cell[entry + j] + k * in_step[entry + j]]
        at = matrix_start[c]
        for i in range(out_start[c], out_start[c + 1]):
            value = 0.0  # what nothing delays is there from the start
            for j in range(width):
                other = matrix[at + j] + x[j]
                if other > value:  # twice as fast as max()
                    value = other
            at += width
            times[out_cell[i] + k * out_step[i]] = value
            if value > latest:
                latest = value
            if into >= 0:
                logs[into, i - out_start[begin]] = value
    return latest


@inner
def grows_evenly(r: int, k: int, q: int, periods: int, reach: Reach, times: Any) -> int:
    """Return for how many periods after ``k``, at most ``periods``, what was there before grows evenly."""
    step, before = reach.step[r], reach.before
    for b in range(reach.before_start[r], reach.before_start[r + 1]):
        base = before[b]
        for t in range(k - q + 1, k + 1 + periods * q - q):
            two = times[base + t * step]
            if times[base + (t + q) * step] - two != two - times[base + (t - q) * step]:
                periods = max(0, (t - k - 1) // q + 1)
                break
    return periods


@inner
def is_even(k: int, q: int, back: int, logs: Any, logged: int) -> bool:
    """Whether each of the last ``back`` repetitions wrote as much later than q before as that one did."""
    kept = len(logs) - 1
    for i in range(k, k - back, -1):
        now, before, first = i % kept, (i - q) % kept, (i - 2 * q) % kept
        for at in range(logged):
            if logs[now, at] - logs[before, at] != logs[before, at] - logs[first, at]:
                return False
    return True


@inner
def write_line(r: int, k: int, q: int, ahead: int, calls: CallArrays, state: LoopState) -> None:
    """Write what repetition ``k + ahead`` writes by the line through its like of the last two periods."""
    times, logs, out_cell, out_step = state.times, state.logs, calls.out_cell, calls.out_step
    kept = len(logs) - 1
    n = (ahead + q - 1) // q
    like = k + ahead - n * q
    now, before = like % kept, (like - q) % kept
    first = calls.out_start[calls.start[r]]
    for i in range(first, calls.out_start[calls.start[r + 1]]):
        value = logs[now, i - first]
        value += n * (value - logs[before, i - first])
        times[out_cell[i] + (k + ahead) * out_step[i]] = value


@inner
def is_on_line(k: int, q: int, ahead: int, logs: Any, logged: int) -> bool:
    """Whether the repetition ``k + ahead`` that was tried wrote what the line says."""
    kept = len(logs) - 1
    n = (ahead + q - 1) // q
    like = k + ahead - n * q
    now, before = like % kept, (like - q) % kept
    for at in range(logged):
        if logs[kept, at] != logs[now, at] + n * (logs[now, at] - logs[before, at]):
            return False
    return True


@inner
def fill_lines(r: int, k: int, q: int, periods: int, calls: CallArrays, state: LoopState) -> None:
    """Write what so many periods after ``k`` leave in cells per microbatch."""
    times, logs, out_cell, out_step = state.times, state.logs, calls.out_cell, calls.out_step
    kept = len(logs) - 1
    first = calls.out_start[calls.start[r]]
    for i in range(first, calls.out_start[calls.start[r + 1]]):
        step = out_step[i]
        if step == 0:
            continue
        for like in range(k - q + 1, k + 1):
            now = logs[like % kept, i - first]
            grown = now - logs[(like - q) % kept, i - first]
            cell = out_cell[i] + like * step
            for n in range(1, periods + 1):
                times[cell + n * q * step] = now + n * grown


@inner
def jump(r: int, k: int, q: int, calls: CallArrays, reach: Reach, state: LoopState) -> int:
    """Jump over periods of q repetitions after ``k``; return how many repetitions that was, proof included.

    What is returned is a multiple of q, 0 if the line does not go on for a period that could be jumped over:
    then everything is as it was.
    """
    begin, end, logs = calls.start[r], calls.start[r + 1], state.logs
    logged = calls.out_start[end] - calls.out_start[begin]
    back = max(q, reach.lag[r])
    periods = (calls.repeats[r] - 1 - k) // q
    if periods > 1:
        periods = grows_evenly(r, k, q, periods, reach, state.times)
    periods = max(periods - 1, 0)  # the last one is computed
    while periods > 0:
        far = periods * q
        for ahead in range(max(1, far - back + 1), far + 1):
            write_line(r, k, q, ahead, calls, state)
        right = True
        for ahead in range(far + 1, far + q + 1):
            run_calls(begin, end, k + ahead, calls, state, len(logs) - 1)
            right = right and is_on_line(k, q, ahead, logs, logged)
        if right:
            fill_lines(r, k, q, periods, calls, state)
            return far + q
        periods //= 4
    write_line(r, k, q, periods, calls, state)  # of none ahead: as it was
    return 0


@compiled
def run_in_full(calls: CallArrays, state: LoopState) -> int:
    """Run all rounds, every repetition; return how many repetitions these are."""
    computed = 0
    for r in range(len(calls.repeats)):
        for k in range(calls.repeats[r]):
            run_calls(calls.start[r], calls.start[r + 1], k, calls, state, -1)
        computed += calls.repeats[r]
    return computed


@inner
def run_repeating(r: int, calls: CallArrays, reach: Reach, state: LoopState) -> int:
    """Run a round; return how many of its repetitions were computed, the others followed from them."""
    logs, latest = state.logs, state.latest
    kept, computed, periods = len(latest), 0, reach.periods[r]
    begin, end, repeats = calls.start[r], calls.start[r + 1], calls.repeats[r]
    logged = calls.out_start[end] - calls.out_start[begin]
    k: Any = np.int64(0)  # a plain 0 would be compiled for anew
    pause, resume, since = 1, 0, 0
    while k < repeats:
        latest[k % kept] = run_calls(begin, end, k, calls, state, k % kept)
        computed += 1
        q = jumped = 0
        for q in range(1, periods + 1):
            back = max(q, reach.lag[r])
            if k < resume or k + 1 < since + 2 * q + back or k + 2 * q >= repeats:
                break
            now, before, first = latest[k % kept], latest[(k - q) % kept], latest[(k - 2 * q) % kept]
            if now - before == before - first and is_even(k, q, back, logs, logged):
                jumped = jump(r, k, q, calls, reach, state)
                resume = k + pause  # asked again later, ever more rarely
                pause *= 2
                break
        k += jumped + 1
        if jumped:
            computed += q
            since = k
    return computed


@compiled
def run_and_jump(calls: CallArrays, reach: Reach, state: LoopState) -> int:
    """Run all rounds; return how many repetitions were computed, the others followed from them."""
    computed = 0
    for r in range(len(calls.repeats)):
        if reach.periods[r]:
            computed += run_repeating(r, calls, reach, state)
            continue
        for k in range(calls.repeats[r]):
            run_calls(calls.start[r], calls.start[r + 1], k, calls, state, -1)
        computed += calls.repeats[r]
    return computed


def run_rounds(calls: CallArrays, reach: Reach | None, state: LoopState) -> int:
    """Run all rounds; return how many repetitions were computed. Without a reach that is every one.

    The times of all cells start with 0. What jumps is compiled for the first step that may be jumped in.
    """
    return run_in_full(calls, state) if reach is None else run_and_jump(calls, reach, state)


@compiled
def find_reach(calls: CallArrays, reach: Reach, registers: int, count: int, written: Any, before: Any) -> int:
    """Fill in the lags and ``before`` [.., 2], (round, cell); return how many of these there are.

    Asked are the rounds with periods. Cells from ``registers`` on are per microbatch, of which there are
    ``count``. ``written`` [cells] is -1 everywhere.
    """
    found = 0
    for r in range(len(calls.repeats)):
        if not reach.periods[r]:
            continue
        begin, end, step = calls.start[r], calls.start[r + 1], reach.step[r]
        for i in range(calls.out_start[begin], calls.out_start[end]):
            written[calls.out_cell[i]] = r  # the round whose first repetition writes the cell
        for j in range(calls.in_start[begin], calls.in_start[end]):
            if calls.in_step[j] == 0:
                continue
            cell = calls.in_cell[j]
            microbatch = (cell - registers) % count
            ago = 0
            while 0 <= microbatch + ago * step < count:
                if written[cell + ago * step] == r:
                    break
                ago += 1
            if 0 <= microbatch + ago * step < count:
                reach.lag[r] = max(reach.lag[r], ago)
            else:
                before[found, 0], before[found, 1] = r, cell
                found += 1
    return found
