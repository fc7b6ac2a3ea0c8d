"""List scheduling: actions are appended rank by rank, each starts once its rank is free and its input there.

What the searches of zero-bubble schedules share: a schedule that is being made, with the clock of each rank.
Times are integers, ticks of 2^-40 s, and memory is counted in 2^-20 of an activation: sums are exact, so no
choice hangs on how they were rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from distsim.compile import inner
from distsim.errors import ScheduleError
from distsim.schedule.codes import code_of
from distsim.schedule.table import Schedule

Ints = npt.NDArray[np.int64]

FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = 0, 1, 2
"""Rows of what is known per kind; the last two are kinds 2 and 3 in the codes of a schedule."""

TICKS = 2.0**40
"""Ticks in a second."""

UNITS = 2**20
"""Units of memory in an activation, what one stage keeps of one microbatch."""

LARGEST = 2.0**40
"""Activations that stand for no limit of memory."""

NEVER = 2**62
"""When an action ends that is not issued."""

LONGEST = 2.0**21
"""The most seconds that all actions together may take: no sum then comes near NEVER."""

RANK = np.dtype(
    [
        ("limit", np.int64),  # the most units of memory
        ("held", np.int64),  # units of memory
        ("clock", np.int64),  # when the last action ends
        ("first", np.int64),  # when the first one starts
        ("idle", np.int64),  # ticks between the two in which the rank waits
        ("issued", np.int64),  # actions
        ("inputs", np.int64),  # I that have run
        ("weights", np.int64),  # W that have run
    ]
)
"""What is known of a rank."""

STAGE = np.dtype([("rank", np.int64), ("share", np.int64)])
"""The rank of a stage, and the units that W frees of an activation; I frees the others."""


class Costs(NamedTuple):
    """What actions take, in ticks and units of memory; compared by value."""

    name: str
    """Of the schedule, for errors."""
    num_microbatches: int
    rank_of: tuple[int, ...]
    limit: tuple[int, ...]
    """Per rank: the most units."""
    ticks: tuple[tuple[int, ...], ...]
    """Per stage: of F, I and W."""
    send: int
    """Ticks that a message between ranks is on its way; it occupies nobody."""
    share: tuple[int, ...]
    """Per stage: what W frees of the units of an activation; I frees the others."""


class Line(NamedTuple):
    """A schedule that is being made, as compiled loops read and write it."""

    send: int
    """Ticks that a message between ranks is on its way; it occupies nobody."""
    ranks: Any
    """[ranks] of RANK."""
    stages: Any
    """[stages] of STAGE."""
    ticks: Ints
    """[3, stages]: how long F, I and W take."""
    done: Ints
    """[3, stages]: how many microbatches have run F, I and W."""
    finish: Ints
    """[2, stages, microbatches]: when F and I end, NEVER while they are not issued."""
    order: Ints
    """[ranks, actions]: their codes."""
    queue: Ints
    """[ranks, actions]: the stage of each I that has run, in order; W run in the same order."""


def make_costs(
    name: str,
    num_microbatches: int,
    rank_of: Sequence[int],
    memory_limit: float | Sequence[float],
    seconds: Sequence[float] | Sequence[Sequence[float]],
    send: float,
    weight_share: float | Sequence[float],
) -> Costs:
    """Check what a search is asked for.

    Args:
        name: Of the schedule, for errors.
        num_microbatches: At least 1.
        rank_of: [stages].
        memory_limit: Activations that a rank may hold, or one such number per rank.
        seconds: F, I and W, or [stages, 3].
        send: Seconds of a message between ranks.
        weight_share: What share of an activation is freed by W, the rest by I, or one per stage.

    Raises:
        ScheduleError: a number is missing or makes no sense.
    """
    stages = len(rank_of)
    table = _numbers(name, "seconds of F, I and W", seconds, (stages, 3))
    delay = float(_numbers(name, "send", send, ()))
    total = float(table.sum() + 2 * stages * delay) * num_microbatches
    if not total <= LONGEST:
        raise ScheduleError(f"{name}: {total:.3g} s of work exceeds {LONGEST:.3g} s; give times in seconds")
    limit = _numbers(name, "memory_limit", memory_limit, (max(rank_of) + 1,))
    if limit.min() < 1:
        raise ScheduleError(
            f"{name}: memory_limit={limit.min():g} of rank {limit.argmin()} is less than one activation "
            f"(one stage, one microbatch); give at least 1"
        )
    share = _numbers(name, "weight_share", weight_share, (stages,))
    if share.max() > 1:
        raise ScheduleError(f"{name}: weight_share={share.max():g} is more than the whole; give 0 to 1")
    return Costs(
        name=name,
        num_microbatches=num_microbatches,
        rank_of=tuple(rank_of),
        limit=_rounded(np.minimum(limit, LARGEST) * UNITS),
        ticks=tuple(map(_rounded, table * TICKS)),
        send=round(delay * TICKS),
        share=_rounded(share * UNITS),
    )


def _rounded(numbers: npt.NDArray[np.float64]) -> tuple[int, ...]:
    return tuple(map(round, numbers.tolist()))


def _numbers(name: str, noun: str, given: object, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Return numbers of at least 0 in a shape, given so or one, or one row, for all."""
    try:
        numbers = np.array(given, np.float64)
        if numbers.shape not in (shape, shape[1:], shape[2:]):
            raise ValueError
    except (TypeError, ValueError):
        wanted = f"{' x '.join(map(str, shape))} numbers, nor one for all" if shape else "a number"
        raise ScheduleError(f"{name}: {noun}: {given!r} is not {wanted}") from None
    if not (numbers >= 0).all():
        raise ScheduleError(f"{name}: {noun}: {given!r} must be at least 0")
    return np.broadcast_to(numbers, shape)


