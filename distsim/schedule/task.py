"""Tasks of a pipeline and the order in which each rank runs them: integers, no tensors."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from itertools import product

from distsim.errors import ScheduleError


@functools.total_ordering
class Phase(enum.Enum):
    """What a stage does with a microbatch; phases compare in the order in which they happen."""

    FORWARD = "F"
    BACKWARD = "B"

    def __lt__(self, other: Phase) -> bool:
        return self is Phase.FORWARD and other is Phase.BACKWARD


@dataclass(frozen=True, order=True)
class Task:
    """One phase of one stage on one microbatch, printed as `F3@1`: forward of microbatch 3 on stage 1.

    >>> print(Task(Phase.BACKWARD, stage=0, microbatch=2))
    B2@0
    """

    phase: Phase
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.phase.value}{self.microbatch}@{self.stage}"


@dataclass(frozen=True)
class Schedule:
    """The order in which each pipeline rank runs its tasks; rank `r` holds stage `r`.

    `ranks[r]` is the task order of rank `r`. Making a Schedule verifies nothing, so that a
    hand-made one can be looked at; :meth:`check` and :meth:`order` verify it.

    >>> F, B = Phase.FORWARD, Phase.BACKWARD
    >>> print(Schedule("one", 1, 2, ((Task(F, 0, 0), Task(B, 0, 0), Task(F, 0, 1), Task(B, 0, 1)),)))
    one: 1 stage, 2 microbatches
    rank 0: F0 B0 F1 B1
    """

    name: str
    num_stages: int
    num_microbatches: int
    ranks: tuple[tuple[Task, ...], ...]

    def __str__(self) -> str:
        rows = (
            f"rank {rank}: " + " ".join(f"{task.phase.value}{task.microbatch}" for task in tasks)
            for rank, tasks in enumerate(self.ranks)
        )
        stages, microbatches = _count(self.num_stages, "stage"), _count(self.num_microbatches, "microbatch")
        return "\n".join([f"{self.name}: {stages}, {microbatches}", *rows])

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
        if not 0 <= stage < len(self.ranks):
            raise ScheduleError(f"{self.name}: no stage {stage}; choose one of 0..{len(self.ranks) - 1}")
        held = most = 0
        for task in self.ranks[stage]:
            held += 1 if task.phase is Phase.FORWARD else -1
            most = max(most, held)
        return most

    def order(self) -> tuple[tuple[Task, ...], ...]:
        """Tasks of all ranks in global steps: tasks of one step are independent of each other.

        In each step every rank runs its next task if the inputs of that task finished in an
        *earlier* step, so a step is one unit of time when all tasks last equally long. Read step
        by step, this is one linear order that agrees with every rank's own.

        Raises:
            ScheduleError: a task is missing, repeated, foreign or on the wrong rank, or the ranks
                wait for each other; the message names the tasks.
        """
        self._check_complete()
        position = [0] * len(self.ranks)
        finished: set[Task] = set()
        steps: list[tuple[Task, ...]] = []
        total = sum(map(len, self.ranks))
        while len(finished) < total:
            heads = (tasks[at] for tasks, at in zip(self.ranks, position, strict=True) if at < len(tasks))
            step = tuple(head for head in heads if all(task in finished for task in self.inputs(head)))
            if not step:
                raise ScheduleError(self._describe_deadlock(position, finished))
            for task in step:
                position[task.stage] += 1
            finished.update(step)
            steps.append(step)
        return tuple(steps)

    def check(self) -> None:
        """Verify that every task is there once, on its rank, and that the ranks never wait in a circle.

        Raises:
            ScheduleError: as :meth:`order`.
        """
        self.order()

    def _check_complete(self) -> None:
        if len(self.ranks) != self.num_stages:
            raise ScheduleError(
                f"{self.name}: {_count(self.num_stages, 'stage')} but task orders for "
                f"{_count(len(self.ranks), 'rank')}; give one order per stage"
            )
        seen: set[Task] = set()
        for rank, tasks in enumerate(self.ranks):
            for task in tasks:
                self._check_task(task, rank)
                if task in seen:
                    raise ScheduleError(f"{self.name}: task {task} is listed twice; run each task once")
                seen.add(task)
        wanted = product(Phase, range(self.num_stages), range(self.num_microbatches))
        missing = [task for task in (Task(*key) for key in wanted) if task not in seen]
        if missing:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            names = ", ".join(map(str, missing[:5]))
            raise ScheduleError(
                f"{self.name}: missing {names}{more}; every rank runs F and B of every microbatch"
            )

    def _check_task(self, task: Task, rank: int) -> None:
        if not (0 <= task.stage < self.num_stages and 0 <= task.microbatch < self.num_microbatches):
            raise ScheduleError(
                f"{self.name}: rank {rank} lists {task}, but stages are 0..{self.num_stages - 1} "
                f"and microbatches 0..{self.num_microbatches - 1}"
            )
        if task.stage != rank:
            raise ScheduleError(f"{self.name}: rank {rank} lists {task}, which belongs on rank {task.stage}")

    def _describe_deadlock(self, position: list[int], finished: set[Task]) -> str:
        """The circle of waits, read from the first stuck rank: each head task waits for another rank."""
        rank = next(r for r, at in enumerate(position) if at < len(self.ranks[r]))
        path: list[Task] = []
        waits: list[str] = []
        head = self.ranks[rank][position[rank]]
        while head not in path:
            path.append(head)
            wanted = next(task for task in self.inputs(head) if task not in finished)
            blocker = self.ranks[wanted.stage][position[wanted.stage]]
            behind = "" if wanted == blocker else f", which rank {wanted.stage} runs after {blocker}"
            waits.append(f"{head} waits for {wanted}{behind}")
            head = blocker
        circle = "; ".join(waits[path.index(head) :])
        return f"{self.name} deadlocks after {len(finished)} tasks: {circle}; reorder one of these ranks"


def _count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{plural}"
