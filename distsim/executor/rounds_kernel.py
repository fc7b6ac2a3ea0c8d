"""The compiled loop over a schedule: one max-plus product per call of a block, periods in closed form.

Once the repetitions of a round are periodic the rest of them follow: let x(k) be everything that repetition
k reads and writes. When x(k) - x(k-1) = x(k-1) - x(k-2) = v, and no entry j catches up with a result i that
it can delay in the r repetitions that remain, M_ij + x_j(k) + r v_j <= x_i(k) + r v_i, then x(k+n) = x(k) +
n v for all n up to r: an entry that decides result i now has v_j >= v_i (it did not delay it more at k-1) and
v_j <= v_i (nor at k+r), so it keeps deciding; the others stay behind, at n = 0, at n = r and in between.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from distsim.compile import compiled

TOLERANCE = 1e-13
"""Two increments are equal when they differ by less than this share of the time at which they occur."""


class Order(NamedTuple):
    """The rounds of a schedule (:class:`distsim.schedule.Rounds`) and the number of its microbatches."""

    num_microbatches: int
    start: Any
    repeats: Any
    stage: Any
    phase: Any
    microbatch: Any
    ends_step: Any


class Wiring(NamedTuple):
    """What each call of a block, and each send, reads and writes.

    A *cell* is a time: cells below ``registers`` are single (when a stream is free, when a sum is there),
    the others hold one time per microbatch. Call ``4 * (2 * stage + phase) + variant`` (1: not the first of
    its stage and phase, 2: the last) multiplies the cells ``ins`` by its matrix, [outs, ins] in row-major
    order from ``matrix_start``, into the cells ``outs``. Sends belong to 2 * stage + phase, follow after
    its step and occupy two registers, ``send_first`` and ``send_second``; a source of -1 is there already.
    """

    registers: int
    matrix_start: Any
    matrix: Any
    in_start: Any
    ins: Any
    out_start: Any
    outs: Any
    send_start: Any
    send_source: Any
    send_first: Any
    send_second: Any
    send_target: Any
    send_seconds: Any


class Record(NamedTuple):
    """What is kept of every call and send when it is asked for: arrays with room for all of them.

    ``sequence`` has the calls, and the complements of the sends, in the order in which they are issued.
    """

    variant: Any
    microbatch: Any
    entries: Any
    send: Any
    send_microbatch: Any
    send_begin: Any
    sequence: Any


@compiled
def place(cell: int, microbatch: int, order: Any, wiring: Any) -> int:
    """Return where the time of a cell is kept, for one microbatch."""
    if cell < wiring.registers:
        return cell
    return wiring.registers + (cell - wiring.registers) * order.num_microbatches + microbatch


@compiled
def run_call(call: int, microbatch: int, order: Any, wiring: Any, times: Any, log: Any) -> int:
    """Multiply the entries of a call by its matrix; log both; return how much was logged."""
    base, width = wiring.in_start[call], wiring.in_start[call + 1] - wiring.in_start[call]
    for j in range(width):
        log[j] = times[place(wiring.ins[base + j], microbatch, order, wiring)]
    at = wiring.matrix_start[call]
    height = wiring.out_start[call + 1] - wiring.out_start[call]
    for i in range(height):
        value = -math.inf
        for j in range(width):
            value = max(value, wiring.matrix[at + j] + log[j])
        at += width
        log[width + i] = value
    for i in range(height):
        cell = wiring.outs[wiring.out_start[call] + i]
        times[place(cell, microbatch, order, wiring)] = log[width + i]
    return width + height


@compiled
def run_send(send: int, microbatch: int, order: Any, wiring: Any, times: Any, log: Any) -> int:
    """Run a send; log what it waits for and its end; return how much was logged."""
    first, second = wiring.send_first[send], wiring.send_second[send]
    log[0], log[1], log[2] = times[first], times[second], times[first]
    if wiring.send_source[send] >= 0:
        log[2] = times[place(wiring.send_source[send], microbatch, order, wiring)]
    log[3] = max(log[0], log[1], log[2]) + wiring.send_seconds[send]
    times[first] = log[3]
    times[second] = log[3]
    times[place(wiring.send_target[send], microbatch, order, wiring)] = log[3]
    return 4


@compiled
def widest(order: Any, wiring: Any) -> int:
    """Return the most that one repetition of a round logs."""
    most = 1
    for r in range(len(order.repeats)):
        size = 0
        for n in range(order.start[r], order.start[r + 1]):
            block = 2 * order.stage[n] + order.phase[n]
            call = 4 * block
            logged = 0
            for variant in range(4):
                here = wiring.in_start[call + variant + 1] - wiring.in_start[call + variant]
                here += wiring.out_start[call + variant + 1] - wiring.out_start[call + variant]
                logged = max(logged, here)
            size += logged + 4 * (wiring.send_start[block + 1] - wiring.send_start[block])
        most = max(most, size)
    return most


@compiled
def remains_linear(cell: int, step: float, microbatch: int, rest: int, state: Any, writer: Any) -> bool:
    """Whether what is read of a cell goes on growing by ``step`` for ``rest`` more microbatches."""
    order, wiring, times = state
    if cell < wiring.registers:
        return True
    base = place(cell, microbatch, order, wiring)
    for n in range(1, rest + 1):
        there = times[base + n]
        if math.isnan(there):  # to be written in this round, then by as much as it is written now
            made = writer[cell - wiring.registers]
            return abs(made - step) <= TOLERANCE * abs(times[base])
        if abs(there - times[base] - n * step) > TOLERANCE * abs(there) * (n + 1):
            return False
    return True


@compiled
def writers(r: int, order: Any, wiring: Any, steps: Any, writer: Any) -> None:
    """Fill in by how much each per-microbatch cell grows that round ``r`` writes (else not a number)."""
    writer[:] = math.nan
    at = 0
    pending = order.start[r]
    for n in range(order.start[r], order.start[r + 1]):
        call = 4 * (2 * order.stage[n] + order.phase[n]) + 1
        at += wiring.in_start[call + 1] - wiring.in_start[call]
        for i in range(wiring.out_start[call], wiring.out_start[call + 1]):
            if wiring.outs[i] >= wiring.registers:
                writer[wiring.outs[i] - wiring.registers] = steps[at]
            at += 1
        if order.ends_step[n]:
            for q in range(pending, n + 1):
                block = 2 * order.stage[q] + order.phase[q]
                for s in range(wiring.send_start[block], wiring.send_start[block + 1]):
                    writer[wiring.send_target[s] - wiring.registers] = steps[at + 3]
                    at += 4
            pending = n + 1


@compiled
def call_is_periodic(
    call: int, microbatch: int, rest: int, steps: Any, log: Any, state: Any, writer: Any
) -> bool:
    """Whether no entry of a call will catch up with a result that it can delay, and all go on growing so."""
    wiring = state[1]
    base, width = wiring.in_start[call], wiring.in_start[call + 1] - wiring.in_start[call]
    at = wiring.matrix_start[call]
    for i in range(wiring.out_start[call + 1] - wiring.out_start[call]):
        last = log[width + i] + rest * (steps[width + i] + TOLERANCE * abs(log[width + i]))
        for j in range(width):
            if wiring.matrix[at + j] + log[j] + rest * steps[j] > last:
                return False
        at += width
    for j in range(width):
        if not remains_linear(wiring.ins[base + j], steps[j], microbatch, rest, state, writer):
            return False
    return True


@compiled
def send_is_periodic(
    send: int, microbatch: int, rest: int, steps: Any, log: Any, state: Any, writer: Any
) -> bool:
    """The same for a send."""
    last = max(log[0], log[1], log[2]) + rest * (steps[3] + TOLERANCE * abs(log[3]))
    for j in range(3):
        if log[j] + rest * steps[j] > last:
            return False
    source = state[1].send_source[send]
    return source < 0 or remains_linear(source, steps[2], microbatch, rest, state, writer)


@compiled
def is_periodic(r: int, k: int, rest: int, logs: Any, logged: int, state: Any, writer: Any) -> bool:
    """Whether round ``r`` goes on as in its repetitions up to ``k``, for ``rest`` more of them."""
    order, wiring, _ = state
    log = logs[k % 3]
    steps = log - logs[(k - 1) % 3]
    before = logs[(k - 1) % 3] - logs[(k - 2) % 3]
    for at in range(logged):
        if abs(steps[at] - before[at]) > TOLERANCE * abs(log[at]):
            return False
    writers(r, order, wiring, steps, writer)
    at = 0
    pending = order.start[r]
    for n in range(order.start[r], order.start[r + 1]):
        call = 4 * (2 * order.stage[n] + order.phase[n]) + 1
        batch = order.microbatch[n] + k
        if not call_is_periodic(call, batch, rest, steps[at:], log[at:], state, writer):
            return False
        at += wiring.in_start[call + 1] - wiring.in_start[call]
        at += wiring.out_start[call + 1] - wiring.out_start[call]
        if order.ends_step[n]:
            for q in range(pending, n + 1):
                block = 2 * order.stage[q] + order.phase[q]
                batch = order.microbatch[q] + k
                for s in range(wiring.send_start[block], wiring.send_start[block + 1]):
                    if not send_is_periodic(s, batch, rest, steps[at:], log[at:], state, writer):
                        return False
                    at += 4
            pending = n + 1
    return True


@compiled
def advance(cell: int, microbatch: int, rest: int, value: float, step: float, state: Any) -> None:
    """Write what a cell holds after ``rest`` more repetitions, and after each of them."""
    order, wiring, times = state
    if cell < wiring.registers:
        times[cell] = value + rest * step
        return
    base = place(cell, microbatch, order, wiring)
    for n in range(1, rest + 1):
        times[base + n] = value + n * step


@compiled
def skip(r: int, k: int, rest: int, logs: Any, state: Any) -> None:
    """Let ``rest`` periodic repetitions after repetition ``k`` of round ``r`` have happened."""
    order, wiring, _ = state
    log = logs[k % 3]
    steps = log - logs[(k - 1) % 3]
    at = 0
    pending = order.start[r]
    for n in range(order.start[r], order.start[r + 1]):
        call = 4 * (2 * order.stage[n] + order.phase[n]) + 1
        at += wiring.in_start[call + 1] - wiring.in_start[call]
        for i in range(wiring.out_start[call], wiring.out_start[call + 1]):
            advance(wiring.outs[i], order.microbatch[n] + k, rest, log[at], steps[at], state)
            at += 1
        if order.ends_step[n]:
            for q in range(pending, n + 1):
                block = 2 * order.stage[q] + order.phase[q]
                for s in range(wiring.send_start[block], wiring.send_start[block + 1]):
                    value, step = log[at + 3], steps[at + 3]
                    batch = order.microbatch[q] + k
                    advance(wiring.send_first[s], batch, rest, value, step, state)
                    advance(wiring.send_second[s], batch, rest, value, step, state)
                    advance(wiring.send_target[s], batch, rest, value, step, state)
                    at += 4
            pending = n + 1


@compiled
def variant_of(block: int, left: Any, total: Any) -> int:
    """Return which variant of a stage and phase is called next, and count it."""
    variant = 0
    if left[block] < total[block]:
        variant += 1
    left[block] -= 1
    if left[block] == 0:
        variant += 2
    return variant


@compiled
def repetition(r: int, k: int, state: Any, left: Any, total: Any, log: Any) -> tuple[int, bool]:
    """Run one repetition of a round; return how much was logged and whether every call was an inner one."""
    order, wiring, times = state
    at, pending, inner = 0, order.start[r], True
    for n in range(order.start[r], order.start[r + 1]):
        block = 2 * order.stage[n] + order.phase[n]
        variant = variant_of(block, left, total)
        inner = inner and variant == 1
        batch = order.microbatch[n] + k
        at += run_call(4 * block + variant, batch, order, wiring, times, log[at:])
        if order.ends_step[n]:
            for q in range(pending, n + 1):
                block = 2 * order.stage[q] + order.phase[q]
                for s in range(wiring.send_start[block], wiring.send_start[block + 1]):
                    at += run_send(s, order.microbatch[q] + k, order, wiring, times, log[at:])
            pending = n + 1
    return at, inner


@compiled
def run_rounds(order: Any, wiring: Any, total: Any, times: Any) -> int:
    """Run a schedule; return how many repetitions were computed, the others followed from them.

    ``total`` counts the tasks of each 2 * stage + phase. ``times`` starts with 0 in the registers and not
    a number in every other cell.
    """
    state = (order, wiring, times)
    left = total.copy()
    logs = np.zeros((3, widest(order, wiring)))
    writer = np.empty((len(times) - wiring.registers) // order.num_microbatches)
    computed = 0
    for r in range(len(order.repeats)):
        k: Any = np.int64(0)  # a plain 0 would be compiled for anew
        settled = 0
        while k < order.repeats[r]:
            logged, inner = repetition(r, k, state, left, total, logs[k % 3])
            computed += 1
            settled = settled + 1 if inner else 0
            rest = order.repeats[r] - 2 - k  # the last one is computed: a stage's last call may be in it
            if settled >= 3 and rest > 0 and is_periodic(r, k, rest, logs, logged, state, writer):
                skip(r, k, rest, logs, state)
                for n in range(order.start[r], order.start[r + 1]):
                    left[2 * order.stage[n] + order.phase[n]] -= rest
                k += rest
                settled = 0
            k += 1
    return computed


@compiled
def record_rounds(order: Any, wiring: Any, total: Any, times: Any, record: Any) -> None:
    """Run a schedule, every repetition, and keep the entries of each call and the start of each send."""
    left = total.copy()
    log = np.zeros(widest(order, wiring))
    calls, sends = 0, 0
    for r in range(len(order.repeats)):
        for k in range(order.repeats[r]):
            pending = order.start[r]
            for n in range(order.start[r], order.start[r + 1]):
                block = 2 * order.stage[n] + order.phase[n]
                call = 4 * block + variant_of(block, left, total)
                batch = order.microbatch[n] + k
                run_call(call, batch, order, wiring, times, log)
                record.variant[calls] = call
                record.microbatch[calls] = batch
                for j in range(wiring.in_start[call + 1] - wiring.in_start[call]):
                    record.entries[calls, j] = log[j]
                record.sequence[calls + sends] = calls
                calls += 1
                if order.ends_step[n]:
                    for q in range(pending, n + 1):
                        block = 2 * order.stage[q] + order.phase[q]
                        for s in range(wiring.send_start[block], wiring.send_start[block + 1]):
                            batch = order.microbatch[q] + k
                            run_send(s, batch, order, wiring, times, log)
                            record.send[sends] = s
                            record.send_microbatch[sends] = batch
                            record.send_begin[sends] = max(log[0], log[1], log[2])
                            record.sequence[calls + sends] = ~sends
                            sends += 1
                    pending = n + 1
