"""The walk that finds a critical path: from the last task back to what each one started after."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from distsim.compile import compiled
from distsim.ir import Function, Op
from distsim.ops import op_label
from distsim.program.program import Program
from distsim.simulation.details import ProgramTimeline, expand
from distsim.simulation.explain.critical_path import CriticalPath, PathBuilder, Segment, kind_of, stages_of
from distsim.simulation.tasks.block_matrix import BlockTasks, neighbours
from distsim.simulation.tasks.task_table import Tasks, TaskTable
from distsim.simulation.tasks.templates import Floats, Ints
from distsim.simulation.tasks.timeline import FlatTimeline, Timeline

Link = tuple[int, int]
"""(call, task) that made a time."""


class Chain(NamedTuple):
    """Tasks of one call, from the last to the first, and the call's times."""

    call: int
    tasks: Ints
    end: Floats


def critical_path(
    timeline: Timeline, simulated: Function | Program, label: Callable[[Op], str] = kind_of
) -> CriticalPath:
    """Return the critical path of what was simulated; ``label`` gives the kind to which an op counts."""
    if isinstance(timeline, ProgramTimeline):
        calls = _ProgramCalls(timeline)
    elif isinstance(timeline, FlatTimeline):
        calls = _OneCall(timeline, simulated)
    else:
        raise TypeError(
            f"{type(timeline).__name__} has no critical path; it is neither flat nor of a program"
        )
    builder, until = PathBuilder(timeline.step_time), timeline.step_time
    known: dict[TaskTable, _Static] = {}
    link = calls.last()
    while link is not None:
        call, task = link
        tasks = calls.tasks(call)
        static = known.get(tasks)
        if static is None:
            static = known[tasks] = _Static(tasks, label)
        ports, clocks, end = calls.times(call)
        found = np.empty(len(tasks), np.int64)
        count, entry = walk_back(task, end, static.waits, ports, clocks, found)
        link, start = (None, 0.0) if entry == NOTHING else calls.source(call, entry)
        chain = Chain(call, found[:count], end)
        builder.segments += calls.segments(chain, start, until)
        _count(builder, static, chain, calls.places(chain), _seconds(chain, start, until))
        until = start
    return builder.path()


class _Static:
    """What all calls of the same tasks share: their kinds, and what each waits for."""

    def __init__(self, tasks: TaskTable, label: Callable[[Op], str]) -> None:
        own = [label(op) for op in tasks.op_table]
        self.kinds = tuple(dict.fromkeys(own))
        self.number = np.array([self.kinds.index(kind) for kind in own], np.int64)[tasks.op]
        before = neighbours(tasks.stream_start, tasks.streams, len(tasks.stream_table))[0]
        self.waits = Waits(tasks.dep_start, tasks.deps, tasks.stream_start, tasks.streams, before)


def _seconds(chain: Chain, start: float, until: float) -> Floats:
    """Return the seconds of tasks: from ``start`` to ``until`` in all."""
    ends = chain.end[chain.tasks]
    ends[0] = until
    return ends - np.append(ends[1:], start)


def _count(builder: PathBuilder, static: _Static, chain: Chain, places: Ints, seconds: Floats) -> None:
    for place in dict.fromkeys(places.tolist()):
        there = places == place
        builder.add_all(static.kinds, static.number[chain.tasks[there]], place, seconds[there])


class _OneCall:
    """Tasks that were simulated one by one: a single call, with nothing before it."""

    def __init__(self, timeline: FlatTimeline, simulated: Function | Program) -> None:
        self.flat, self.end = timeline.tasks, timeline.end
        self.step_time = timeline.step_time
        streams = np.array([stream.rank_class for stream in self.flat.stream_table], np.int64)
        self.stage_of_stream = stages_of(simulated, timeline.classes)[streams] if len(streams) else streams

    def last(self) -> Link | None:
        last = neighbours(self.flat.stream_start, self.flat.streams, len(self.flat.stream_table))[1]
        last = last[last >= 0]
        return (0, int(last[self.end[last] == self.step_time].min())) if len(last) else None

    def tasks(self, call: int) -> Tasks:
        return self.flat

    def times(self, call: int) -> tuple[Floats, Floats, Floats]:
        return np.empty(0), np.zeros(len(self.flat.stream_table)), self.end

    def source(self, call: int, entry: int) -> tuple[Link | None, float]:
        return None, 0.0

    def places(self, chain: Chain) -> Ints:
        return self.stage_of_stream[self.flat.streams[self.flat.stream_start[chain.tasks]]]

    def segments(self, chain: Chain, start: float, until: float) -> Iterator[Segment]:
        """Merge neighbours that are in the same call of the function itself."""
        tasks, stage = self.flat, self.places(chain)
        outermost = tasks.call[chain.tasks]
        while True:
            parent = tasks.call_parent[outermost]
            inner = parent > 0
            if not inner.any():
                break
            outermost = np.where(inner, parent, outermost)
        change = (outermost[1:] != outermost[:-1]) | (outermost[1:] == 0)
        first = np.flatnonzero(np.concatenate([[True], change]))
        ends: list[float] = chain.end[chain.tasks[first]].tolist()
        ends[0] = until
        for place, end, begin in zip(first.tolist(), ends, (*ends[1:], start), strict=True):
            call = tasks.call_op[int(outermost[place])]
            name = op_label(tasks.op_of(int(chain.tasks[place])))
            if call is not None:
                name = call.name or call.callee.name
            yield Segment(name, int(stage[place]), begin, end)


