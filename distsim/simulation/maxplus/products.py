"""The products of blocks with the times that they read and write, as they are wired."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distsim.simulation.maxplus.block_links import BlockLinks
from distsim.simulation.maxplus.matrices import Matrices, condensed
from distsim.simulation.tasks.block_matrix import BlockTasks, Place
from distsim.simulation.tasks.program_ranks import ProgramRanks
from distsim.simulation.tasks.streams import Stream
from distsim.simulation.tasks.templates import Floats, Ints

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
