"""The max-plus engine: a Program is simulated call by call of its table, exactly, and never written out.

Each distinct block is lowered once per *context* (the figures of its devices and how its groups lie on the
topology), summarised as a max-plus matrix, and multiplied once per call; repetitions follow in closed form.
What was made for one plan is found again for the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np

from distsim.cost.cost_model import CostModel
from distsim.ir import Function, Mesh
from distsim.program.program import Program
from distsim.program.table import EVERY, LATEST, ONCE, Table
from distsim.simulate.maxplus.block_links import BlockLinks, block_links
from distsim.simulate.maxplus.row_loop import Products, Reach, Rows, find_reach, run_rounds
from distsim.simulate.maxplus.wiring import Class, Wirer, Wiring
from distsim.simulate.tasks.block_matrix import BlockTasks, block_tasks
from distsim.simulate.tasks.program_ranks import ProgramRanks, program_ranks, used_axes
from distsim.simulate.tasks.templates import Floats, Ints

LONGEST_LAG = 256
"""A round that reads what it wrote more repetitions ago is computed in full."""


@dataclass(frozen=True, eq=False)
class ProgramModel:
    """A table on the rank classes of a mesh, as arrays: what the compiled loop runs.

    There are ``cells`` times: the registers of the wiring, then one per microbatch of what it keeps for each.
    """

    wiring: Wiring
    rows: Rows
    products: Products
    reach: Reach
    cells: int
    longest: int
    widest: int


@dataclass(frozen=True, eq=False)
class ProgramRun:
    """The times that simulating a program left. ``computed`` repetitions of rounds were."""

    program: Program
    model: ProgramModel
    times: Floats
    computed: int

    @cached_property
    def ends(self) -> Floats:
        """When each rank class has ended its last task, rank by rank. Seconds."""
        clocks = self.model.wiring.clocks.values()
        return np.array([self.times[registers].max(initial=0.0) for registers in clocks])

    @cached_property
    def classes(self) -> tuple[Class, ...]:
        """(pipeline rank, rank class) in the order of ``ends``."""
        return tuple(self.model.wiring.clocks)

    @property
    def step_time(self) -> float:
        """Seconds from the first start to the last end."""
        return float(self.times[: self.model.wiring.registers].max(initial=0.0))


def run_program(program: Program, cost_model: CostModel, overlap: bool = True) -> ProgramRun:
    """Simulate a program; raise what :func:`block_tasks` raises."""
    model = program_model(program.table(), program.mesh, cost_model, overlap)
    times = np.zeros(model.cells)
    computed = run_rounds(model.rows, model.products, model.reach, model.longest, model.widest, times)
    return ProgramRun(program, model, times, computed)


# --- models, kept for the next plan ------------------------------------------------------------------


class _Kept:
    """What one cost model's programs share, as long as their tables, flows and functions are there."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.models: WeakKeyDictionary[Table, dict[tuple[Mesh, bool], ProgramModel]] = WeakKeyDictionary()
        self.wirings: WeakValueDictionary[tuple[object, ...], Wiring] = WeakValueDictionary()
        self.tasks: WeakKeyDictionary[Function, dict[object, BlockTasks]] = WeakKeyDictionary()

    def block(
        self, function: Function, rank: int, ranks: ProgramRanks, cost_model: CostModel, overlap: bool
    ) -> BlockTasks:
        known = self.tasks.setdefault(function, {})
        key = (overlap, ranks.key(rank, used_axes(function)))
        found = known.get(key)
        if found is None:
            found = known[key] = block_tasks(function, ranks.slices[rank], cost_model, overlap)
        return found


_kept: WeakKeyDictionary[CostModel, _Kept] = WeakKeyDictionary()


def program_model(table: Table, mesh: Mesh, cost_model: CostModel, overlap: bool) -> ProgramModel:
    """Return the arrays of a table on a mesh, made once."""
    version = cost_model.topology.version
    kept = _kept.get(cost_model)
    if kept is None or kept.version != version:
        kept = _kept[cost_model] = _Kept(version)
    known = kept.models.get(table)
    if known is None:
        known = kept.models[table] = {}
    found = known.get((mesh, overlap))
    if found is None:
        flow = block_links(table)
        wiring = _wiring(flow, flow.last_makers(table), mesh, cost_model, overlap)
        found = known[mesh, overlap] = _model(table, wiring)
    return found


