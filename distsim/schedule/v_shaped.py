"""Schedules of two stages a rank that a microbatch passes down and up again: ZB-V, DualPipeV and DualPipe.

A row is written in letters, F, B, I and W for the rank's first stage and f, b, i and w for its second; `x` is
the W of the oldest I that has none; what stands in brackets overlaps. Microbatches come in their order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from distsim.cache import cached
from distsim.errors import ScheduleError
from distsim.schedule.codes import code_of
from distsim.schedule.refusals import check_microbatches, check_sizes, count
from distsim.schedule.table import Ints, Schedule

_Part = tuple[str, int]
"""Letters of a row, and how often they are repeated."""

_LETTERS = "FBIWfbiwx"
_OF_STAGE, _OLDEST = _LETTERS.index("f"), _LETTERS.index("x")


def zb_v(num_ranks: int, num_microbatches: int, chunks: int = 2) -> Schedule:
    """ZB-V (Qi et al. 2023, section 6) in the order of torch (ScheduleZBVZeroBubble).

    Rank `r` holds stages `r` and `2 p - 1 - r`. With F = I = W and m >= 2 p - 1 no rank is idle from its
    first action to its last, and each holds `2 p` pairs of a stage and a microbatch: 1F1B's memory. Fewer
    microbatches run as the first of 2 p - 1 do.

    Raises:
        ScheduleError: a size is not an integer of at least 1, or chunks is not 2.

    >>> print(zb_v(1, 2))
    zb_v: 2 stages on 1 rank, 2 microbatches
    rank 0: F0@0 F0@1 I0@1 W0@1 F1@0 I0@0 W0@0 F1@1 I1@1 W1@1 I1@0 W1@0
    """
    check_sizes("zb_v", num_ranks, num_microbatches, chunks, only=2)
    return _zb_v(num_ranks, num_microbatches)


@cached("orders of zb_v, by ranks and microbatches", 1024)
def _zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    stages, run = 2 * num_ranks, max(2 * num_ranks - 1, num_microbatches)
    codes: list[Ints] = []
    for rank in range(num_ranks):
        below = num_ranks - rank
        parts = [
            ("F", 2 * below - 1),
            ("fF", rank),
            ("fiw", below),
            ("FIWfiw", run - 2 * num_ranks + rank + 1),
            ("IWfiw", below - 1),
            ("Ii", rank),
            ("IW", below),
            ("w", rank),
            ("W", rank),
        ]
        row = _row(parts, (rank, stages - 1 - rank), stages)
        codes.append(row[row[:, 0] // code_of(stages, 0) < num_microbatches])
    return Schedule.from_codes("zb_v", stages, num_microbatches, codes, _v(num_ranks))


def dualpipe_v(num_ranks: int, num_microbatches: int, chunks: int = 2) -> Schedule:
    """DualPipeV (sail-sg's "cut in half" of DualPipe) in the order of torch and of deepseek-ai/DualPipe.

    Rank `r` holds stages `r` and `2 p - 1 - r`; a forward of one and a backward of the other overlap. With
    F = I = W, pairs in turn, the step takes `6 m + p - 1` units; `2 p + 1` pairs of a stage and a microbatch
    are held.

    Raises:
        ScheduleError: a size is not an integer of at least 1, chunks is not 2, or m < 2 p.

    >>> print(dualpipe_v(1, 2))
    dualpipe_v: 2 stages on 1 rank, 2 microbatches
    rank 0: F0@0 F0@1 F1@0 B0@1 (F1@1;B0@0) B1@1 I1@0 W1@0
    """
    check_sizes("dualpipe_v", num_ranks, num_microbatches, chunks, only=2)
    rule = "microbatches are at least as many as stages, two a rank"
    check_microbatches("dualpipe_v", num_ranks, num_microbatches, rule, lambda m: m >= 2 * num_ranks)
    return _dualpipe_v(num_ranks, num_microbatches)


@cached("orders of dualpipe_v, by ranks and microbatches", 1024)
def _dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    stages = 2 * num_ranks
    codes = [
        _row(_dual_parts(num_ranks, rank, num_microbatches), (rank, stages - 1 - rank), stages)
        for rank in range(num_ranks)
    ]
    return Schedule.from_codes("dualpipe_v", stages, num_microbatches, codes, _v(num_ranks))


def dualpipe(num_ranks: int, num_microbatches: int, chunks: int = 2) -> Schedule:
    """DualPipe (DeepSeek-AI 2024, "DeepSeek-V3", section 3.2.1): two copies run in opposite directions.

    Copy 0 are stages 0..p-1, stage s on rank s; copy 1 stages p..2 p - 1, stage p + s on rank p - 1 - s. Of
    the ``num_microbatches`` of a step each copy runs half: what the Schedule, too, calls its microbatches.
    With F = I = W the step takes `3 m + p - 2` units if a pair ends as one, and `p + 1` pairs of a stage and
    a microbatch are held; rank r and rank p - 1 - r both hold stage r's weights.

    Raises:
        ScheduleError: a size is not an integer of at least 1, chunks is not 2, p or m is odd, or m < 2 p.

    >>> print(dualpipe(2, 4))
    dualpipe: 4 stages on 2 ranks, 2 microbatches
    rank 0: F0@0 F0@3 F1@0 B0@3 (F1@3;B0@0) B1@3 I1@0 W1@0
    rank 1: F0@2 F0@1 F1@2 B0@1 (F1@1;B0@2) B1@1 I1@2 W1@2
    """
    check_sizes("dualpipe", num_ranks, num_microbatches, chunks, only=2)
    if num_ranks % 2:
        raise ScheduleError(
            f"dualpipe: {count(num_ranks, 'rank')} do not pair up; choose {num_ranks + 1}, or dualpipe_v"
        )
    rule = "microbatches are an even number, and at least twice as many as ranks"
    check_microbatches(
        "dualpipe", num_ranks, num_microbatches, rule, lambda m: m % 2 == 0 and m >= 2 * num_ranks
    )
    return _dualpipe(num_ranks, num_microbatches)


@cached("orders of dualpipe, by ranks and microbatches", 1024)
def _dualpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    stages, half, each = 2 * num_ranks, num_ranks // 2, num_microbatches // 2
    rank_of = (*range(num_ranks), *reversed(range(num_ranks)))
    codes: list[Ints] = []
    for rank in range(num_ranks):
        down, up = rank, stages - 1 - rank  # the stages of copy 0 and of copy 1
        outer = min(rank, num_ranks - 1 - rank)
        own = (down, up) if rank < half else (up, down)
        codes.append(_row(_dual_parts(half, outer, each), own, stages))
    return Schedule.from_codes("dualpipe", stages, each, codes, rank_of, copies=2)


def _dual_parts(num_ranks: int, rank: int, num_microbatches: int) -> list[_Part]:
    """Return the eight steps of DualPipeV, which are DualPipe's on half of its ranks and microbatches."""
    below, most = num_ranks - 1 - rank, rank + 1
    main = num_microbatches - 2 * num_ranks + most
    # On the rank where a microbatch turns, the first pair's backward waits for its forward.
    first = "(Fb)(fB)" if below else "Fb(fB)"
    whole = "bB" * (most // 2) + ("b" if rank % 2 == 0 else "")
    halves = ("I" if rank % 2 == 0 else "") + "iI" * (most // 2)
    return [
        ("F", 2 * below),
        ("Ff", most),
        ("ixf", below),
        (first, 1),
        ("(Fb)(fB)", main - 1),
        ("b(fB)", below),
        (whole + halves, 1),
        ("xI", below),
        ("x", most),
    ]


def _v(num_ranks: int) -> tuple[int, ...]:
    """Return the rank of each stage: down to the last rank, and up again."""
    return (*range(num_ranks), *reversed(range(num_ranks)))


def _row(parts: Sequence[_Part], stages: tuple[int, int], num_stages: int) -> Ints:
    """Return the codes, [cells, 2], of a row in letters on a rank that holds these two stages."""
    blocks = [np.tile(_cells(letters), (times, 1)) for letters, times in parts]
    cells = np.concatenate(blocks)
    listed = cells >= 0
    letters = cells[listed]
    chunk, kind = letters // _OF_STAGE, letters % _OF_STAGE
    microbatch = np.zeros(len(letters), np.int64)
    for half in (0, 1):
        own = letters // _OF_STAGE == half
        for kinds in ((0,), (1, 2)):
            same = own & np.isin(kind, kinds)
            microbatch[same] = np.arange(same.sum())
    inputs = kind == 2
    for weights, pending in ((letters == 3, inputs & (chunk == 0)), (letters == 7, inputs & (chunk == 1))):
        microbatch[weights] = microbatch[pending][: weights.sum()]
    oldest = letters == _OLDEST
    if oldest.any():
        kind[oldest], chunk[oldest], microbatch[oldest] = 3, chunk[inputs], microbatch[inputs]
    codes = np.full(cells.shape, -1, np.int64)
    codes[listed] = code_of(microbatch * num_stages + np.array(stages)[chunk], kind)
    return codes


@cached("rows of schedules in letters, by letters", 1024)
def _cells(letters: str) -> Ints:
    """Return the places of letters in ``_LETTERS``, [cells, 2], -1 beside what stands alone."""
    cells = re.findall(r"\((.)(.)\)|(.)", letters)
    places = [[_LETTERS.index(one or alone), _LETTERS.index(two) if two else -1] for one, two, alone in cells]
    return np.array(places, np.int64).reshape(-1, 2)
