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


class Rows(NamedTuple):
    """The rows of a table: ``block`` [rows], ``microbatch`` [rows, 3]: first, second, and 0.

    Round r are the rows ``start[r]:start[r + 1]``; in repetition k of ``repeats[r]`` microbatches are ``k *
    advance[r]`` higher.
    """

    block: Any
    microbatch: Any
    start: Any
    repeats: Any
    advance: Any


class Products(NamedTuple):
    """What the calls of each block read and write, CSR over blocks, then over their products.

    Block b are the products ``first[b]:first[b + 1]``. Product p multiplies its ins, from ``in_start[p]``
    to ``in_start[p + 1]``, by its matrix, [outs, ins] row by row from ``matrix_start[p]``, into its outs.
    An in or out is the cell at its base plus the microbatch in column ``which`` of the row; 2 for a single
    cell.
    """

    first: Any
    in_start: Any
    in_base: Any
    in_which: Any
    out_start: Any
    out_base: Any
    out_which: Any
    matrix_start: Any
    matrix: Any


class Reach(NamedTuple):
    """How far back each round reads, and what it reads that was there before.

    ``lag[r]`` repetitions; -1: it cannot be jumped over. Cells ``before[before_start[r]:..]`` are read in the
    first repetition, in the others those ``advance`` further on.
    """

    lag: Any
    before_start: Any
    before: Any


@inner
def run_rows(begin: int, end: int, moved: int, rows: Any, products: Any, times: Any, x: Any, log: Any) -> int:
    """Run rows, microbatches ``moved`` on; log what they write, if there is room; return how much that is."""
    logged = 0
    for n in range(begin, end):
        for p in range(products.first[rows.block[n]], products.first[rows.block[n] + 1]):
            entry = products.in_start[p]
            width = products.in_start[p + 1] - entry
            for j in range(width):
                which = products.in_which[entry + j]
                cell = products.in_base[entry + j] + rows.microbatch[n, which]
                x[j] = times[cell + moved if which < 2 else cell]
            at = products.matrix_start[p]
            for i in range(products.out_start[p], products.out_start[p + 1]):
                value = 0.0  # what nothing delays is there from the start
                for j in range(width):
                    other = products.matrix[at + j] + x[j]
                    if other > value:  # twice as fast as max()
                        value = other
                at += width
                which = products.out_which[i]
                cell = products.out_base[i] + rows.microbatch[n, which]
                times[cell + moved if which < 2 else cell] = value
                if len(log):
                    log[logged] = value
                logged += 1
    return logged


