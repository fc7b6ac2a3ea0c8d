"""Who tries units of plans: this process, several of their own, or those of a Dask cluster.

What comes out does not depend on it: each unit starts from the same standing, whoever tries it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any, Protocol
from uuid import uuid4

from distsim.cache import fewer_collections
from distsim.errors import SimulationError
from distsim.plan import Plan
from distsim.plan_search.evaluation import PlanEvaluator, SearchProblem, Standing
from distsim.plan_search.journal import JournalWriter, distsim_version
from distsim.plan_search.trial import PlanTrial
from distsim.schedule import SCHEDULES, Generator, register_schedule

Schedules = Mapping[str, Generator]
"""Those that were registered where a search began, by name."""
SharedProblem = tuple[SearchProblem, Schedules]
"""What a process is given to try units of."""


@dataclass(frozen=True, eq=False)
class PlanUnit:
    """Plans that share a division, so one process tries them; what is known of some is not tried again.

    Of those that turn out to be expected above ``until`` none is tried now. ``division`` is what they share.
    """

    plans: tuple[Plan, ...]
    known: Mapping[str, PlanTrial]
    until: float
    division: Hashable


def _nothing() -> None:
    """Close nothing."""


@dataclass(frozen=True, eq=False)
class RemoteWorkers:
    """Workers behind an executor of :mod:`concurrent.futures`, each with a distsim of its own.

    ``share`` hands bytes on to all of them, and returns what stands for these in a call; ``died`` is what a
    call raises whose worker died more often than the executor forgives.
    """

    executor: Executor
    share: Callable[[bytes], Any] = bytes
    died: tuple[type[BaseException], ...] = (BrokenExecutor,)
    close: Callable[[], None] = _nothing


class Workers(Protocol):
    """Tries units of a problem; what is tried is appended to a journal."""

    def run(self, units: Sequence[PlanUnit], standing: Standing) -> Iterator[tuple[int, list[PlanTrial]]]:
        """Yield the place of each unit with what became of its plans, as they come."""
        ...

    def close(self) -> None:
        """Let the workers go; what is under way is not waited for."""
        ...


PLANS_OF_A_PROCESS = 50
"""So many plans take about as long as a process that tries some of them takes to start."""


def processes_for(plans: int) -> int:
    """Return how many processes are worth starting for so many plans, at most one a core."""
    return max(1, min(os.cpu_count() or 1, plans // PLANS_OF_A_PROCESS))


_GUARD = (
    'put what starts the search under `if __name__ == "__main__":`, as each process imports the script it is '
    "in, or search with one worker"
)


def check_started(workers: int | RemoteWorkers) -> None:
    """Check that this process can start so many; raise :class:`SimulationError` if a search is starting it.

    So it is where a script searches with several processes as soon as it is imported, by each of them too.
    """
    starting = getattr(multiprocessing.current_process(), "_inheriting", False)
    if starting and not isinstance(workers, RemoteWorkers) and workers > 1:
        raise SimulationError(f"a process of a search searches itself before it has started: {_GUARD}")


def workers_for(
    problem: SearchProblem,
    given: int | RemoteWorkers,
    journal: Path | None,
    evaluator: PlanEvaluator,
    schedules: Schedules,
) -> Workers:
    """Return so many processes as workers, one being this one, or those behind an executor.

    Raises :class:`SimulationError` for less than one, and for ``schedules`` that were registered here and
    cannot be handed on to other processes.
    """
    if isinstance(given, RemoteWorkers):
        _check_importable(schedules, elsewhere=True)
        return _RemoteUnits((problem, schedules), given, journal)
    if given < 1:
        raise SimulationError(f"{given} workers: a search takes at least one process")
    if given == 1:
        return _UnitRunner(evaluator, journal)
    _check_importable(schedules, elsewhere=False)
    return _Processes((problem, schedules), given, journal)


def _check_importable(schedules: Schedules, elsewhere: bool) -> None:
    """Check that other processes, perhaps on other machines, find what makes schedules by its name."""
    started = hasattr(sys.modules["__main__"], "__file__") and not elsewhere
    for name, generator in schedules.items():
        try:
            found = started or generator.make.__module__ != "__main__"
            pickle.dumps(generator)
        except (AttributeError, TypeError, pickle.PicklingError):
            found = False
        if not found:
            raise SimulationError(
                f"the schedule {name!r} was registered in this process, and others cannot import what "
                "makes it: define that at the top of a module of its own, or search with one worker"
            )


def _evaluator(problem: SearchProblem, schedules: Schedules) -> PlanEvaluator:
    """Return the evaluator of a process that lacks what was registered where the search began."""
    for name, generator in schedules.items():
        if SCHEDULES.get(name) != generator:
            register_schedule(name, generator)
    return PlanEvaluator(problem)


class _UnitRunner:
    """Tries units in this process."""

    def __init__(self, evaluator: PlanEvaluator, journal: Path | None) -> None:
        self.evaluator = evaluator
        self.writer = None if journal is None else JournalWriter(journal)

    def run(self, units: Sequence[PlanUnit], standing: Standing) -> Iterator[tuple[int, list[PlanTrial]]]:
        for place, unit in enumerate(units):
            yield place, self.trials(unit, standing.copy())

    @fewer_collections()
    def trials(self, unit: PlanUnit, standing: Standing) -> list[PlanTrial]:
        """Return what becomes of the plans of a unit."""
        found: list[PlanTrial] = []
        for trial in self.evaluator.trials(unit.plans, standing, unit.known, unit.until):
            found.append(trial)
            if self.writer is not None:
                _append(self.writer, trial, unit)
        return found

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


def _append(writer: JournalWriter, trial: PlanTrial, unit: PlanUnit) -> None:
    """Write a trial, but one that was discarded, or is in the journal."""
    if not trial.discarded and trial.text not in unit.known:
        writer.append(trial)


# --- processes of one's own ---------------------------------------------------------------------------


class _Processes:
    """Tries units in processes, each in the one that is free; each writes to the journal what it tried."""

    def __init__(self, problem: SharedProblem, count: int, journal: Path | None) -> None:
        self._journal = journal
        # Processes of their own from the start: one that is forked has the locks of threads that it lacks.
        self._before = set(multiprocessing.active_children())
        self._context = multiprocessing.get_context("spawn")
        # In a file: a process that dies before it has read all that it is given would be waited for.
        self._folder = Path(mkdtemp(prefix="distsim-"))
        (self._folder / _PROBLEM).write_bytes(pickle.dumps(problem))
        self._pools = [self._pool() for _ in range(count)]
        self._started = [set[BaseProcess]() for _ in range(count)]
        self._last: dict[Hashable, int] = {}  # the process that has what a division shares

    def run(self, units: Sequence[PlanUnit], standing: Standing) -> Iterator[tuple[int, list[PlanTrial]]]:
        # The longest first: no process is left with one when the others are done.
        waiting = sorted(range(len(units)), key=lambda place: len(units[place].plans))
        free = list(range(len(self._pools)))
        under_way: dict[Future[list[PlanTrial]], tuple[int, int]] = {}
        died: set[int] = set()
        while waiting or under_way:
            while waiting and free:
                worker = free.pop(0)
                place = self._next(waiting, units, worker)
                under_way[self._submit(worker, units[place], standing)] = place, worker
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                place, worker = under_way.pop(future)
                free.append(worker)
                try:
                    yield place, future.result()
                except BrokenProcessPool:
                    self._pools[worker].shutdown(wait=False)
                    if self._none_starts(worker, place in died):
                        raise SimulationError(
                            f"a process of a search ended before it had started: {_GUARD}"
                        ) from None
                    if place in died:
                        raise _died(units[place], "twice") from None
                    self._pools[worker] = self._pool()
                    died.add(place)
                    waiting.append(place)

    def _submit(self, worker: int, unit: PlanUnit, standing: Standing) -> Future[list[PlanTrial]]:
        """Have a process try a unit, or another one in its place if it died while it had nothing to do."""
        before = set(multiprocessing.active_children())
        try:
            future = self._pools[worker].submit(_run_unit, unit, standing)
        except BrokenProcessPool:
            self._pools[worker].shutdown(wait=False)
            self._pools[worker] = self._pool()
            future = self._pools[worker].submit(_run_unit, unit, standing)
        self._started[worker] |= set(multiprocessing.active_children()) - before
        return future

    def _none_starts(self, worker: int, again: bool) -> bool:
        """Whether no process has begun to try plans, and the last one of a worker ended by itself, or died
        ``again``: so it is not for want of memory, but for what each imports."""
        if any(self._folder.glob(f"{_BEGAN}*")):
            return False
        return again or any((process.exitcode or 0) > 0 for process in self._started[worker])

    def _next(self, waiting: list[int], units: Sequence[PlanUnit], worker: int) -> int:
        """Take out of the places of units that wait what a process had last, or else what no other had."""
        owners = [self._last.get(units[place].division, worker) for place in waiting]
        own = [place for place, owner in zip(waiting, owners, strict=True) if owner == worker]
        place = (own or waiting)[-1]
        waiting.remove(place)
        self._last[units[place].division] = worker
        return place

    def _pool(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, self._context, _begin, (self._folder, self._journal))

    def close(self) -> None:
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - self._before:
            process.terminate()
        rmtree(self._folder, ignore_errors=True)


def _died(unit: PlanUnit, often: str) -> SimulationError:
    return SimulationError(
        f"a process died {often} at plans like {unit.plans[0]}, perhaps for want of memory; use fewer "
        "workers, or leave such plans out"
    )


_RUNNER: list[_UnitRunner] = []
"""That of a process that was started for it."""


_PROBLEM, _BEGAN = "problem", "began"
"""Files of a search: what processes are given to try units of, and one for each that has started."""


def _begin(folder: Path, journal: Path | None) -> None:
    """Begin a process of workers; Ctrl-C is left to the one that waits for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    (folder / f"{_BEGAN}{os.getpid()}").touch()
    problem: SharedProblem = pickle.loads((folder / _PROBLEM).read_bytes())
    _RUNNER[:] = [_UnitRunner(_evaluator(*problem), journal)]


