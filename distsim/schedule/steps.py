"""The compiled loop over a schedule: its ranks run step by step."""

from __future__ import annotations

from typing import Any

from distsim.compile import compiled, inner
from distsim.schedule.codes import CODES, kind_of, number_of


@inner
def _listed_once(cells: Any, start: Any, rank_of: Any, finished: Any) -> bool:
    """Whether every action is there once, on its rank, and pairs are of two kinds; all unfinished then."""
    never = len(cells) + 1
    for rank in range(len(start) - 1):
        for at in range(start[rank], start[rank + 1]):
            for place in range(2):
                code = cells[at, place]
                if place == 1 and code == -1:
                    continue
                if code < 0 or code >= len(finished) - CODES or finished[code] != 0:
                    return False
                if rank_of[number_of(code) % len(rank_of)] != rank or (
                    place == 1 and kind_of(code ^ cells[at, 0]) == 0
                ):
                    return False
                finished[code] = never
    for code in range(0, len(finished) - CODES, CODES):
        whole, half, weight = finished[code + 1], finished[code + 2], finished[code + 3]
        if finished[code] == 0 or (whole == 0) == (half == 0) or half != weight:
            return False
        finished[code + 1] = finished[code + 2] = finished[code + 3] = never
    return True


@compiled
def run_steps(
    cells: Any, start: Any, rank_of: Any, chain: int, finished: Any, order: Any, ends_step: Any, position: Any
) -> int:
    """Run the cells in steps; return how many of them ran, fewer than all if the ranks wait for each other.

    ``cells[start[r]:start[r + 1]]`` are the codes of rank r (:meth:`Schedule.from_codes`), of stages in
    chains of ``chain``; ``finished`` is a zero for each code and ``CODES`` more. Returns -1 if an action is
    missing, repeated, foreign or on a wrong rank. In each step every rank, by increasing rank, runs its next
    cell if what its actions wait for finished in an earlier step. Filled in: the cells in the order of the
    steps, whether one is the last of its step, and how many cells each rank has run.
    """
    if not _listed_once(cells, start, rank_of, finished):
        return -1
    ran = now = 0
    while ran < len(cells):
        before = ran
        for rank in range(len(position)):
            at = start[rank] + position[rank]
            if at == start[rank + 1]:
                continue
            ready = True
            for place in range(2):
                code = cells[at, place]
                kind = kind_of(code)
                if code < 0 or not ready:
                    continue
                # At an end of a chain the neighbour by number is another microbatch's and may say no: whether
                # this is an end takes longest and is asked last. A call for each action would take ten times.
                if kind == 0:
                    ready = finished[code - CODES] < now or number_of(code) % chain == 0
                elif kind == 3:
                    ready = finished[code - 1] < now
                elif finished[code - kind] < now:
                    after = code - kind + CODES  # of the stage after, B and I: one of them runs
                    ready = finished[after + 1] < now or finished[after + 2] < now
                    ready = ready or (number_of(code) + 1) % chain == 0
                else:
                    ready = False
            if ready:
                for place in range(2):
                    if cells[at, place] >= 0:
                        finished[cells[at, place]] = now
                position[rank] += 1
                order[ran] = at
                ran += 1
        if ran == before:
            break
        ends_step[ran - 1] = True
        now += 1
    return ran
