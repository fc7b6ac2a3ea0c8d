"""The timeline of a Program: blocks expanded, one call at a time, from when they were entered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from distsim.ir import Attributes, Op, Value
from distsim.ir.type import as_tensor
from distsim.simulate.maxplus.engine import ProgramRun, join_signature
from distsim.simulate.maxplus.kernels import evaluate
from distsim.simulate.maxplus.registers import Record
from distsim.simulate.maxplus.schedule_loop import record_rounds
from distsim.simulate.maxplus.tail import SEND, UPDATE, Item
from distsim.simulate.maxplus.wiring import Transfer
from distsim.simulate.tasks.block_matrix import BlockTasks
from distsim.simulate.tasks.lower import Stream
from distsim.simulate.tasks.rank_classes import RankClasses
from distsim.simulate.tasks.templates import Floats, Ints
from distsim.simulate.tasks.timeline import Piece, names_of

_ONE = np.zeros(1, np.int64)
_ROOT = np.array([-1], np.int64)


class ProgramTimeline:
    """What a run of the max-plus engine found; see :class:`Timeline`."""

    def __init__(self, run: ProgramRun) -> None:
        self.run = run
        self.program = run.program
        self.model = run.model
        self._class = {place: number for number, place in enumerate(run.model.classes)}
        self._streams: dict[tuple[int, int], tuple[Stream, ...]] = {}
        self._ops: dict[Transfer, Op] = {}
        self._names: dict[tuple[int, int], list[str]] = {}

    @property
    def name(self) -> str:
        """The name of the program."""
        return self.program.name

    @cached_property
    def classes(self) -> RankClasses:
        """The rank classes, stage by stage."""
        members = tuple(group for stage in self.model.ranks.stages for group in stage.members)
        return RankClasses(members, lockstep=True)

    @property
    def step_time(self) -> float:
        """Seconds from the first start to the last end."""
        return self.run.step_time

    @property
    def ends(self) -> Floats:
        """When each rank class ends its last task."""
        return self.run.ends

    @property
    def last_microbatch_end(self) -> float:
        """When the last microbatch has run on every stage: before updates. Seconds."""
        return max(float(self._before_tail[own].max(initial=0.0)) for own in self.model.clocks)

    @cached_property
    def stream_table(self) -> Sequence[Stream]:
        """Every stream of every class."""
        found: dict[Stream, None] = {}
        for stage in range(len(self.program.stages)):
            for tasks in self._blocks_of(stage):
                found.update(dict.fromkeys(self._stream_table(stage, tasks)))
        transfers = [*self.model.transfers, *(i.transfer for i in self.model.items if i.transfer)]
        for transfer in transfers:
            found.update(dict.fromkeys(self._ends_of(transfer)))
        return tuple(found)

    @property
    def op_counts(self) -> Sequence[tuple[Op, int, int]]:
        """Every op on every class on which it is run."""
        count = self.run.order.num_microbatches
        found: list[tuple[Op, int, int]] = []
        for block, (first, more) in enumerate(self.model.tasks):
            if self.run.block(block).outputs:
                found += self._counts(block // 2, first, 1)
                found += self._counts(block // 2, more, count - 1)
        for item in self.model.items:
            if item.tasks is not None:
                found += self._counts(item.stage, item.tasks, 1)
            elif item.transfer is not None:
                ends = dict.fromkeys(s.rank_class for s in self._ends_of(item.transfer))
                found += [(self._send_op(item.transfer), c, 1) for c in ends]
            else:
                found.append((self._join_op(item), self._class[item.stage, item.rank_class], 1))
        for transfer in self.model.transfers:
            ends = dict.fromkeys(s.rank_class for s in self._ends_of(transfer))
            found += [(self._send_op(transfer), c, count) for c in ends]
        return [(op, c, n) for op, c, n in found if n]

    def __len__(self) -> int:
        count = self.run.order.num_microbatches
        blocks = sum(
            len(first) + (count - 1) * len(more)
            for n, (first, more) in enumerate(self.model.tasks)
            if self.run.block(n).outputs
        )
        items = sum(1 if item.tasks is None else len(item.tasks) for item in self.model.items)
        return blocks + items + count * len(self.model.transfers)

    def pieces(self, rank_class: int | None = None) -> Iterator[Piece]:
        """Yield every call and send, each expanded when it is its turn."""
        wanted = None if rank_class is None else self.model.classes[rank_class][0]
        first = 0
        for event, size in zip(self._record.sequence.tolist(), self._sizes, strict=True):
            if size and (wanted is None or wanted in self._stages(event)):
                yield self._call(first, event) if event >= 0 else self._transfer(first, ~event)
            first += size
        times = self._before_tail.copy()
        begin = self.run.begin.tolist()
        for number, item in enumerate(self.model.items):
            piece = self._item(first, number, item, times, begin[number])
            if wanted is None or wanted in self._stages_of_item(item):
                yield piece
            first += len(piece)

    # --- what is recorded -----------------------------------------------------------------------------

    @cached_property
    def recorded(self) -> tuple[Record, Floats]:
        """Every call and send in the order of issue, and the times that they leave to the tail."""
        run, wiring = self.run, self.model.wiring
        count = run.order.num_microbatches
        calls = len(self.model.tasks) * count
        sends = len(self.model.transfers) * count
        widest = int(np.diff(wiring.in_start).max(initial=0))
        record = Record(
            np.zeros(calls, np.int64),
            np.zeros(calls, np.int64),
            np.zeros((calls, widest)),
            np.zeros(sends, np.int64),
            np.zeros(sends, np.int64),
            np.zeros(sends),
            np.zeros(calls + sends, np.int64),
        )
        times = np.full(len(run.times), np.nan)
        times[: wiring.registers] = 0.0
        record_rounds(run.order, wiring, np.full(len(self.model.tasks), count, np.int64), times, record)
        return record, times

    @property
    def _record(self) -> Record:
        return self.recorded[0]

    @property
    def _before_tail(self) -> Floats:
        return self.recorded[1]

    @cached_property
    def _sizes(self) -> list[int]:
        """The number of tasks of each call and send, in the order of issue."""
        record = self._record
        of_variant = np.array(
            [
                len(tasks) if self.run.block(block).outputs else 0
                for block, (first, more) in enumerate(self.model.tasks)
                for tasks in (first, more, first, more)
            ]
        )
        calls = of_variant[record.variant[np.maximum(record.sequence, 0)]]
        return np.where(record.sequence < 0, 1, calls).tolist()

    def tasks_of(self, call: int) -> tuple[int, BlockTasks]:
        """Return the block, 2 * stage + phase, that a call runs, and its tasks."""
        variant = int(self._record.variant[call])
        return variant // 4, self.model.tasks[variant // 4][variant % 2]

    def _stages(self, event: int) -> tuple[int, ...]:
        if event >= 0:
            return (int(self._record.variant[event]) // 8,)
        return self.model.transfers[int(self._record.send[~event])].stages

    def _stages_of_item(self, item: Item) -> tuple[int, ...]:
        return (item.stage,) if item.transfer is None else item.transfer.stages

    # --- pieces ---------------------------------------------------------------------------------------

    def _call(self, first: int, call: int) -> Piece:
        block, tasks = self.tasks_of(call)
        start, end = expand(tasks, *self.entries_of(call))
        names = self._call_names(block, int(self._record.variant[call]) % 2)
        streams = self._stream_table(block // 2, tasks)
        return self._piece(first, self.path_of(call), tasks, streams, start, end, names)

    def entries_of(self, call: int) -> tuple[Floats, Floats]:
        """Return when each port of a call is there (-inf: never late), and when each stream is free."""
        _, tasks = self.tasks_of(call)
        width = len(tasks.stream_table)
        entries = self._record.entries[call]
        ports = np.full(len(tasks.ports), -np.inf)
        needed = self.ports_of(call)
        ports[list(needed)] = entries[width : width + len(needed)]
        return ports, entries[:width].copy()

    def ports_of(self, call: int) -> tuple[int, ...]:
        """Return the ports that may delay a call: its entries after those of its streams."""
        variant = int(self._record.variant[call])
        return self.model.ports[variant // 4][variant % 2]

    def path_of(self, call: int) -> str:
        """Return the name of a call."""
        block = int(self._record.variant[call]) // 4
        return f"{'FB'[block % 2]}{int(self._record.microbatch[call])}@{block // 2}"

    def _piece(
        self,
        first: int,
        path: str,
        tasks: BlockTasks,
        streams: tuple[Stream, ...],
        start: Floats,
        end: Floats,
        names: Sequence[str],
    ) -> Piece:
        return Piece(
            first,
            path,
            tasks.op,
            tasks.op_table,
            tasks.call,
            tasks.call_parent,
            names,
            tasks.stream_start,
            tasks.streams,
            streams,
            start,
            end,
        )

    def _transfer(self, first: int, number: int) -> Piece:
        transfer = self.model.transfers[int(self._record.send[number])]
        return self._one(
            first,
            self._send_op(transfer),
            self._ends_of(transfer),
            float(self._record.send_begin[number]),
            transfer.seconds,
        )

    def _one(self, first: int, op: Op, streams: tuple[Stream, ...], begin: float, seconds: float) -> Piece:
        start = np.array([begin])
        count = len(streams)
        return Piece(
            first,
            "",
            _ONE,
            (op,),
            _ONE,
            _ROOT,
            ("",),
            np.array([0, count]),
            np.arange(count),
            streams,
            start,
            start + seconds,
        )

    def _item(self, first: int, number: int, item: Item, times: Floats, begin: float) -> Piece:
        """Expand an item of the tail; ``times`` moves on."""
        if item.kind == SEND and item.transfer is not None:
            self._moved_on(number, item, times, begin + item.transfer.seconds)
            op, streams = self._send_op(item.transfer), self._ends_of(item.transfer)
            return self._one(first, op, streams, begin, item.transfer.seconds)
        if item.kind == UPDATE and item.tasks is not None:
            clocks = times[list(item.streams)]
            read = self.model.tail.operands(number)
            operands = np.array([self._operand(cell, block, times) for cell, block in read])
            start, end = expand(item.tasks, operands, clocks)
            times[list(item.streams)] = clocks
            for task, register in self.model.tail.results(number):
                times[register] = end[task]
            streams = self._stream_table(item.stage, item.tasks)
            names = own_names(item.tasks, item.names)
            return self._piece(first, f"U@{item.stage}", item.tasks, streams, start, end, names)
        seconds = float(self.run.join_seconds[number])
        self._moved_on(number, item, times, begin + seconds)
        rank_class = self._class[item.stage, item.rank_class]
        name = "compute" if self.model.overlap else "all"
        return self._one(first, self._join_op(item), (Stream(rank_class, name),), begin, seconds)

    def _moved_on(self, number: int, item: Item, times: Floats, end: float) -> None:
        for register in (*item.streams, *[register for _, register in self.model.tail.results(number)]):
            times[register] = end

    def _operand(self, cell: int, block: int, times: Floats) -> float:
        registers = self.model.wiring.registers
        if cell < 0:
            return 0.0
        if cell < registers:
            return float(times[cell])
        count = self.run.order.num_microbatches
        return float(times[registers + (cell - registers) * count + int(self.run.last[block])])

    # --- ops and streams ------------------------------------------------------------------------------

    def _call_names(self, block: int, variant: int) -> list[str]:
        key = (block, variant)
        if key not in self._names:
            own = self.run.block(block)
            more = variant and own.accumulating is not None
            names = own.accumulating_names if more else own.names
            self._names[key] = own_names(self.model.tasks[block][variant], names)
        return self._names[key]

    def _blocks_of(self, stage: int) -> Iterator[BlockTasks]:
        for block in (2 * stage, 2 * stage + 1):
            if self.run.block(block).outputs:
                yield from self.model.tasks[block]
        for item in self.model.items:
            if item.stage == stage and item.tasks is not None:
                yield item.tasks

    def _stream_table(self, stage: int, tasks: BlockTasks) -> tuple[Stream, ...]:
        key = (stage, id(tasks))
        found = self._streams.get(key)
        if found is None:
            found = tuple(Stream(self._class[stage, s.rank_class], s.name) for s in tasks.stream_table)
            self._streams[key] = found
        return found

    def _ends_of(self, transfer: Transfer) -> tuple[Stream, ...]:
        (s, t), (a, b) = transfer.stages, transfer.classes
        source, target = self._class[s, a], self._class[t, b]
        if not self.model.overlap:
            return Stream(source, "all"), Stream(target, "all")
        return Stream(source, f"send {target}"), Stream(target, f"receive {source}")

    def _send_op(self, transfer: Transfer) -> Op:
        found = self._ops.get(transfer)
        if found is None:
            type_ = as_tensor(transfer.key.type, transfer.key.name)
            source, target = (self.program.stages[stage].mesh for stage in transfer.stages)
            ends = Value(transfer.key.name, type_.on(source)), Value(transfer.key.name, type_.on(target))
            found = Op("Send", ends[:1], ends[1:], Attributes({"to": target}))
            self._ops[transfer] = found
        return found

    def _join_op(self, item: Item) -> Op:
        name, mesh = "" if item.key is None else item.key.name, self.program.stages[item.stage].mesh
        key = item.key or Value(name, as_tensor(None, name))
        signature = join_signature(key, self.program)
        parts = tuple(Value(f"{name}.{i}", t.on(mesh)) for i, t in enumerate(signature.inputs))
        return Op("Concat", parts, (Value(name, signature.outputs[0].on(mesh)),), signature.attributes)

    def _counts(self, stage: int, tasks: BlockTasks, times: int) -> list[tuple[Op, int, int]]:
        table = self._stream_table(stage, tasks)
        use: Ints = np.repeat(np.arange(len(tasks)), np.diff(tasks.stream_start))
        classes = np.array([stream.rank_class for stream in table], np.int64)[tasks.streams]
        count = len(self._class)
        keys, runs = np.unique(tasks.op[use] * count + classes, return_counts=True)
        pairs = zip(keys.tolist(), runs.tolist(), strict=True)
        return [(tasks.op_table[key // count], key % count, n * times) for key, n in pairs]


def own_names(tasks: BlockTasks, names: Sequence[str]) -> list[str]:
    """Return the names of the calls in a block; ``names`` are those that its ops have on its stage."""
    found = names_of(tasks.call_op)
    given = dict(zip(tasks.function.ops, names, strict=False))
    for number, op in enumerate(tasks.call_op):
        if op is not None and given.get(op):
            found[number] = given[op]
    return found


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
