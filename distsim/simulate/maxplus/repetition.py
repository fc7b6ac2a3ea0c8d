"""Periodic repetitions of a round, in closed form.

Let x(k) be everything that repetition k of a round reads and writes. When x(k) - x(k-c) = x(k-c) - x(k-2c)
= v for the last c repetitions, and no entry j catches up with a result i that it can delay in r more periods,
M_ij + x_j(k) + r v_j <= x_i(k) + r v_i, then x(k+nc) = x(k) + n v for all n up to r: an entry that decides
result i now has v_j >= v_i (it did not delay it more at k-c) and v_j <= v_i (nor at k+rc), so it keeps
deciding; the others stay behind, at n = 0, at n = r and in between. The period c is the number of
microbatches on the critical circuit: one when a stage is the bottleneck, and up to the number of stages when
sends are, as under 1F1B the circuit then goes down the pipeline and back (Baccelli et al. 1992, chapter 3).
"""

from __future__ import annotations

import math
from typing import Any

from distsim.compile import compiled
from distsim.simulate.maxplus.registers import place

TOLERANCE = 1e-13
"""Two increments are equal when they differ by less than this share of the time at which they occur."""

CHANGING, GROWING, PERIODIC = 0, 1, 2
"""Increments differ; they are equal, but some of what is to be read will not go on so; they all go on."""


@compiled
def remains_linear(
    cell: int, step: float, microbatch: int, rest: int, period: int, state: Any, writer: Any
) -> bool:
    """Whether what is read of a cell goes on growing by ``step`` for ``rest`` more periods."""
    order, wiring, times = state
    if cell < wiring.registers:
        return True
    base = place(cell, microbatch, order, wiring)
    for n in range(1, rest + 1):
        there = times[base + n * period]
        if math.isnan(there):  # to be written in this round, then by as much as it is written now
            made = writer[cell - wiring.registers]
            return abs(made - step) <= TOLERANCE * abs(times[base])
        if abs(there - times[base] - n * step) > TOLERANCE * abs(there) * (n + 1):
            return False
    return True


@compiled
def note_writers(r: int, order: Any, wiring: Any, log: Any, before: Any, first: bool, writer: Any) -> None:
    """Note by how much each per-microbatch cell grows that a repetition of round ``r`` writes.

    After the ``first`` repetition, a cell that grows by something else is not a number again.
    """
    at = 0
    pending = order.start[r]
    for n in range(order.start[r], order.start[r + 1]):
        call = 4 * (2 * order.stage[n] + order.phase[n]) + 1
        at += wiring.in_start[call + 1] - wiring.in_start[call]
        for i in range(wiring.out_start[call], wiring.out_start[call + 1]):
            if wiring.outs[i] >= wiring.registers:
                note(wiring.outs[i] - wiring.registers, log[at], before[at], first, writer)
            at += 1
        if order.ends_step[n]:
            for q in range(pending, n + 1):
                block = 2 * order.stage[q] + order.phase[q]
                for s in range(wiring.send_start[block], wiring.send_start[block + 1]):
                    cell = wiring.send_target[s] - wiring.registers
                    note(cell, log[at + 3], before[at + 3], first, writer)
                    at += 4
            pending = n + 1


@compiled
def note(cell: int, now: float, before: float, first: bool, writer: Any) -> None:
    """Note by how much one cell grows."""
    step = now - before
    if first:
        writer[cell] = step
    elif not abs(writer[cell] - step) <= TOLERANCE * abs(now):
        writer[cell] = math.nan


@compiled
def call_goes_on(
    call: int, microbatch: int, rest: int, period: int, log: Any, before: Any, state: Any, writer: Any
) -> bool:
    """Whether no entry of a call will catch up with a result that it can delay, and all go on growing so."""
    wiring = state[1]
    base, width = wiring.in_start[call], wiring.in_start[call + 1] - wiring.in_start[call]
    at = wiring.matrix_start[call]
    for i in range(wiring.out_start[call + 1] - wiring.out_start[call]):
        end = log[width + i]
        last = end + rest * (end - before[width + i] + TOLERANCE * abs(end))
        for j in range(width):
            if wiring.matrix[at + j] + log[j] + rest * (log[j] - before[j]) > last:
                return False
        at += width
    for j in range(width):
        step = log[j] - before[j]
        if not remains_linear(wiring.ins[base + j], step, microbatch, rest, period, state, writer):
            return False
    return True


