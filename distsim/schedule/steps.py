"""The compiled loop that runs the ranks of a schedule step by step."""

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
