"""Every call of a table, with what it waited for: what details are expanded from."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from distsim.compile import compiled
from distsim.simulate.maxplus.engine import ProgramModel


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
def record_rows(rows: Any, products: Any, widest: int, record: Any) -> None:
    """Run all rows, every repetition, and fill in the record."""
    x = np.empty(widest)
    shift = np.zeros(3, np.int64)
    c, e = 0, 0
    for r in range(len(rows.repeats)):
        for k in range(rows.repeats[r]):
            shift[0] = shift[1] = k * rows.advance[r]
            for n in range(rows.start[r], rows.start[r + 1]):
                for p in range(products.first[rows.block[n]], products.first[rows.block[n] + 1]):
                    entry = products.in_start[p]
                    width = products.in_start[p + 1] - entry
                    for j in range(width):
                        which = products.in_which[entry + j]
                        cell = products.in_base[entry + j] + rows.microbatch[n, which] + shift[which]
                        x[j] = record.times[cell]
                        record.entries[e] = x[j]
                        record.call[e] = record.last_call[cell]
                        record.result[e] = record.last_result[cell]
                        e += 1
                    at = products.matrix_start[p]
                    for i in range(products.out_start[p], products.out_start[p + 1]):
                        value = 0.0
                        for j in range(width):
                            value = max(value, products.matrix[at + j] + x[j])
                        at += width
                        which = products.out_which[i]
                        cell = products.out_base[i] + rows.microbatch[n, which] + shift[which]
                        record.times[cell] = value
                        record.last_call[cell] = c
                        record.last_result[cell] = i - products.out_start[p]
                    record.product[c] = p
                    for i in range(2):
                        one = rows.microbatch[n, i]
                        record.microbatch[c, i] = one + shift[i] if one >= 0 else -1
                    c += 1
                    record.start[c] = e


def record_of(model: ProgramModel) -> Record:
    """Return the record of a simulated table."""
    rows, products = model.rows, model.products
    often = np.repeat(rows.repeats, np.diff(rows.start))
    calls = int((np.diff(products.first)[rows.block] * often).sum())
    entries = int((np.diff(products.in_start[products.first])[rows.block] * often).sum())
    record = Record(
        product=np.zeros(calls, np.int64),
        microbatch=np.zeros((calls, 2), np.int64),
        start=np.zeros(calls + 1, np.int64),
        entries=np.zeros(entries),
        call=np.zeros(entries, np.int64),
        result=np.zeros(entries, np.int64),
        times=np.zeros(model.cells),
        last_call=np.full(model.cells, -1, np.int64),
        last_result=np.zeros(model.cells, np.int64),
    )
    record_rows(rows, products, model.widest, record)
    return record
