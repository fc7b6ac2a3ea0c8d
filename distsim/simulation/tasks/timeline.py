"""When every task runs, piece by piece: what a simulation expands its details from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from distsim.ir import Op
from distsim.simulation.tasks.rank_classes import RankClasses
from distsim.simulation.tasks.recurrence import run
from distsim.simulation.tasks.streams import Stream
from distsim.simulation.tasks.task_table import Tasks
from distsim.simulation.tasks.templates import Floats, Ints, tasks_of_uses


@dataclass(frozen=True, eq=False, slots=True)
class Piece:
    """Tasks that come one after the other: a whole function, a call of a block, or a send.

    Task i, number ``first + i`` of all, runs ``op_table[op[i]]`` from ``start[i]`` to ``end[i]`` seconds on
    the streams ``streams[stream_start[i]:stream_start[i + 1]]``, in the call ``call[i]`` (0: the piece
    itself, which stands at ``path``); call c is named ``call_names[c]`` and made in ``call_parent[c]``.
    """

    first: int
    path: str
    op: Ints
    op_table: Sequence[Op]
    call: Ints
    call_parent: Ints
    call_names: Sequence[str]
    stream_start: Ints
    streams: Ints
    stream_table: Sequence[Stream]
    start: Floats
    end: Floats

    def __len__(self) -> int:
        return len(self.start)

    def paths(self) -> list[str]:
        """Return where each call stands: the names of the calls that lead to it, joined by ``/``."""
        found = [self.path]
        parents: list[int] = self.call_parent.tolist()
        for own, parent in zip(self.call_names[1:], parents[1:], strict=True):
            found.append("/".join(filter(None, (found[parent], own))))
        return found


def names_of(calls: Sequence[Op | None]) -> list[str]:
    """Return the name of each call: its op's or else its callee's."""
    return ["" if op is None else op.name or op.callee.name for op in calls]


class OpRuns(NamedTuple):
    """How often an op is run on each device of a rank class, and how many seconds all of that takes."""

    op: Op
    rank_class: int
    times: int
    seconds: float


def op_runs(
    op_table: Sequence[Op], ops: Ints, classes: Ints, seconds: Floats, times: int = 1
) -> list[OpRuns]:
    """Return the runs of each op on each class where ``times`` times op ``ops[i]`` takes ``seconds[i]`` on
    class ``classes[i]``.
    """
    count = int(classes.max(initial=0)) + 1
    keys, place, runs = np.unique(ops * count + classes, return_inverse=True, return_counts=True)
    taken: list[float] = np.bincount(place, seconds, len(keys)).tolist()
    numbers: list[int] = keys.tolist()
    return [
        OpRuns(op_table[key // count], key % count, n * times, sum_ * times)
        for key, n, sum_ in zip(numbers, runs.tolist(), taken, strict=True)
    ]


class Timeline(Protocol):
    """What one run of an engine found."""

    @property
    def name(self) -> str:
        """The name of what was simulated."""
        ...

    @cached_property
    def classes(self) -> RankClasses:
        """The rank classes and their devices."""
        ...

    @property
    def step_time(self) -> float:
        """Seconds from the first start to the last end."""
        ...

    @property
    def ends(self) -> Floats:
        """When each rank class ends its last task, in seconds; 0.0 if it has none."""
        ...

    def ends_after(self, begins: Floats) -> Floats:
        """Return when each rank class ends, on all its streams, if each begins then, on all of its own."""
        ...

    @cached_property
    def stream_table(self) -> Sequence[Stream]:
        """Every stream."""
        ...

    @property
    def op_runs(self) -> Sequence[OpRuns]:
        """Every op that is run, how often and how long on each class.

        An op that several classes run together, as a Send does on both its ends, is listed on each.
        """
        ...

    def __len__(self) -> int:
        """Return the number of tasks."""
        ...

    def pieces(self, rank_class: int | None = None) -> Iterator[Piece]:
        """Yield all tasks in the order in which they are issued, or those in which a class takes part."""
        ...


@dataclass(frozen=True, eq=False)
class FlatTimeline:
    """The timeline of a function whose tasks were simulated one by one."""

    tasks: Tasks
    start: Floats
    end: Floats

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.tasks.function.name

    @cached_property
    def classes(self) -> RankClasses:
        """The rank classes of the function."""
        return self.tasks.classes

    @property
    def step_time(self) -> float:
        """The last end."""
        return float(self.end.max(initial=0.0))

    @property
    def ends(self) -> Floats:
        """The last end on each class."""
        last = np.zeros(len(self.classes.members))
        tasks = tasks_of_uses(self.tasks.stream_start)
        np.maximum.at(last, self._class_of_stream[self.tasks.streams], self.end[tasks])
        return last

    def ends_after(self, begins: Floats) -> Floats:
        """Return when classes end that begin then, if tasks take as long as they did."""
        clocks, ends = begins[self._class_of_stream], begins.copy()
        run(self.tasks, self.end - self.start, clocks)
        np.maximum.at(ends, self._class_of_stream, clocks)
        return ends

    @cached_property
    def stream_table(self) -> Sequence[Stream]:
        """Every stream."""
        return self.tasks.stream_table

    @property
    def op_runs(self) -> Sequence[OpRuns]:
        """Every op on every class on which it is run."""
        task = tasks_of_uses(self.tasks.stream_start)
        classes, seconds = self._class_of_stream[self.tasks.streams], (self.end - self.start)[task]
        return op_runs(self.tasks.op_table, self.tasks.op[task], classes, seconds)

    def __len__(self) -> int:
        return len(self.tasks)

    def pieces(self, rank_class: int | None = None) -> Iterator[Piece]:
        """Yield the function as one piece; of all classes, as they share tasks."""
        tasks = self.tasks
        yield Piece(
            0,
            "",
            tasks.op,
            tasks.op_table,
            tasks.call,
            tasks.call_parent,
            names_of(tasks.call_op),
            tasks.stream_start,
            tasks.streams,
            tasks.stream_table,
            self.start,
            self.end,
        )

    @property
    def _class_of_stream(self) -> Ints:
        return np.array([stream.rank_class for stream in self.tasks.stream_table], np.int64)
