"""What every possible stage would cost, as arrays: the input of the compiled loops.

Blocks ``i`` up to, not including, ``j`` on one stage are the entry ``[i, j]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from distsim.errors import PartitionError, ScheduleError
from distsim.schedule import FLUSH, SCHEDULES, Kind, Schedule, schedule
from distsim.schedule.action import by_code
from distsim.schedule.codes import kind_of, number_of
from distsim.schedule.table import Ints
from distsim.stage_balance.cost import BlockCost, Communication, check_count
from distsim.suggestions import choices_for

TASK = np.dtype([(name, np.int64) for name in ("stage", "phase", "microbatch", "rank")], align=True)
STAGE = np.dtype(
    [
        (name, float)
        for name in ("lead", "back_lead", "forward", "backward", "more", "tail", "half", "weight")
    ],
    align=True,
)
EDGE = np.dtype([("rest", float), ("rest_more", float)], align=True)
SENDS = np.dtype([("ahead", float), ("back", float)], align=True)


_PHASES = ("F", "B", "I", "W")
"""The kinds that the loops know: a task's phase is the place of its kind here."""
_PHASE_OF = by_code(lambda kind: _PHASES.index(kind.value) if kind.value in _PHASES else -1)


class Order(NamedTuple):
    """``tasks`` in an order in which they can run: stage, phase (0 F, 1 B, 2 I, 3 W), microbatch and rank.

    ``plain``: stage s is alone on rank s and runs forwards and whole backwards; the rest holds for such.
    ``aligned``: every stage runs its forwards, and its backwards, by increasing microbatch. ``paired``
    [k, i]: stage k and all after it run a forward between the backwards of microbatches i - 1 and i.
    ``due`` [n]: how many backwards the last stage may run when it has run n + 1 forwards.
    """

    tasks: np.ndarray
    plain: bool
    aligned: bool
    paired: npt.NDArray[np.bool_]
    due: Ints


class Tables(NamedTuple):
    """Seconds. ``stages`` [i, j]: ``lead`` and ``back_lead`` (constants, before anything is received),
    ``forward``, ``backward``, ``more`` (accumulation, but for the first microbatch), ``tail`` (what follows
    the last backward), ``half`` and ``weight`` (what the halves of ``backward`` take; of a first stage whose
    ``half`` is 0, W is all of it).

    ``edges`` [i]: how long before the end of a backward of a stage that begins with block i its gradient
    leaves, ``rest`` for the first microbatch and ``rest_more`` for the others. ``sends`` [s, j]: ``ahead``
    from stage s to the next, and ``back``, when that one begins with block j; nothing on the same rank.
    ``bytes`` [s, i, j] is what they need, ``limits`` [ranks] what there is, ``allowed`` [s, i, j] whether
    they fit there alone. ``rank_of``: the rank of each stage, of all copies of the model.
    """

    stages: np.ndarray
    edges: np.ndarray
    sends: np.ndarray
    bytes: np.ndarray
    limits: np.ndarray
    allowed: np.ndarray
    rank_of: Ints


def as_schedule(named: str | Schedule, stages: int, microbatches: int) -> Schedule:
    """Return a schedule of this many stages and microbatches; raise :class:`PartitionError` if it is not."""
    if isinstance(named, str):
        if named not in SCHEDULES:
            raise PartitionError(
                f"schedule={named!r} is unknown; choose one of {choices_for(named, SCHEDULES)}"
            )
        for name, number in (("stages", stages), ("microbatches", microbatches)):
            check_count(name, number)
        named = schedule(named, stages, microbatches)
    if named.weights != FLUSH:
        raise PartitionError(
            f"{named!r} has no flush, and splits are compared by the step up to a flush; search with 1f1b, "
            "whose order it has"
        )
    if (named.chain, named.num_microbatches * named.copies) != (stages, microbatches):
        raise PartitionError(
            f"{named!r} does not fit stages={stages}, microbatches={microbatches}; make them agree, with a "
            "Schedule for one of several stages a rank"
        )
    return named


