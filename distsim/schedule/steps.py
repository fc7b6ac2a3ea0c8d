"""The compiled loops over a schedule: its ranks run step by step, and its steps compared."""

from __future__ import annotations

from typing import Any

from distsim.compile import compiled, inner


@inner
def _ready(code: Any, stages: Any, chain: Any, finished: Any, now: Any) -> bool:
    """Whether what an action waits for finished before step ``now``; -1, no action, waits for nothing."""
    kind, stage = code % 4, code // 4 % stages
    if code < 0:
        return True
    if kind == 3:
        return finished[code - 1] < now
    if kind == 0:
        return stage % chain == 0 or finished[code - 4] < now
    forward = code - kind
    if finished[forward] >= now:
        return False
    # Of the whole backward and that of inputs, the stage after runs one.
    return (stage + 1) % chain == 0 or finished[forward + 5] < now or finished[forward + 6] < now


@compiled
def run_steps(
    cells: Any, start: Any, stages: int, chain: int, finished: Any, ranks: Any, ends_step: Any, position: Any
) -> int:
    """Run the cells in steps; return how many of them ran, fewer than all if the ranks wait for each other.

    ``cells[start[r]:start[r + 1]]`` are the codes of rank r (:meth:`Schedule.from_codes`), of stages in
    chains of ``chain``. In each step every rank, by increasing rank, runs its next cell if what its actions
    wait for finished in an earlier step. ``finished``, by code, comes in as a step that is never reached.
    Filled in: the rank of each cell in the order of the steps, whether it is the last of its step, and how
    many cells each rank has run.
    """
    ran = now = 0
    while ran < len(cells):
        before = ran
        for rank in range(len(position)):
            at = start[rank] + position[rank]
            if at == start[rank + 1]:
                continue
            one, two = cells[at, 0], cells[at, 1]
            if _ready(one, stages, chain, finished, now) and _ready(two, stages, chain, finished, now):
                finished[one] = now
                if two >= 0:
                    finished[two] = now
                position[rank] += 1
                ranks[ran] = rank
                ran += 1
        if ran == before:
            break
        ends_step[ran - 1] = True
        now += 1
    return ran


@compiled
def count_repeated(stage: Any, code: Any, steps: Any, runs: Any) -> None:
    """Count the steps that are run again later, with every microbatch one higher.

    ``runs[n - 1, t]``: how many steps from step ``t`` on, without a gap, are run again ``n`` steps after
    each. Step ``t`` are the actions ``steps[t]:steps[t + 1]``, of codes 2 * microbatch + phase.
    """
    count = len(steps) - 1
    for n in range(1, len(runs) + 1):
        for t in range(count - n - 1, -1, -1):
            first, size = steps[t], steps[t + 1] - steps[t]
            shift = steps[t + n] - first
            same = steps[t + n + 1] - steps[t + n] == size
            i = first
            while same and i < first + size:
                same = stage[i + shift] == stage[i] and code[i + shift] == code[i] + 2
                i += 1
            runs[n - 1, t] = runs[n - 1, t + 1] + 1 if same else 0
