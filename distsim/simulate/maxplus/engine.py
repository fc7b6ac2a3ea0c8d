"""The max-plus engine: a Program is simulated block by block, exactly, and never written out.

Each distinct block is lowered once per *context* (the figures of its devices and how its groups lie on the
topology), summarised as a max-plus matrix, and multiplied once per call; periodic repetitions follow in
closed form. What was made for one plan is found again for the next.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np

from distsim.cost.cost_model import CostModel
from distsim.ir import Attributes, Function, Value
from distsim.ir.type import as_tensor
from distsim.ops import Signature
from distsim.program.block import Block
from distsim.program.program import Program
from distsim.schedule import Rounds, Schedule
from distsim.simulate.maxplus.registers import Order, Wiring
from distsim.simulate.maxplus.schedule_loop import run_rounds
from distsim.simulate.maxplus.tail import JOIN, Item, Tail, TailTables, run_tail, tail_tables
from distsim.simulate.maxplus.wiring import Transfer, Wirer
from distsim.simulate.tasks.block_matrix import BlockTasks, block_tasks
from distsim.simulate.tasks.program_ranks import ProgramRanks, program_ranks, used_axes
from distsim.simulate.tasks.templates import Floats, Ints

MOST_KEPT = 4096
"""Programs, and blocks, that are kept for the next plan; beyond it the caches start anew."""


@dataclass(frozen=True, eq=False)
class ProgramModel:
    """A program as arrays for any schedule and number of microbatches: what the kernels run.

    ``tasks`` are those of each block (2 * stage + phase) and variant, ``updates`` those of each stage.
    ``clocks`` lists, per stage and rank class, the registers that tell when it is done; ``ports`` the ports
    of each block and variant that may delay it; ``results`` the (output, rank class) of each block that have
    a cell, after an inner call and after the last one.
    """

    ranks: ProgramRanks
    tasks: Sequence[tuple[BlockTasks, BlockTasks]]
    wiring: Wiring
    tail: TailTables
    items: tuple[Item, ...]
    results: Sequence[tuple[Ints, Ints]]
    transfers: tuple[Transfer, ...]
    classes: tuple[tuple[int, int], ...]
    clocks: tuple[Ints, ...]
    num_batched: int
    ports: Sequence[tuple[tuple[int, ...], ...]]
    overlap: bool


@dataclass(frozen=True, eq=False)
class ProgramRun:
    """The times that simulating a program left: registers, then a time per microbatch of each cell."""

    program: Program
    model: ProgramModel
    order: Order
    times: Floats
    last: Ints
    join_seconds: Floats
    begin: Floats
    computed: int

    def block(self, number: int) -> Block:
        """Return block 2 * stage + phase."""
        stage = self.program.stages[number // 2]
        return stage.backward if number % 2 else stage.forward

    @cached_property
    def ends(self) -> Floats:
        """When each rank class has ended its last task, in the order of ``model.classes``. Seconds."""
        return np.array([self.times[registers].max(initial=0.0) for registers in self.model.clocks])

    @property
    def step_time(self) -> float:
        """Seconds from the first start to the last end."""
        return float(self.times[: self.model.wiring.registers].max(initial=0.0))


def run_program(program: Program, cost_model: CostModel, overlap: bool = True) -> ProgramRun:
    """Simulate a program; raise what :func:`block_tasks` and ``Schedule.rounds`` raise."""
    model = program_model(program, cost_model, overlap)
    order, last = order_of(program.schedule)
    count = order.num_microbatches
    registers = model.wiring.registers
    times = np.full(registers + model.num_batched * count, np.nan)
    times[:registers] = 0.0
    total = np.full(len(model.tasks), count, np.int64)
    computed = run_rounds(order, model.wiring, total, times)
    begin = np.zeros(len(model.tail.kind))
    join_seconds = _join_seconds(program, model, cost_model)
    run_tail(model.tail, times, registers, count, last, join_seconds, begin)
    return ProgramRun(program, model, order, times, last, join_seconds, begin, computed)


# --- models, kept for the next plan ------------------------------------------------------------------


class _Kept:
    """What one cost model's programs share."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.models: dict[Hashable, tuple[ProgramModel, object]] = {}
        self.tasks: dict[Hashable, BlockTasks] = {}

    def block(
        self, function: Function, stage: int, ranks: ProgramRanks, cost_model: CostModel, overlap: bool
    ) -> BlockTasks:
        key = (id(function), overlap, ranks.key(stage, used_axes(function)))
        found = self.tasks.get(key)
        if found is None:
            if len(self.tasks) > 16 * MOST_KEPT:
                self.tasks.clear()
            found = self.tasks[key] = block_tasks(function, ranks.stages[stage], cost_model, overlap)
        return found