@compiled
def send_goes_on(
    send: int, microbatch: int, rest: int, period: int, log: Any, before: Any, state: Any, writer: Any
) -> bool:
    """The same for a send."""
    step = log[3] - before[3]
    last = max(log[0], log[1], log[2]) + rest * (step + TOLERANCE * abs(log[3]))
    for j in range(3):
        if log[j] + rest * (log[j] - before[j]) > last:
            return False
    source = state[1].send_source[send]
    read = log[2] - before[2]
    return source < 0 or remains_linear(source, read, microbatch, rest, period, state, writer)


@compiled
def round_goes_on(
    r: int, k: int, rest: int, period: int, log: Any, before: Any, state: Any, writer: Any
) -> bool:
    """Whether everything in repetition ``k`` of a round goes on as from one period to the next."""
    order, wiring, _ = state
    at = 0
    pending = order.start[r]
    for n in range(order.start[r], order.start[r + 1]):
        call = 4 * (2 * order.stage[n] + order.phase[n]) + 1
        batch = order.microbatch[n] + k
        if not call_goes_on(call, batch, rest, period, log[at:], before[at:], state, writer):
            return False
        at += wiring.in_start[call + 1] - wiring.in_start[call]
        at += wiring.out_start[call + 1] - wiring.out_start[call]
        if order.ends_step[n]:
            for q in range(pending, n + 1):
                block = 2 * order.stage[q] + order.phase[q]
                batch = order.microbatch[q] + k
                for s in range(wiring.send_start[block], wiring.send_start[block + 1]):
                    if not send_goes_on(s, batch, rest, period, log[at:], before[at:], state, writer):
                        return False
                    at += 4
            pending = n + 1
    return True


@compiled
def compare(r: int, k: int, rest: int, period: int, logs: Any, logged: int, state: Any, writer: Any) -> int:
    """Return how round ``r`` goes on after repetition ``k``, for ``rest`` more periods."""
    kept = len(logs)
    for i in range(k, k - period, -1):
        log, before, first = logs[i % kept], logs[(i - period) % kept], logs[(i - 2 * period) % kept]
        for at in range(logged):
            same = log[at] == before[at] and before[at] == first[at]  # as what was never made is
            change = (log[at] - before[at]) - (before[at] - first[at])
            if not (same or abs(change) <= TOLERANCE * abs(log[at])):
                return CHANGING
    writer[:] = math.nan
    for i in range(k, k - period, -1):
        note_writers(r, state[0], state[1], logs[i % kept], logs[(i - period) % kept], i == k, writer)
    for i in range(k, k - period, -1):
        log, before = logs[i % kept], logs[(i - period) % kept]
        if not round_goes_on(r, i, rest, period, log, before, state, writer):
            return GROWING
    return PERIODIC


@compiled
def advance(
    cell: int, microbatch: int, rest: int, period: int, value: float, before: float, state: Any
) -> None:
    """Write what a cell holds after ``rest`` more periods, and after each of them."""
    order, wiring, times = state
    step = 0.0 if value == before else value - before
    if cell < wiring.registers:
        times[cell] = value + rest * step
        return
    base = place(cell, microbatch, order, wiring)
    for n in range(1, rest + 1):
        times[base + n * period] = value + n * step


@compiled
def skip(r: int, k: int, rest: int, period: int, log: Any, before: Any, state: Any) -> None:
    """Let repetition ``k`` of round ``r`` happen again ``rest`` times, every ``period`` repetitions."""
    order, wiring, _ = state
    at = 0
    pending = order.start[r]
    for n in range(order.start[r], order.start[r + 1]):
        call = 4 * (2 * order.stage[n] + order.phase[n]) + 1
        at += wiring.in_start[call + 1] - wiring.in_start[call]
        batch = order.microbatch[n] + k
        for i in range(wiring.out_start[call], wiring.out_start[call + 1]):
            advance(wiring.outs[i], batch, rest, period, log[at], before[at], state)
            at += 1
        if order.ends_step[n]:
            for q in range(pending, n + 1):
                block = 2 * order.stage[q] + order.phase[q]
                batch = order.microbatch[q] + k
                for s in range(wiring.send_start[block], wiring.send_start[block + 1]):
                    now, then = log[at + 3], before[at + 3]
                    advance(wiring.send_first[s], batch, rest, period, now, then, state)
                    advance(wiring.send_second[s], batch, rest, period, now, then, state)
                    advance(wiring.send_target[s], batch, rest, period, now, then, state)
                    at += 4
            pending = n + 1
