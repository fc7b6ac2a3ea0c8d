"""Schedule: the order in which each rank runs its tasks, as integers; no tensors."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from distsim.errors import ScheduleError
from distsim.schedule.refusals import Ranks, check_complete, count, deadlock
from distsim.schedule.rounds import Bools, Ints, Rounds, find_rounds
from distsim.schedule.steps import run_steps
from distsim.schedule.task import Phase, Task

_PHASES = (Phase.FORWARD, Phase.BACKWARD)


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Schedule:
    """The order in which each pipeline rank runs its tasks; rank `r` holds stage `r`.

    `ranks[r]` is the task order of rank `r`. Making a Schedule verifies nothing, so that a
    hand-made one can be looked at; :meth:`check`, :meth:`order` and :meth:`rounds` verify it.
    Schedules are compared by value. One made :meth:`from_codes` is kept as integers and has its
    :class:`Task` objects made when they are read.

    >>> F, B = Phase.FORWARD, Phase.BACKWARD
    >>> print(Schedule("one", 1, 2, ((Task(F, 0, 0), Task(B, 0, 0), Task(F, 0, 1), Task(B, 0, 1)),)))
    one: 1 stage, 2 microbatches
    rank 0: F0 B0 F1 B1
    """

    name: str
    num_stages: int
    num_microbatches: int
    _given: Ranks | Ints

    def __init__(self, name: str, num_stages: int, num_microbatches: int, ranks: Ranks) -> None:
        self._set(name, num_stages, num_microbatches, ranks)

    def _set(self, name: str, num_stages: int, num_microbatches: int, given: Ranks | Ints) -> None:
        for field, value in zip(fields(self), (name, num_stages, num_microbatches, given), strict=True):
            object.__setattr__(self, field.name, value)

    @classmethod
    def from_codes(cls, name: str, codes: Ints) -> Schedule:
        """Make a schedule of integers: `codes[r, i]` is 2 * microbatch + phase of task `i` of rank `r`.

        The phase is 0 for a forward and 1 for a backward; a rank has two tasks per microbatch.

        >>> print(Schedule.from_codes("one", np.array([[0, 1, 2, 3]])))
        one: 1 stage, 2 microbatches
        rank 0: F0 B0 F1 B1
        """
        codes = codes.copy()
        codes.setflags(write=False)
        made = cls.__new__(cls)
        made._set(name, codes.shape[0], codes.shape[1] // 2, codes)
        return made

    @cached_property
    def ranks(self) -> Ranks:
        """The task order of each rank."""
        if not isinstance(self._given, np.ndarray):
            return self._given
        return tuple(tuple(_tasks([rank] * len(row), row)) for rank, row in enumerate(self._given.tolist()))

    def __str__(self) -> str:
        rows = (
            f"rank {rank}: " + " ".join(f"{task.phase.value}{task.microbatch}" for task in tasks)
            for rank, tasks in enumerate(self.ranks)
        )
        return "\n".join([f"{self.name}: {self._sizes}", *rows])

    def __repr__(self) -> str:
        return f"Schedule({self.name}: {self._sizes})"

    @property
    def _sizes(self) -> str:
        return f"{count(self.num_stages, 'stage')}, {count(self.num_microbatches, 'microbatch')}"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return self is other or (self._key == other._key and self._same_order(other))

    def __hash__(self) -> int:
        return hash(self._key)

    def __reduce__(self) -> tuple[object, ...]:
        if isinstance(self._given, np.ndarray):
            return Schedule.from_codes, (self.name, self._given)
        return Schedule, (*self._key, self._given)

    @property
    def _key(self) -> tuple[str, int, int]:
        return self.name, self.num_stages, self.num_microbatches

    def _same_order(self, other: Schedule) -> bool:
        if isinstance(self._given, np.ndarray) and isinstance(other._given, np.ndarray):
            return np.array_equal(self._given, other._given)
        return self.ranks == other.ranks

    def inputs(self, task: Task) -> tuple[Task, ...]:
        """Tasks that must finish before `task` starts, whatever the order on its rank.

        A forward needs the forward of the same microbatch on the stage before; a backward needs
        the forward on its own stage and the backward on the stage after.
        """
        stage, microbatch = task.stage, task.microbatch
        if task.phase is Phase.FORWARD:
            return (Task(Phase.FORWARD, stage - 1, microbatch),) if stage > 0 else ()
        forward = Task(Phase.FORWARD, stage, microbatch)
        if stage + 1 == self.num_stages:
            return (forward,)
        return (forward, Task(Phase.BACKWARD, stage + 1, microbatch))

    def in_flight(self, stage: int) -> int:
        """Most microbatches whose forward has started on `stage` and whose backward has not finished.

        That many sets of saved activations are held at once. GPipe holds `m`, 1F1B holds
        `min(m, p - stage)` (Narayanan et al. 2021, section 2.2).

        Raises:
            ScheduleError: there is no such stage.
        """
        given = self._given
        if not 0 <= stage < len(given):
            raise ScheduleError(f"{self.name}: no stage {stage}; choose one of 0..{len(given) - 1}")
        if isinstance(given, np.ndarray):
            phases = given[stage] % 2
        else:
            phases = np.array([task.phase is Phase.BACKWARD for task in given[stage]], np.int64)
        return int((1 - 2 * phases).cumsum().max(initial=0))

    def order(self) -> tuple[tuple[Task, ...], ...]:
        """Tasks of all ranks in global steps: tasks of one step are independent of each other.

        In each step every rank runs its next task if the inputs of that task finished in an
        *earlier* step, so a step is one unit of time when all tasks last equally long. Read step
        by step, this is one linear order that agrees with every rank's own.

        Raises:
            ScheduleError: a task is missing, repeated, foreign or on the wrong rank, or the ranks
                wait for each other; the message names the tasks.
        """
        return self._order

    def rounds(self) -> Rounds:
        """The same order, with the steps that repeat written once.

        Raises:
            ScheduleError: as :meth:`order`.
        """
        return self._rounds

    def check(self) -> None:
        """Verify that every task is there once, on its rank, and that the ranks never wait in a circle.

        Raises:
            ScheduleError: as :meth:`order`.
        """
        self.rounds()

    @cached_property
    def _order(self) -> tuple[tuple[Task, ...], ...]:
        stage, code, ends_step = self._steps()
        tasks = _tasks(stage.tolist(), code.tolist())
        ends: list[int] = (np.flatnonzero(ends_step) + 1).tolist()
        return tuple(tuple(tasks[first:end]) for first, end in zip([0, *ends], ends, strict=False))

    @cached_property
    def _rounds(self) -> Rounds:
        return find_rounds(*self._steps())

    def _steps(self) -> tuple[Ints, Ints, Bools]:
        """Return stage, code and whether it ends its step for every task, in the order of the steps."""
        codes = self._codes()
        stage, code = np.zeros(codes.size, np.int64), np.zeros(codes.size, np.int64)
        ends_step = np.zeros(codes.size, np.bool_)
        position = np.zeros(len(codes), np.int64)
        if run_steps(codes, stage, code, ends_step, position) < codes.size:
            raise deadlock(self.name, self.ranks, position.tolist(), self.inputs)
        return stage, code, ends_step

    def _codes(self) -> Ints:
        """Return the integers of a complete schedule: see :meth:`from_codes`."""
        if isinstance(self._given, np.ndarray) and _each_once(self._given):
            return self._given
        check_complete(*self._key, self.ranks)
        rows = [[2 * t.microbatch + (t.phase is Phase.BACKWARD) for t in tasks] for tasks in self.ranks]
        return np.array(rows, np.int64).reshape(len(rows), -1 if rows and rows[0] else 0)


def _tasks(stages: list[int], codes: list[int]) -> list[Task]:
    return [Task(_PHASES[code % 2], stage, code // 2) for stage, code in zip(stages, codes, strict=True)]


def _each_once(codes: Ints) -> bool:
    """Whether every row is a permutation of 0, 1, ..., and of even length."""
    length = codes.shape[1]
    if length % 2 or (codes.size and (codes.min() < 0 or codes.max() >= length)):
        return False
    seen = np.zeros(codes.shape, np.bool_)
    np.put_along_axis(seen, codes, True, axis=1)
    return bool(seen.all())
