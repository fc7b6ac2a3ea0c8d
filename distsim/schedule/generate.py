"""The pipeline schedules by name: functions of the numbers of stages and of microbatches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from distsim.errors import ScheduleError
from distsim.schedule.table import Schedule


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
    return _make("gpipe", num_stages, num_microbatches, _gpipe_warm_up)


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
    return _make("1f1b", num_stages, num_microbatches, _one_f_one_b_warm_up)


SCHEDULES: Mapping[str, Callable[[int, int], Schedule]] = MappingProxyType(
    {"1f1b": one_f_one_b, "gpipe": gpipe}
)
"""Schedules by the name that a plan uses, each made from (num_stages, num_microbatches)."""


def schedule(name: str, num_stages: int, num_microbatches: int) -> Schedule:
    """Return the schedule called `name` (a key of `SCHEDULES`); asked for again, the same object.

    Raises:
        ScheduleError: there is no such schedule, or a number is not an integer of at least 1.

    >>> schedule("1f1b", 4, 8).in_flight(0)
    4
    """
    if name not in SCHEDULES:
        raise ScheduleError(f"unknown schedule {name!r}; choose one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name](num_stages, num_microbatches)


def _gpipe_warm_up(num_stages: int, num_microbatches: int) -> list[int]:
    return [num_microbatches] * num_stages


def _one_f_one_b_warm_up(num_stages: int, num_microbatches: int) -> list[int]:
    return [min(num_microbatches, num_stages - stage - 1) for stage in range(num_stages)]


@functools.lru_cache(1024)
def _make(
    name: str, num_stages: int, num_microbatches: int, warm_up: Callable[[int, int], list[int]]
) -> Schedule:
    """Both schedules are one shape: per stage `warm_up` forwards, then pairs, then what remains."""
    m = num_microbatches
    codes = np.full((num_stages, 2 * m, 2), -1, np.int64)
    for stage, warm in enumerate(warm_up(num_stages, m)):
        row = codes[stage, :, 0]
        forwards = 4 * (num_stages * np.arange(m) + stage)
        backwards = forwards + 1
        row[:warm] = forwards[:warm]
        row[warm : 2 * m - warm : 2] = forwards[warm:]
        row[warm + 1 : 2 * m - warm : 2] = backwards[: m - warm]
        row[2 * m - warm :] = backwards[m - warm :]
    return Schedule.from_codes(name, num_stages, m, list(codes))


def _check_sizes(name: str, num_stages: object, num_microbatches: object) -> None:
    for noun, number in (("num_stages", num_stages), ("num_microbatches", num_microbatches)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ScheduleError(f"{name}: {noun}={number!r} must be an integer of at least 1")
