"""The compiled loops over a schedule: its ranks run step by step, and its steps compared."""

from __future__ import annotations

from typing import Any

import numpy as np

from distsim.compile import compiled


@compiled
def run_steps(codes: Any, stage: Any, code: Any, ends_step: Any, position: Any) -> int:
    """Run the tasks in steps; return how many of them ran, fewer than all if the ranks wait for each other.

    ``codes[r]`` are the tasks of rank r, each 2 * microbatch + phase. In each step every rank, by
    increasing rank, runs its next task if the inputs of that task finished in an earlier step.
    Filled in: the stage and the code of each task in the order of the steps, whether it is the last of its
    step, and how many tasks each rank has run.
    """
    stages, length = codes.shape
    later = 2 * stages * length + 1
    finished = np.full((stages, length), later)  # by stage and code: the step
    ran = now = 0
    while ran < stages * length:
        before = ran
        for s in range(stages):
            at = position[s]
            if at == length:
                continue
            task = codes[s, at]
            if task % 2 == 0:
                ready = s == 0 or finished[s - 1, task] < now
            else:
                ready = finished[s, task - 1] < now and (s + 1 == stages or finished[s + 1, task] < now)
            if ready:
                finished[s, task] = now
                position[s] = at + 1
                stage[ran], code[ran] = s, task
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
    each. Step ``t`` are the tasks ``steps[t]:steps[t + 1]``.
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
