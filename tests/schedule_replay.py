"""Replays a schedule with a time for each kind of action: what the figures of the reference tables are."""

from __future__ import annotations

from distsim.schedule import Action, Kind, Schedule

TIMES = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.BACKWARD_INPUT: 1.0, Kind.BACKWARD_WEIGHT: 1.0}


def replay(made: Schedule, send: float = 0.0, atomic: bool = False) -> tuple[float, float]:
    """Return the makespan, and the longest time from a rank's first start to its last end.

    A message between ranks arrives ``send`` after the action that makes it and occupies nobody. A pair runs
    in turn, or, ``atomic``, starts when both can and gives both results at its end.
    """
    end: dict[Action, float] = {}
    rows = made.ranks if atomic else [[(action,) for action in actions] for actions in made.actions]
    queues = [[*row][::-1] for row in rows]
    first, free = [-1.0] * made.num_ranks, [0.0] * made.num_ranks
    while any(queues):
        before = len(end)
        for rank, queue in enumerate(queues):
            while queue and all(need in end for a in queue[-1] for need in made.inputs(a)):
                cell = queue.pop()
                needs = [need for action in cell for need in made.inputs(action)]
                start = free[rank]
                for need in needs:
                    start = max(start, end[need] + send * (made.rank_of[need.stage] != rank))
                first[rank] = start if first[rank] < 0 else first[rank]
                free[rank] = start + sum(TIMES[action.kind] for action in cell)
                end.update(dict.fromkeys(cell, free[rank]))
        assert len(end) > before, "deadlock"
    return max(free), max(last - begin for last, begin in zip(free, first, strict=True))


def peaks(made: Schedule) -> tuple[list[int], list[int], list[int]]:
    """Return per rank the most pairs in flight, until I, and pending W, written apart from Schedule."""
    found: tuple[list[int], list[int], list[int]] = ([], [], [])
    for actions in made.actions:
        held: tuple[set, set, set] = (set(), set(), set())
        most = [0, 0, 0]
        for action in actions:
            pair = action.stage, action.microbatch
            for which, (begins, ends) in enumerate((("F", "BW"), ("F", "BI"), ("I", "W"))):
                if action.kind.value in begins:
                    held[which].add(pair)
                elif action.kind.value in ends:
                    held[which].discard(pair)
                most[which] = max(most[which], len(held[which]))
        for which in range(3):
            found[which].append(most[which])
    return found
