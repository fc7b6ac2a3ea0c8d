"""The max-plus engine: a Program is simulated call by call of its table, exactly, and never written out.

Each distinct block is lowered once per *context* (the figures of its devices and how its groups lie on the
topology), summarised as a max-plus matrix, and multiplied once per call; repetitions follow in closed form.
What was made for one plan is found again for the next.

The tasks of a block of other sizes: those of the block that it is like, each as long as its op takes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np

from distsim.cache import uncollected
from distsim.cost.cost_model import CostModel
from distsim.ir import Function, Mesh, Op
from distsim.program.program import Program
from distsim.program.table import Table
from distsim.resizing import Likeness, likeness_of
from distsim.simulation.maxplus.block_links import BlockLinks, block_links
from distsim.simulation.maxplus.call_arrays import CallOrder, call_arrays, call_order
from distsim.simulation.maxplus.matrices import Class, Wiring
from distsim.simulation.maxplus.row_loop import CallArrays, LoopState, Reach, find_reach, run_rounds
from distsim.simulation.maxplus.wiring import Wirer
from distsim.simulation.tasks.block_matrix import BlockTasks, StageRanks, block_tasks
from distsim.simulation.tasks.lower import Lowering
from distsim.simulation.tasks.program_ranks import ProgramRanks, program_ranks, used_axes
from distsim.simulation.tasks.templates import Floats

FEWEST_REPETITIONS = 16
"""A round of fewer is computed in full: it takes no longer than to prove that it need not be."""

LONGEST_LAG = 256
"""A round that reads what it wrote more repetitions ago is computed in full."""


@dataclass(frozen=True, eq=False)
class ProgramModel:
    """A table on the rank classes of a mesh, as arrays: what the compiled loop runs.

    There are ``cells`` times: ``registers``, then one per microbatch of what the wiring keeps for each.
    """

    wiring: Wiring
    order: CallOrder
    calls: CallArrays
    reach: Reach | None
    registers: int
    cells: int

    def state(self) -> LoopState:
        """Return the working memory of a run."""
        ins, kept, logged = self.sizes
        return LoopState(np.zeros(self.cells), np.empty(ins), np.empty((kept + 1, logged)), np.empty(kept))

    @cached_property
    def sizes(self) -> tuple[int, int, int]:
        """The most ins of a call, and of the rounds that may be jumped over repetitions and outs."""
        calls, reach = self.calls, self.reach
        widest = int(np.diff(calls.in_start).max(initial=1))
        if reach is None:
            return widest, 1, 0
        periods = reach.periods
        kept = 2 * periods + np.maximum(periods, reach.lag) + 1
        logged = np.diff(calls.out_start[calls.start])[periods > 0]
        return (
            widest,
            int(kept[periods > 0].max(initial=1)),
            int(logged.max(initial=0)),
        )


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
        return self._ends(self.times, np.zeros(len(self.classes)))

    def ends_after(self, begins: Floats) -> Floats:
        """Return when each rank class ends, on all its streams, if each begins then, on all of its own."""
        model, state = self.model, self.model.state()
        registers, of = model.wiring.streams
        np.maximum.at(state.times, registers, begins[of])
        run_rounds(model.calls, model.reach, state)
        return self._ends(state.times, begins)

    def _ends(self, times: Floats, begins: Floats) -> Floats:
        registers, of = self.model.wiring.streams
        ends = begins.copy()
        np.maximum.at(ends, of, times[registers])
        return ends

    @cached_property
    def classes(self) -> tuple[Class, ...]:
        """(pipeline rank, rank class) in the order of ``ends``."""
        return tuple(self.model.wiring.clocks)

    @property
    def step_time(self) -> float:
        """Seconds from the first start to the last end."""
        return float(self.times[: self.model.wiring.matrices.clocks].max(initial=0.0))


def run_program(program: Program, cost_model: CostModel, overlap: bool = True) -> ProgramRun:
    """Simulate a program; raise what :func:`block_tasks` raises."""
    model = program_model(program.table(), program.mesh, cost_model, overlap)
    state = model.state()
    computed = run_rounds(model.calls, model.reach, state)
    return ProgramRun(program, model, state.times, computed)


# --- models, kept for the next plan ------------------------------------------------------------------


class _Kept:
    """What one cost model's programs share, as long as their tables, flows and functions are there."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.models: WeakKeyDictionary[Table, dict[tuple[Mesh, bool], ProgramModel]] = WeakKeyDictionary()
        self.wirings: WeakValueDictionary[tuple[object, ...], Wiring] = WeakValueDictionary()
        self.wired: WeakKeyDictionary[BlockLinks, dict[object, Wirer]] = WeakKeyDictionary()
        self.tasks: WeakKeyDictionary[Function, dict[object, BlockTasks]] = WeakKeyDictionary()

    def block(
        self, function: Function, rank: int, ranks: ProgramRanks, cost_model: CostModel, overlap: bool
    ) -> BlockTasks:
        known = self.tasks.setdefault(function, {})
        key = (overlap, ranks.key(rank, used_axes(function)))
        found = known.get(key)
        if found is None:
            likeness, part = likeness_of(function), ranks.slices[rank]
            if likeness is not None and used_axes(likeness.like) == used_axes(function):
                like = self.block(likeness.like, rank, ranks, cost_model, overlap)
                found = resized_tasks(like, function, part, cost_model, overlap)
            found = found or block_tasks(function, part, cost_model, overlap)
            known[key] = found
        return found


_kept: WeakKeyDictionary[CostModel, _Kept] = WeakKeyDictionary()


def tasks_of(function: Function, rank: int, ranks: ProgramRanks, cost_model: CostModel) -> BlockTasks:
    """Return the tasks of the function of a block on a pipeline rank, made once."""
    return _kept_for(cost_model).block(function, rank, ranks, cost_model, True)