def order_of(schedule: Schedule) -> Order:
    """Return the tasks of a schedule.

    Raises :class:`ScheduleError` as its ``check()``, and for a kind of action whose time nobody says here.
    """
    ranks, _ = schedule.merged()
    codes = schedule.codes_in_order
    count, m = schedule.num_stages, schedule.num_microbatches
    plain = count == schedule.num_ranks and schedule.rank_of == tuple(range(count))
    rank, flat = np.repeat(ranks, 2), codes.ravel()
    rank, flat = rank[flat >= 0], flat[flat >= 0]
    kind, number = _PHASE_OF[kind_of(flat)], number_of(flat)
    if (kind < 0).any():
        unknown = tuple(Kind)[kind_of(int(flat[kind < 0][0]))]
        raise ScheduleError(
            f"{schedule.name} runs {unknown.value} ({unknown.phase}), and stages are balanced by the times "
            f"of {', '.join(_PHASES)}; give stages by their sizes, or a schedule of these"
        )
    plain = plain and len(flat) == len(codes) and not (kind > 1).any()
    stage, microbatch = number % max(count, 1), number // max(count, 1)
    tasks = _records(TASK, (len(flat),), stage, kind, microbatch, rank)
    aligned, paired, due = plain, np.ones((count + 1, m), np.bool_), np.zeros(m, np.int64)
    for s in range(count - 1, -1, -1) if plain else ():
        own = stage == s
        backward = kind[own] == 1
        forwards = np.cumsum(~backward)[backward]  # before each backward
        if s == count - 1:
            due = np.searchsorted(forwards, np.arange(1, m + 1), side="right")
        paired[s] = paired[s + 1] & (np.diff(forwards, prepend=forwards[0]) > 0)
        aligned &= all((np.diff(microbatch[own][part]) > 0).all() for part in (backward, ~backward))
    return Order(tasks, plain, aligned, paired, due)


def tables_of(
    costs: Sequence[BlockCost],
    schedule: Schedule,
    communication: Communication,
    needed: np.ndarray,
    limits: Sequence[float] | None,
) -> Tables:
    """Return the tables of these blocks on the stages of ``schedule``, of which they need these bytes."""
    room = np.full(schedule.num_ranks, np.inf) if limits is None else np.array(limits, float)
    count = len(costs)
    many = schedule.num_microbatches > 1
    figures = {
        field.name: np.array([getattr(cost, field.name) for cost in costs], float)
        for field in fields(BlockCost)
        if field.name not in ("name", "returned", "backward_input")
    }
    accumulate = figures["accumulate"] if many else np.zeros(count)
    tail = np.zeros((count + 1, count + 1))
    backward = figures["recompute"] + figures["backward"]
    last = backward + accumulate
    for j in range(1, count + 1):
        late = done = 0.0
        for i in range(j - 1, -1, -1):
            # Gradients are reduced beside the backwards of the blocks before; those of the first block, the
            # last to be reduced, are the first to be applied.
            late = max(late - last[i], 0.0) + figures["reduce"][i]
            tail[i, j] = late + figures["update"][i] - figures["overlap"][i] + done
            done += figures["update"][i]
    half = _sums(figures["recompute"] + np.array([cost.half for cost in costs], float))
    weight = _sums(figures["weight"])
    for i, cost in enumerate(costs):
        if cost.half == 0:  # nobody waits for what the stage makes
            half[i], weight[i] = 0.0, _sums(backward)[i]
    ahead, back = _sends(costs, schedule, communication)
    seconds = (
        most_of(figures["shared"].tolist()),
        most_of(figures["shared_backward"].tolist()),
        _sums(figures["forward"]),
        _sums(backward),
        _sums(accumulate),
        tail,
        half,
        weight,
    )
    edges = (np.append(figures["after"], 0.0), np.append(figures["after"] + accumulate, 0.0))
    return Tables(
        _records(STAGE, tail.shape, *seconds),
        _records(EDGE, (count + 1,), *edges),
        _records(SENDS, ahead.shape, ahead, back),
        needed,
        *within(needed, room, schedule),
        np.array(schedule.rank_of, np.int64),
    )


