"""The critical path of a Program: back over calls and sends; only the calls on it are looked at op by op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distsim.simulate.details import ProgramTimeline, expand
from distsim.simulate.explain.critical_path import (
    TIES,
    CriticalPath,
    PathBuilder,
    Segment,
    kind_of,
    last_on_streams,
    seconds_of,
    task_before,
)
from distsim.simulate.explain.path_kernel import NOTHING, trace_writers, walk_back
from distsim.simulate.maxplus.tail import JOIN, SEND, UPDATE, Item
from distsim.simulate.tasks.block_matrix import START, BlockTasks
from distsim.simulate.tasks.templates import Floats, Ints

Link = tuple[int, int, float]
"""(event, slot, time): who wrote a time, where it is kept, what it is. Events: calls and sends, the tail."""


@dataclass(frozen=True, eq=False)
class _Entered:
    """What an item of the tail waits for: for its streams, then for each of its operands."""

    streams: Sequence[Link]
    operands: Sequence[Link]


@dataclass(frozen=True, eq=False)
class _Static:
    """What all calls of a block share."""

    kinds: Sequence[str]
    number: Ints
    before: Ints
    last: Ints


def program_path(timeline: ProgramTimeline) -> CriticalPath:
    """Return the critical path of a simulated program."""
    return _Walk(timeline).path()


class _Walk:
    """Who wrote each time, and the walk back from the last one."""

    def __init__(self, timeline: ProgramTimeline) -> None:
        self.timeline = timeline
        self.run, self.model = timeline.run, timeline.model
        self.wiring, self.order = self.model.wiring, self.run.order
        self.record, times = timeline.recorded
        self.times = np.where(np.arange(len(times)) < self.wiring.registers, 0.0, np.nan)
        self.writer = np.empty(len(times), np.int64)
        self.call_after = np.full(self.record.entries.shape, NOTHING)
        self.send_after = np.full((len(self.record.send), 3), NOTHING)
        self.waits = np.empty(self.send_after.shape)
        trace_writers(
            self.order,
            self.wiring,
            self.record,
            self.times,
            self.writer,
            self.call_after,
            self.send_after,
            self.waits,
        )
        self.count = len(self.record.sequence)
        self._static: dict[int, _Static] = {}
        self._made: dict[int, dict[int, int]] = {}
        self.tail = [self._enter(n, item) for n, item in enumerate(self.model.items)]
        self.builder = PathBuilder(self.run.step_time)
        self.tolerance = TIES * self.run.step_time

    def path(self) -> CriticalPath:
        """Walk back from the last end."""
        event, slot = self._last()
        until = self.builder.step_time
        while event != NOTHING:
            event, slot, until = self._visit(event, slot, until)
        return self.builder.path()

    def _last(self) -> tuple[int, int]:
        """Return who ended last: of several, the one whose task comes first."""
        registers = np.concatenate([np.zeros(0, np.int64), *self.model.clocks])
        registers = np.unique(registers[self.writer[registers] != NOTHING])
        if not len(registers):
            return NOTHING, 0
        ends = self.times[registers]
        tied = registers[ends >= ends.max() - self.tolerance].tolist()
        slot = min(tied, key=lambda slot: (int(self.writer[slot]), self._task(int(self.writer[slot]), slot)))
        return int(self.writer[slot]), slot

    def _visit(self, event: int, slot: int, until: float) -> Link:
        if event >= self.count:
            return self._visit_item(event, slot, until)
        call = int(self.record.sequence[event])
        if call < 0:
            return self._visit_send(~call, until)
        return self._visit_call(event, call, slot, until)

    # --- calls of blocks ------------------------------------------------------------------------------

    def _visit_call(self, event: int, call: int, slot: int, until: float) -> Link:
        task = self._task(event, slot)
        if task < 0:  # what came in goes out as it was
            return self._entry(call, ~task, until)
        _, tasks = self.timeline.tasks_of(call)
        ports, clocks = self.timeline.entries_of(call)
        found, end, after = self._inside(tasks, task, ports, clocks)
        if after < NOTHING:
            after = len(clocks) + self.timeline.ports_of(call).index(-2 - after)
        event, slot, time = (NOTHING, 0, 0.0) if after == NOTHING else self._entry(call, after)
        segment = Segment(self.timeline.path_of(call), int(self.record.variant[call]) // 8, time, until)
        self._count(segment, tasks, found, end)
        return event, slot, time

    def _entry(self, call: int, column: int, time: float | None = None) -> Link:
        """Return the link to who wrote an entry of a call."""
        cell = int(self.wiring.ins[self.wiring.in_start[self.record.variant[call]] + column])
        slot = self._slot(cell, int(self.record.microbatch[call]))
        time = float(self.record.entries[call, column]) if time is None else time
        return int(self.call_after[call, column]), slot, time

    def _inside(
        self, tasks: BlockTasks, task: int, ports: Floats, clocks: Floats
    ) -> tuple[Ints, Floats, int]:
        """Return the tasks from one back to what entered the block, all ends, and that entry."""
        _, end = expand(tasks, ports, clocks.copy())
        found = np.empty(len(tasks), np.int64)
        count, after = walk_back(
            task,
            end,
            tasks.dep_start,
            tasks.deps,
            tasks.stream_start,
            tasks.streams,
            self._of(tasks).before,
            ports,
            clocks,
            self.tolerance,
            found,
        )
        return found[:count], end, after

    def _count(self, segment: Segment, tasks: BlockTasks, found: Ints, end: Floats) -> None:
        static = self._of(tasks)
        self.builder.segments.append(segment)
        seconds = seconds_of(found, end, segment.start, segment.end)
        self.builder.add_all(static.kinds, static.number[found], segment.stage, seconds)

    def _of(self, tasks: BlockTasks) -> _Static:
        found = self._static.get(id(tasks))
        if found is None:
            kinds = {kind: i for i, kind in enumerate(dict.fromkeys(map(kind_of, tasks.op_table)))}
            of_op = np.array([kinds[kind_of(op)] for op in tasks.op_table], np.int64)
            found = self._static[id(tasks)] = _Static(
                tuple(kinds),
                of_op[tasks.op],
                task_before(tasks.stream_start, tasks.streams),
                last_on_streams(tasks.stream_start, tasks.streams, len(tasks.stream_table)),
            )
        return found

    # --- who made what --------------------------------------------------------------------------------

    def _slot(self, cell: int, microbatch: int) -> int:
        """Return where the time of a cell is kept."""
        registers = self.wiring.registers
        count = self.order.num_microbatches
        return cell if cell < registers else registers + (cell - registers) * count + microbatch

    def _task(self, event: int, slot: int) -> int:
        """Return the task of a call, send or item that wrote a time; ~column if it is an entry as it came."""
        if event >= self.count:
            return self._task_of_item(event - self.count, slot)
        call = int(self.record.sequence[event])
        if call < 0:
            return 0
        registers = self.wiring.registers
        cell = slot if slot < registers else registers + (slot - registers) // self.order.num_microbatches
        variant = int(self.record.variant[call])
        if variant not in self._made:
            self._made[variant] = self._made_by(call, variant)
        return self._made[variant][cell]

    def _made_by(self, call: int, variant: int) -> dict[int, int]:
        """Return who makes each cell that a call writes, as :meth:`_task` does."""
        block, tasks = self.timeline.tasks_of(call)
        wiring = self.wiring
        results = self.model.results[block][variant % 4 > 1]
        made: list[int] = self._of(tasks).last.tolist()
        width = int(wiring.in_start[variant + 1] - wiring.in_start[variant])
        at = int(wiring.matrix_start[variant]) + len(made) * width
        for index, rank_class in results.tolist():
            task = int(tasks.makers[index, rank_class])
            if task < START:
                passed = np.flatnonzero(wiring.matrix[at : at + width] == 0.0)
                made.append(~int(passed[-1]) if len(passed) else 0)
            else:
                made.append(max(task, 0))
            at += width
        cells = wiring.outs[wiring.out_start[variant] : wiring.out_start[variant + 1]]
        return dict(zip(cells.tolist(), made, strict=True))

    def _task_of_item(self, number: int, slot: int) -> int:
        item = self.model.items[number]
        if item.tasks is None:
            return 0
        if slot in item.streams:
            return int(self._of(item.tasks).last[item.streams.index(slot)])
        return next(task for task, register in self.model.tail.results(number) if register == slot)

    # --- sends and joins ------------------------------------------------------------------------------

    def _visit_send(self, number: int, until: float) -> Link:
        send, microbatch = int(self.record.send[number]), int(self.record.send_microbatch[number])
        wiring, after = self.wiring, self.send_after[number].tolist()
        cells = (wiring.send_first[send], wiring.send_second[send], wiring.send_source[send])
        waits = zip(after, cells, self.waits[number].tolist(), strict=True)
        links = [(event, self._slot(int(cell), microbatch), time) for event, cell, time in waits]
        return self._single("Send", "send", self.model.transfers[send].stages[0], links, until)

    def _single(self, name: str, kind: str, stage: int, links: Sequence[Link], until: float) -> Link:
        """Count a single task; return the first of the links that it waited for."""
        latest = max(link[2] for link in links)
        chosen = next(link for link in links if link[2] >= latest - self.tolerance)
        self.builder.segments.append(Segment(name, stage, chosen[2], until))
        self.builder.add(kind, stage, until - chosen[2])
        return chosen

    def _visit_item(self, event: int, slot: int, until: float) -> Link:
        item, entered = self.model.items[event - self.count], self.tail[event - self.count]
        if item.tasks is None:
            name, kind = ("Send", "send") if item.kind == SEND else ("Concat", "Concat")
            return self._single(name, kind, item.stage, (*entered.streams, *entered.operands), until)
        ports = np.array([time for _, _, time in entered.operands])
        clocks = np.array([time for _, _, time in entered.streams])
        found, end, after = self._inside(
            item.tasks, self._task_of_item(event - self.count, slot), ports, clocks
        )
        link = (NOTHING, 0, 0.0)
        if after != NOTHING:
            link = entered.streams[after] if after >= 0 else entered.operands[-2 - after]
        self._count(Segment(f"U@{item.stage}", item.stage, link[2], until), item.tasks, found, end)
        return link

    # --- the tail -------------------------------------------------------------------------------------

    def _enter(self, number: int, item: Item) -> _Entered:
        """Return what an item waits for, and write what it makes."""
        tables, writer, times = self.model.tail, self.writer, self.times
        streams = [(int(writer[s]), s, float(times[s])) for s in item.streams]
        operands: list[Link] = []
        for place in range(tables.operand_start[number], tables.operand_start[number + 1]):
            cell, block = int(tables.operand_cell[place]), int(tables.operand_block[place])
            if cell < 0:
                operands.append((NOTHING, 0, -np.inf))
                continue
            last = range(self.order.num_microbatches) if item.kind == JOIN else (int(self.run.last[block]),)
            slots = [self._slot(cell, microbatch) for microbatch in last]
            operands += [(int(writer[slot]), slot, float(times[slot])) for slot in slots]
        results = tables.results(number)
        made = (*item.streams, *(register for _, register in results))
        if item.kind == UPDATE and item.tasks is not None:
            clocks = np.array([time for _, _, time in streams])
            _, end = expand(item.tasks, np.array([time for _, _, time in operands]), clocks)
            times[list(item.streams)] = clocks
            for task, register in results:
                times[register] = end[task]
        else:
            seconds = float(self.run.join_seconds[number])
            if item.transfer is not None:
                seconds = item.transfer.seconds
            times[list(made)] = max(time for _, _, time in (*streams, *operands)) + seconds
        writer[list(made)] = self.count + number
        return _Entered(streams, operands)
