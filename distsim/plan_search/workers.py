"""Who tries units of plans: this process, or several of their own; what comes out does not depend on it."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from distsim.errors import SimulationError
from distsim.plan import Plan
from distsim.plan_search.evaluation import PlanEvaluator, SearchProblem, Standing
from distsim.plan_search.journal import JournalWriter
from distsim.plan_search.trial import PlanTrial


@dataclass(frozen=True, eq=False)
class PlanUnit:
    """Plans that share a division, so one process tries them; what is known of some is not tried again."""

    plans: tuple[Plan, ...]
    known: Mapping[str, PlanTrial]


class Workers:
    """Tries units of a problem in so many processes; what is tried is appended to a journal.

    One is this process. Units go to the process that is free; each starts from the same standing, so that
    what comes out is the same whoever tries it.
    """

    def __init__(
        self, problem: SearchProblem, count: int, journal: Path | None, evaluator: PlanEvaluator
    ) -> None:
        if count < 1:
            raise SimulationError(f"{count} workers: a search takes at least one process")
        self._problem, self._journal = problem, journal
        self._local = _UnitRunner(evaluator, journal) if count == 1 else None
        # Processes of their own from the start: one that is forked has the locks of threads that it lacks.
        self._before = set(multiprocessing.active_children())
        self._context = multiprocessing.get_context("spawn")
        self._pools = [] if count == 1 else [self._pool() for _ in range(count)]

    def run(self, units: Sequence[PlanUnit], standing: Standing) -> Iterator[tuple[int, list[PlanTrial]]]:
        """Yield the place of each unit with what became of its plans, as they come."""
        if self._local is not None:
            for place, unit in enumerate(units):
                yield place, self._local.run(unit, standing.copy())
            return
        waiting = list(reversed(range(len(units))))
        free = list(range(len(self._pools)))
        under_way: dict[Future[list[PlanTrial]], tuple[int, int]] = {}
        died: set[int] = set()
        while waiting or under_way:
            while waiting and free:
                place, worker = waiting.pop(), free.pop(0)
                under_way[self._pools[worker].submit(_run_unit, units[place], standing)] = place, worker
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                place, worker = under_way.pop(future)
                free.append(worker)
                try:
                    yield place, future.result()
                except BrokenProcessPool:
                    self._replace(worker, units[place], place in died)
                    died.add(place)
                    waiting.append(place)

    def _replace(self, worker: int, unit: PlanUnit, again: bool) -> None:
        """Put a new process in the place of one that died; its unit is tried once more, and no more."""
        self._pools[worker].shutdown(wait=False)
        if again:
            raise SimulationError(
                f"a process died twice at plans like {unit.plans[0]}, perhaps for want of memory; use fewer "
                "--workers, or leave such plans out"
            )
        self._pools[worker] = self._pool()

    def _pool(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, self._context, _begin, (self._problem, self._journal))

    def close(self) -> None:
        """Let the processes go; what is under way is not waited for."""
        if self._local is not None:
            self._local.close()
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - self._before:
            process.terminate()


class _UnitRunner:
    """Tries units in this process."""

    def __init__(self, evaluator: PlanEvaluator, journal: Path | None) -> None:
        self.evaluator = evaluator
        self.writer = None if journal is None else JournalWriter(journal)

    def run(self, unit: PlanUnit, standing: Standing) -> list[PlanTrial]:
        found: list[PlanTrial] = []
        for trial in self.evaluator.trials(unit.plans, standing, unit.known):
            found.append(trial)
            if self.writer is not None and not trial.discarded and trial.text not in unit.known:
                self.writer.append(trial)
        return found

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


_RUNNER: list[_UnitRunner] = []
"""That of a process that was started for it."""


def _begin(problem: SearchProblem, journal: Path | None) -> None:
    """Begin a process of workers; Ctrl-C is left to the one that waits for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _RUNNER[:] = [_UnitRunner(PlanEvaluator(problem), journal)]


def _run_unit(unit: PlanUnit, standing: Standing) -> list[PlanTrial]:
    return _RUNNER[0].run(unit, standing)
