"""What a pipeline of known layers or stages falls below under no schedule: of its seconds, and of its bytes.

Of each schedule it counts which stages a rank holds, and how many microbatches it has in flight in each of
them at a time. With w_s seconds that a microbatch keeps the compute stream of stage s, forward and backward,
and M microbatches, a step takes at least M sum(w_s, s on r) for each rank r. Where stages are whole layers,
each of which takes in what the one before makes, a rank begins when a microbatch has gone through all layers
ahead of its first stage, and what it sends last, the gradient of that stage, goes through all of these.

Where only the layers are known, not which a stage has: a rank has a whole number of them, L in all, each of w
seconds, and one rank has the head's h. The step takes at least the least for which L layers find room.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
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
    """``stages`` of a rank, the microbatches in flight in each of them [times, stages], and between halves of
    a backward pass (``pending``), and whether there are sums of its gradients (``summed``); the most that all
    of them have in flight at a time (``least``), and while all have sums (``behind_sums``; -1: at no time);
    and whether the backward pass of the first of its stages is what the rank does last (``ends_first``)."""

    stages: tuple[int, ...]
    counts: npt.NDArray[Any]
    pending: npt.NDArray[Any]
    summed: npt.NDArray[Any]
    least: int
    behind_sums: int
    ends_first: bool


def flights(plan: Plan) -> tuple[Flights, ...]:
    """Return those of each rank; none for schedules of which nothing is known here: searched ones, several
    copies of the model, overlapping pairs, no flush. Of a backward pass in two halves the first may leave
    nothing of what is saved."""
    return _flights(plan.schedule, plan.pp, plan.microbatches, plan.chunks)


@cached("microbatches in flight, by schedule and sizes", 4096)
def _flights(name: str, ranks: int, microbatches: int, chunks: int) -> tuple[Flights, ...]:
    """Beyond a few times the stages more microbatches matter with GPipe alone, which holds them all."""
    name = parse_schedule(name)[0]
    known = SCHEDULES.get(name)
    if known is None or known.searched:
        return ()
    few = min(microbatches, 4 * ranks)
    try:
        made = schedule_named(name, ranks, few, chunks if known.chunks is None else None)
    except ScheduleError:
        return ()
    if made.copies > 1 or made.pairs_actions or made.weights != FLUSH:
        return ()
    found: list[Flights] = []
    for rank, codes in enumerate(made.codes):
        cells = codes[codes >= 0]
        stages = tuple([stage for stage, own in enumerate(made.rank_of) if own == rank])
        changes = np.array([(kind.until_i, kind.pending_w) for kind in Kind])[kind_of(cells)].T
        own = [number_of(cells) % made.num_stages == stage for stage in stages]
        held = [np.cumsum(change * at) for change in changes for at in own]
        held += [_are_summed(kind_of(cells), at) for at in own]
        last = int(cells[-1])
        ends_first = kind_of(last) == Kind.BACKWARD.code and number_of(last) % made.num_stages == min(stages)
        counts, pending, summed = np.split(np.unique(np.array(held).T, axis=0), 3, axis=1)
        least = counts.min(axis=1)
        behind = int(least[summed.all(axis=1)].max(initial=-1))
        found.append(Flights(stages, counts, pending, summed, int(least.max(initial=0)), behind, ends_first))
    return tuple(found)


def _are_summed(kinds: npt.NDArray[Any], own: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return whether there are sums of all gradients of a stage after each action, of which ``own`` are its:
    the first microbatch has made them, and to those of none the last one has added."""
    weights, last = (
        (Kind.BACKWARD.code, Kind.BACKWARD_WEIGHT.code),
        (Kind.BACKWARD.code, Kind.BACKWARD_INPUT.code),
    )
    made = np.cumsum(own & np.isin(kinds, weights)) > 0
    left = own & np.isin(kinds, last)
    return made & (np.cumsum(left) < left.sum())


def layers_counted(plan: Plan, layers: int) -> tuple[int, ...]:
    """Return how many of equal layers each stage has where a plan counts them; nothing where it does not."""
    sizes, count = parse_stages(plan.stages), plan.num_stages
    if sizes:
        return sizes if sum(sizes) == layers else ()
    if plan.stages == "layers":
        return () if layers % count else (layers // count,) * (count if layers else 0)
    if plan.stages != "default" or not layers:
        return ()
    with suppress(PartitionError):
        return default_split(layers, count)
    return ()


def seconds_of_stages(
    plan: Plan, stages: Sequence[StageWork], passage: LayerPassage | None = None, after: float = 0.0
) -> float:
    """Return the seconds that a plan of these stages takes at least; 0 where nothing is known.

    ``passage`` is the way through a layer, of stages that begin between layers; ``after`` are seconds for
    each layer of a rank that follow its last backward pass.
    """
    if len(stages) != plan.num_stages:
        return 0.0
    ahead = [0, *accumulate(stage.layers for stage in stages)]
    found, ranks = 0.0, flights(plan)
    fewest = min([sum(stages[stage].layers for stage in rank.stages) for rank in ranks], default=0)
    for rank in ranks:
        seconds = plan.microbatches * sum(stages[stage].seconds for stage in rank.stages)
        if passage is not None and (before := ahead[min(rank.stages)]):
            # The gradient of what the first layer takes in may be of no use.
            back = (before - 1) * passage.behind - passage.late if rank.ends_first else 0.0
            seconds += before * passage.ahead + max(back, 0.0)
        found = max(found, seconds)
    return found + fewest * after


def bytes_of_stages(
    plan: Plan, stages: Sequence[StageWork], every: HeldParts, layered: HeldParts | None
) -> float:
    """Return the bytes that the fullest rank of a plan of these stages holds at least; 0: nothing is known.

    All ranks together hold ``every``, and of equal layers, which the stages have whole, ``layered``.
    """
    ranks = flights(plan)
    if not ranks or len(stages) != plan.num_stages:
        return 0.0
    saved = [np.array([stages[stage].saved for stage in rank.stages]) for rank in ranks]
    halves = [np.array([stages[stage].pending for stage in rank.stages]) for rank in ranks]
    moments = [
        rank.counts @ own + rank.pending @ half for rank, own, half in zip(ranks, saved, halves, strict=True)
    ]
    peaks = [float(each.max(initial=0)) for each in moments]
    found = [*peaks, (every.held + sum(peaks)) / len(ranks)]
    layers = sum(stage.layers for stage in stages)
    if layered is not None and layers:
        for rank, each in zip(ranks, moments, strict=True):
            shares = np.array([stages[stage].layers / layers for stage in rank.stages])
            sums = rank.summed @ (layered.gradients * shares)
            found.append(layered.held * float(shares.sum()) + float((each + sums).max(initial=0)))
    return max(found)


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
