"""The compiled loop over a schedule: one max-plus product per call of a block, periods in closed form.

The rest of a periodic round follows: :mod:`distsim.simulate.maxplus.repetition`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from distsim.compile import compiled
from distsim.simulate.maxplus.registers import place
from distsim.simulate.maxplus.repetition import GROWING, PERIODIC, TOLERANCE, compare, skip


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
    longest = min(order.stage.max() + 2, order.repeats.max() // 4 + 1)  # of the periods looked for
    logs = np.empty((3 * longest, widest(order, wiring)))
    latest = np.empty(3 * longest)
    writer = np.empty((len(times) - wiring.registers) // order.num_microbatches)
    computed = 0
    for r in range(len(order.repeats)):
        k: Any = np.int64(0)  # a plain 0 would be compiled for anew
        settled, pause, resume = 0, 1, 0
        while k < order.repeats[r]:
            log = logs[k % len(logs)]
            logged, inner = repetition(r, k, state, left, total, log)
            latest[k % len(logs)] = log[:logged].max() if logged else 0.0
            computed += 1
            settled = settled + 1 if inner else 0
            rest = order.repeats[r] - 2 - k  # the last one is computed: a stage's last call may be in it
            for period in range(1, min(longest, rest, settled // 3) + 1):
                if k < resume or not may_repeat(k, period, latest):
                    continue
                found = compare(r, k, rest // period, period, logs, logged, state, writer)
                if found == GROWING:  # the same holds for its multiples; ask again later, ever more rarely
                    resume = k + pause
                    pause *= 2
                if found == PERIODIC:
                    for i in range(k - period + 1, k + 1):
                        now, before = logs[i % len(logs)], logs[(i - period) % len(logs)]
                        skip(r, i, rest // period, period, now, before, state)
                    rest -= rest % period
                    for n in range(order.start[r], order.start[r + 1]):
                        left[2 * order.stage[n] + order.phase[n]] -= rest
                    k += rest
                    settled = 0
                    break
            k += 1
    return computed


@compiled
def may_repeat(k: int, period: int, latest: Any) -> bool:
    """Whether the latest ends of repetitions one and two periods ago are equally far apart."""
    kept = len(latest)
    now, before, first = latest[k % kept], latest[(k - period) % kept], latest[(k - 2 * period) % kept]
    return abs((now - before) - (before - first)) <= TOLERANCE * abs(now)


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
