"""What a pipeline of known layers or stages falls below under no schedule: of its seconds, and of its bytes.

Of each schedule it counts which stages a rank holds, and how many microbatches it has in flight in each of
them at a time. With w_s seconds that a microbatch keeps the compute stream of stage s, forward and backward,
and M microbatches, a rank r takes at least M sum(w_s, s on r) from a step to the next. Where stages are whole
layers, each of which takes in what the one before makes, it computes first when a microbatch has gone through
all layers ahead of its first stage. That delays it once, not step by step; but if what it does last is the
backward pass of that stage, whose gradient goes back through all of these, the rank of the first stage
begins no step before all that of the one before is done. Where updates wait for a sum over the gradients of
all stages (``joined``), as for their norm, no rank begins a step before all have made theirs, so that it
delays every rank in each step.

Where only the layers are known, not which a stage has: a rank has a whole number of them, L in all, each of w
seconds, and one rank has the head's h. The step takes at least the least for which L layers find room.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from math import floor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from distsim.cache import cached
from distsim.errors import PartitionError, ScheduleError
from distsim.plan import Plan, parse_schedule, parse_stages
from distsim.plan_search.bounds.layer_figures import LayerPassage, LayerWork, StageWork
from distsim.schedule import FLUSH, SCHEDULES, Kind
from distsim.schedule import schedule as schedule_named
from distsim.schedule.action import (
    HALVES,
    HELD,
    SENDS_BACK,
    SUMS_GRADIENTS,
    InFlight,
    are_of,
    freed_at_once,
)
from distsim.schedule.codes import kind_of, number_of
from distsim.stage_balance import default_split

ROUNDED = 1e-9
"""The part by which sums of durations may be rounded."""


class HeldParts(NamedTuple):
    """Bytes that are ``held`` all step, those of ``gradients`` of which a stage holds sums from its first
    microbatch until its last, 0 where these are divided, or may be, and those of gradients that all ranks
    hold ``at_once``, be it each at a time of its own."""

    held: float
    gradients: float
    at_once: float = 0.0


class Flights(NamedTuple):
    """The ``stages`` of each rank [ranks, stages a rank]; the microbatches in flight in each of them at times
    of a rank [ranks, times, stages a rank], those between halves of a backward pass (``pending``), and
    whether there are sums of its gradients (``summed``), at a few times with most of these;
    by rank the most that all of its stages have in flight at a time (``least``), and while all have sums
    (``behind_sums``; -1: at no time); and whether the backward pass of the first of its stages is what it
    does last (``ends_first``)."""

    stages: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int32]
    pending: npt.NDArray[np.int32]
    summed: npt.NDArray[np.int32]
    least: tuple[int, ...]
    behind_sums: tuple[int, ...]
    ends_first: npt.NDArray[np.bool_]


def flights(plan: Plan) -> Flights | None:
    """Return those of a plan; None for schedules of which nothing is known here: searched ones, several
    copies of the model, overlapping pairs, no flush. Of a backward pass in two halves the first may leave
    nothing of what is saved."""
    return _flights(plan.schedule, plan.pp, plan.microbatches, plan.chunks)


@cached("microbatches in flight, by schedule and sizes", 4096)
def _flights(name: str, ranks: int, microbatches: int, chunks: int) -> Flights | None:
    """Beyond a few times the stages more microbatches matter with GPipe alone, which holds them all."""
    name = parse_schedule(name)[0]
    known = SCHEDULES.get(name)
    if known is None or known.searched:
        return None
    few = min(microbatches, 4 * ranks)
    try:
        made = schedule_named(name, ranks, few, chunks if known.chunks is None else None)
    except ScheduleError:
        return None
    if made.copies > 1 or made.pairs_actions or made.weights != FLUSH:
        return None
    each, moments = list[list[int]](), list[npt.NDArray[np.int32]]()
    least, behind, ends_first = list[int](), list[int](), list[bool]()
    for rank, codes in enumerate(made.codes):
        cells = codes[codes >= 0]
        kinds, numbers = kind_of(cells), number_of(cells) % made.num_stages
        stages = [stage for stage, own in enumerate(made.rank_of) if own == rank]
        own = numbers[:, None] == np.array(stages)
        counts, pending = (np.cumsum(own * change[:, None], axis=0) for change in _held_surely(cells).T)
        summed, fewest = _are_summed(kinds, own), counts.min(axis=1)
        moments.append(_most(np.hstack([counts, pending, summed]).astype(np.int32)))
        least.append(int(fewest.max(initial=0)))
        behind.append(int(fewest[summed.all(axis=1)].max(initial=-1)))
        ends_first.append(kinds[-1] == Kind.BACKWARD.code and numbers[-1] == min(stages))
        each.append(stages)
    times = max(map(len, moments))
    filled = [np.vstack([own, np.repeat(own[-1:], times - len(own), axis=0)]) for own in moments]
    in_flight, between, sums = np.split(np.array(filled), 3, axis=2)
    return Flights(
        np.array(each), in_flight, between, sums, tuple(least), tuple(behind), np.array(ends_first)
    )


MOMENTS = 8
"""How many times of a rank are looked at: where stages are alike the first is the one that counts."""


def _most(moments: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return moments [times, figures] of which no other has as much of each figure or more, the largest."""
    found: list[npt.NDArray[np.int32]] = []
    while len(moments) and len(found) < MOMENTS:
        largest = moments[moments.sum(axis=1).argmax()]
        found.append(largest)
        moments = moments[(moments > largest).any(axis=1)]
    return np.array(found)


