"""Why a schedule cannot run: what is missing or foreign, and who waits for whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

from distsim.errors import ScheduleError
from distsim.schedule.task import Phase, Task

Ranks = tuple[tuple[Task, ...], ...]


def check_complete(name: str, num_stages: int, num_microbatches: int, ranks: Ranks) -> None:
    """Verify that every task is there once, on the rank of its stage; raise :class:`ScheduleError`."""
    if len(ranks) != num_stages:
        raise ScheduleError(
            f"{name}: {count(num_stages, 'stage')} but task orders for "
            f"{count(len(ranks), 'rank')}; give one order per stage"
        )
    seen: set[Task] = set()
    for rank, tasks in enumerate(ranks):
        for task in tasks:
            if not (0 <= task.stage < num_stages and 0 <= task.microbatch < num_microbatches):
                raise ScheduleError(
                    f"{name}: rank {rank} lists {task}, but stages are 0..{num_stages - 1} "
                    f"and microbatches 0..{num_microbatches - 1}"
                )
            if task.stage != rank:
                raise ScheduleError(f"{name}: rank {rank} lists {task}, which belongs on rank {task.stage}")
            if task in seen:
                raise ScheduleError(f"{name}: task {task} is listed twice; run each task once")
            seen.add(task)
    wanted = product(Phase, range(num_stages), range(num_microbatches))
    missing = [task for task in (Task(*key) for key in wanted) if task not in seen]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        names = ", ".join(map(str, missing[:5]))
        raise ScheduleError(f"{name}: missing {names}{more}; every rank runs F and B of every microbatch")


def deadlock(
    name: str, ranks: Ranks, position: Sequence[int], inputs: Callable[[Task], tuple[Task, ...]]
) -> ScheduleError:
    """Return the error that names the circle of waits when rank ``r`` is stuck after ``position[r]`` tasks.

    It is read from the first stuck rank: each head task waits for another rank.
    """
    finished = {task for tasks, at in zip(ranks, position, strict=True) for task in tasks[:at]}
    rank = next(r for r, at in enumerate(position) if at < len(ranks[r]))
    path: list[Task] = []
    waits: list[str] = []
    head = ranks[rank][position[rank]]
    while head not in path:
        path.append(head)
        wanted = next(task for task in inputs(head) if task not in finished)
        blocker = ranks[wanted.stage][position[wanted.stage]]
        behind = "" if wanted == blocker else f", which rank {wanted.stage} runs after {blocker}"
        waits.append(f"{head} waits for {wanted}{behind}")
        head = blocker
    circle = "; ".join(waits[path.index(head) :])
    return ScheduleError(
        f"{name} deadlocks after {len(finished)} tasks: {circle}; reorder one of these ranks"
    )


def count(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural where it needs one."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{plural}"
