"""What the blocks of a model cost, from the IR: each as if it were a stage of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from distsim.cost.cost_model import CostModel
from distsim.ir import Function, Mesh, Role, Value
from distsim.ops.marks import HOST
from distsim.program.block import Block
from distsim.program.parts import Stage
from distsim.program.passes.backward_halves import stage_halves
from distsim.program.program import Program
from distsim.schedule import Action, Kind, Schedule
from distsim.simulation.memory.program_memory import program_memory
from distsim.simulation.tasks.block_matrix import BlockTasks, StageRanks, block_tasks
from distsim.simulation.tasks.templates import Floats
from distsim.stage_balance.cost import BlockCost, mesh_communication


def program_costs(
    program: Program,
    cost_model: CostModel,
    names: Sequence[str] | None = None,
    ranks: Mesh | None = None,
    halves: bool = False,
) -> tuple[BlockCost, ...]:
    """Return what each stage of a program costs, as blocks for :func:`auto_split`.

    Cut a function into stages of one block each to learn what its blocks cost. Times are those of the ops of
    a stage on the first ranks of its mesh, or of ``ranks`` (axes dp, tp) if given, alone, with everything
    that it receives there; bytes are those that the simulated memory grows by from one microbatch in flight
    to the next. Blocks that do the same are looked at once. ``halves``: what the halves
    of a backward take is told too. Raises what the cost model raises.
    """
    pricer = _Pricer(program, cost_model, ranks)
    sent, returned = _boundaries(program)
    memory = _memory(program)
    halved = _halves(program) if halves else None
    found: list[BlockCost] = []
    for index, stage in enumerate(program.stages):
        constants, forward, summed = pricer.forward(stage)
        backward_constants, backward, after, accumulate = pricer.backward(stage)
        reduce, update, overlap = pricer.updates(stage)
        state, saved, workspace = memory[index]
        name = f"block {index}" if names is None else names[index]
        found.append(
            BlockCost(
                name,
                forward,
                backward,
                sent[index],
                returned[index],
                state,
                saved,
                workspace,
                after=after,
                accumulate=accumulate + summed,
                shared=constants,
                shared_backward=backward_constants,
                reduce=reduce,
                update=update,
                overlap=overlap,
                weight=0.0 if halved is None else pricer.beside_constants(halved[index][1], stage),
                backward_input=None if halved is None else pricer.beside_constants(halved[index][0], stage),
            )
        )
    return tuple(found)


class ActionCosts(NamedTuple):
    """What the actions of a program's stages cost.

    ``seconds`` [stages, 3]: of F, I and W; ``send``: of the slowest message between neighbours; ``pending``
    [stages]: of the bytes that a stage saves from F, the share of what it still holds between I and W.
    """

    seconds: Floats
    send: float
    pending: Floats


def action_costs(program: Program, cost_model: CostModel) -> ActionCosts:
    """Return the costs by which a schedule for a program's stages is searched for.

    Raises what the cost model raises.
    """
    pricer = _Pricer(program, cost_model, None)
    communication = mesh_communication(program.mesh, cost_model)
    sent, returned = _boundaries(program)
    rank_of = program.schedule.rank_of
    seconds: list[list[float]] = []
    pending: list[float] = []
    send = 0.0
    for index, (stage, (half, rest)) in enumerate(zip(program.stages, _halves(program), strict=True)):
        seconds.append([pricer.total(block, stage) for block in (stage.forward, half, rest)])
        saved = {key: None for key in stage.forward.outputs if key in set(stage.backward.inputs)}
        made = {*saved, *half.outputs}
        before, after = (sum(key.type.nbytes for key in keys) for keys in (saved, made & {*rest.inputs}))
        pending.append(min(after / before, 1.0) if before else 1.0)
        if index + 1 < len(program.stages) and rank_of[index] != rank_of[index + 1]:
            send = max(send, communication(rank_of[index], rank_of[index + 1], sent[index]))
            send = max(send, communication(rank_of[index + 1], rank_of[index], returned[index]))
    return ActionCosts(np.array(seconds), send, np.array(pending))


def _halves(program: Program) -> tuple[tuple[Block, Block], ...]:
    """Return the halves of the backward pass of each stage."""
    return stage_halves([(stage.forward, stage.backward, stage.updates) for stage in program.stages])


class _Pricer:
    """Times blocks alone; equal ones on equal ranks once."""

    def __init__(self, program: Program, cost_model: CostModel, ranks: Mesh | None) -> None:
        self.cost_model, self.ranks = cost_model, ranks
        blocks = [(s, b) for s, stage in enumerate(program.stages) for b in (stage.forward, stage.backward)]
        maker = {key: s for s, block in blocks for key in block.outputs}
        readers: dict[Value, list[int]] = {}
        for s, block in blocks:
            for key in block.inputs:
                readers.setdefault(key, []).append(s)
        self.leaving = {key for key, stages in readers.items() if any(s != maker.get(key, s) for s in stages)}
        self._tasks: dict[tuple[int, Mesh], BlockTasks] = {}

    def tasks(self, function: Function, mesh: Mesh) -> BlockTasks:
        key = (id(function), mesh)
        found = self._tasks.get(key)
        if found is None:
            ranks = StageRanks(mesh, np.zeros(len(mesh.devices), np.int64))
            found = self._tasks[key] = block_tasks(function, ranks, self.cost_model, overlap=True)
        return found

    def _ranks_of(self, stage: Stage) -> Mesh:
        return stage.mesh if self.ranks is None else self.ranks

    def forward(self, stage: Stage) -> tuple[float, float, float]:
        """Return the seconds of making constants, of the rest, and of sums (the loss) over microbatches."""
        mesh = self._ranks_of(stage)
        constants = _constants(self.tasks(stage.forward.function, mesh))
        total = self._total(stage.forward.function, mesh)
        return constants, total - constants, self._accumulation(stage.forward, mesh, total)

    def backward(self, stage: Stage) -> tuple[float, float, float, float]:
        """Return the seconds of constants, of the rest, of that after the gradient left, of accumulation."""
        block = stage.backward
        if not block.outputs:
            return 0.0, 0.0, 0.0, 0.0
        mesh = self._ranks_of(stage)
        tasks = self.tasks(block.function, mesh)
        summary = tasks.summary(range(len(tasks.ports)))
        total, constants = _longest(summary.clocks), _constants(tasks)
        makers = [int(tasks.makers[i, 0]) for i, key in enumerate(block.outputs) if key in self.leaving]
        leaves = max([_longest(summary.end(task)) for task in makers if task >= 0], default=total)
        accumulation = self._accumulation(block, mesh, total)
        after = min(max(total - leaves, 0.0), total - constants)
        return constants, total - constants, after, accumulation

    def total(self, block: Block, stage: Stage) -> float:
        """Return the seconds of a block on the ranks of a stage; 0 for what nobody reads."""
        return self._total(block.function, self._ranks_of(stage)) if block.outputs else 0.0

    def beside_constants(self, block: Block, stage: Stage) -> float:
        """Return the seconds of a block but for those of making constants; 0 for what nobody reads."""
        if not block.outputs:
            return 0.0
        mesh = self._ranks_of(stage)
        return max(self._total(block.function, mesh) - _constants(self.tasks(block.function, mesh)), 0.0)

    def _total(self, function: Function, mesh: Mesh) -> float:
        tasks = self.tasks(function, mesh)
        return _longest(tasks.summary(range(len(tasks.ports))).clocks)

    def _accumulation(self, block: Block, mesh: Mesh, first: float) -> float:
        """Return how much longer a block takes when there are sums to add to."""
        return 0.0 if block.accumulating is None else max(self._total(block.accumulating, mesh) - first, 0.0)

    def updates(self, stage: Stage) -> tuple[float, float, float]:
        """Return the seconds of collectives and of compute that follow the last microbatch, and of both."""
        reduce = update = overlap = 0.0
        mesh = self._ranks_of(stage)
        for _, block in stage.updates:
            tasks = self.tasks(block.function, mesh)
            names = _names(tasks)
            computes, moves = names == "compute", (names != "compute") & (names != HOST)
            busy, moving = float(tasks.durations[computes].sum()), float(tasks.durations[moves].sum())
            update += busy
            reduce += moving
            overlap += min(max(busy + moving - self._total(block.function, mesh), 0.0), busy, moving)
        return reduce, update, overlap


def _constants(tasks: BlockTasks) -> float:
    """Return the seconds of the ops, outside of Calls, that need no input: a stage runs them once.

    Of what their launches take, and they do, the longer.
    """
    host = _names(tasks) == HOST
    fixed, launches = (tasks.call == 0) | host, np.zeros(len(tasks), np.bool_)
    for task in range(len(tasks)):
        needs = tasks.deps[tasks.dep_start[task] : tasks.dep_start[task + 1]]
        fixed[task] &= bool((needs >= 0).all() and fixed[needs].all())
        if fixed[task] and not host[task]:
            launches[needs] = True
    durations = tasks.durations
    return max(float(durations[fixed & ~host].sum()), float(durations[launches & host].sum()))


def _names(tasks: BlockTasks) -> npt.NDArray[np.str_]:
    """Return the name of the stream, of the first rank, that each task is on."""
    first = tasks.streams[tasks.stream_start[:-1]] if len(tasks) else np.zeros(0, np.int64)
    return np.array([stream.name for stream in tasks.stream_table], np.str_)[first]


def _longest(seconds: np.ndarray) -> float:
    return max(float(seconds.max(initial=0.0)), 0.0)


def _boundaries(program: Program) -> tuple[list[float], list[float]]:
    """Return, per stage, the bytes that cross to the stages after it and back, per microbatch.

    A value that a far stage reads crosses every boundary on the way.
    """
    count = len(program.stages)
    last: dict[Value, int] = {}
    first: dict[Value, int] = {}
    for index, stage in enumerate(program.stages):
        for key in (*stage.forward.inputs, *stage.backward.inputs):
            last[key] = index
            first.setdefault(key, index)
    sent, returned = np.zeros(count), np.zeros(count)
    for index, stage in enumerate(program.stages):
        for key in _per_microbatch(stage.forward):
            sent[index : last.get(key, index)] += key.type.nbytes
        for key in _per_microbatch(stage.backward):
            returned[first.get(key, index) : index] += key.type.nbytes
    return sent.tolist(), returned.tolist()


def _per_microbatch(block: Block) -> list[Value]:
    return [key for key in block.outputs if key not in block.accumulated]


def _memory(program: Program) -> list[tuple[float, float, float]]:
    """Return (state, saved, workspace) of each stage.

    The peaks of a stage that runs one microbatch, or two, forward and then backward, and again, tell what a
    microbatch in flight adds; sums of gradients are there from the first ones on.
    """
    count = len(program.stages)
    one, two = (program_memory(replace(program, schedule=_in_turn(count, size))).peaks for size in (1, 2))
    state = [0.0] * count
    for given in program.inputs:
        if given.source.role is not Role.INPUT:
            for stage in given.stages:
                state[stage] += given.key.type.nbytes
    for index, stage in enumerate(program.stages):
        sums = chain(stage.forward.accumulated, stage.backward.accumulated)
        state[index] += sum(key.type.nbytes for key in sums)
    found: list[tuple[float, float, float]] = []
    for own, low, high in zip(state, one, two, strict=True):
        saved = float(max(high - low, 0))
        found.append((own, saved, max(low - saved - own, 0.0)))
    return found


def _in_turn(stages: int, size: int) -> Schedule:
    """Return the schedule in which every stage runs ``size`` forwards, their backwards, and so on."""
    turns = [range(size * turn, size * turn + size) for turn in range(3)]
    row = [(kind, m) for turn in turns for kind in (Kind.FORWARD, Kind.BACKWARD) for m in turn]
    ranks = [[Action(kind, stage, m) for kind, m in row] for stage in range(stages)]
    return Schedule(f"{size} in turn", stages, 3 * size, ranks)
