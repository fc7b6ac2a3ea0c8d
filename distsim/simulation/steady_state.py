"""The steady state of a pipeline without a flush, whose next step follows at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from distsim.program.program import Program
from distsim.schedule import FLUSH, Schedule, longer
from distsim.schedule.refusals import count

_FULL = 8
"""Microbatches a stage after which a pipeline is taken to run in its steady state."""


def microbatch_time(order: Schedule, step_time: Callable[[int], float]) -> float | None:
    """Return what each further microbatch takes once the pipeline is full; None for a step with a flush.

    ``step_time(n)`` is what n microbatches take from an empty pipeline to an empty one. It is asked for n and
    for 2 n, n being eight a stage or more, and the difference is shared by the n that are more: filling and
    draining are in both. That is the mean over n microbatches. Where the pipeline repeats itself only every k
    of them and k does not divide n, it is off by a part of one period in n: up to 0.3 % was seen.
    """
    if order.weights == FLUSH:
        return None
    more = _whole_batches(order, _FULL * order.num_stages)
    return (step_time(2 * more) - step_time(more)) / more


def full_schedule(order: Schedule) -> Schedule:
    """Return a schedule long enough for all that each stage holds in the steady state; itself if it is.

    Without a flush that is activations of as many microbatches as are ever in flight, and as many versions of
    the weights, all of which are there after two microbatches a stage and two updates more. Raises
    :class:`ScheduleError` for one that is shorter and not of the catalogue.
    """
    if order.weights == FLUSH:
        return order
    least = _whole_batches(order, 2 * order.num_stages) + 2 * order.weights.update_every
    return order if order.num_microbatches >= least else longer(order, least)


def full_program(program: Program) -> Program:
    """Return a program over enough microbatches for the memory that it needs in the steady state.

    Raises :class:`ScheduleError` as :func:`full_schedule`.
    """
    full = full_schedule(program.schedule)
    return program if full is program.schedule else replace(program, schedule=full)


def short_step_note(order: Schedule) -> str:
    """Return what to know of a step too short for all that a pipeline without a flush holds; "" if it is not.

    Raises :class:`ScheduleError` as :func:`full_schedule`.
    """
    full = full_schedule(order)
    if full is order:
        return ""
    for stage in range(order.num_stages):
        texts = [
            f"{count(each.versions_of(stage), 'version')} of its weights and activations of "
            f"{count(each.in_flight_of(stage), 'microbatch')}"
            for each in (order, full)
        ]
        if texts[0] != texts[1]:
            short = (
                f"in a step of {count(order.num_microbatches, 'microbatch')} alone stage {stage} would hold"
            )
            return f"{short} {texts[0]}, and {texts[1]} once the pipeline runs on"
    return ""


def _whole_batches(order: Schedule, least: int) -> int:
    """Return the fewest microbatches from ``least`` that are a whole number of updates."""
    every = order.weights.update_every
    return -(-least // every) * every
