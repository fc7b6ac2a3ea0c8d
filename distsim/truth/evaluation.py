"""What becomes of rows: each predicted in a process, with a limit: one that fails loses itself only."""

from __future__ import annotations

import math
import multiprocessing
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from distsim.errors import DistsimError
from distsim.plan import Plan
from distsim.truth.case import case_of
from distsim.truth.prediction import measure_of, predict, shown_peak
from distsim.truth.row import Row
from distsim.truth.score import mfu_seconds


@dataclass(frozen=True)
class Outcome:
    """What became of a row: a prediction, or why there is none; ``failed`` where distsim is at fault.

    ``seconds`` of a step, with 90 % between ``low`` and ``high`` (infinite where that is not known); those of
    the baselines, :func:`distsim.truth.score.mfu_seconds` and ``PredictedStep.best_shape``; ``peak`` in the
    unit, and of the kind, that the row says; ``layouts``: see :func:`layouts_of`; ``took``: seconds.
    """

    seconds: float = 0.0
    low: float = 0.0
    high: float = math.inf
    mfu_seconds: float = 0.0
    best_shape: float = 0.0
    peak: float = 0.0
    fits: bool = True
    layouts: tuple[str, ...] = ()
    missing: str = ""
    failed: str = ""
    took: float = 0.0
    left_out: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()

    @property
    def predicted(self) -> bool:
        """Whether there is a prediction."""
        return not (self.missing or self.failed)


def layouts_of(plan: Plan) -> tuple[str, ...]:
    """Return the groups of layouts that a plan is in: tp, pp or both, and zero, cp, ep; else dp only.

    >>> layouts_of(Plan.parse("dp=2,tp=2,pp=2,zero=1")), layouts_of(Plan.parse("dp=2"))
    (('tp+pp', 'zero'), ('dp only',))
    """
    used = {
        "+".join([axis for axis in ("tp", "pp") if getattr(plan, axis) > 1]): plan.tp * plan.pp > 1,
        **{"zero": plan.zero > 0, "cp": plan.cp > 1, "ep": plan.ep > 1},
    }
    return tuple([name for name, is_used in used.items() if is_used]) or ("dp only",)


def outcome_of(row: Row, limit: float) -> Outcome:
    """Return what becomes of a row within so many seconds; raises nothing that a row can cause."""
    start = time.perf_counter()
    alarm = signal.signal(signal.SIGALRM, _late)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        return _predicted(row, start)
    except DistsimError as error:
        return Outcome(missing=str(error), took=time.perf_counter() - start)
    except TimeoutError:
        return Outcome(failed=f"not done within {limit:g} s", took=limit)
    except Exception as error:  # a row must not cost the others
        return Outcome(failed=f"{type(error).__name__}: {error}"[:300], took=time.perf_counter() - start)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)


def _predicted(row: Row, start: float) -> Outcome:
    case = case_of(row)
    kind, unit = measure_of(row)
    step = predict(case)
    low, high, _ = step.interval or (0.0, math.inf, 1.0)
    return Outcome(
        *(step.seconds, low, high, mfu_seconds(case), step.best_shape),
        *(shown_peak(step.peak, kind, step.device) / unit, step.fits, layouts_of(case.plan)),
        left_out=case.left_out,
        assumed=case.assumed,
        took=time.perf_counter() - start,
    )


def _late(number: int, frame: object) -> None:
    raise TimeoutError


def evaluated(rows: Sequence[Row], workers: int, limit: float) -> Iterator[tuple[int, Outcome]]:
    """Yield the place of each row with what becomes of it, as they come, over so many processes.

    A process that dies takes the rows with it that others had or were waiting for: those that may have run
    are tried again, each in a process of its own, so that only the one that kills it is lost.
    """
    if workers == 1:
        for place, row in enumerate(rows):
            yield place, outcome_of(row, limit)
        return
    # Rows of a model lie side by side, so that a worker finds what the one before made.
    alike = ("model", "seq", "global_batch")
    waiting = sorted(range(len(rows)), key=lambda place: [rows[place].get(name, "") for name in alike])
    while waiting:
        died: list[int] = []
        for place, outcome in _shared(rows, waiting, workers, limit):
            if outcome is None:
                died.append(place)
            else:
                yield place, outcome
        left = [place for place in waiting if place in set(died)]
        suspects, waiting = left[: 2 * workers], left[2 * workers :]
        for place in suspects:
            ((_, outcome),) = _shared(rows, [place], 1, limit)
            yield place, outcome or Outcome(failed="the process died, perhaps for want of memory")


def _shared(
    rows: Sequence[Row], places: Sequence[int], workers: int, limit: float
) -> Iterator[tuple[int, Outcome | None]]:
    """Yield what becomes of some rows over so many processes; None for all that are left when one dies."""
    before = set(multiprocessing.active_children())
    # Processes of their own from the start: one that is forked has the locks of threads that it lacks.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(places)), context, _leave_interrupts) as pool:
        try:
            under_way = {pool.submit(outcome_of, rows[place], limit): place for place in places}
            for future in as_completed(under_way):
                try:
                    yield under_way[future], future.result()
                except BrokenProcessPool:
                    yield under_way[future], None
        except BaseException:  # Ctrl-C, or who asks wants no more: nobody waits for rows that run
            for process in set(multiprocessing.active_children()) - before:
                process.terminate()
            raise


def _leave_interrupts() -> None:
    """Leave Ctrl-C to the process that waits for this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
