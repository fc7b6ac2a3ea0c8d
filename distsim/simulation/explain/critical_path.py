"""The critical path: the chain of tasks that takes the whole step, each starting when the one before ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np

from distsim.ir import Function, Op, callees
from distsim.ir.device import devices_of
from distsim.ops import op_label, operator
from distsim.program.program import Program
from distsim.simulation.tasks.rank_classes import RankClasses, placements
from distsim.simulation.tasks.templates import Floats, Ints

K = TypeVar("K", str, int)


@dataclass(frozen=True, slots=True)
class PathPart:
    """What one kind of op on one stage takes of a critical path: ``seconds``, in ``tasks`` tasks.

    Where a pipeline rank holds several stages they count as one, numbered by the rank.
    ``kind`` is the name of a compute operator, ``collective <axis>``, ``send``, or ``transfer`` (between
    one device and a mesh). A send counts to the stage that sends.
    """

    kind: str
    stage: int
    seconds: float
    tasks: int

    @property
    def communicates(self) -> bool:
        """Whether it moves something between devices, or to or from a host."""
        if self.kind in ("send", "transfer") or self.kind.startswith("collective "):
            return True
        return not (operator(self.kind).computes or operator(self.kind).issues)


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
    parts: tuple[PathPart, ...]

    @cached_property
    def by_kind(self) -> Mapping[str, float]:
        """Seconds of each kind, most first."""
        return sums([(part.kind, part.seconds) for part in self.parts])

    @cached_property
    def by_stage(self) -> Mapping[int, float]:
        """Seconds on each stage, most first."""
        return sums([(part.stage, part.seconds) for part in self.parts])


def sums(pairs: Sequence[tuple[K, float]]) -> dict[K, float]:
    """Return the sum of the seconds of each key, most first."""
    found: dict[K, float] = {}
    for key, seconds in pairs:
        found[key] = found.get(key, 0.0) + seconds
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def kind_of(op: Op) -> str:
    """Return the kind of an op, as in :class:`PathPart`."""
    meaning = operator(op.op_type).communication
    if meaning is None or meaning.kind == "local":
        return op_label(op)
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
            PathPart(kind, stage, seconds, self._tasks[kind, stage])
            for (kind, stage), seconds in self._seconds.items()
            if seconds  # what only waits takes none, and is no part
        ]
        parts.sort(key=lambda part: (-part.seconds, part.stage, part.kind))
        return CriticalPath(self.step_time, tuple(reversed(self.segments)), tuple(parts))


def stages_of(simulated: Function | Program, classes: RankClasses) -> Ints:
    """Return the stage of each rank class: the pipeline rank on which it is.

    Those of a function are the sets of devices that hold a value together, by increasing device.
    """
    count = len(classes.members)
    stage = np.arange(count)
    if isinstance(simulated, Program):
        for number, part in enumerate(simulated.mesh.slices("pp")):
            for device in part.devices:
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