_UNSAID = [
    kind for kind in Kind if kind.runs not in (HALVES, Kind.FORWARD.runs) and kind.in_flight == InFlight()
]
"""Kinds that are no passes and say nothing of what they hold: one may make again what another holds."""
_BESIDE = [kind for kind in Kind if kind.runs.stream and max(kind.in_flight[:2]) > 0]


def _held_surely(codes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return what each action of a rank adds to what is held, [actions, 2] as
    :class:`distsim.schedule.action.InFlight` has it, whenever copies beside computation begin and end.

    What one of them brings back counts, and is gone, with what waits for it. Nothing counts of microbatches
    with a kind that does not say what it adds: where it does add, plans are refused, but as they are built.
    """
    kinds, numbers, freed = kind_of(codes), number_of(codes), freed_at_once(codes)
    changes = HELD.T[kinds]
    if freed is not None:
        changes[freed] = 0
    for kind in _UNSAID:
        changes[np.isin(numbers, numbers[kinds == kind.code])] = 0
    for kind in _BESIDE:
        brings = kinds == kind.code
        if brings.any():
            waits = are_of(kind.waits.holds)[kinds] & np.isin(numbers, numbers[brings])
            changes[brings] = 0
            changes[waits] += kind.in_flight[:2]
    return changes


def _are_summed(kinds: npt.NDArray[Any], own: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return whether there are sums of all gradients of stages after each action, of which ``own`` are theirs
    [actions, stages]: the first microbatch has made them, and to those of none the last one has added."""
    made = np.cumsum(own & SUMS_GRADIENTS[kinds][:, None], axis=0) > 0
    left = np.cumsum(own & SENDS_BACK[kinds][:, None], axis=0)
    return made & (left < left[-1])


def layers_counted(plan: Plan, layers: int) -> tuple[int, ...]:
    """Return how many of equal layers each stage has where a plan counts them; nothing where it does not."""
    return _layers_counted(plan.stages, plan.num_stages, layers)


@cached("layers of stages, by how they are counted", 4096)
def _layers_counted(stages: str, count: int, layers: int) -> tuple[int, ...]:
    sizes = parse_stages(stages)
    if sizes:
        return sizes if sum(sizes) == layers else ()
    if stages == "layers":
        return () if layers % count else (layers // count,) * (count if layers else 0)
    if stages != "default" or not layers:
        return ()
    with suppress(PartitionError):
        return default_split(layers, count)
    return ()


def seconds_of_stages(
    plan: Plan,
    stages: Sequence[StageWork],
    passage: LayerPassage | None = None,
    after: float = 0.0,
    joined: bool = False,
) -> float:
    """Return the seconds from a step to the next of a plan of these stages, at least; 0: nothing is known.

    ``passage`` is the way through a layer, of stages that begin between layers; ``after`` are seconds for
    each layer of a rank that follow its last backward pass; ``joined``: updates wait for all stages.
    """
    known = flights(plan)
    if known is None or len(stages) != plan.num_stages:
        return 0.0
    layers = np.array([stage.layers for stage in stages])
    seconds = plan.microbatches * np.array([stage.seconds for stage in stages])[known.stages].sum(axis=1)
    if passage is not None:
        before = (np.cumsum(layers) - layers)[known.stages.min(axis=1)]
        # The gradient of what the first layer takes in may be of no use.
        ahead, back = before * passage.ahead, (before - 1) * passage.behind - passage.late
        around = np.maximum(ahead + back, 0.0) * known.ends_first
        around = np.maximum(around, ahead) if joined else around
        seconds = seconds + np.where(before > 0, around, 0.0)
    return float(seconds.max()) + int(layers[known.stages].sum(axis=1).min()) * after


def bytes_of_stages(
    plan: Plan, stages: Sequence[StageWork], every: HeldParts, layered: HeldParts | None
) -> float:
    """Return the bytes that the fullest rank of a plan of these stages holds at least; 0: nothing is known.

    All ranks together hold ``every``, and of equal layers, which the stages have whole, ``layered``.
    """
    known = flights(plan)
    if known is None or len(stages) != plan.num_stages:
        return 0.0
    figures = np.array([(stage.saved, stage.pending, stage.layers) for stage in stages], float)
    saved, halves, layers = np.moveaxis(figures[known.stages][:, None], 3, 0)
    moments = (known.counts * saved + known.pending * halves).sum(axis=2)
    peaks = np.maximum(moments.max(axis=1), 0.0)
    found = max(peaks.max(), (every.held + peaks.sum()) / len(peaks))
    if layered is not None and layers.any():
        shares = layers / layers.sum()
        sums = (known.summed * (layered.gradients * shares)).sum(axis=2)
        held = layered.held * shares.sum(axis=(1, 2)) + (moments + sums).max(axis=1)
        found = max(found, held.max())
    return float(found)


def least_wherever_cut(held: float, saved: float, in_flight: tuple[int, ...]) -> float:
    """Return the bytes that the fullest rank holds wherever stages begin, with so many microbatches in flight
    on each."""
    return max([(often * held + n * saved) / weights for often, n, weights in _weights(in_flight)], default=0)


@cached("weights of ranks in means of what they hold, by microbatches in flight", 4096)
def _weights(in_flight: tuple[int, ...]) -> tuple[tuple[int, int, float], ...]:
    """Return how often what is held, and what is saved, are in sums over the ranks, and the weights of these.

    None where a rank has none in flight: it may have all that is saved.
    """
    if not all(in_flight):
        return ()
    each = [(1, n, sum([max(1.0, n / own) for own in in_flight])) for n in dict.fromkeys(in_flight)]
    return (0, 1, sum([1 / own for own in in_flight])), *each


def seconds_of_layers(plan: Plan, work: LayerWork, sums: float = 0.0) -> float:
    """Return the seconds that a plan takes at least whose stages are of whole layers; 0: nothing is known.

    ``sums`` are seconds of each layer besides, the mean over microbatches.
    """
    if not work.layer or not work.layers:
        return 0.0
    return plan.microbatches * _seconds_of_layers(plan.pp, work.layers, work.layer + sums, work.head)


@cached("the least seconds of whole layers, by ranks and layers", 65536)
def _seconds_of_layers(ranks: int, layers: int, layer: float, head: float) -> float:
    """Return the least that the busiest rank has of a microbatch: so many layers, or the head and some."""
    counts = range(layers + 1)
    limits = sorted([*(n * layer for n in counts), *(head + n * layer for n in counts)])
    return next(limit for limit in limits if _have_room(limit, ranks, layers, layer, head))


def _have_room(seconds: float, ranks: int, layers: int, layer: float, head: float) -> bool:
    """Whether all layers find room on the ranks, and the head on one of them."""
    seconds *= 1 + ROUNDED
    return (
        seconds >= head and (ranks - 1) * floor(seconds / layer) + floor((seconds - head) / layer) >= layers
    )
