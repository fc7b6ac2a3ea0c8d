"""The steady state: steps that follow each other, and a pipeline without a flush.

With a flush each rank goes on to the next step when it has ended its own part of this one: nothing but the
messages and collectives of the program holds it up. So a step whose ranks begin one after the other and end
so, as that of a zero-bubble schedule (Qi et al. 2024, "Zero bubble pipeline parallelism", ICLR, section 4),
overlaps the next one, and steps follow each other faster than one takes. If ``A[i, j]`` is by how much rank i
ends later than rank j began, x(k + 1) = A x(k) in (max, +) are the beginnings of step k + 1 by those of step
k, and the period is the eigenvalue of A: the greatest mean of its circuits (Baccelli, Cohen, Olsder and
Quadrat, "Synchronization and Linearity", 1992, theorem 3.23).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np

from distsim.program.program import Program
from distsim.schedule import FLUSH, Schedule, longer
from distsim.schedule.refusals import count
from distsim.simulation.memory.program_memory import ProgramMemory, dearer_note, program_memory
from distsim.simulation.memory.timeline import TimedStep, larger_over_time
from distsim.simulation.tasks.templates import Floats
from distsim.simulation.tasks.timeline import Timeline

_FULL = 8
"""Microbatches a stage after which a pipeline is taken to run in its steady state."""


def step_period(timeline: Timeline) -> float:
    """Return the seconds from a step to the next where each rank goes on when it has ended its own part.

    Exact where the seconds of tasks are. Of tasks whose seconds are not fixed (jitter, shared links) it is by
    those of this step, and nothing is known of links that two steps share.
    """
    ends = timeline.ends
    if len(ends) == 0 or ends.min() == ends.max():
        return timeline.step_time
    gains = timeline.ends_after(ends) - ends
    if gains.min() == gains.max():
        return float(gains[0])
    # No circuit has a greater mean than what any beginnings lead to at most; is that of one rank as great?
    rank = int(gains.argmax())
    column = step_column(timeline, rank)
    if column.min() >= 0 and (timeline.ends_after(column) - column).max() <= column[rank]:
        return float(column[rank])
    return cycle_time(np.column_stack([step_column(timeline, each) for each in range(len(ends))]))


def step_column(timeline: Timeline, rank: int) -> Floats:
    """Return by how much each rank class ends later than one began; -inf where it does not wait for it."""
    begins = np.zeros(len(timeline.ends))
    begins[rank] = late = 2 * timeline.step_time  # what does not wait for it has ended before
    ends = timeline.ends_after(begins)
    return np.where(ends < late, -np.inf, ends - late)


def cycle_time(matrix: Floats) -> float:
    """Return the eigenvalue of a matrix in (max, +), the greatest mean of the circuits of its graph.

    By Karp 1978, "A characterization of the minimum cycle mean in a digraph", from all nodes at once. What
    waits for nobody else waits for itself.

    >>> cycle_time(np.array([[1.0, 5.0], [2.0, -np.inf]]))  # 5 to the other node and 2 back
    3.5
    """
    count = len(matrix)
    matrix = np.maximum(matrix, np.where(np.eye(count, dtype=np.bool_), 0.0, -np.inf))
    if matrix.diagonal().max() == matrix.max():
        return float(matrix.max())
    walks = np.zeros((count + 1, count))  # the longest of so many steps that ends at each node
    for steps in range(count):
        walks[steps + 1] = (matrix + walks[steps]).max(axis=1)
    means = (walks[count] - walks[:count]) / np.arange(count, 0, -1)[:, None]
    return float(means.min(axis=0).max())


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


class ProgramStep(TimedStep, Protocol):
    """What is asked of the simulation of a program (:class:`distsim.simulation.Simulation`)."""

    @property
    def longer(self) -> Callable[[int], TimedStep] | None:
        """Simulates the program over another number of microbatches."""
        ...


def memory_of_ranks(step: ProgramStep) -> ProgramMemory | None:
    """Return the memory in use on each pipeline rank in the steady state; None for a function."""
    program = step.simulated
    return step_memory(program_memory(full_program(program)), step) if isinstance(program, Program) else None


def step_memory(memory: ProgramMemory, step: ProgramStep) -> ProgramMemory:
    """Return the memory of the program of a step, given in the order of its calls (of :func:`full_program`).

    On ranks of a schedule with kinds that copy to or from the host beside computation it is that over
    simulated time, where that is more (:func:`larger_over_time`); the step is written out for it.
    """
    order = memory.program.schedule
    if not any(kind.runs.stream for kind in order.kinds):
        return memory
    known = isinstance(step.simulated, Program) and step.simulated.schedule is order
    run = None if known else step.longer
    return larger_over_time(memory, step if run is None else run(order.num_microbatches))


def program_notes(program: Program) -> tuple[str, ...]:
    """Return what a user should know of a program and of its memory."""
    short = short_step_note(program.schedule)
    given = [f"{short}, as memory is given"] if short else []
    return (*program.notes, *dearer_note(program, full_program), *given)


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