def _kept_for(cost_model: CostModel) -> _Kept:
    """Return what is kept for a cost model, as its topology is now."""
    version = cost_model.topology.version
    kept = _kept.get(cost_model)
    if kept is None or kept.version != version:
        kept = _kept[cost_model] = _Kept(version)
    return kept


def program_model(table: Table, mesh: Mesh, cost_model: CostModel, overlap: bool) -> ProgramModel:
    """Return the arrays of a table on a mesh, made once."""
    kept = _kept_for(cost_model)
    known = kept.models.get(table)
    if known is None:
        known = kept.models[table] = {}
    found = known.get((mesh, overlap))
    if found is None:
        found = known[mesh, overlap] = _made(table, mesh, cost_model, overlap)
    return found


@uncollected()
def _made(table: Table, mesh: Mesh, cost_model: CostModel, overlap: bool) -> ProgramModel:
    """Return the arrays of a table on a mesh."""
    flow = block_links(table)
    return _model(table, _wiring(flow, flow.last_makers(table), mesh, cost_model, overlap))


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
        wired = kept.wired.setdefault(flow.like or flow, {})
        # Tables that differ in sizes alone are wired as the first of them is.
        alike = (last, ranks, overlap)
        found = wired[alike].resized(flow, tasks) if alike in wired else None
        if found is None:
            wirer = Wirer(flow, last, ranks, tasks, cost_model, overlap)
            found = wirer.wiring()
            wired[alike] = wirer.kept(found)
        kept.wirings[key] = found
    return found


def _model(table: Table, wiring: Wiring) -> ProgramModel:
    matrices, order = wiring.condensed, call_order(table, wiring)
    calls = call_arrays(table, order, matrices)
    cells = matrices.registers + wiring.batched * table.microbatches
    return ProgramModel(
        wiring=wiring,
        order=order,
        calls=calls,
        reach=_reach(calls, table, matrices.registers, cells),
        registers=matrices.registers,
        cells=cells,
    )


def _reach(calls: CallArrays, table: Table, registers: int, cells: int) -> Reach | None:
    rounds = len(table.repeats)
    periods = np.minimum(table.order.schedule.num_stages + 1, table.repeats // 4)
    periods[table.repeats < FEWEST_REPETITIONS] = 0
    none = np.zeros(0, np.int64)
    reach = Reach(np.zeros(rounds, np.int64), periods, table.advance, np.zeros(rounds + 1, np.int64), none)
    if not periods.any():
        return None
    before = np.zeros((len(calls.in_cell), 2), np.int64)
    written = np.full(cells, -1, np.int64)
    before = before[: find_reach(calls, reach, registers, table.microbatches, written, before)]
    periods[reach.lag > LONGEST_LAG] = 0
    start = np.searchsorted(before[:, 0], np.arange(rounds + 1)).astype(np.int64)
    return reach._replace(before_start=start, before=np.ascontiguousarray(before[:, 1]))


def resized_tasks(
    tasks: BlockTasks, function: Function, ranks: StageRanks, cost_model: CostModel, overlap: bool
) -> BlockTasks | None:
    """Return the tasks of a function that differs in sizes alone from that of ``tasks``, on the same ranks.

    None where an op is more than one task a call, as on several rank classes or with launches: which they
    are may depend on its size.
    """
    likeness, lowering = likeness_of(function), Lowering(ranks, cost_model, overlap)
    if likeness is None or lowering.issues or len(ranks.members) > 1:
        return None
    for stream in tasks.stream_table:
        lowering.stream(stream.rank_class, stream.name)
    changed = _changed(likeness, function)
    first = np.zeros(len(tasks.op_table), np.int64)
    first[tasks.op[::-1]] = np.arange(len(tasks))[::-1]
    seconds = tasks.durations[first]
    ops, runs = list(tasks.op_table), dict[int, int]()
    for number, op in enumerate(ops):
        if op in changed:
            owner, ops[number] = changed[op]
            run = _run(lowering, owner, ops[number])
            if run is None:
                return None
            runs[number] = run
    ways, begins, streams = list(lowering.runs), tasks.stream_start.tolist(), tasks.streams.tolist()
    for number, run in runs.items():
        seconds[number], own = ways[run]
        task = int(first[number])
        if own != tuple(streams[begins[task] : begins[task + 1]]):
            return None
    calls = [None if op is None or op not in changed else changed[op][1] for op in tasks.call_op]
    call_op = tuple([own or op for own, op in zip(calls, tasks.call_op, strict=True)])
    found = replace(
        tasks, durations=seconds[tasks.op], op_table=tuple(ops), call_op=call_op, _summaries={}, _products={}
    )
    found.__dict__["order"] = tasks.order  # of what they take it knows nothing
    return found


def _changed(likeness: Likeness, function: Function) -> dict[Op, tuple[Function, Op]]:
    """Return the ops of a function and its callees that are others, each with what it is, and where."""
    found = {op: (function, own) for op, own in likeness.ops.items()}
    for callee in {own.callee for own in likeness.ops.values() if own.is_call}:
        inner = likeness_of(callee)
        if inner is not None:
            found |= _changed(inner, callee)
    return found


def _run(lowering: Lowering, function: Function, op: Op) -> int | None:
    """Return the run of the one task of an op; None if it has not one."""
    kind = lowering.kind(function, op)
    if kind is None:
        exchanges = lowering.exchanges(op)
        return None if len(exchanges) != 1 or exchanges[0].issues or exchanges[0].slows else exchanges[0].run
    return None if len(kind) != 1 or kind[0][2] else kind[0][1]