def _wiring(
    flow: BlockLinks, last: tuple[int, ...], mesh: Mesh, cost_model: CostModel, overlap: bool
) -> Wiring:
    kept = _kept[cost_model]
    key = (flow, last, mesh, overlap)
    found = kept.wirings.get(key)
    if found is None:
        ranks = program_ranks(mesh, flow.communication, cost_model)
        tasks = [
            None
            if block.function is None
            else kept.block(block.function, block.rank, ranks, cost_model, overlap)
            for block in flow.blocks
        ]
        found = kept.wirings[key] = Wirer(flow, last, ranks, tasks, cost_model, overlap).wiring()
    return found


def _model(table: Table, wiring: Wiring) -> ProgramModel:
    microbatch = np.zeros((len(table.block), 3), np.int64)
    microbatch[:, :2] = table.microbatch
    rows = Rows(wiring.flow.numbers(table), microbatch, table.start, table.repeats, table.advance)
    products = _products(table, wiring)
    cells = wiring.registers + wiring.batched * table.microbatches
    return ProgramModel(
        wiring=wiring,
        rows=rows,
        products=products,
        reach=_reach(rows, products, table.microbatches, cells),
        cells=cells,
        longest=table.order.schedule.num_stages + 1,
        widest=int(np.diff(products.in_start).max(initial=1)),
    )


def _products(table: Table, wiring: Wiring) -> Products:
    """Return the products with their cells at their places for these microbatches."""
    count, sides = table.microbatches, (wiring.ins, wiring.outs)
    bases: list[Ints] = []
    for side in sides:
        batched = wiring.registers + side.number * count
        base = np.where(side.which == ONCE, side.number, batched)
        for place, key in side.latest:
            base[place] += table.latest[key]
        bases.append(base)
    whiches = [np.where(side.which == LATEST, ONCE, side.which) for side in sides]
    start, matrix, (ins, outs) = wiring.ins.start, wiring.matrix, bases
    every = whiches[0] == EVERY
    heights = np.diff(wiring.outs.start)
    if every.any():  # what is read of every microbatch is that many entries
        often = np.where(every, count, 1)
        widths = np.diff(start)
        sizes = widths * heights
        product = np.repeat(np.arange(len(sizes)), sizes)
        element = np.arange(len(product)) - (np.cumsum(sizes) - sizes)[product]
        matrix = np.repeat(matrix, often[start[product] + element % widths[product]])
        first = np.repeat(np.cumsum(often) - often, often)
        ins = np.repeat(ins, often) + np.where(np.repeat(every, often), np.arange(len(first)) - first, 0)
        whiches[0] = np.repeat(np.where(every, ONCE, whiches[0]), often)
        start = np.concatenate([[0], np.cumsum(often)])[start].astype(np.int64)
    return Products(
        first=wiring.first,
        in_start=start,
        in_base=ins,
        in_which=whiches[0],
        out_start=wiring.outs.start,
        out_base=outs,
        out_which=whiches[1],
        matrix_start=np.concatenate([[0], np.cumsum(np.diff(start) * heights)]).astype(np.int64),
        matrix=matrix,
    )


def _reach(rows: Rows, products: Products, count: int, cells: int) -> Reach:
    rounds = len(rows.repeats)
    most = int(np.diff(products.in_start[products.first])[rows.block].sum())
    lag, before = np.zeros(rounds, np.int64), np.zeros((most, 2), np.int64)
    found = find_reach(rows, products, count, cells, LONGEST_LAG, lag, before)
    before = before[:found]
    start = np.searchsorted(before[:, 0], np.arange(rounds + 1)).astype(np.int64)
    return Reach(lag, start, np.ascontiguousarray(before[:, 1]))