class _ProgramCalls:
    """The calls of a table; only those on the path are looked at op by op."""

    def __init__(self, timeline: ProgramTimeline) -> None:
        self.timeline, self.record = timeline, timeline.record
        self._last: dict[BlockTasks, Ints] = {}

    def last(self) -> Link | None:
        """Return which task ended last: of several, the first."""
        record, run = self.record, self.timeline.run
        registers = np.arange(run.model.wiring.matrices.registers)
        registers = registers[(record.last_call[registers] >= 0) & (record.times[registers] == run.step_time)]
        pairs = zip(record.last_call[registers].tolist(), record.last_result[registers].tolist(), strict=True)
        links = [self._link(call, result) for call, result in pairs]
        return min([link for link, _ in links if link is not None], default=None)

    def tasks(self, call: int) -> BlockTasks:
        return self.timeline.product_of(call).tasks

    def times(self, call: int) -> tuple[Floats, Floats, Floats]:
        """Return when each port of a call is there and each stream free, and the ends of its tasks."""
        ports, clocks = self.timeline.entries_of(call)
        return ports, clocks, expand(self.tasks(call), ports, clocks.copy())[1]

    def source(self, call: int, entry: int) -> tuple[Link | None, float]:
        """Return who made what a call was entered with, and when: stream s, or port p as -2 - p."""
        product = self.timeline.product_of(call)
        if entry < NOTHING:
            place = tuple(product.tasks.ports[-2 - entry].tolist())
            entry = len(product.streams) + product.entries.index(place)
        return self._source(call, entry)

    def _source(self, call: int, column: int) -> tuple[Link | None, float]:
        """Return who made an entry of a call, and when."""
        record = self.record
        at, end = int(record.start[call]) + column, int(record.start[call + 1])
        if column >= len(self.timeline.product_of(call).streams) and end - int(record.start[call]) > (
            len(self.timeline.product_of(call).streams) + len(self.timeline.product_of(call).entries)
        ):
            at += int(record.entries[at:end].argmax())  # of every microbatch: the last
        link = None
        if record.call[at] >= 0:
            link, _ = self._link(int(record.call[at]), int(record.result[at]))
        return link, float(record.entries[at])

    def _link(self, call: int, result: int) -> tuple[Link | None, float]:
        """Return the task that made a result of a call: of another one, if it is an input as it came."""
        product = self.timeline.product_of(call)
        count = len(product.streams)
        if result < count:
            single = self.timeline.block_of(product).function is None
            return (call, 0 if single else int(self._last_of(product.tasks)[result])), 0.0
        index, rank_class = product.results[result - count]
        made = int(product.tasks.makers[index, rank_class])
        if made >= 0:
            return (call, made), 0.0
        entry = (-2 - made, rank_class)
        return (
            self._source(call, count + product.entries.index(entry))
            if entry in product.entries
            else (None, 0.0)
        )

    def _last_of(self, tasks: BlockTasks) -> Ints:
        found = self._last.get(tasks)
        if found is None:
            last = neighbours(tasks.stream_start, tasks.streams, len(tasks.stream_table))[1]
            found = self._last[tasks] = last
        return found

    def places(self, chain: Chain) -> Ints:
        """Return the stage of each task."""
        block = self.timeline.block_of(self.timeline.product_of(chain.call))
        return np.full(len(chain.tasks), block.rank)

    def segments(self, chain: Chain, start: float, until: float) -> Iterator[Segment]:
        """Yield the segments that tasks of a call are, from the last to the first."""
        product = self.timeline.product_of(chain.call)
        name = self.timeline.path_of(chain.call) or op_label(product.tasks.op_table[0])
        yield Segment(name, self.timeline.block_of(product).rank, start, until)


NOTHING = -1
"""What a task starts after that waits for nothing."""


class Waits(NamedTuple):
    """What tasks wait for, as :class:`TaskTable` has it; a dependency d < 0 is port -2 - d."""

    dep_start: Ints
    deps: Ints
    stream_start: Ints
    streams: Ints
    before: Ints
    """[uses]: the task before on the stream of each use, -1 for none."""


@compiled
def walk_back(task: int, end: Any, waits: Any, ports: Any, clocks: Any, found: Any) -> tuple[int, int]:
    """Fill in the tasks from ``task`` back, each after the one that it started after.

    Of those that ended last it is the one before on the first stream, else the first dependency. A stream on
    which none is before is free from ``clocks`` on; what comes in at a port is there from ``ports`` on.
    Return the number of tasks and what the last of them started after: a stream s, a port p as -2 - p, or
    ``NOTHING``.
    """
    dep_start, deps, stream_start = waits.dep_start, waits.deps, waits.stream_start
    streams, before = waits.streams, waits.before
    count = 0
    while True:
        found[count] = task
        count += 1
        latest = -math.inf
        for k in range(stream_start[task], stream_start[task + 1]):
            latest = max(latest, end[before[k]] if before[k] >= 0 else clocks[streams[k]])
        for k in range(dep_start[task], dep_start[task + 1]):
            latest = max(latest, end[deps[k]] if deps[k] >= 0 else ports[-2 - deps[k]])
        if latest == -math.inf:
            return count, NOTHING
        following = -1
        for k in range(stream_start[task], stream_start[task + 1]):
            if (end[before[k]] if before[k] >= 0 else clocks[streams[k]]) >= latest:
                if before[k] < 0:
                    return count, streams[k]
                following = before[k]
                break
        if following < 0:
            for k in range(dep_start[task], dep_start[task + 1]):
                if (end[deps[k]] if deps[k] >= 0 else ports[-2 - deps[k]]) >= latest:
                    if deps[k] < 0:
                        return count, deps[k]
                    following = deps[k]
                    break
        task = following
