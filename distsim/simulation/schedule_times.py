"""When the actions of a schedule run if each kind takes a given time, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from distsim.ops import operator
from distsim.schedule import Cell, Schedule, longer
from distsim.simulation.action_times import ActionTimes, timed_program
from distsim.simulation.simulator import Simulator
from distsim.simulation.steady_state import microbatch_time


@dataclass(frozen=True, slots=True)
class CellTime:
    """An action, or a pair of two that run ``together``, from ``start`` to ``end`` seconds."""

    cell: Cell
    start: float
    end: float


@dataclass(frozen=True, eq=False)
class ScheduleTimes:
    """A schedule, the times of its actions, and per rank what it does when, in its order. Seconds.

    ``beside`` is what each rank does meanwhile on other streams than that of computation, by their names;
    ``held``, of a schedule with such, the most pairs of a stage and a microbatch in the memory of each rank
    at a time, with those that are being copied.
    """

    schedule: Schedule
    times: ActionTimes
    ranks: tuple[tuple[CellTime, ...], ...]
    beside: tuple[Mapping[str, tuple[CellTime, ...]], ...]
    held: tuple[int, ...] = ()

    @cached_property
    def makespan(self) -> float:
        """From 0 to the last end."""
        beside = [cells for streams in self.beside for cells in streams.values()]
        return max(cells[-1].end for cells in (*self.ranks, *beside) if cells)

    @cached_property
    def rank_span(self) -> float:
        """The longest that a rank takes from its first start to its last end."""
        return max(cells[-1].end - cells[0].start for cells in self.ranks if cells)

    @cached_property
    def bubble(self) -> float:
        """The share of :attr:`rank_span` in which a rank does nothing, on the average of ranks.

        Where all ranks do the same work this is the bubble rate of Qi et al. 2023, "Zero bubble pipeline
        parallelism", table 5: 1 - m (F + I + W) / span. The rest of the makespan is the skew of a pipeline
        that fills, which overlaps that of the step before if nothing waits for all ranks.
        """
        return 1 - sum(self.busy) / len(self.ranks) / self.rank_span

    @cached_property
    def microbatch_time(self) -> float | None:
        """Each further microbatch once the pipeline is full; None for a schedule with a flush.

        See :func:`distsim.simulation.steady_state.microbatch_time`. Raises :class:`ScheduleError` for one
        that is not of the catalogue.
        """

        def step_time(count: int) -> float:
            program, costs = timed_program(longer(self.schedule, count), self.times)
            return Simulator(costs).simulate(program).step_time

        return microbatch_time(self.schedule, step_time)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds of work of each rank, copies beside it not counted."""
        return tuple(float(sum([box.end - box.start for box in cells])) for cells in self.ranks)


def time_schedule(
    schedule: Schedule, times: ActionTimes | None = None, together: bool = False
) -> ScheduleTimes:
    """Simulate a schedule; ``together`` is how pairs run: see :func:`timed_program`.

    Raises :class:`ScheduleError` for a schedule that cannot run.

    >>> from distsim.schedule import one_f_one_b
    >>> found = time_schedule(one_f_one_b(4, 8))
    >>> found.makespan, round(found.bubble, 4)
    (33.0, 0.2727)
    """
    times = times or ActionTimes()
    program, costs = timed_program(schedule, times, together)
    simulation = Simulator(costs).simulate(program)
    # Replicas are there for the streams of messages and do the same: one device stands for each rank.
    rank_of = {
        simulation.class_of(piece.devices[0]): rank for rank, piece in enumerate(program.mesh.slices("pp"))
    }
    boxes: list[dict[str, list[tuple[float, float]]]] = [{} for _ in rank_of]
    for span in simulation.spans():
        # An action is what takes time: a Delay, or a copy. What carries its messages and sums takes none.
        stream = operator(span.op.op_type).host_stream
        if (
            span.stream.rank_class in rank_of
            and (stream or span.op.op_type == "Delay")
            and span.end > span.start
        ):
            boxes[rank_of[span.stream.rank_class]].setdefault(stream, []).append((span.start, span.end))
    cells = schedule.ranks if together else [[(action,) for action in row] for row in schedule.actions]
    found = [_by_stream(row, own) for row, own in zip(cells, boxes, strict=True)]
    memory = simulation.rank_memory if any(kind.runs.stream for kind in schedule.kinds) else None
    held = () if memory is None else memory.peaks  # a byte each: see timed_program
    return ScheduleTimes(schedule, times, tuple([own.pop("") for own in found]), tuple(found), held)


def _by_stream(
    cells: Sequence[Cell], boxes: Mapping[str, Sequence[tuple[float, float]]]
) -> dict[str, tuple[CellTime, ...]]:
    """Return the cells of a rank by the stream that they are on, with when they run."""
    streams = dict.fromkeys(["", *boxes, *[cell[0].kind.runs.stream for cell in cells]])
    own = {stream: [cell for cell in cells if cell[0].kind.runs.stream == stream] for stream in streams}
    return {stream: _in_order(row, boxes.get(stream, ())) for stream, row in own.items()}


def _in_order(cells: Sequence[Cell], boxes: Sequence[tuple[float, float]]) -> tuple[CellTime, ...]:
    """Return the cells of a stream with when they run: one after the other, in their order."""
    pairs = zip(cells, sorted(boxes), strict=True)
    return tuple(CellTime(cell, start, end) for cell, (start, end) in pairs)
