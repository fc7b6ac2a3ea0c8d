"""Schedules of one shape: each rank runs some forwards ahead, then a forward and a backward in turn.

A rank's forwards come in one order, its backwards in another. It warms up with some forwards, alternates
one forward and one backward, and drains with the backwards that remain; where backward is in two halves, W
follows some number of I behind. Which orders, how many forwards ahead and how far behind: all that differs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distsim.cache import cached
from distsim.errors import ScheduleError
from distsim.schedule.action import Kind
from distsim.schedule.codes import code_of
from distsim.schedule.refusals import check_microbatches, check_sizes
from distsim.schedule.table import Ints, Schedule
from distsim.schedule.weights import FLUSH, Weights


@dataclass(frozen=True)
class WarmUp:
    """What makes a schedule of these: per rank the forwards ``ahead``, and W ``behind`` so many I, if halved.

    A rank runs ``group`` microbatches on its first stage, the same on its next, and so on, then the next
    group; backward so from its last stage, or where it is ``mirrored`` in the reverse order of forward. The
    forward and the backward of a round overlap where they are ``paired``.
    """

    group: int
    ahead: tuple[int, ...]
    behind: tuple[int, ...] | None = None
    mirrored: bool = False
    weights: Weights = FLUSH
    paired: bool = False


def gpipe(num_ranks: int, num_microbatches: int, chunks: int = 1) -> Schedule:
    """All forwards, then all backwards (GPipe, Huang et al. 2019).

    Backwards run in the order of the forwards, as in figure 3 of Narayanan et al. 2021 and in torch; figure
    2c of Huang et al. draws them reversed, with the same makespan and memory. With equal stages the bubble
    is `(p - 1) / (m + p - 1)` of the step and every rank holds `m` microbatches.

    Raises:
        ScheduleError: a size is not an integer of at least 1, or chunks is not 1.

    >>> print(gpipe(2, 2))
    gpipe: 2 stages, 2 microbatches
    rank 0: F0 F1 B0 B1
    rank 1: F0 F1 B0 B1
    """
    check_sizes("gpipe", num_ranks, num_microbatches, chunks, only=1)
    return warm_up_schedule(
        "gpipe", num_ranks, num_microbatches, 1, WarmUp(num_microbatches, (num_microbatches,) * num_ranks)
    )


def one_f_one_b(num_ranks: int, num_microbatches: int, chunks: int = 1) -> Schedule:
    """1F1B, that is PipeDream-flush: one forward, one backward, and a flush per step.

    Narayanan et al. 2021 ("Efficient large-scale language model training on GPU clusters using
    Megatron-LM", section 2.2): rank `r` warms up with `min(m, p - r - 1)` forwards, then
    alternates a forward and a backward, then runs the backwards that remain. The bubble is that
    of :func:`gpipe`, but rank `r` holds `min(m, p - r)` microbatches. The weights are those of
    the step's start throughout: :func:`pipedream` stashes them.

    Raises:
        ScheduleError: a size is not an integer of at least 1, or chunks is not 1.

    >>> print(one_f_one_b(3, 4))
    1f1b: 3 stages, 4 microbatches
    rank 0: F0 F1 F2 B0 F3 B1 B2 B3
    rank 1: F0 F1 B0 F2 B1 F3 B2 B3
    rank 2: F0 B0 F1 B1 F2 B2 F3 B3
    """
    check_sizes("1f1b", num_ranks, num_microbatches, chunks, only=1)
    shape = WarmUp(num_microbatches, ahead_by(num_ranks, 1))
    return warm_up_schedule("1f1b", num_ranks, num_microbatches, 1, shape)


def pipedream(num_ranks: int, num_microbatches: int, chunks: int = 1) -> Schedule:
    """PipeDream (Narayanan et al. 2019): the order of 1F1B without a flush, weights stashed.

    Rank `r` updates its weights after each backward, and a microbatch's backward reads the version that its
    forward read: `p - r` versions (section 3.3), of `2 (p - r - 1)` microbatches or more.

    Raises:
        ScheduleError: as :func:`one_f_one_b`.

    >>> pipedream(3, 4).actions == one_f_one_b(3, 4).actions
    True
    """
    check_sizes("pipedream", num_ranks, num_microbatches, chunks, only=1)
    shape = WarmUp(num_microbatches, ahead_by(num_ranks, 1), weights=Weights(1))
    return warm_up_schedule("pipedream", num_ranks, num_microbatches, 1, shape)


def pipedream_2bw(
    num_ranks: int, num_microbatches: int, chunks: int = 1, update_every: int | None = None
) -> Schedule:
    """PipeDream-2BW (Narayanan et al. 2021, "Memory-efficient pipeline-parallel DNN training").

    The order of 1F1B without a flush, one update every `update_every` microbatches, over which gradients are
    summed, and two versions of the weights: gradients are of weights one update old. With at least p
    microbatches an update no third version is needed (section 3.1); by default the fewest of those that
    divide the m microbatches.

    Raises:
        ScheduleError: as :func:`one_f_one_b`, there are fewer microbatches, or fewer an update, than ranks,
            or updates do not divide the microbatches.

    >>> pipedream_2bw(3, 8).actions == one_f_one_b(3, 8).actions
    True
    >>> pipedream_2bw(3, 8).weights
    Weights(update_every=4, delayed=True)
    """
    name = "pipedream_2bw"
    check_sizes(name, num_ranks, num_microbatches, chunks, only=1)
    rule = "with two versions, microbatches are at least as many as ranks"
    check_microbatches(name, num_ranks, num_microbatches, rule, lambda m: m >= num_ranks)
    fits = [n for n in range(num_ranks, num_microbatches + 1) if num_microbatches % n == 0]
    if update_every is None:
        update_every = fits[0]
    elif update_every not in fits:
        raise ScheduleError(
            f"{name}: update_every={update_every!r} must divide {num_microbatches} microbatches and be at "
            f"least the {num_ranks} ranks; choose one of {', '.join(map(str, fits[:8]))}"
        )
    shape = WarmUp(num_microbatches, ahead_by(num_ranks, 1), weights=Weights(update_every, delayed=True))
    return warm_up_schedule(name, num_ranks, num_microbatches, 1, shape)


def interleaved(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """Interleaved 1F1B in the order of Megatron-LM (Narayanan et al. 2021, section 2.2).

    Rank `r` holds stages `r`, `p + r`, ... and runs p microbatches on each in turn; it warms up with
    `(v - 1) p + 2 (p - r - 1)` forwards. The bubble is that of 1F1B over v; rank `r` holds
    `p v + p - 1 - 2 r` pairs of a stage and a microbatch, at most `m v`.

    Megatron refuses m that p does not divide, and with one chunk runs 1F1B. There torch differs: see
    :func:`interleaved_torch`. Elsewhere both orders are the same.

    Raises:
        ScheduleError: a size is not an integer of at least 1, or chunks > 1 and p does not divide m.

    >>> print(interleaved(2, 2, 2))
    interleaved: 4 stages on 2 ranks, 2 microbatches
    rank 0: F0@0 F1@0 F0@2 F1@2 B0@2 B1@2 B0@0 B1@0
    rank 1: F0@1 F1@1 F0@3 B0@3 F1@3 B1@3 B0@1 B1@1
    """
    check_sizes("interleaved", num_ranks, num_microbatches, chunks)
    if chunks == 1:
        shape = WarmUp(num_microbatches, ahead_by(num_ranks, 1))
    else:
        rule = "ranks divide microbatches, in Megatron (interleaved_torch takes more)"
        check_microbatches("interleaved", num_ranks, num_microbatches, rule, lambda m: m % num_ranks == 0)
        shape = WarmUp(num_ranks, ahead_by(num_ranks, 2, (chunks - 1) * num_ranks))
    return warm_up_schedule("interleaved", num_ranks, num_microbatches, chunks, shape)


def combined_1f1b(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """Interleaved 1F1B whose forward and backward overlap (Megatron-LM's combined 1F1B).

    The order of :func:`interleaved` with one more forward ahead, so that each backward stands beside the next
    forward, which does not wait for it: tokens on their way to the experts of one microbatch are hidden
    behind computation of the other (``--overlap-moe-expert-parallel-comm``,
    core/pipeline_parallel/combined_1f1b.py; schedules.py, ``get_pp_rank_microbatches``). With one stage on
    each of several ranks a pair would wait for the ranks on both sides of it: Megatron refuses that too.

    If what overlaps takes as long as one after the other, so does the step as :func:`interleaved`. Rank `r`
    holds `p v + p - 2 r` pairs of a stage and a microbatch, at most `m v`.

    Raises:
        ScheduleError: as :func:`interleaved`, or there is one stage on each of several ranks.

    >>> print(combined_1f1b(2, 2, 2))
    combined_1f1b: 4 stages on 2 ranks, 2 microbatches
    rank 0: F0@0 F1@0 F0@2 F1@2 B0@2 B1@2 B0@0 B1@0
    rank 1: F0@1 F1@1 F0@3 (F1@3;B0@3) B1@3 B0@1 B1@1
    """
    check_sizes("combined_1f1b", num_ranks, num_microbatches, chunks)
    if chunks == 1 < num_ranks:
        raise ScheduleError(
            f"combined_1f1b: with one stage on each of {num_ranks} ranks no pair overlaps another's; choose "
            "chunks of 2 or more, or 1f1b"
        )
    rule = "ranks divide microbatches, in Megatron"
    check_microbatches("combined_1f1b", num_ranks, num_microbatches, rule, lambda m: m % num_ranks == 0)
    shape = WarmUp(num_ranks, ahead_by(num_ranks, 2, (chunks - 1) * num_ranks + 1), paired=True)
    return warm_up_schedule("combined_1f1b", num_ranks, num_microbatches, chunks, shape)


def interleaved_torch(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """Interleaved 1F1B in the order of torch (ScheduleInterleaved1F1B).

    As :func:`interleaved`, but microbatches are in `max(1, m // p)` groups of equal size, which is p or
    more (or m < p), and with one chunk, too, rank `r` warms up with `2 (p - r - 1)` forwards: up to 2 p - 1
    held where 1F1B holds p, and less sensitive to the time of sends.

    Raises:
        ScheduleError: a size is not an integer of at least 1, or m is no multiple of `m // p`.

    >>> print(interleaved_torch(2, 3, 1))
    interleaved_torch: 2 stages, 3 microbatches
    rank 0: F0 F1 F2 B0 B1 B2
    rank 1: F0 B0 F1 B1 F2 B2
    """
    check_sizes("interleaved_torch", num_ranks, num_microbatches, chunks)
    group = _torch_group("interleaved_torch", num_ranks, num_microbatches)
    shape = WarmUp(group, ahead_by(num_ranks, 2, (chunks - 1) * group))
    return warm_up_schedule("interleaved_torch", num_ranks, num_microbatches, chunks, shape)


def looped_bfs(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """Breadth-first pipeline (Lamy-Poirier 2022, arXiv 2211.05953), in the order of torch.

    All microbatches run on a rank's first stage, then on its next; backward in the reverse order, the last
    microbatch first. For m >= p the bubble is that of :func:`interleaved`; `m v` pairs are held.

    Raises:
        ScheduleError: a size is not an integer of at least 1.

    >>> print(looped_bfs(1, 2, 2))
    looped_bfs: 2 stages on 1 rank, 2 microbatches
    rank 0: F0@0 F1@0 F0@1 F1@1 B1@1 B0@1 B1@0 B0@0
    """
    check_sizes("looped_bfs", num_ranks, num_microbatches, chunks)
    ahead = (num_microbatches * chunks,) * num_ranks
    shape = WarmUp(num_microbatches, ahead, mirrored=True)
    return warm_up_schedule("looped_bfs", num_ranks, num_microbatches, chunks, shape)


def zb_h1(num_ranks: int, num_microbatches: int, chunks: int = 1) -> Schedule:
    """ZB-H1 (Qi et al. 2023, "Zero bubble pipeline parallelism", section 2.3): 1F1B's memory, W last.

    Forwards and I are 1F1B's; W of rank `r` follows r I behind. The bubble is `(p - 1) (F + I - W)`; rank
    `r` holds `p - r` microbatches, and what W needs of r more.

    Raises:
        ScheduleError: a size is not an integer of at least 1, or chunks is not 1.

    >>> print(zb_h1(2, 3))
    zb_h1: 2 stages, 3 microbatches
    rank 0: F0 F1 I0 W0 F2 I1 W1 I2 W2
    rank 1: F0 I0 F1 I1 W0 F2 I2 W1 W2
    """
    check_sizes("zb_h1", num_ranks, num_microbatches, chunks, only=1)
    shape = WarmUp(num_microbatches, ahead_by(num_ranks, 1), tuple(range(num_ranks)))
    return warm_up_schedule("zb_h1", num_ranks, num_microbatches, 1, shape)


def zb_h2(num_ranks: int, num_microbatches: int, chunks: int = 1) -> Schedule:
    """ZB-H2 (Qi et al. 2023, section 2.3): no bubble within a rank's step, twice the memory.

    Rank `r` warms up with `2 (p - r - 1)` forwards and W follows 2 r I behind. With F = I = W and
    m >= 2 p - 1 a rank is never idle between; it holds `2 (p - r) - 1` microbatches, and what W needs of
    2 r more. What is saved counts only if no step waits for all ranks at its end.

    Raises:
        ScheduleError: a size is not an integer of at least 1, or chunks is not 1.

    >>> print(zb_h2(2, 3))
    zb_h2: 2 stages, 3 microbatches
    rank 0: F0 F1 F2 I0 W0 I1 W1 I2 W2
    rank 1: F0 I0 F1 I1 F2 I2 W0 W1 W2
    """
    check_sizes("zb_h2", num_ranks, num_microbatches, chunks, only=1)
    shape = WarmUp(num_microbatches, ahead_by(num_ranks, 2), tuple(range(0, 2 * num_ranks, 2)))
    return warm_up_schedule("zb_h2", num_ranks, num_microbatches, 1, shape)


def interleaved_zb(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """ZB1P over several stages a rank, in the order of torch (ScheduleInterleavedZeroBubble).

    Groups as in :func:`interleaved_torch`; rank `r` warms up with `(v - 1) g + p - r - 1` forwards, g to a
    group, and W follows r I behind. With F = I = W the step takes `3 m v + p - 1` units; where p divides m
    `p v` pairs of a stage and a microbatch are held.

    Raises:
        ScheduleError: as :func:`interleaved_torch`.

    >>> print(interleaved_zb(2, 2, 1))
    interleaved_zb: 2 stages, 2 microbatches
    rank 0: F0 F1 I0 W0 I1 W1
    rank 1: F0 I0 F1 I1 W0 W1
    """
    check_sizes("interleaved_zb", num_ranks, num_microbatches, chunks)
    group = _torch_group("interleaved_zb", num_ranks, num_microbatches)
    shape = WarmUp(group, ahead_by(num_ranks, 1, (chunks - 1) * group), tuple(range(num_ranks)))
    return warm_up_schedule("interleaved_zb", num_ranks, num_microbatches, chunks, shape)


def ahead_by(num_ranks: int, each: int, least: int = 0) -> tuple[int, ...]:
    """Return the forwards ahead: ``least`` on the last rank, ``each`` more for each rank before it.

    >>> ahead_by(4, 2, 1)
    (7, 5, 3, 1)
    """
    return tuple(range(least + each * (num_ranks - 1), least - 1, -each))


def _torch_group(name: str, num_ranks: int, num_microbatches: int) -> int:
    """Return how many microbatches torch runs on one stage of a rank before the next."""
    rule = "groups of at least as many microbatches as ranks are as many as fit, and equal"
    check_microbatches(name, num_ranks, num_microbatches, rule, lambda m: m % max(1, m // num_ranks) == 0)
    return num_microbatches // max(1, num_microbatches // num_ranks)


@cached("orders of schedules that warm up, by name, sizes and shape", 1024)
def warm_up_schedule(
    name: str, num_ranks: int, num_microbatches: int, chunks: int, shape: WarmUp
) -> Schedule:
    """Return the schedule of a shape: each action is at the place that the numbers before it give.

    Raises:
        ScheduleError: a size is not an integer of at least 1, or the shape is not of so many ranks, or is of
            pairs and halves.

    >>> print(warm_up_schedule("eager", 2, 3, 1, WarmUp(3, ahead_by(2, 2))))
    eager: 2 stages, 3 microbatches
    rank 0: F0 F1 F2 B0 B1 B2
    rank 1: F0 B0 F1 B1 F2 B2
    """
    check_sizes(name, num_ranks, num_microbatches, chunks)
    for numbers in (shape.ahead, shape.behind):
        if numbers is not None and len(numbers) != num_ranks:
            raise ScheduleError(
                f"{name}: a shape of {len(numbers)} ranks for {num_ranks}; give each a number"
            )
    if shape.paired and shape.behind is not None:
        raise ScheduleError(f"{name}: pairs of forward and backward have whole backwards; leave behind out")
    count, kinds = num_microbatches * chunks, 2 if shape.behind is None else 3
    forward, backward = _orders(num_ranks, num_microbatches, chunks, shape)
    if shape.paired:
        rows = [
            _paired(forward + code_of(r, 0), backward + code_of(r, 1), shape.ahead[r])
            for r in range(num_ranks)
        ]
        return Schedule.from_codes(name, num_ranks * chunks, num_microbatches, rows, weights=shape.weights)
    codes = np.full((num_ranks, kinds * count, 2), -1, np.int64)
    nth, rank = np.arange(count), np.arange(num_ranks)[:, None]
    ahead = np.minimum(shape.ahead, count)[:, None]
    behind = count if shape.behind is None else np.array(shape.behind)[:, None]
    # Round k runs forward ahead + k, backward k and W k - behind: counted is what stands before each.
    place = nth + np.maximum(nth - ahead, 0) + np.maximum(nth - ahead - behind, 0)
    codes[rank, place, 0] = forward + code_of(rank, 0)
    place = nth + np.minimum(nth + ahead + 1, count) + np.maximum(nth - behind, 0)
    codes[rank, place, 0] = backward + code_of(rank, kinds - 1)
    if shape.behind is not None:
        after = nth + behind + 1
        place = nth + np.minimum(after, count) + np.minimum(after + ahead, count)
        codes[rank, place, 0] = backward + code_of(rank, Kind.BACKWARD_WEIGHT.code)
    codes.setflags(write=False)
    return Schedule.from_codes(name, num_ranks * chunks, num_microbatches, list(codes), weights=shape.weights)


def _paired(forward: Ints, backward: Ints, ahead: int) -> Ints:
    """Return the codes [cells, 2] of a rank: forwards, pairs of one and a backward, backwards."""
    count = len(forward)
    ahead = min(ahead, count)
    codes = np.full((ahead + count, 2), -1, np.int64)
    codes[:count, 0] = forward
    codes[ahead:count, 1] = backward[: count - ahead]
    codes[count:, 0] = backward[count - ahead :]
    codes.setflags(write=False)
    return codes


def _orders(num_ranks: int, num_microbatches: int, chunks: int, shape: WarmUp) -> tuple[Ints, Ints]:
    """Return the codes of the forwards of rank 0, and its backwards' less their kind, in their orders."""
    nth = np.arange(num_microbatches * chunks)
    turn, rest = nth // (shape.group * chunks), nth % (shape.group * chunks)
    first = code_of((turn * shape.group + rest % shape.group) * num_ranks * chunks, 0)
    chunk = rest // shape.group
    forward = first + code_of(num_ranks * chunk, 0)
    back = code_of(num_ranks * (chunks - 1 - chunk), 0)
    return forward, forward[::-1] if shape.mirrored else first + back