def _run_unit(unit: PlanUnit, standing: Standing) -> list[PlanTrial]:
    return _RUNNER[0].trials(unit, standing)


# --- an executor --------------------------------------------------------------------------------------


class _RemoteUnits:
    """Tries units behind an executor; a unit is written to the journal when it comes back."""

    def __init__(self, problem: SharedProblem, remote: RemoteWorkers, journal: Path | None) -> None:
        self._remote, self._token = remote, uuid4().hex
        self._under_way: dict[Future[list[PlanTrial]], int] = {}
        self._problem = remote.share(zlib.compress(pickle.dumps(problem)))
        self._writer = None if journal is None else JournalWriter(journal)

    def run(self, units: Sequence[PlanUnit], standing: Standing) -> Iterator[tuple[int, list[PlanTrial]]]:
        submit = self._remote.executor.submit
        under_way = self._under_way
        under_way |= {
            submit(_run_remotely, self._token, self._problem, unit, standing): place
            for place, unit in enumerate(units)
        }
        while under_way:
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                place = under_way.pop(future)
                try:
                    trials = future.result()
                except self._remote.died:
                    raise _died(units[place], "again and again") from None
                if self._writer is not None:
                    for trial in trials:
                        _append(self._writer, trial, units[place])
                yield place, trials

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        for future in self._under_way:
            future.cancel()


