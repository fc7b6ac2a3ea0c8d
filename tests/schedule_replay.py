"""Replays a schedule with a time for each kind of action: what the figures of the reference tables are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distsim.schedule import Action, Kind, Schedule


def replay(
    made: Schedule,
    send: float = 0.0,
    atomic: bool = False,
    seconds: Sequence[float] | Sequence[Sequence[float]] = (1.0, 1.0, 1.0),
) -> tuple[float, float]:
    """Return the makespan, and the longest time from a rank's first start to its last end.

    ``seconds`` are of F, I and W, of every stage or [stages, 3]; B takes as long as I and W, all else
    nothing. A message between ranks arrives ``send`` after the action that makes it and occupies nobody. A
    pair runs in turn, or, ``atomic``, starts when both can and gives both results at its end.
    """
    stages, rank_of = made.num_stages, made.rank_of
    takes = [
        {"F": f, "B": i + w, "I": i, "W": w}
        for f, i, w in np.broadcast_to(np.array(seconds), (stages, 3)).tolist()
    ]
    cells = [[*row] if atomic else [(each,) for cell in row for each in cell] for row in made.ranks]
    queues = [
        [(cell, [need for action in cell for need in made.inputs(action)]) for cell in reversed(row)]
        for row in cells
    ]
    end: dict[Action, float] = {}

    first, free = [-1.0] * made.num_ranks, [0.0] * made.num_ranks
    left = sum(map(len, queues))
    while left:
        before = left
        for rank, queue in enumerate(queues):
            while queue:
                cell, inputs = queue[-1]
                if any(need not in end for need in inputs):
                    break
                queue.pop()
                start = free[rank]
                for need in inputs:
                    start = max(start, end[need] + send * (rank_of[need.stage] != rank))
                first[rank] = start if first[rank] < 0 else first[rank]
                free[rank] = start + sum(takes[action.stage].get(action.kind.value, 0.0) for action in cell)
                end.update(dict.fromkeys(cell, free[rank]))
                left -= 1
        assert left < before, "deadlock"
    return max(free), max(last - begin for last, begin in zip(free, first, strict=True))


def peaks(made: Schedule) -> tuple[list[int], list[int], list[int]]:
    """Return per rank the most pairs in flight, until I, and pending W, written apart from Schedule."""
    found: tuple[list[int], list[int], list[int]] = ([], [], [])
    for actions in made.actions:
        again = {(a.stage, a.microbatch) for a in actions if "F" in a.kind.in_flight.frees}
        held: tuple[set, set, set] = (set(), set(), set())
        most = [0, 0, 0]
        for action in actions:
            pair = action.stage, action.microbatch
            for which, (begins, ends) in enumerate((("F", "BW"), ("F", "BI"), ("I", "W"))):
                if action.kind.value in begins:
                    held[which].add(pair)
                elif action.kind.value in ends:
                    held[which].discard(pair)
                elif action.kind.value not in "FBIW" and which < 2:
                    (held[which].add if action.kind.in_flight.until_i > 0 else held[which].discard)(pair)
                most[which] = max(most[which], len(held[which]))
                if action.kind is Kind.FORWARD and pair in again:
                    held[which].discard(pair)
        for which in range(3):
            found[which].append(most[which])
    return found
