"""Every call of a table, with what it waited for: what details are expanded from."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from distsim.compile import compiled
from distsim.program.table import Table
from distsim.simulation.maxplus.call_arrays import call_arrays
from distsim.simulation.maxplus.engine import ProgramModel
from distsim.simulation.maxplus.matrices import starts
from distsim.simulation.maxplus.row_loop import CallArrays
from distsim.simulation.tasks.templates import Ints


class Record(NamedTuple):
    """The calls of products in the order in which they are issued, every repetition of a round.

    Call c is of ``product[c]`` for the microbatches ``microbatch[c]``. It read the ``entries`` from
    ``start[c]`` to ``start[c + 1]``; entry e is result ``result[e]`` of call ``call[e]``, -1 for what was
    there from the start. ``times`` are the cells in the end, ``last_call`` and ``last_result`` who wrote
    them.
    """

    product: Any
    microbatch: Any
    start: Any
    entries: Any
    call: Any
    result: Any
    times: Any
    last_call: Any
    last_result: Any


@compiled
def record_calls(calls: CallArrays, x: Any, record: Record) -> None:
    """Run all calls, every repetition, and fill in what they read and who wrote it."""
    times, last_call, last_result = record.times, record.last_call, record.last_result
    matrix, ran, e = calls.matrix, 0, 0
    for r in range(len(calls.repeats)):
        for k in range(calls.repeats[r]):
            for c in range(calls.start[r], calls.start[r + 1]):
                width = 0
                for j in range(calls.in_start[c], calls.in_start[c + 1]):
                    cell = calls.in_cell[j] + k * calls.in_step[j]
                    x[width] = times[cell]
                    record.entries[e] = x[width]
                    record.call[e] = last_call[cell]
                    record.result[e] = last_result[cell]
                    width += 1
                    e += 1
                at = calls.matrix_start[c]
                first = calls.out_start[c]
                for i in range(first, calls.out_start[c + 1]):
                    value = 0.0
                    for j in range(width):
                        other = matrix[at + j] + x[j]
                        if other > value:
                            value = other
                    at += width
                    cell = calls.out_cell[i] + k * calls.out_step[i]
                    times[cell] = value
                    last_call[cell] = ran
                    last_result[cell] = i - first
                ran += 1


def record_of(model: ProgramModel, table: Table) -> Record:
    """Return the record of a simulated table."""
    wiring, order = model.wiring, model.order
    calls = call_arrays(table, order, wiring.matrices)
    sizes = np.diff(order.start)
    ran = starts(sizes * table.repeats)
    rounds = np.repeat(np.arange(len(sizes)), np.diff(ran))
    nth: Ints = np.arange(int(ran[-1])) - ran[rounds]
    repetition, place = np.divmod(nth, sizes[rounds])
    number = order.start[rounds] + place  # of the call in the first repetition
    microbatch = table.microbatch[order.row[number]]
    moved = (repetition * table.advance[rounds])[:, None]
    start = starts(np.diff(calls.in_start)[number])
    cells = wiring.matrices.registers + wiring.batched * table.microbatches
    record = Record(
        product=order.product[number],
        microbatch=np.where(microbatch >= 0, microbatch + moved, -1),
        start=start,
        entries=np.zeros(start[-1]),
        call=np.zeros(start[-1], np.int64),
        result=np.zeros(start[-1], np.int64),
        times=np.zeros(cells),
        last_call=np.full(cells, -1, np.int64),
        last_result=np.zeros(cells, np.int64),
    )
    record_calls(calls, np.empty(np.diff(calls.in_start).max(initial=1)), record)
    return record
