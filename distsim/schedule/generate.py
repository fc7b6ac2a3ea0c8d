"""The pipeline schedules by name: functions of the numbers of stages and of microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from distsim.errors import ScheduleError
from distsim.schedule.task import Phase, Schedule, Task


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards (GPipe, Huang et al. 2019).

    Backwards run in the order of the forwards, as in figure 3 of Narayanan et al. 2021; figure 2c
    of Huang et al. draws them reversed, with the same makespan and memory. With equal stages the
    bubble is `(p - 1) / (m + p - 1)` of the step and every stage holds `m` microbatches.

    Raises:
        ScheduleError: a number is not an integer of at least 1.

    >>> print(gpipe(2, 2))
    gpipe: 2 stages, 2 microbatches
    rank 0: F0 F1 B0 B1
    rank 1: F0 F1 B0 B1
    """
    _check_sizes("gpipe", num_stages, num_microbatches)
    return _make("gpipe", num_stages, num_microbatches, lambda stage: num_microbatches)


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B, that is PipeDream-flush: one forward, one backward, and a flush per step.

    Narayanan et al. 2021 ("Efficient large-scale language model training on GPU clusters using
    Megatron-LM", section 2.2): stage `s` warms up with `min(m, p - s - 1)` forwards, then
    alternates a forward and a backward, then runs the backwards that remain. The bubble is that
    of :func:`gpipe`, but stage `s` holds `min(m, p - s)` microbatches. The weights are those of
    the step's start throughout: asynchronous PipeDream with its stashed weights is another
    schedule.

    Raises:
        ScheduleError: a number is not an integer of at least 1.

    >>> print(one_f_one_b(3, 4))
    1f1b: 3 stages, 4 microbatches
    rank 0: F0 F1 F2 B0 F3 B1 B2 B3
    rank 1: F0 F1 B0 F2 B1 F3 B2 B3
    rank 2: F0 B0 F1 B1 F2 B2 F3 B3
    """
    _check_sizes("1f1b", num_stages, num_microbatches)
    return _make(
        "1f1b", num_stages, num_microbatches, lambda stage: min(num_microbatches, num_stages - stage - 1)
    )


SCHEDULES: Mapping[str, Callable[[int, int], Schedule]] = MappingProxyType(
    {"1f1b": one_f_one_b, "gpipe": gpipe}
)
"""Schedules by the name that a plan uses, each made from (num_stages, num_microbatches)."""


def schedule(name: str, num_stages: int, num_microbatches: int) -> Schedule:
    """Make the schedule called `name` (a key of `SCHEDULES`).

    Raises:
        ScheduleError: there is no such schedule, or a number is not an integer of at least 1.

    >>> schedule("1f1b", 4, 8).in_flight(0)
    4
    """
    if name not in SCHEDULES:
        raise ScheduleError(f"unknown schedule {name!r}; choose one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name](num_stages, num_microbatches)


def _make(name: str, num_stages: int, num_microbatches: int, warm_up: Callable[[int], int]) -> Schedule:
    """Both schedules are one shape: `warm_up(stage)` forwards, then pairs, then what remains."""
    ranks = tuple(_rank(stage, num_microbatches, warm_up(stage)) for stage in range(num_stages))
    return Schedule(name, num_stages, num_microbatches, ranks)


def _rank(stage: int, num_microbatches: int, warm_up: int) -> tuple[Task, ...]:
    forwards = [Task(Phase.FORWARD, stage, microbatch) for microbatch in range(num_microbatches)]
    backwards = [Task(Phase.BACKWARD, stage, microbatch) for microbatch in range(num_microbatches)]
    steady = num_microbatches - warm_up
    pairs = (task for pair in zip(forwards[warm_up:], backwards[:steady], strict=True) for task in pair)
    return (*forwards[:warm_up], *pairs, *backwards[steady:])


def _check_sizes(name: str, num_stages: object, num_microbatches: object) -> None:
    for noun, number in (("num_stages", num_stages), ("num_microbatches", num_microbatches)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ScheduleError(f"{name}: {noun}={number!r} must be an integer of at least 1")