@inner
def grows_evenly(r: int, k: int, q: int, periods: int, rows: Any, reach: Any, times: Any) -> int:
    """Return for how many periods after ``k``, at most ``periods``, what was there before grows evenly."""
    step = rows.advance[r]
    for b in range(reach.before_start[r], reach.before_start[r + 1]):
        base = reach.before[b]
        for t in range(k - q + 1, k + 1 + periods * q - q):
            one, two, three = (
                times[base + (t - q) * step],
                times[base + t * step],
                times[base + (t + q) * step],
            )
            if three - two != two - one:
                periods = max(0, (t - k - 1) // q + 1)
                break
    return periods


@inner
def is_even(k: int, q: int, back: int, logs: Any, logged: int) -> bool:
    """Whether each of the last ``back`` repetitions wrote as much later than q before as that one did."""
    kept = len(logs)
    for i in range(k, k - back, -1):
        now, before, first = i % kept, (i - q) % kept, (i - 2 * q) % kept
        for at in range(logged):
            if logs[now, at] - logs[before, at] != logs[before, at] - logs[first, at]:
                return False
    return True


@inner
def write_line(r: int, k: int, q: int, ahead: int, rows: Any, products: Any, times: Any, logs: Any) -> None:
    """Write what repetition ``k + ahead`` writes by the line through its like of the last two periods."""
    n = (ahead + q - 1) // q
    like = k + ahead - n * q
    now, before = like % len(logs), (like - q) % len(logs)
    moved = (k + ahead) * rows.advance[r]
    at = 0
    for row in range(rows.start[r], rows.start[r + 1]):
        for p in range(products.first[rows.block[row]], products.first[rows.block[row] + 1]):
            for i in range(products.out_start[p], products.out_start[p + 1]):
                which = products.out_which[i]
                cell = products.out_base[i] + rows.microbatch[row, which]
                value = logs[now, at] + n * (logs[now, at] - logs[before, at])
                times[cell + moved if which < 2 else cell] = value
                at += 1


@inner
def fill_lines(r: int, k: int, q: int, periods: int, rows: Any, products: Any, times: Any, logs: Any) -> None:
    """Write what so many periods after ``k`` leave in cells per microbatch."""
    step, at = rows.advance[r], 0
    for row in range(rows.start[r], rows.start[r + 1]):
        for p in range(products.first[rows.block[row]], products.first[rows.block[row] + 1]):
            for i in range(products.out_start[p], products.out_start[p + 1]):
                which = products.out_which[i]
                for like in range(k - q + 1, k + 1 if which < 2 else 0):
                    now = logs[like % len(logs), at]
                    grown = now - logs[(like - q) % len(logs), at]
                    cell = products.out_base[i] + rows.microbatch[row, which] + like * step
                    for n in range(1, periods + 1):
                        times[cell + n * q * step] = now + n * grown
                at += 1


@inner
def off_line(k: int, q: int, ahead: int, logs: Any, log: Any) -> int:
    """Return how many times that repetition ``k + ahead`` wrote, in ``log``, are not what the line says."""
    n = (ahead + q - 1) // q
    like = k + ahead - n * q
    now, before = like % len(logs), (like - q) % len(logs)
    count = 0
    for at in range(len(log)):
        count += log[at] != logs[now, at] + n * (logs[now, at] - logs[before, at])
    return count


@inner
def latest_of(log: Any) -> float:
    """Return the latest time, 0 if there is none."""
    latest = 0.0
    for time in log:
        latest = max(latest, time)
    return latest


@inner
def jump(r: int, k: int, q: int, tables: Any, times: Any, x: Any, logs: Any, logged: int) -> int:
    """Jump over periods of q repetitions after ``k``; return how many repetitions that was, proof included.

    What is returned is a multiple of q, 0 if the line does not go on for a period that could be jumped over:
    then everything is as it was.
    """
    rows, products, reach = tables
    begin, end, step = rows.start[r], rows.start[r + 1], rows.advance[r]
    back = max(q, reach.lag[r])
    periods = (rows.repeats[r] - 1 - k) // q
    if periods > 1:
        periods = grows_evenly(r, k, q, periods, rows, reach, times)
    periods -= 1  # the last one is computed
    log = np.empty(logged)
    while periods > 0:
        far = periods * q
        for ahead in range(max(1, far - back + 1), far + 1):
            write_line(r, k, q, ahead, rows, products, times, logs)
        right = True
        for ahead in range(far + 1, far + q + 1):
            run_rows(begin, end, (k + ahead) * step, rows, products, times, x, log)
            right = right and off_line(k, q, ahead, logs, log) == 0
        if right:
            fill_lines(r, k, q, periods, rows, products, times, logs)
            return far + q
        periods //= 4
    write_line(r, k, q, 0, rows, products, times, logs)
    return 0


@compiled
def run_rounds(rows: Any, products: Any, reach: Any, longest: int, widest: int, times: Any) -> int:
    """Run all rounds; return how many repetitions were computed, the others followed from them.

    ``longest`` is the longest period looked for, ``widest`` the most cells that a product reads. ``times``
    starts with 0 in every cell.
    """
    tables = (rows, products, reach)
    x = np.empty(widest)
    computed = 0
    for r in range(len(rows.repeats)):
        begin, end, repeats, step = rows.start[r], rows.start[r + 1], rows.repeats[r], rows.advance[r]
        periods = min(longest, repeats // 4) if reach.lag[r] >= 0 else 0
        logged = 0
        for n in range(begin, end):
            b = rows.block[n]
            logged += products.out_start[products.first[b + 1]] - products.out_start[products.first[b]]
        if not periods:
            logged = 0
        kept = 2 * periods + max(periods, reach.lag[r]) + 1
        logs = np.empty((kept, logged))
        latest = np.empty(kept)
        k: Any = np.int64(0)  # a plain 0 would be compiled for anew
        pause, resume, since = 1, 0, 0
        while k < repeats:
            log = logs[k % kept]
            run_rows(begin, end, k * step, rows, products, times, x, log)
            latest[k % kept] = latest_of(log)
            computed += 1
            q = jumped = 0
            for q in range(1, periods + 1):
                back = max(q, reach.lag[r])
                if k < resume or k + 1 < since + 2 * q + back or k + 2 * q >= repeats:
                    break
                now, before, first = latest[k % kept], latest[(k - q) % kept], latest[(k - 2 * q) % kept]
                if now - before == before - first and is_even(k, q, back, logs, logged):
                    jumped = jump(r, k, q, tables, times, x, logs, logged)
                    resume = k + pause  # asked again later, ever more rarely
                    pause *= 2
                    break
            k += jumped + 1
            if jumped:
                computed += q
                since = k
    return computed


@compiled
def find_reach(rows: Any, products: Any, count: int, cells: int, most: int, lag: Any, before: Any) -> int:
    """Fill in ``lag`` [rounds] and ``before`` [.., 2], (round, cell); return how many of these there are.

    ``count`` are the microbatches, ``most`` the longest lag with which repetitions are jumped over.
    """
    found = 0
    written = np.zeros(cells, np.int64) - 1  # the round whose first repetition writes a cell
    for r in range(len(rows.repeats)):
        lag[r] = 0
        step = rows.advance[r]
        if rows.repeats[r] < 4:
            continue
        for n in range(rows.start[r], rows.start[r + 1]):
            for p in range(products.first[rows.block[n]], products.first[rows.block[n] + 1]):
                for i in range(products.out_start[p], products.out_start[p + 1]):
                    written[products.out_base[i] + rows.microbatch[n, products.out_which[i]]] = r
        for n in range(rows.start[r], rows.start[r + 1]):
            for p in range(products.first[rows.block[n]], products.first[rows.block[n] + 1]):
                for j in range(products.in_start[p], products.in_start[p + 1]):
                    which = products.in_which[j]
                    if which == 2:
                        continue
                    base, microbatch = products.in_base[j], rows.microbatch[n, which]
                    ago = 0
                    while 0 <= microbatch + ago * step < count:
                        if written[base + microbatch + ago * step] == r:
                            break
                        ago += 1
                    if 0 <= microbatch + ago * step < count:
                        lag[r] = max(lag[r], ago)
                    else:
                        before[found, 0], before[found, 1] = r, base + microbatch
                        found += 1
        if lag[r] > most:
            lag[r] = -1
    return found
