"""The compiled search for steps of a schedule that are run again with their microbatches moved on."""

from __future__ import annotations

from typing import Any

from distsim.compile import compiled, inner


@inner
def _alike(rank: Any, code: Any, steps: Any, one: Any, other: Any, shift: Any) -> bool:
    """Whether two steps run the same cells, those of ``other`` with codes higher by ``shift``."""
    begin, size = steps[one], steps[one + 1] - steps[one]
    away = steps[other] - begin
    if steps[other + 1] - steps[other] != size:
        return False
    for i in range(begin, begin + size):
        if rank[i + away] != rank[i]:
            return False
        for k in range(2):
            if code[i, k] < 0:
                if code[i + away, k] >= 0:
                    return False
            elif code[i + away, k] != code[i, k] + shift:
                return False
    return True


@compiled
def find_repeats(rank: Any, code: Any, steps: Any, period: int, most: int, parts: Any) -> int:
    """Cut steps into parts, each repeated as often as it can be; return how many parts there are.

    Step ``t`` are the cells ``steps[t]:steps[t + 1]``; codes that are equal modulo ``period`` are the same
    action of another microbatch. From left to right, a stretch of steps that is run again right away, every
    code higher by the same shift, becomes a part, in the way, of up to ``most`` that the next calls of its
    first cell suggest, that leaves the fewest steps to write. ``parts`` [.., 4] is filled with the first
    step, the number of steps, the repetitions and the shift from one to the next.
    """
    count = len(steps) - 1
    found = at = single = 0
    while at < count:
        first = steps[at]
        best, length, repeats, shift = 0, 0, 0, 0
        known_length, known_shift = 0, 0
        tried = 0
        for t in range(at + 1, count):
            if tried == most:
                break
            for i in range(steps[t], steps[t + 1]):
                if rank[i] != rank[first] or (code[i, 0] - code[first, 0]) % period:
                    continue
                tried += 1
                n, moved = t - at, code[i, 0] - code[first, 0]
                if known_length and n % known_length == 0 and moved * known_length == known_shift * n:
                    continue  # a multiple of what repeats already
                run = 0
                while t + run < count and _alike(rank, code, steps, at + run, t + run, moved):
                    run += 1
                if run // n * n > best:
                    best, length, repeats, shift = run // n * n, n, run // n + 1, moved
                if run >= n:
                    known_length, known_shift = n, moved
        if not best:
            at += 1
            continue
        if single < at:
            parts[found, 0], parts[found, 1], parts[found, 2], parts[found, 3] = single, at - single, 1, 0
            found += 1
        parts[found, 0], parts[found, 1], parts[found, 2], parts[found, 3] = at, length, repeats, shift
        found += 1
        at += length * repeats
        single = at
    if single < count:
        parts[found, 0], parts[found, 1], parts[found, 2], parts[found, 3] = single, count - single, 1, 0
        found += 1
    return found


@compiled
def note_ends(code: Any, stages: int, first: Any, last: Any, latest: Any) -> None:
    """Note where each stage runs each kind of action first and last, in places: two to a cell.

    ``first`` and ``last`` [3 * stages] are by F, B or W, and I of each stage; ``latest`` [stages, 3] is
    filled with the microbatch of its last F, its last B or W, its last B or I.
    """
    for cell in range(len(code)):
        for k in range(2):
            if code[cell, k] < 0:
                continue
            kind, number = code[cell, k] & 3, code[cell, k] >> 2
            microbatch = number // stages  # a division takes as long as all else here
            stage = number - microbatch * stages
            which = 3 * stage + (0 if kind == 0 else 2 if kind == 2 else 1)
            if first[which] < 0:
                first[which] = 2 * cell + k
            last[which] = 2 * cell + k
            if kind == 0:
                latest[stage, 0] = microbatch
            if kind == 1 or kind == 3:
                latest[stage, 1] = microbatch
            if kind == 1 or kind == 2:
                latest[stage, 2] = microbatch
