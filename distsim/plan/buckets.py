"""Gradient buckets: how much is reduced over data-parallel ranks at a time, as frameworks choose it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from distsim.cache import cached
from distsim.errors import PlanError
from distsim.suggestions import did_you_mean

UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
"""Bytes of a unit of ``bucket=``."""

BARE = 2**10
"""Bytes that a number without a unit says at least: fewer may be meant as the MiB of a framework's option."""


class Fill(NamedTuple):
    """What makes a bucket full: ``limit``, or ``by_rank`` for each rank if that is more; of the first bucket
    ``first``, if there is one; in bytes as they are sent, or in ``elements``. ``held``: buffers have all
    gradients as they are sent, from the start of the step to its end; ``twice``: others have them as backward
    makes them, in the type of their parameters."""

    limit: int
    by_rank: int = 0
    first: int | None = None
    elements: bool = False
    held: bool = False
    twice: bool = False


BUCKETS = {
    # torch/nn/parallel/distributed.py: bucket_cap_mb=25; dist._DEFAULT_FIRST_BUCKET_BYTES = 1048576
    "torch": Fill(25 * 2**20, first=2**20),
    # nanotron, optim/gradient_accumulator.py: sums in float32, and DDP's buckets, each of which is added to
    # them, and sums are sent (get_fp32_accum_hook); trainer.py has DDP copy gradients into its buckets
    # (no gradient_as_bucket_view), which in 16 bits, or summed in one type, are there beside them
    "nanotron": Fill(50 * 2**20, first=2 * 2**20, held=True, twice=True),
    # Megatron-LM core/distributed/distributed_data_parallel.py: max(40000000, 1000000 * dp size) parameters
    "megatron": Fill(40_000_000, by_rank=1_000_000, elements=True, held=True),
    # DeepSpeed runtime/zero/config.py: reduce_bucket_size 5e8 elements
    "deepspeed": Fill(500_000_000, elements=True),
    # torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py: all of a module that is wrapped, a layer
    "fsdp2": Fill(2**62),
}
"""What frameworks choose."""

BUCKET = ("auto", *BUCKETS, "NMiB", "NB", "Np")
"""What ``bucket=`` may be: torch's, or layers with ``zero=3``; a framework's; bytes; parameters."""

LAYERS = ("auto", "fsdp2")
"""What it may be with ``zero=3``: layers, in a buffer that parameters and gradients lie in, or are copied
out of, and into."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """When a bucket is full: once it holds ``limit`` bytes as they are sent, the first one ``first``.

    With ``elements`` both count elements. ``layers``: each layer's gradients are one bucket in place of that,
    and its parameters are gathered together. ``early``: a bucket is reduced while the last backward pass, or
    that of each microbatch, still runs; else after it, or it waits for that. ``ahead``: new parameters are
    gathered bucket by bucket during the first forward pass of the next step, in place of at the end.
    ``held``, ``twice``: see :class:`Fill`. ``blocking``: the parameters of a layer are gathered one by one,
    when it comes to them. ``listed``: new parameters are gathered into lists of a slice of each a rank, and
    gradients of which a rank needs a part are summed whole. ``copied``: parameters are copied out of the
    buffer into which they are gathered, gradients into the one that is scattered. ``averaged``: a kernel
    divides each bucket by the ranks before it is sent; ``together``: what is reduced once a step is when all
    gradients of a stage are there; ``checked``: before that the host waits for its norm
    (:mod:`distsim.transforms.gradient_passes`).
    """

    limit: int
    first: int
    elements: bool = False
    early: bool = True
    layers: bool = False
    ahead: bool = False
    blocking: bool = False
    held: bool = False
    twice: bool = False
    listed: bool = False
    copied: bool = False
    averaged: bool = False
    together: bool = False
    checked: bool = False


def parse_bucket(text: object) -> Fill:
    """Return what makes a bucket full by ``bucket=``.

    Raises :class:`PlanError` for anything else, and for fewer than :data:`BARE` bytes without their unit.

    >>> parse_bucket("1MiB").limit, parse_bucket("40000000p").elements
    (1048576, True)
    """
    if text == "auto":
        return BUCKETS["torch"]
    if isinstance(text, str) and text in BUCKETS:
        return BUCKETS[text]
    given = text if isinstance(text, str) else ""
    found = re.fullmatch(r"([1-9][0-9]{0,14})(p|B|[kMG]B|[KMG]iB)?", given, re.ASCII)
    if found is None:
        raise PlanError(
            f"bucket={repr(text)[:40]} is unknown; choose one of {', '.join(BUCKET)}, as in 25MiB, or "
            f"40000000p for parameters{did_you_mean(text, (*BUCKETS, 'auto'))}"
        )
    number, unit = int(found[1]), found[2] or ""
    if not unit and number < BARE:
        raise PlanError(
            f"bucket={number} is {number} bytes, if it is not meant as MiB (torch's bucket_cap_mb): write "
            f"bucket={number}MiB, or bucket={number}B for bytes"
        )
    return Fill(number, elements=True) if unit == "p" else Fill(number * UNITS[unit])


@cached("buckets of plans, by text, ranks and how they are sent", 4096)
def buckets_of(
    text: str, dp: int, early: bool, zero: int, ahead: bool = False, blocking: bool = False
) -> Buckets:
    """Return the buckets of ``bucket=`` for so many data-parallel ranks, over which ``zero`` divides.

    With 3 they are layers. Megatron-LM and nanotron make no buckets where they do not overlap: one holds all
    of a rank's gradients. With 2 each microbatch's are scattered, and no buffer has all of them.
    """
    named, layers = text in ("megatron", "nanotron"), zero == 3
    if layers or (named and not early):
        held, listed = zero < 2, text == "nanotron" and not layers
        more = {"early": early, "layers": layers, "ahead": ahead, "blocking": blocking, "listed": listed}
        more |= {"copied": text == "fsdp2"}
        return Buckets(2**62, 2**62, held=held, **more)
    fill = parse_bucket(text)
    limit = max(fill.limit, fill.by_rank * dp)
    first = limit if fill.first is None else fill.first
    held, twice = fill.held and zero < 2, fill.twice and zero < 2
    return Buckets(limit, first, fill.elements, early, ahead=ahead, held=held, twice=twice)
