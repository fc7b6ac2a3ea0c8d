"""The critical path: the chain of tasks that takes the whole step, each starting when the one before ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np

from distsim.ir import Function, Op, callees
from distsim.ir.device import devices_of
from distsim.ops import operator
from distsim.program.program import Program
from distsim.simulate.explain.path_kernel import walk_back
from distsim.simulate.tasks.rank_classes import RankClasses, placements
from distsim.simulate.tasks.templates import Floats, Ints
from distsim.simulate.tasks.timeline import FlatTimeline

K = TypeVar("K", str, int)

TIES = 1e-11
"""Ends that are closer than this share of the step are equal: they differ by rounding."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one kind of op on one stage takes of a critical path: ``seconds``, in ``tasks`` tasks.

    ``kind`` is the name of a compute operator, ``collective <axis>``, ``send``, or ``transfer`` (between
    one device and a mesh). A send counts to the stage that sends.
    """

    kind: str
    stage: int
    seconds: float
    tasks: int

    @property
    def communicates(self) -> bool:
        """Whether it moves something between devices."""
        return self.kind in ("send", "transfer") or self.kind.startswith("collective ")


@dataclass(frozen=True, slots=True)
class Segment:
    """Tasks of a critical path that follow each other in one call; ``name`` is the call's, or the op's."""

    name: str
    stage: int
    start: float
    end: float


@dataclass(frozen=True)
class CriticalPath:
    """A chain from time 0 to ``step_time``: its segments in order of time, and what they consist of.

    Each task counts from the end of the one before to its own. The seconds of the parts sum to the
    step time, and so do those of the segments. Of several such chains it is the one that stays on a
    stream where it can, and otherwise follows the first dependency.
    """

    step_time: float
    segments: tuple[Segment, ...]
    parts: tuple[Part, ...]

    @cached_property
    def by_kind(self) -> Mapping[str, float]:
        """Seconds of each kind, most first."""
        return _sums([(part.kind, part.seconds) for part in self.parts])

    @cached_property
    def by_stage(self) -> Mapping[int, float]:
        """Seconds on each stage, most first."""
        return _sums([(part.stage, part.seconds) for part in self.parts])


def _sums(pairs: Sequence[tuple[K, float]]) -> dict[K, float]:
    found: dict[K, float] = {}
    for key, seconds in pairs:
        found[key] = found.get(key, 0.0) + seconds
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def kind_of(op: Op) -> str:
    """Return the kind of an op, as in :class:`Part`."""
    meaning = operator(op.op_type).communication
    if meaning is None or meaning.kind == "local":
        return op.op_type
    if meaning.kind == "send":
        return "send"
    return f"collective {op.attributes['axis']}" if "axis" in op.attributes else "transfer"


@dataclass
class PathBuilder:
    """Collects a path from its end to its start."""

    step_time: float
    segments: list[Segment] = field(default_factory=list[Segment])
    _seconds: dict[tuple[str, int], float] = field(default_factory=dict[tuple[str, int], float])
    _tasks: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])

    def add(self, kind: str, stage: int, seconds: float, tasks: int = 1) -> None:
        """Count tasks of a kind on a stage."""
        key = (kind, stage)
        self._seconds[key] = self._seconds.get(key, 0.0) + seconds
        self._tasks[key] = self._tasks.get(key, 0) + tasks

    def add_all(self, kinds: Sequence[str], number: Ints, stage: int, seconds: Floats) -> None:
        """Count tasks of one stage; ``number`` has the kind of each."""
        sums = np.bincount(number, seconds, len(kinds)).tolist()
        tasks = np.bincount(number, minlength=len(kinds)).tolist()
        for kind, total, count in zip(kinds, sums, tasks, strict=True):
            if count:
                self.add(kind, stage, total, count)

    def path(self) -> CriticalPath:
        """Return the path."""
        parts = [
            Part(kind, stage, seconds, self._tasks[kind, stage])
            for (kind, stage), seconds in self._seconds.items()
        ]
        parts.sort(key=lambda part: (-part.seconds, part.stage, part.kind))
        return CriticalPath(self.step_time, tuple(reversed(self.segments)), tuple(parts))


def task_before(stream_start: Ints, streams: Ints) -> Ints:
    """Return the task before on the stream of each use, -1 for the first one."""
    task = np.repeat(np.arange(len(stream_start) - 1), np.diff(stream_start))
    order = np.argsort(streams, kind="stable")
    same = streams[order[1:]] == streams[order[:-1]]
    before = np.full(len(streams), -1, np.int64)
    before[order[1:][same]] = task[order[:-1][same]]
    return before


def last_on_streams(stream_start: Ints, streams: Ints, count: int) -> Ints:
    """Return the last task on each of ``count`` streams, -1 where there is none."""
    last = np.full(count, -1, np.int64)
    np.maximum.at(last, streams, np.repeat(np.arange(len(stream_start) - 1), np.diff(stream_start)))
    return last


def seconds_of(found: Ints, end: Floats, after: float, until: float) -> Floats:
    """Return the seconds of tasks found from the last to the first: from ``after`` to ``until`` in all."""
    ends = end[found]
    ends[0] = until
    return ends - np.append(ends[1:], after)


def stages_of(simulated: Function | Program, classes: RankClasses) -> Ints:
    """Return the stage of each rank class.

    Stages of a function are the sets of devices that hold a value together, by increasing device.
    """
    count = len(classes.members)
    stage = np.arange(count)
    if isinstance(simulated, Program):
        for number, part in enumerate(simulated.stages):
            for device in part.mesh.devices:
                if device in classes.of:
                    stage[classes.of[device]] = number
        return stage
    for place in placements((*callees(simulated), simulated)):
        held = np.array([classes.of[device] for device in devices_of(place)], np.int64)
        joined = np.isin(stage, stage[held])
        stage[joined] = stage[joined].min()
    first = np.array([min(device.id for device in members) for members in classes.members], np.int64)
    lowest = np.array([first[stage == own].min() for own in stage.tolist()], np.int64).reshape(count)
    return np.unique(lowest, return_inverse=True)[1]


def flat_path(timeline: FlatTimeline, simulated: Function | Program) -> CriticalPath:
    """Return the critical path of tasks that were simulated one by one."""
    tasks, end = timeline.tasks, timeline.end
    builder = PathBuilder(timeline.step_time)
    if not len(tasks):
        return builder.path()
    tolerance = TIES * builder.step_time
    last = last_on_streams(tasks.stream_start, tasks.streams, len(tasks.stream_table))
    last = last[last >= 0]
    found = np.empty(len(tasks), np.int64)
    count, _ = walk_back(
        int(last[end[last] >= builder.step_time - tolerance].min()),
        end,
        tasks.dep_start,
        tasks.deps,
        tasks.stream_start,
        tasks.streams,
        task_before(tasks.stream_start, tasks.streams),
        np.empty(0),
        np.zeros(len(tasks.stream_table)),
        tolerance,
        found,
    )
    found = found[:count]
    seconds = seconds_of(found, end, 0.0, builder.step_time)
    table = np.array([stream.rank_class for stream in tasks.stream_table], np.int64)
    classes = table[tasks.streams[tasks.stream_start[found]]]
    stage = stages_of(simulated, timeline.classes)[classes]
    kinds = [kind_of(op) for op in tasks.op_table]
    for number in dict.fromkeys(stage.tolist()):
        there = stage == number
        builder.add_all(kinds, tasks.op[found[there]], number, seconds[there])
    _segments(builder, timeline, found, stage)
    return builder.path()


def _segments(builder: PathBuilder, timeline: FlatTimeline, found: Ints, stage: Ints) -> None:
    """Merge neighbours that are in the same call of the function itself."""
    tasks = timeline.tasks
    outermost = tasks.call[found]
    while True:
        parent = tasks.call_parent[outermost]
        inner = parent > 0
        if not inner.any():
            break
        outermost = np.where(inner, parent, outermost)
    change = (outermost[1:] != outermost[:-1]) | (outermost[1:] == 0)
    first = np.flatnonzero(np.concatenate([[True], change]))
    ends: list[float] = timeline.end[found[first]].tolist()
    ends[0] = builder.step_time
    for place, end, start in zip(first.tolist(), ends, (*ends[1:], 0.0), strict=True):
        call = tasks.call_op[int(outermost[place])]
        name = tasks.op_of(int(found[place])).op_type if call is None else call.name or call.callee.name
        builder.segments.append(Segment(name, int(stage[place]), start, end))
