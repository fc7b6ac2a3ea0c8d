"""The matrices of products with the cells that they read and write, and how few cells it takes.

A block that hands many values to another one, such as the gradients of all parameters to the update, hands on
no more than the reader writes: by how much each of that follows what the maker reads, by way of these values,
is one matrix, whatever their number. So the maker writes that product, or the reader reads what the maker
read, and a step does not grow with the layers. Exact: a product of matrices on the grid is on it.

The products of blocks with the times that they read and write, as they are wired.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from distsim.ir import Value
from distsim.program.table import ONCE
from distsim.simulation.maxplus.block_links import BlockLinks
from distsim.simulation.tasks.block_matrix import BlockTasks, Place
from distsim.simulation.tasks.program_ranks import ProgramRanks
from distsim.simulation.tasks.streams import Stream
from distsim.simulation.tasks.templates import Floats, Ints


class Cells(NamedTuple):
    """Cells that products read, or write, one product after the other from ``start`` on.

    ``number`` counts registers where ``which`` is ONCE, else values of which there is one a microbatch.
    ``latest`` are the (value, rank) of the numbers that are LATEST.
    """

    start: Ints
    number: Ints
    which: Ints
    latest: Mapping[int, tuple[Value, int]]


@dataclass(frozen=True, eq=False)
class Matrices:
    """Products: the cells that they read and write, and their matrices, [outs, ins] one after the other.

    There are ``registers`` single times, of which the first ``clocks`` tell when a stream is free.
    """

    ins: Cells
    outs: Cells
    matrix: Floats
    registers: int
    clocks: int

    @cached_property
    def start(self) -> Ints:
        """Where the matrix of each product begins."""
        return starts(np.diff(self.ins.start) * np.diff(self.outs.start))


def starts(sizes: Ints) -> Ints:
    """Return where parts of these sizes begin, one after the other, and where the last one ends."""
    found = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=found[1:])
    return found


def max_plus(left: Floats, right: Floats) -> Floats:
    """Return the product of two matrices in (max, +)."""
    return np.array([(row[:, None] + right).max(axis=0, initial=-np.inf) for row in left])


def condensed(full: Matrices) -> Matrices:
    """Return matrices by which the streams are free at the same times, with fewer cells where there can be.

    What one product alone writes, and another one reads, as one value a step, may go through other cells.
    What is in a cell from the start is 0 as before: it delays nothing, as all that waits for a value waits
    for a stream as well.
    """
    handed = _handed_on(full)
    return _Condenser(full, handed).matrices() if handed else full


def _handed_on(full: Matrices) -> dict[tuple[int, int], list[int]]:
    """Return the registers, several, that one product alone writes and another one reads."""
    count = len(full.ins.start) - 1
    readers, makers = (np.repeat(np.arange(count), np.diff(side.start)) for side in (full.ins, full.outs))
    read, made = (
        np.flatnonzero((side.which == ONCE) & (side.number >= full.clocks)) for side in (full.ins, full.outs)
    )
    maker = np.full(full.registers, -1, np.int64)
    maker[full.outs.number[made]] = makers[made]
    maker[np.bincount(full.outs.number[made], minlength=full.registers) != 1] = -1
    of = maker[full.ins.number[read]]
    read, of = read[of >= 0], of[of >= 0]
    pairs, which, often = np.unique(of * count + readers[read], return_inverse=True, return_counts=True)
    order = np.argsort(which, kind="stable")
    parts = np.split(full.ins.number[read][order], np.cumsum(often))[:-1]
    return {
        divmod(pair, count): part.tolist()
        for pair, part in zip(pairs.tolist(), parts, strict=True)
        if len(part) > 1 and pair // count != pair % count
    }


class _CellProduct(NamedTuple):
    """A product: its cells, as 8 times their number and which, and its matrix."""

    ins: list[int]
    outs: list[int]
    matrix: Floats


class _Condenser:
    """Replaces what is handed on, pair of products by pair, as long as that takes fewer cells."""

    def __init__(self, full: Matrices, handed: Mapping[tuple[int, int], list[int]]) -> None:
        self.full, self.registers = full, full.registers
        self.products = [*self._products(full)]
        pending = {pair: [8 * number + ONCE for number in numbers] for pair, numbers in handed.items()}
        self.readers: dict[int, int] = {}
        for product in self.products:
            for cell in product.ins:
                self.readers[cell] = self.readers.get(cell, 0) + 1
        before = -1
        while before != self.registers:  # what a reader writes may itself have become less
            before = self.registers
            for pair, cells in pending.items():
                pending[pair] = self._replaced(*pair, cells)

    @staticmethod
    def _products(full: Matrices) -> Iterator[_CellProduct]:
        ins, outs = (
            np.split(8 * side.number + side.which, side.start[1:-1]) for side in (full.ins, full.outs)
        )
        for own, made, matrix in zip(ins, outs, np.split(full.matrix, full.start[1:-1]), strict=True):
            yield _CellProduct(own.tolist(), made.tolist(), matrix.reshape(len(made), len(own)))

    def _replaced(self, maker: int, reader: int, cells: list[int]) -> list[int]:
        """Return the cells that one product hands on to another one instead of these."""
        one, other = self.products[maker], self.products[reader]
        place = {cell: row for row, cell in enumerate(one.outs)}
        column = {cell: j for j, cell in enumerate(other.ins)}
        columns = [column[cell] for cell in cells]
        through = max_plus(other.matrix[:, columns], one.matrix[[place[cell] for cell in cells]])
        delays = through > -np.inf
        rows, entries = np.flatnonzero(delays.any(axis=1)), np.flatnonzero(delays.any(axis=0))
        if min(len(rows), len(entries)) >= len(cells):
            return cells
        if len(rows) <= len(entries):
            written, read = through[rows], _unit(len(other.outs), rows)
        else:
            written, read = _unit(len(one.ins), entries).T, through[:, entries]
        new = [8 * number + ONCE for number in range(self.registers, self.registers + len(written))]
        self.registers += len(new)
        for cell in cells:
            self.readers[cell] -= 1
        self.readers.update(dict.fromkeys(new, 1))
        handed = set(cells)
        kept = [row for row, cell in enumerate(one.outs) if cell not in handed or self.readers[cell]]
        self.products[maker] = _CellProduct(
            one.ins, [one.outs[row] for row in kept] + new, np.concatenate([one.matrix[kept], written])
        )
        others = np.setdiff1d(np.arange(len(other.ins)), columns)
        self.products[reader] = _CellProduct(
            [other.ins[j] for j in others.tolist()] + new,
            other.outs,
            np.concatenate([other.matrix[:, others], read], axis=1),
        )
        return new

    def matrices(self) -> Matrices:
        """Return the products with the registers that are left, numbered anew."""
        ins, outs = ([getattr(product, side) for product in self.products] for side in ("ins", "outs"))
        sides = [np.array([cell for own in side for cell in own], np.int64) for side in (ins, outs)]
        used = np.unique(np.concatenate([side[side % 8 == ONCE] // 8 for side in sides]))
        clocks = self.full.clocks
        used = used[used >= clocks]
        numbers = np.arange(self.registers)
        numbers[used] = np.arange(clocks, clocks + len(used))
        made: list[Cells] = []
        for side, codes, own in zip((self.full.ins, self.full.outs), sides, (ins, outs), strict=True):
            number, which = codes // 8, codes % 8
            once = which == ONCE
            number[once] = numbers[number[once]]
            sizes = np.array([len(cells) for cells in own], np.int64)
            made.append(Cells(starts(sizes), number, which, side.latest))
        matrix = np.concatenate([product.matrix.reshape(-1) for product in self.products])
        return Matrices(made[0], made[1], matrix, clocks + len(used), clocks)


def _unit(height: int, rows: Ints) -> Floats:
    """Return [height, rows]: 0 where column j has row ``rows[j]``, else -inf."""
    found = np.full((height, len(rows)), -np.inf)
    found[rows, np.arange(len(rows))] = 0.0
    return found


Class = tuple[int, int]
"""(pipeline rank, rank class)."""


@dataclass(frozen=True, eq=False)
class Product:
    """One max-plus product of a block's calls: of a function all of it, of a transfer one pair of classes.

    Its entries are ``streams`` (registers), then ``entries``, (input of the block, rank class); its results
    the streams, then ``results``, (output, rank class). ``shown`` are the streams as people see them, of the
    rank classes of all ranks, numbered rank by rank: a transfer is one register and two streams.
    """

    block: int
    tasks: BlockTasks
    streams: tuple[int, ...]
    shown: tuple[Stream, ...]
    entries: tuple[Place, ...]
    results: tuple[Place, ...]


@dataclass(frozen=True, eq=False)
class Wiring:
    """The products of the blocks of a flow, in order, on the rank classes of a mesh.

    Block b has the products ``first[b]:first[b + 1]``. ``matrices`` have the cells of each in the order of
    its streams, entries and results. There are ``batched`` values of which there is a time per microbatch.
    ``clocks`` are the registers that tell when a rank class is done.
    """

    flow: BlockLinks
    ranks: ProgramRanks
    overlap: bool
    products: tuple[Product, ...]
    first: Ints
    matrices: Matrices
    batched: int
    clocks: Mapping[Class, Ints]

    @cached_property
    def streams(self) -> tuple[Ints, Ints]:
        """The ``clocks`` of all rank classes, and of which class, by number, each is."""
        each = [*self.clocks.values()]
        none = np.zeros(0, np.int64)
        return np.concatenate([none, *each]), np.repeat(np.arange(len(each)), [len(own) for own in each])

    @cached_property
    def condensed(self) -> Matrices:
        """The matrices with no more cells than when the streams are free depends on."""
        return condensed(self.matrices)


def matrix_of(products: Sequence[Product]) -> Floats:
    """Return the matrices of products, one after the other."""
    return np.concatenate(
        [np.zeros(0), *[p.tasks.product(p.entries, p.results).reshape(-1) for p in products]]
    )


def ordered_alike(one: BlockTasks | None, two: BlockTasks | None) -> bool:
    """Whether the tasks of blocks differ at most in what they take."""
    if one is None or two is None:
        return one is two
    if one is two:
        return True
    a, b = one.order, two.order
    if a is b:
        return one.stream_table == two.stream_table
    pairs = (a.hides, b.hides), (a.waits, b.waits), (a.enters, b.enters)
    pairs += (one.makers, two.makers), (one.ports, two.ports)
    return one.stream_table == two.stream_table and all(np.array_equal(x, y) for x, y in pairs)
