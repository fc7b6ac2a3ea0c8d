"""The last part of a step: updates, what they send, and outputs that are put together over microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from distsim.compile import compiled
from distsim.errors import SimulationError
from distsim.ir import Value
from distsim.program.block import Block
from distsim.simulate.maxplus.kernels import evaluate
from distsim.simulate.maxplus.wiring import NOTHING, Transfer, Wirer
from distsim.simulate.tasks.block_matrix import START, BlockTasks
from distsim.simulate.tasks.templates import Ints

UPDATE, SEND, JOIN = 0, 1, 2

Pairs = list[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class Item:
    """One thing of the tail: a call of an update block, a send, or a join (``Concat``) over microbatches.

    ``streams`` are registers; what it reads and writes is in the tables.
    """

    kind: int
    stage: int
    streams: tuple[int, ...]
    tasks: BlockTasks | None = None
    transfer: Transfer | None = None
    key: Value | None = None
    rank_class: int = 0
    names: tuple[str, ...] = ()


class TailTables(NamedTuple):
    """The items as arrays; templates one after the other. Units: seconds.

    An item reads the cells ``operand_cell``: of a cell per microbatch that of the last call of the block
    ``operand_block``. It writes the end of its task ``result_task`` to ``result_register``.
    """

    kind: Any
    template: Any
    stream_start: Any
    streams: Any
    operand_start: Any
    operand_cell: Any
    operand_block: Any
    result_start: Any
    result_task: Any
    result_register: Any
    seconds: Any
    task_start: Any
    durations: Any
    dep_start: Any
    deps: Any
    use_start: Any
    uses: Any

    def results(self, item: int) -> list[tuple[int, int]]:
        """Return (task, register) of what an item makes."""
        own = slice(self.result_start[item], self.result_start[item + 1])
        return list(zip(self.result_task[own].tolist(), self.result_register[own].tolist(), strict=True))

    def operands(self, item: int) -> list[tuple[int, int]]:
        """Return (cell, block) of what an item reads; a cell of -1 is there from the start."""
        own = slice(self.operand_start[item], self.operand_start[item + 1])
        return list(zip(self.operand_cell[own].tolist(), self.operand_block[own].tolist(), strict=True))


@dataclass(eq=False)
class Tail:
    """Collects the items in the order in which the program, written out, has them."""

    wirer: Wirer
    updates: Sequence[Sequence[tuple[int, BlockTasks]]]
    """Per stage: (round, tasks of the update block)."""
    items: list[Item] = field(default_factory=list[Item])
    operands: list[Pairs] = field(default_factory=list[Pairs])
    results: list[Pairs] = field(default_factory=list[Pairs])
    _there: dict[tuple[int, Value, int], int] = field(default_factory=dict[tuple[int, Value, int], int])
    _made: dict[Value, int] = field(default_factory=dict[Value, int])
    _given: dict[Value, tuple[int, ...]] = field(default_factory=dict[Value, tuple[int, ...]])
    _returned: dict[Value, int] = field(default_factory=dict[Value, int])
    """Of what an update returns as it came: the block that made it."""

    def __post_init__(self) -> None:
        program = self.wirer.program
        self._given.update((given.key, given.stages) for given in program.inputs)
        for number in sorted({number for stage in program.stages for number, _ in stage.updates}):
            for index, stage in enumerate(program.stages):
                for (own, block), (_, tasks) in zip(stage.updates, self.updates[index], strict=True):
                    if own == number and block.outputs:
                        self._update(index, block, tasks)
        for output in program.outputs:
            if output.microbatched and program.schedule.num_microbatches > 1:
                self._join(output.stage, output.key)
            else:
                self._fetch(output.key, output.stage)
        for output in program.outputs:
            for stage in output.copies:
                self._fetch(output.key, stage)

    def _origin(self, key: Value, stage: int) -> int:
        """Return the stage from which a value comes that is read on ``stage``."""
        if key in self._made:
            return self._made[key]
        made = self.wirer.sums.get(key) or self.wirer.made.get(key)
        if made is not None:
            return made[0] // 2
        given = self._given.get(key, (stage,))
        return stage if stage in given else given[0]

    def _fetch(self, key: Value, stage: int) -> None:
        """Send a value to a stage unless it is there."""
        wirer = self.wirer
        origin = self._origin(key, stage)
        if origin == stage or (stage, key, 0) in self._there:
            return
        if key in wirer.made and stage in wirer.readers.get(key, ()):
            return  # it came with its microbatch
        for transfer in wirer.transfer(key, origin, stage, wirer.cells.register, self._cell):
            operand = (transfer.source, self._block(key))
            streams = tuple(dict.fromkeys(transfer.channels))
            self._add(Item(SEND, origin, streams, None, transfer), [operand], [(0, transfer.target)])
            self._there[stage, key, transfer.classes[1]] = transfer.target

    def _cell(self, stage: int, key: Value, rank_class: int) -> int:
        found = self._there.get((stage, key, rank_class))
        if found is not None:
            return found
        if key in self._made:
            return NOTHING  # made from nothing, or returned as it came
        maker = self.wirer.sums.get(key)
        if maker is None or maker[0] // 2 != stage:
            return self.wirer.source(stage, key, rank_class)
        if self.wirer.tasks[maker[0]][1].makers[maker[1], rank_class] < 0:
            return self.wirer.source(stage, key, rank_class)
        cell = self.wirer.cells.register("sum", stage, key, rank_class)
        self.wirer.closing[maker[0]][cell] = (maker[1], rank_class)
        return cell

    def _block(self, key: Value) -> int:
        maker = self.wirer.made.get(key)
        return self._returned.get(key, -1) if maker is None else maker[0]

    def _update(self, stage: int, block: Block, tasks: BlockTasks) -> None:
        inputs, outputs = block.inputs, block.outputs
        ports: list[list[int]] = tasks.ports.tolist()
        for key in inputs:
            self._fetch(key, stage)
        cells = self.wirer.cells
        streams = tuple(cells.register("stream", stage, s.rank_class, s.name) for s in tasks.stream_table)
        operands = [(self._cell(stage, inputs[place], c), self._block(inputs[place])) for place, c in ports]
        results: list[tuple[int, int]] = []
        makers: list[list[int]] = tasks.makers.tolist()
        for key, made in zip(outputs, makers, strict=True):
            self._made[key] = stage
            for c, task in enumerate(made):
                if task < START:
                    self._returned[key] = self._block(inputs[-2 - task])
                    self._there[stage, key, c] = self._cell(stage, inputs[-2 - task], c)
                elif task >= 0:
                    cell = self._there[stage, key, c] = cells.register("made", stage, key, c)
                    results.append((task, cell))
        self._add(Item(UPDATE, stage, streams, tasks, names=block.names), operands, results)

    def _join(self, stage: int, key: Value) -> None:
        wirer, origin = self.wirer, self._origin(key, stage)
        if origin != stage and stage not in wirer.readers.get(key, ()):
            raise SimulationError(
                f"{wirer.program.name}: output {key.name} is put together on stage {stage}, which does not "
                f"hold its microbatches; put it together on stage {origin}"
            )
        for c in range(len(wirer.ranks[stage].members)):
            stream = wirer.cells.register("stream", stage, c, "compute" if wirer.overlap else "all")
            operand = (wirer.source(stage, key, c), -1)
            self._add(Item(JOIN, stage, (stream,), key=key, rank_class=c), [operand], [])

    def _add(self, item: Item, operands: Pairs, results: Pairs) -> None:
        self.items.append(item)
        self.operands.append(operands)
        self.results.append(results)


def tail_tables(tail: Tail) -> TailTables:
    """Return the items as arrays; the seconds of a join are those of its run."""
    items, cells = tail.items, tail.wirer.cells
    distinct: dict[int, int] = {}
    templates: list[BlockTasks] = []
    for item in items:
        if item.tasks is not None and id(item.tasks) not in distinct:
            distinct[id(item.tasks)] = len(templates)
            templates.append(item.tasks)

    def ints(numbers: Sequence[int]) -> Ints:
        return np.array(numbers, np.int64).reshape(len(numbers))

    def lengths(groups: Sequence[Sequence[object]]) -> Ints:
        return np.cumsum([0, *map(len, groups)]).astype(np.int64)

    def join(arrays: Sequence[Any]) -> Any:
        return np.concatenate(arrays) if arrays else np.zeros(0)

    dep_base = np.cumsum([0, *(len(t.deps) for t in templates)])
    use_base = np.cumsum([0, *(len(t.streams) for t in templates)])
    return TailTables(
        ints([item.kind for item in items]),
        ints([-1 if item.tasks is None else distinct[id(item.tasks)] for item in items]),
        lengths([item.streams for item in items]),
        ints([s for item in items for s in item.streams]),
        lengths(tail.operands),
        cells.final([cell for own in tail.operands for cell, _ in own]),
        ints([block for own in tail.operands for _, block in own]),
        lengths(tail.results),
        ints([task for own in tail.results for task, _ in own]),
        ints([register for own in tail.results for _, register in own]),
        np.array([0.0 if i.transfer is None else i.transfer.seconds for i in items]).reshape(len(items)),
        lengths([t.durations for t in templates]),  # pyright: ignore[reportArgumentType]
        join([t.durations for t in templates]).astype(np.float64),
        join(
            [*(t.dep_start[:-1] + b for t, b in zip(templates, dep_base, strict=False)), dep_base[-1:]]
        ).astype(np.int64),
        join([t.deps for t in templates]).astype(np.int64),
        join(
            [*(t.stream_start[:-1] + b for t, b in zip(templates, use_base, strict=False)), use_base[-1:]]
        ).astype(np.int64),
        join([t.streams for t in templates]).astype(np.int64),
    )


@compiled
def run_tail(
    tables: Any, times: Any, registers: int, num_microbatches: int, last: Any, join_seconds: Any, begin: Any
) -> None:
    """Run the items on the times that the rounds left; ``begin`` is filled with the start of sends and joins.

    ``last`` is the microbatch of the last call of each block.
    """
    for n in range(len(tables.kind)):
        base = tables.operand_start[n]
        there = np.zeros(tables.operand_start[n + 1] - base)
        for i in range(len(there)):
            cell = tables.operand_cell[base + i]
            if cell >= registers:
                at = registers + (cell - registers) * num_microbatches
                if tables.kind[n] == JOIN:
                    there[i] = times[at : at + num_microbatches].max()
                else:
                    there[i] = times[at + last[tables.operand_block[base + i]]]
            elif cell >= 0:
                there[i] = times[cell]
        first = tables.stream_start[n]
        clocks = times[tables.streams[first : tables.stream_start[n + 1]]]
        results = range(tables.result_start[n], tables.result_start[n + 1])
        if tables.kind[n] == UPDATE:
            low, high = tables.task_start[tables.template[n]], tables.task_start[tables.template[n] + 1]
            end = np.empty(high - low)
            evaluate(
                tables.durations[low:high],
                tables.dep_start[low : high + 1],
                tables.deps,
                tables.use_start[low : high + 1],
                tables.uses,
                there,
                clocks,
                np.empty(high - low),
                end,
            )
            for i in results:
                times[tables.result_register[i]] = end[tables.result_task[i]]
        else:
            begin[n] = max(clocks.max(), there.max())
            clocks[:] = begin[n] + (tables.seconds[n] if tables.kind[n] == SEND else join_seconds[n])
            for i in results:
                times[tables.result_register[i]] = clocks[0]
        for i in range(len(clocks)):
            times[tables.streams[first + i]] = clocks[i]