def empty_line(costs: Costs) -> Line:
    """Return a line with nothing issued."""
    stages, ranks, m = len(costs.rank_of), len(costs.limit), costs.num_microbatches
    most = m * max(map(costs.rank_of.count, range(ranks)))
    line = Line(
        send=costs.send,
        ranks=np.zeros(ranks, RANK),
        stages=np.zeros(stages, STAGE),
        ticks=np.array(costs.ticks, np.int64).T.copy(),
        done=np.zeros((3, stages), np.int64),
        finish=np.full((2, stages, m), NEVER),
        order=np.full((ranks, 3 * most), -1, np.int64),
        queue=np.zeros((ranks, most), np.int64),
    )
    line.ranks["limit"] = costs.limit
    line.stages["rank"] = costs.rank_of
    line.stages["share"] = costs.share
    return line


def longest_span(line: Line) -> int:
    """Return the most ticks from first start to last end of a rank: what the papers' rates divide by."""
    return int((line.ranks["clock"] - line.ranks["first"]).max())


def make_schedule(costs: Costs, line: Line) -> Schedule:
    """Return the order of a line on which everything is issued."""
    codes = [np.stack([row, np.full_like(row, -1)], axis=1) for row in line.order]
    return Schedule.from_codes(costs.name, len(costs.rank_of), costs.num_microbatches, codes, costs.rank_of)


@inner
def arrival(kind: int, stage: int, line: Any) -> int:
    """Return when the input of a stage's next F or I is on its rank; -1: it waits for no other stage."""
    source = stage - 1 if kind == FORWARD else stage + 1
    if source < 0 or source == len(line.stages):
        return -1
    end = line.finish[kind, source, line.done[kind, stage]]
    return end if line.stages[source].rank == line.stages[stage].rank else end + line.send


@inner
def issue(kind: int, stage: int, line: Any) -> None:
    """Append a stage's next action of a kind to its rank: it starts as soon as it can."""
    place, microbatch = line.stages[stage].rank, line.done[kind, stage]
    rank = line.ranks[place]
    start = rank.clock
    if kind != BACKWARD_WEIGHT:
        start = max(start, arrival(kind, stage, line))
    if rank.issued == 0:
        rank.first = start
    else:
        rank.idle += start - rank.clock
    rank.clock = start + line.ticks[kind, stage]
    if kind == FORWARD:
        rank.held += UNITS
    elif kind == BACKWARD_INPUT:
        rank.held -= UNITS - line.stages[stage].share
        line.queue[place, rank.inputs] = stage
        rank.inputs += 1
    else:
        rank.held -= line.stages[stage].share
        rank.weights += 1
    if kind != BACKWARD_WEIGHT:
        line.finish[kind, stage, microbatch] = rank.clock
    code = kind if kind == FORWARD else kind + 1
    line.order[place, rank.issued] = code_of(microbatch * len(line.stages) + stage, code)
    rank.issued += 1
    line.done[kind, stage] += 1


@inner
def issue_weights(place: int, line: Any) -> None:
    """Append the W that is pending longest on the rank."""
    issue(BACKWARD_WEIGHT, line.queue[place, line.ranks[place].weights], line)


@inner
def make_room(place: int, line: Any) -> None:
    """Run W, as long as some are pending, until one more forward fits into the memory of the rank."""
    rank = line.ranks[place]
    while rank.held + UNITS > rank.limit and rank.weights < rank.inputs:
        issue_weights(place, line)


@inner
def fill_gap(place: int, until: int, least: int, line: Any) -> None:
    """Run the W that end by a tick, and one more if the rank still waited for more than ``least`` ticks."""
    rank = line.ranks[place]
    while rank.weights < rank.inputs:
        stage = line.queue[place, rank.weights]
        if rank.clock + line.ticks[BACKWARD_WEIGHT, stage] > until:
            break
        issue_weights(place, line)
    if rank.weights < rank.inputs and until - rank.clock > least:
        issue_weights(place, line)


@inner
def drain(place: int, line: Any) -> None:
    """Run all W that are pending on the rank."""
    rank = line.ranks[place]
    while rank.weights < rank.inputs:
        issue_weights(place, line)


@inner
def behind(place: int, line: Any) -> int:
    """Return how much less the rank has waited than the one that has waited most."""
    most = 0
    for rank in range(len(line.ranks)):
        most = max(most, line.ranks[rank].idle)
    return most - line.ranks[place].idle
