"""The timeline of a Program: blocks expanded, one call at a time, from when they were entered.

Every call of a table, with what it waited for: what details are expanded from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from distsim.compile import compiled
from distsim.program.table import BoundBlock, Table
from distsim.simulation.maxplus.call_arrays import call_arrays
from distsim.simulation.maxplus.engine import ProgramModel, ProgramRun
from distsim.simulation.maxplus.kernels import evaluate
from distsim.simulation.maxplus.matrices import Product, starts
from distsim.simulation.maxplus.row_loop import CallArrays, run_rounds
from distsim.simulation.tasks.block_matrix import BlockTasks
from distsim.simulation.tasks.rank_classes import RankClasses
from distsim.simulation.tasks.streams import Stream
from distsim.simulation.tasks.templates import Floats, Ints, tasks_of_uses
from distsim.simulation.tasks.timeline import OpRuns, Piece, names_of, op_runs


class ProgramTimeline:
    """What a run of the max-plus engine found; see :class:`Timeline`."""

    def __init__(self, run: ProgramRun) -> None:
        self.run, self.program, self.model = run, run.program, run.model
        self.wiring = run.model.wiring
        self.products = self.wiring.products
        self._names: dict[int, list[str]] = {}

    @property
    def name(self) -> str:
        """The name of the program."""
        return self.program.name

    @cached_property
    def classes(self) -> RankClasses:
        """The rank classes, rank by rank."""
        members = tuple(group for own in self.wiring.ranks.slices for group in own.members)
        return RankClasses(members, lockstep=True)

    @cached_property
    def table(self) -> Table:
        """The table of calls."""
        return self.program.table()

    @property
    def step_time(self) -> float:
        """Seconds from the first start to the last end."""
        return self.run.step_time

    @property
    def ends(self) -> Floats:
        """When each rank class ends its last task."""
        return self.run.ends

    def ends_after(self, begins: Floats) -> Floats:
        """Return when classes end that begin then."""
        return self.run.ends_after(begins)

    @property
    def last_microbatch_end(self) -> float:
        """When the last microbatch has run on every rank: before updates. Seconds."""
        calls, state = self.model.calls, self.model.state()
        run_rounds(calls._replace(repeats=calls.repeats[: self.table.tail]), self.model.reach, state)
        return float(state.times[: self.wiring.matrices.clocks].max(initial=0.0))

    @cached_property
    def stream_table(self) -> Sequence[Stream]:
        """Every stream of every class."""
        found: dict[Stream, None] = {}
        for product in self.products:
            found.update(dict.fromkeys(product.shown))
        return tuple(found)

    @property
    def op_runs(self) -> Sequence[OpRuns]:
        """Every op on every class on which it is run."""
        found: list[OpRuns] = []
        for product, times in zip(self.products, self._calls, strict=True):
            found += self._runs(product, times)
        return found

    def __len__(self) -> int:
        return sum(len(p.tasks) * times for p, times in zip(self.products, self._calls, strict=True))

    @cached_property
    def _calls(self) -> list[int]:
        """How often each product is called."""
        order = self.model.order
        often = np.repeat(self.table.repeats, np.diff(order.start))
        return np.bincount(order.product, often, len(self.products)).astype(np.int64).tolist()

    @cached_property
    def record(self) -> Record:
        """Every call, in the order of issue."""
        return record_of(self.model, self.table)

    def pieces(self, rank_class: int | None = None) -> Iterator[Piece]:
        """Yield every call, expanded when it is its turn."""
        rank = None if rank_class is None else self.run.classes[rank_class][0]
        wanted = [rank is None or rank in self.block_of(product).ranks for product in self.products]
        sizes = [len(product.tasks) for product in self.products]
        first = 0
        numbers: list[int] = self.record.product.tolist()
        for call, product in enumerate(numbers):
            if wanted[product] and sizes[product]:
                yield self._piece(first, call, product)
            first += sizes[product]

    # --- calls ----------------------------------------------------------------------------------------

    def block_of(self, product: Product) -> BoundBlock:
        """Return the block that a product is of."""
        return self.wiring.flow.blocks[product.block]

    def product_of(self, call: int) -> Product:
        """Return the product that a call is of."""
        return self.products[int(self.record.product[call])]

    def entries_of(self, call: int) -> tuple[Floats, Floats]:
        """Return when each port of a call is there (-inf: never late), and when each stream is free."""
        product, record = self.product_of(call), self.record
        entries = record.entries[record.start[call] : record.start[call + 1]]
        width, tasks = len(product.streams), product.tasks
        ports = np.full(len(tasks.ports), -np.inf)
        if len(entries) > width + len(product.entries):  # one of every microbatch
            entries = np.append(entries[:width], entries[width:].max())
        for place, entry in enumerate(product.entries, width):
            port = tasks.port_of.get(entry)
            if port is not None:
                ports[port] = entries[place]
        return ports, entries[:width].copy()

    def path_of(self, call: int) -> str:
        """Return the name of a call."""
        first, second = self.record.microbatch[call].tolist()
        return self.table.name(self.block_of(self.product_of(call)), first, second)

    def _piece(self, first: int, call: int, number: int) -> Piece:
        product = self.products[number]
        tasks, uses = product.tasks, len(product.shown)
        start, end = expand(tasks, *self.entries_of(call))
        single = self.block_of(product).function is None
        return Piece(
            first=first,
            path=self.path_of(call),
            op=tasks.op,
            op_table=tasks.op_table,
            call=tasks.call,
            call_parent=tasks.call_parent,
            call_names=self._call_names(number),
            stream_start=np.array([0, uses]) if single else tasks.stream_start,
            streams=np.arange(uses) if single else tasks.streams,
            stream_table=product.shown,
            start=start,
            end=end,
        )

    def _call_names(self, number: int) -> list[str]:
        """Return the names of the calls in a block: those that its ops have where it is."""
        found = self._names.get(number)
        if found is None:
            product = self.products[number]
            block = self.block_of(product)
            found = self._names[number] = names_of(product.tasks.call_op)
            ops = () if block.function is None else block.function.ops
            given = dict(zip(ops, block.names, strict=False))
            for place, op in enumerate(product.tasks.call_op):
                if op is not None and given.get(op):
                    found[place] = given[op]
        return found

    def _runs(self, product: Product, times: int) -> list[OpRuns]:
        """Return the ops of a block, which take as long in each call."""
        tasks = product.tasks
        classes = np.array([stream.rank_class for stream in product.shown], np.int64)
        if self.block_of(product).function is None:
            seconds = float(tasks.durations[0])
            runs = [(c, times, seconds * times) for c in dict.fromkeys(classes.tolist())]
            return [OpRuns(tasks.op_table[0], *each) for each in runs]
        use = tasks_of_uses(tasks.stream_start)
        return op_runs(tasks.op_table, tasks.op[use], classes[tasks.streams], tasks.durations[use], times)


def expand(tasks: BlockTasks, ports: Floats, clocks: Floats) -> tuple[Floats, Floats]:
    """Return start and end of every task of a block; ``clocks`` moves on."""
    start, end = np.empty(len(tasks)), np.empty(len(tasks))
    evaluate(
        tasks.durations,
        tasks.dep_start,
        tasks.deps,
        tasks.stream_start,
        tasks.streams,
        ports,
        clocks,
        start,
        end,
    )
    return start, end


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
