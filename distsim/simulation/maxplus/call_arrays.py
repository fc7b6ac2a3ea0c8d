"""The calls of a table, each with its cells: what the compiled loops run."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from distsim.program.table import EVERY, LATEST, ONCE, Table
from distsim.simulation.maxplus.matrices import Cells, Matrices, Wiring, starts
from distsim.simulation.maxplus.row_loop import CallArrays
from distsim.simulation.tasks.templates import Floats, Ints


class CallOrder(NamedTuple):
    """The calls of products that rows are, in order: CSR over rounds; ``row`` and ``product`` of each."""

    start: Ints
    row: Ints
    product: Ints


def call_order(table: Table, wiring: Wiring) -> CallOrder:
    """Return the calls of a table, of every round those of its first repetition."""
    number = wiring.flow.numbers(table)
    first = wiring.first[number]
    start = starts(wiring.first[number + 1] - first)
    row = np.repeat(np.arange(len(first)), np.diff(start))
    product = np.arange(len(row)) + (first - start[:-1])[row]
    return CallOrder(start[table.start], row, product)


def call_arrays(table: Table, order: CallOrder, matrices: Matrices) -> CallArrays:
    """Return the calls with their cells: the registers, then a cell per microbatch of each other value."""
    products = _products(table, matrices)
    moved = np.repeat(table.advance, np.diff(table.start))
    once = np.zeros(len(table.block), np.int64)
    # By first, second or no microbatch: how far on a cell is in the first repetition, and in each later one.
    microbatch = np.column_stack([table.microbatch, once])[order.row].reshape(-1)
    step = np.column_stack([moved, moved, once])[order.row].reshape(-1)
    laid: list[tuple[Ints, Ints, Ints]] = []
    for side in (products.ins, products.outs):
        sizes = np.diff(side.start)[order.product]
        start = starts(sizes)
        call = np.repeat(np.arange(len(sizes)), sizes)
        entry = np.arange(len(call)) + (side.start[order.product] - start[:-1])[call]
        which = 3 * call + side.which[entry]
        laid.append((start, side.base[entry] + microbatch[which], step[which]))
    (in_start, in_cell, in_step), (out_start, out_cell, out_step) = laid
    return CallArrays(
        start=order.start,
        repeats=table.repeats,
        in_start=in_start,
        in_cell=in_cell,
        in_step=in_step,
        out_start=out_start,
        out_cell=out_cell,
        out_step=out_step,
        matrix_start=products.matrix_start[order.product],
        matrix=products.matrix,
    )


class _PlacedCells(NamedTuple):
    """The cells that products read, or write: ``base``, plus the microbatch in column ``which`` of a row."""

    start: Ints
    base: Ints
    which: Ints


class _PlacedProducts(NamedTuple):
    """Products with their cells at their places for so many microbatches."""

    ins: _PlacedCells
    outs: _PlacedCells
    matrix_start: Ints
    matrix: Floats


def _products(table: Table, matrices: Matrices) -> _PlacedProducts:
    ins, outs = (_placed(table, side, matrices.registers) for side in (matrices.ins, matrices.outs))
    every, heights, matrix = matrices.ins.which == EVERY, np.diff(outs.start), matrices.matrix
    if not every.any():
        return _PlacedProducts(ins, outs, matrices.start, matrix)
    # What is read of every microbatch is that many entries.
    often = np.where(every, table.microbatches, 1)
    widths = np.diff(ins.start)
    product = np.repeat(np.arange(len(widths)), widths * heights)
    element = np.arange(len(product)) - matrices.start[product]
    matrix = np.repeat(matrix, often[ins.start[product] + element % widths[product]])
    of = np.repeat(np.arange(len(often)), often)
    ahead = np.where(every[of], np.arange(len(of)) - starts(often)[of], 0)
    ins = _PlacedCells(starts(often)[ins.start], ins.base[of] + ahead, ins.which[of])
    return _PlacedProducts(ins, outs, starts(np.diff(ins.start) * heights), matrix)


def _placed(table: Table, side: Cells, registers: int) -> _PlacedCells:
    base = np.where(side.which == ONCE, side.number, registers + side.number * table.microbatches)
    for place in np.flatnonzero(side.which == LATEST).tolist():
        base[place] += table.latest[side.latest[int(side.number[place])]]
    return _PlacedCells(side.start, base, np.minimum(side.which, ONCE))