_REMOTE: dict[str, _UnitRunner] = {}
"""The one of the last search that this process has worked for, by its token."""

_ONE_AT_A_TIME = threading.Lock()
"""Workers may have several threads; what an evaluator keeps is of one."""


def _run_remotely(token: str, problem: bytes, unit: PlanUnit, standing: Standing) -> list[PlanTrial]:
    with _ONE_AT_A_TIME:
        if token not in _REMOTE:
            _REMOTE.clear()
            _REMOTE[token] = _UnitRunner(_evaluator(*pickle.loads(zlib.decompress(problem))), None)
        return _REMOTE[token].trials(unit, standing.copy())


def dask_workers(address: str, seconds: float = 30.0) -> RemoteWorkers:
    """Return the workers of the Dask cluster whose scheduler has this address, as ``tcp://host:8786``.

    A worker that dies is Dask's to replace: its units are tried by others. Raises :class:`SimulationError`
    without the package ``distributed``, where no worker answers within ``seconds``, and where one has no
    distsim or another version.
    """
    try:
        distributed = import_module("distributed")
    except ImportError:
        raise SimulationError("a Dask cluster takes Dask: pip install 'distsim[dask]'") from None
    try:
        client = distributed.Client(address, timeout=seconds, set_as_default=False)
    except (OSError, ValueError) as error:
        raise SimulationError(
            f"no Dask scheduler answers at {address} ({error}); start one with `dask scheduler` and workers "
            "with `dask worker ADDRESS`"
        ) from None
    try:
        client.wait_for_workers(1, timeout=seconds)
        own, found = distsim_version(), {str(version) for version in client.run(distsim_version).values()}
    except TimeoutError:
        client.close()
        raise SimulationError(
            f"the Dask scheduler at {address} has no workers; start some with `dask worker {address}`"
        ) from None
    except ImportError as error:
        client.close()
        raise SimulationError(f"workers of {address} lack distsim: install it there ({error})") from None
    if found != {own}:
        client.close()
        raise SimulationError(f"workers of {address} have distsim {', '.join(sorted(found))}, not {own}")
    return RemoteWorkers(
        client.get_executor(pure=False),
        lambda data: client.scatter(data, broadcast=True),
        (distributed.KilledWorker,),
        client.close,
    )
