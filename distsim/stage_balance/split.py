"""Splitting blocks into stages: what a split takes, and the one that takes least."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import comb

import numpy as np

from distsim.errors import PartitionError
from distsim.schedule import Schedule
from distsim.stage_balance.cost import BlockCost, Communication, check_count, check_sizes, free_communication
from distsim.stage_balance.kernel import OTHERS, makespan, replay, room_for
from distsim.stage_balance.search import Suffix, climb, exhaust, fill_suffix, search
from distsim.stage_balance.tables import (
    Order,
    Tables,
    as_schedule,
    memory_limits,
    nothing_fits,
    order_of,
    stage_memory,
    tables_of,
    within,
)

EFFORT = 2_000_000
"""How many simulations a search may take before it returns what it has."""


@dataclass(frozen=True, slots=True)
class Split:
    """Contiguous stages: how many blocks each holds, and what that takes.

    ``step_time``: simulated seconds; ``lower_bound``: no split takes less; ``memory``: bytes per stage;
    ``simulations``: how many splits, whole or in part, were simulated to find it.
    """

    sizes: tuple[int, ...]
    step_time: float
    lower_bound: float
    memory: tuple[float, ...]
    simulations: int = 1

    @property
    def gap(self) -> float:
        """How much longer than the lower bound it takes, as a share; 0 when it is proven optimal."""
        return self.step_time / self.lower_bound - 1 if self.lower_bound > 0 else 0.0

    @property
    def proven(self) -> bool:
        """Whether no split takes less."""
        return self.lower_bound >= self.step_time

    @property
    def starts(self) -> tuple[int, ...]:
        """The first block of each stage."""
        return (0, *accumulate(self.sizes[:-1]))

    @property
    def assignment(self) -> tuple[int, ...]:
        """The stage of each block: for :func:`~distsim.device_placement.partition`, if blocks are ops.

        >>> Split((2, 1), 3.0, 3.0, (0.0, 0.0)).assignment
        (0, 0, 1)
        """
        return tuple([stage for stage, size in enumerate(self.sizes) for _ in range(size)])


def split_time(
    costs: Sequence[BlockCost],
    sizes: Sequence[int],
    microbatches: int,
    schedule: str | Schedule = "1f1b",
    communication: Communication = free_communication,
) -> float:
    """Return the simulated seconds of a step when stage s holds the next ``sizes[s]`` blocks.

    Equal to the :class:`distsim.simulation.Simulator` on stages that take as long, but that the sums of
    gradients over copies of the model (DualPipe), which follow the last backward, are left out, and a pair of
    actions runs one after the other. Raises :class:`PartitionError` for sizes that are not positive or do not
    sum to the number of blocks.

    >>> blocks = [BlockCost("layer", forward=1.0, backward=2.0)] * 4
    >>> split_time(blocks, (2, 2), microbatches=4)  # (m + p - 1) * (2 + 4)
    30.0
    """
    found = as_schedule(schedule, len(sizes), microbatches)
    return StageProblem(costs, found, communication).time(sizes)


def auto_split(
    costs: Sequence[BlockCost],
    stages: int,
    microbatches: int,
    schedule: str | Schedule = "1f1b",
    communication: Communication = free_communication,
    memory: float | Sequence[float] | None = None,
    effort: int = EFFORT,
) -> Split:
    """Return the contiguous, non-empty stages of least simulated step time that fit in ``memory``.

    ``memory`` are the bytes of each stage's device (one figure for all; None: endless). A split of least
    bottleneck is improved by moving blocks, then branch and bound proves that none is better, or finds it:
    what the first stages do is simulated with bounds on the others in their place. After ``effort``
    simulations the best so far is returned with its gap. Under a schedule of several stages a rank, of halves
    or of two copies all splits are tried, or where they are over ``effort`` blocks are moved only
    (:class:`StageProblem`).

    Raises :class:`PartitionError` for fewer blocks than stages, and when nothing fits: it names the least
    excess and where it is.

    >>> blocks = [BlockCost("layer", 1.0, 2.0)] * 5 + [BlockCost("head", 2.0, 4.0)]
    >>> split = auto_split(blocks, stages=3, microbatches=8)
    >>> split.sizes, split.step_time, split.proven
    ((3, 2, 1), 78.0, True)
    """
    found = as_schedule(schedule, stages, microbatches)
    if len(costs) < stages:
        raise PartitionError(
            f"{len(costs)} blocks cannot make {stages} stages that all hold one; use at most "
            f"{max(len(costs), 1)} stages, or divide the blocks"
        )
    check_count("effort", effort)
    return StageProblem(costs, found, communication, memory_limits(memory, found.num_ranks)).best(effort)


class StageProblem:
    """Blocks, a schedule and a memory, as arrays made once, for any number of splits.

    ``limits`` are the bytes of each rank. Where a rank has several stages, or backward runs in two halves, a
    split is simulated as any other, and all are tried if they are no more than the effort. Of more, what
    moving blocks finds is not proven: the lower bound is the work of the ranks alone, far from any schedule.
    """

    def __init__(
        self,
        costs: Sequence[BlockCost],
        schedule: Schedule,
        communication: Communication = free_communication,
        limits: Sequence[float] | None = None,
    ) -> None:
        self.schedule, self.blocks, self.stages = schedule, len(costs), schedule.chain
        self.microbatches, self.limits = schedule.num_microbatches, limits
        self.order: Order = order_of(schedule)
        self.bytes = stage_memory(costs, [schedule.in_flight_of(stage) for stage in range(self.stages)])
        self.tables: Tables = tables_of(costs, schedule, communication, self.bytes, limits)
        self.room = room_for(schedule.num_stages, self.microbatches)

    def within(self, limits: Sequence[float]) -> StageProblem:
        """Return the same problem with other bytes on the devices of the ranks."""
        made = copy(self)
        room, allowed = within(self.bytes, np.array(limits, float), self.schedule)
        made.limits, made.tables = limits, self.tables._replace(limits=room, allowed=allowed)
        return made

    def time(self, sizes: Sequence[int]) -> float:
        """Return the seconds of a split, as :func:`split_time`."""
        check_sizes(sizes, self.blocks)
        bounds = np.array([0, *accumulate(sizes)], np.int64)
        if not self.order.plain:
            return replay(bounds, self.order, self.tables, self.room)
        return makespan(bounds, self.stages, self.room.none[0], self.order, self.tables, self.room)

    def memory(self, sizes: Sequence[int]) -> tuple[float, ...]:
        """Return the bytes that a split needs on each stage."""
        check_sizes(sizes, self.blocks)
        bounds = pairwise([0, *accumulate(sizes)])
        return tuple([float(self.bytes[s, i, j]) for s, (i, j) in enumerate(bounds)])

    def best(self, effort: int = EFFORT) -> Split:
        """Return the best split, as :func:`auto_split`."""
        suffix = self._suffix()
        if not suffix.trip[0, 0] < np.inf:
            raise self._nothing_fits()
        best, time, tried = self._climbed(suffix)
        if self.few(effort):
            time, more = exhaust(best, time, self.order, self.tables, self.room)
            bound = time
        elif self.order.plain and time < np.inf:
            state = (self.order, self.tables, suffix, self.room)
            time, bound, more = search(best, time, self.microbatches, effort, state)
        else:
            bound, more = min(self._least_work(), time), 0
        if time == np.inf:
            raise self._nothing_fits()
        bounds: list[int] = best.tolist()
        sizes = tuple([j - i for i, j in pairwise(bounds)])
        return Split(sizes, float(time), float(bound), self.memory(sizes), tried + more)

    def few(self, effort: int) -> bool:
        """Whether all splits are tried, as no bound is worth its while: of stages that are not alone."""
        return not self.order.plain and comb(self.blocks - 1, self.stages - 1) <= effort

    def _least_work(self) -> float:
        """Return seconds that no split is faster than: the work of all stages, shared evenly by the ranks, or
        that of the heaviest block on its one."""
        stages, count = self.tables.stages, self.blocks
        work = stages["forward"] + stages["backward"]
        heaviest = max([float(work[block, block + 1]) for block in range(count)])
        even = float(work[0, count]) * self.schedule.copies / self.schedule.num_ranks
        return self.microbatches * max(even, heaviest)

    def _nothing_fits(self) -> PartitionError:
        rank_of, limits = self.schedule.rank_of[: self.stages], self.limits or ()
        return nothing_fits(self.bytes, [limits[rank] for rank in rank_of])

    def _suffix(self) -> Suffix:
        shape = (self.stages + 1, self.blocks + 1)
        suffix = Suffix(
            np.full(shape, np.inf),
            np.full(shape, np.inf),
            np.full(shape, np.inf, OTHERS),
            np.zeros((2, *shape), np.int64),
        )
        fill_suffix(self.microbatches, self.order.aligned, self.tables, suffix)
        return suffix

    def _climbed(self, suffix: Suffix) -> tuple[np.ndarray, float, int]:
        """Return the best of what climbing makes of the splits of least bounds, its time and the effort."""
        found: list[tuple[float, np.ndarray]] = []
        total = 0
        for choice in suffix.splits:
            bounds = np.zeros(self.stages + 1, np.int64)
            for stage in range(self.stages):
                bounds[stage + 1] = choice[stage, bounds[stage]]
            time, tried = climb(bounds, self.order, self.tables, self.room)
            found.append((float(time), bounds))
            total += tried
        time, best = min(found, key=lambda pair: pair[0])
        return best, time, total


def default_split(layers: int, stages: int, input_weight: int = 1, output_weight: int = 1) -> tuple[int, ...]:
    """Return how many of ``layers`` each of ``stages`` holds, as torchtitan splits a language model.

    The embedding, on the first stage, counts as ``input_weight`` layers, the final norm and the output
    head, on the last, as ``output_weight``. All these are divided evenly, the remainder one each to the
    first stages. A first or last stage may hold no layer. (torchtitan, ``pipeline_parallel.py``,
    ``generate_llm_fqn_per_model_part``, 2025.)

    Raises :class:`PartitionError` for fewer than one stage, numbers that are negative or not whole, more
    stages than layers with the weights, and a weight over what the smallest stage holds.

    >>> default_split(6, 4), default_split(12, 4), default_split(16, 4)
    ((1, 2, 2, 1), (3, 4, 3, 2), (4, 5, 4, 3))
    """
    check_count("stages", stages)
    for name, number in (
        ("layers", layers),
        ("input_weight", input_weight),
        ("output_weight", output_weight),
    ):
        check_count(name, number, 0)
    if stages == 1:
        return (layers,)
    total = layers + input_weight + output_weight
    counted = f"{layers} layers, input_weight={input_weight} and output_weight={output_weight}"
    least, more = divmod(total, stages)
    if least == 0:
        raise PartitionError(
            f"{stages} stages, but only {total} to divide ({counted}), so some would be empty; use at most "
            f"{max(total, 1)} stages"
        )
    for name, weight in (("input_weight", input_weight), ("output_weight", output_weight)):
        if weight > least:
            raise PartitionError(
                f"{name}={weight} is more than the {least} that the smallest of {stages} stages holds "
                f"({counted}); use fewer stages or a smaller weight"
            )
    sizes = [least + (stage < more) for stage in range(stages)]
    sizes[0] -= input_weight
    sizes[-1] -= output_weight
    return tuple(sizes)