def within(needed: np.ndarray, limits: np.ndarray, schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of each rank, and which blocks [stage, i, j] fit there alone."""
    return limits, needed <= limits[list(schedule.rank_of[: schedule.chain])][:, None, None]


def _records(kind: np.dtype[np.void], shape: tuple[int, ...], *figures: np.ndarray) -> np.ndarray:
    """Return an array of records whose fields are these arrays: one record is passed around, not them all."""
    made = np.zeros(shape, kind)
    for name, array in zip(kind.names or (), figures, strict=True):
        made[name] = array
    return made


def _sums(figures: np.ndarray) -> np.ndarray:
    """Return the sums over every range of blocks."""
    before = np.concatenate([[0.0], np.cumsum(figures)])
    return np.maximum(before[None, :] - before[:, None], 0.0)


def _sends(
    costs: Sequence[BlockCost], schedule: Schedule, communication: Communication
) -> tuple[np.ndarray, np.ndarray]:
    stages, rank_of = schedule.chain, schedule.rank_of
    ahead, back = np.zeros((stages, len(costs) + 1)), np.zeros((stages, len(costs) + 1))
    for stage in range(stages - 1):
        source, target = rank_of[stage], rank_of[stage + 1]
        for j in range(1, len(costs)) if source != target else ():
            made = costs[j - 1]
            if made.sent > 0:  # what is not there takes not even a latency
                ahead[stage, j] = communication(source, target, made.sent)
            if made.gradient > 0:
                back[stage, j] = communication(target, source, made.gradient)
    for seconds in (ahead, back):
        if not (np.isfinite(seconds).all() and (seconds >= 0).all()):
            raise PartitionError(
                "communication gives a time that is negative or not finite; give seconds of at least 0"
            )
    return ahead, back


def stage_memory(costs: Sequence[BlockCost], in_flight: Sequence[int]) -> np.ndarray:
    """Return [stage, i, j]: the bytes that blocks i up to j need on a stage with so many microbatches.

    Their states, what is saved of every microbatch in flight, and the largest workspace.

    >>> blocks = [BlockCost("a", 1, 2, state=100, saved=10, workspace=5)] * 2
    >>> float(stage_memory(blocks, [3])[0, 0, 2])
    265.0
    """
    state = np.concatenate([[0.0], np.cumsum([cost.state for cost in costs])])
    saved = np.concatenate([[0.0], np.cumsum([cost.saved for cost in costs])])
    held = state[None, :] - state[:, None] + most_of([cost.workspace for cost in costs])
    kept = saved[None, :] - saved[:, None]
    return held[None] + np.array(in_flight, float)[:, None, None] * kept[None]


def most_of(figures: Sequence[float]) -> np.ndarray:
    """Return [i, j]: the largest of the figures i up to j, 0 where there is none."""
    count = len(figures)
    most = np.zeros((count + 1, count + 1))
    for i in range(count):
        most[i, i + 1 :] = np.maximum.accumulate(figures[i:])
    return most


def memory_limits(memory: float | Sequence[float] | None, ranks: int) -> list[float] | None:
    """Return the bytes of each rank's device; raise :class:`PartitionError` if they are not as many."""
    if memory is None:
        return None
    limits = [float(memory)] * ranks if isinstance(memory, (int, float)) else [float(m) for m in memory]
    if len(limits) != ranks:
        raise PartitionError(f"memory of {len(limits)} ranks is given for {ranks}; give one for each")
    for rank, limit in enumerate(limits):
        if not limit > 0:
            raise PartitionError(f"memory of rank {rank} is {limit} bytes; give a positive size")
    return limits


def nothing_fits(memory: np.ndarray, limits: Sequence[float]) -> PartitionError:
    """Return the error for blocks of which no split fits: the least that would be over, and where.

    ``memory`` is that of :func:`stage_memory`. Named is a split whose largest excess is the least there is of
    stages alone; it has none where only stages that share a rank are too much for it.
    """
    stages, count = memory.shape[0], memory.shape[1] - 1
    excess = memory - np.array(limits)[:, None, None]
    best = np.full((stages + 1, count + 1), np.inf)
    best[stages, count] = -np.inf
    choice = np.zeros((stages, count + 1), np.int64)
    for stage in range(stages - 1, -1, -1):
        for i in range(count - (stages - stage), -1, -1):
            worst = np.maximum(excess[stage, i, i + 1 :], best[stage + 1, i + 1 :])
            choice[stage, i] = i + 1 + int(np.argmin(worst))
            best[stage, i] = worst.min()
    sizes: list[int] = []
    at, found = 0, (-np.inf, 0)
    for stage in range(stages):
        end = int(choice[stage, at])
        found = max(found, (float(excess[stage, at, end]), -stage))
        sizes.append(end - at)
        at = end
    over, worst_stage = found[0], -found[1]
    if over <= 0:
        return PartitionError(
            f"no split of {count} blocks into {stages} stages that fits in memory was found: each stage of "
            f"sizes {', '.join(map(str, sizes))} would alone, but not those that share a rank; use more "
            "ranks, smaller microbatches, or recompute more"
        )
    return PartitionError(
        f"no split of {count} blocks into {stages} stages fits in memory: at best some stage is over by "
        f"{over / 2**20:,.1f} MiB, stage {worst_stage} of sizes {', '.join(map(str, sizes))}, which needs "
        f"{(over + limits[worst_stage]) / 2**20:,.1f} of {limits[worst_stage] / 2**20:,.1f} MiB; use more "
        "stages, smaller microbatches, or recompute more"
    )
