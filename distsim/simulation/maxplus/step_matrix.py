"""The step as one max-plus matrix: when each rank class ends its part, by when each begins its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from distsim.compile import compiled
from distsim.simulation.maxplus.engine import ProgramRun
from distsim.simulation.maxplus.row_loop import CallArrays
from distsim.simulation.tasks.templates import Floats


@compiled
def run_from_each(calls: CallArrays, times: Any, x: Any) -> None:
    """Run all calls, every repetition, on ``times`` [cells, beginnings]: after each, -inf where never.

    ``x`` [the most ins of a call, beginnings] is working memory.
    """
    in_start, in_cell, in_step = calls.in_start, calls.in_cell, calls.in_step
    out_start, out_cell, out_step = calls.out_start, calls.out_cell, calls.out_step
    matrix = calls.matrix
    beginnings = times.shape[1]
    for r in range(len(calls.repeats)):
        for k in range(calls.repeats[r]):
            for c in range(calls.start[r], calls.start[r + 1]):
                entry = in_start[c]
                width = in_start[c + 1] - entry
                for j in range(width):
                    cell = in_cell[entry + j] + k * in_step[entry + j]
                    for b in range(beginnings):
                        x[j, b] = times[cell, b]
                at = calls.matrix_start[c]
                for i in range(out_start[c], out_start[c + 1]):
                    cell = out_cell[i] + k * out_step[i]
                    for b in range(beginnings):
                        times[cell, b] = -np.inf
                    for j in range(width):
                        delay = matrix[at + j]
                        if delay == -np.inf:
                            continue
                        for b in range(beginnings):
                            other = delay + x[j, b]
                            if other > times[cell, b]:
                                times[cell, b] = other
                    at += width


def step_matrix(run: ProgramRun) -> Floats:
    """Return [classes, classes], in the order of ``run.classes``: by how much each rank class, all its
    streams, ends later than each began all of its own; -inf where it does not wait for it. Seconds.

    Its largest element is the step time.
    """
    model = run.model
    clocks = [*model.wiring.clocks.values()]
    times = np.full((model.cells, len(clocks)), -np.inf)
    for number, registers in enumerate(clocks):
        times[registers, number] = 0.0
    run_from_each(model.calls, times, np.empty((model.sizes[0], len(clocks))))
    return np.array([times[registers].max(axis=0, initial=-np.inf) for registers in clocks])