_kept: WeakKeyDictionary[CostModel, _Kept] = WeakKeyDictionary()


def program_model(program: Program, cost_model: CostModel, overlap: bool) -> ProgramModel:
    """Return the arrays of a program, made once for equal blocks on ranks that take equally long."""
    version = cost_model.topology.version
    kept = _kept.get(cost_model)
    if kept is None or kept.version != version:
        kept = _kept[cost_model] = _Kept(version)
    blocks = tuple(
        [
            block
            for stage in program.stages
            for block in (stage.forward, stage.backward, *[update for _, update in stage.updates])
        ]
    )
    rounds = tuple([tuple([number for number, _ in stage.updates]) for stage in program.stages])
    one = program.schedule.num_microbatches == 1
    key = (program.mesh, overlap, one, rounds, id(program.inputs), id(program.outputs), *map(id, blocks))
    found = kept.models.get(key)
    if found is None:
        if len(kept.models) > MOST_KEPT:
            kept.models.clear()
        # What is named by its id is kept along, so that the id stays its own.
        named = (blocks, program.inputs, program.outputs)
        found = kept.models[key] = (_model(program, cost_model, overlap, kept), named)
    return found[0]


def _model(program: Program, cost_model: CostModel, overlap: bool, kept: _Kept) -> ProgramModel:
    ranks = program_ranks(program, cost_model)

    def tasks(function: Function, stage: int) -> BlockTasks:
        return kept.block(function, stage, ranks, cost_model, overlap)

    variants: list[tuple[BlockTasks, BlockTasks]] = []
    for index, stage in enumerate(program.stages):
        for block in (stage.forward, stage.backward):
            first = tasks(block.function, index)
            more = first if block.accumulating is None else tasks(block.accumulating, index)
            variants.append((first, more))
    updates = [
        [(number, tasks(block.function, index)) for number, block in stage.updates]
        for index, stage in enumerate(program.stages)
    ]
    wirer = Wirer(program, ranks.stages, variants, cost_model, overlap)
    tail = Tail(wirer, updates)
    wiring, transfers = wirer.arrays()
    classes = tuple((s, c) for s, stage in enumerate(ranks.stages) for c in range(len(stage.members)))
    clocks = tuple(np.array(wirer.clocks_of(s, c), np.int64) for s, c in classes)
    tables = tail_tables(tail)
    ports = [tuple(tuple(sorted(own)) for own in both) for both in wirer.ports]
    batched = len(wirer.cells.batched)
    return ProgramModel(
        ranks,
        variants,
        wiring,
        tables,
        tuple(tail.items),
        wirer.results(),
        transfers,
        classes,
        clocks,
        batched,
        ports,
        overlap,
    )


def _join_seconds(program: Program, model: ProgramModel, cost_model: CostModel) -> Floats:
    """Return the seconds of each item of the tail that is a join of the parts of a microbatch."""
    seconds = np.zeros(len(model.items))
    for number, item in enumerate(model.items):
        if item.kind == JOIN and item.key is not None:
            device = model.ranks.stages[item.stage].members[item.rank_class][0]
            seconds[number] = cost_model.seconds(join_signature(item.key, program), (device,))
    return seconds


def join_signature(key: Value, program: Program) -> Signature:
    """Return the signature of the ``Concat`` that puts a value together over the microbatches."""
    part, count = as_tensor(key.type, key.name), program.schedule.num_microbatches
    whole = part.with_shape((part.shape[0] * count, *part.shape[1:]))
    return Signature("Concat", Attributes({"axis": 0}), (part,) * count, (whole,))


_orders: WeakKeyDictionary[Rounds, tuple[Order, Ints]] = WeakKeyDictionary()


def order_of(schedule: Schedule) -> tuple[Order, Ints]:
    """Return the rounds of a schedule as arrays, and the microbatch of the last call of each block."""
    rounds = schedule.rounds()
    found = _orders.get(rounds)
    if found is None:
        order = Order(
            schedule.num_microbatches,
            rounds.start,
            rounds.repeats,
            rounds.stage,
            rounds.phase,
            rounds.microbatch,
            rounds.ends_step,
        )
        last = np.zeros(2 * schedule.num_stages, np.int64)
        for r in range(len(rounds.repeats)):
            part = slice(rounds.start[r], rounds.start[r + 1])
            last[2 * rounds.stage[part] + rounds.phase[part]] = (
                rounds.microbatch[part] + rounds.repeats[r] - 1
            )
        found = _orders[rounds] = (order, last)
    return found
