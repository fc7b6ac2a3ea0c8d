"""How a plan lays its ranks out: the order of axes over the devices, the kinds of context parallelism, and
which ranks have experts each."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from distsim.errors import PlanError, shortened
from distsim.suggestions import did_you_mean

MAX_DEGREE = 2**20
"""Largest degree and microbatch count: about ten times the largest clusters, so more is a slip."""

ORDER = "tp-cp-ep-dp-pp"
"""Which axis of ranks changes fastest over the devices, which next, as in Megatron-LM (parallel_state.py)."""

CP_KINDS = ("allgather", "ring", "torch_allgather", "torch_alltoall", "ulysses", "usp:U")
"""How ranks of a context divide attention (:mod:`distsim.ops.attention_sharding`): keys and values of all
are brought together; they pass around a ring; either, as torch does it part by part in float32; heads are
divided, by all-to-alls; U ranks exchange heads, rings are of the others (Fang and Zhao 2024, USP)."""


def check_order(text: str) -> None:
    """Raise :class:`PlanError` for an order of axes that does not name each once."""
    if sorted(text.split("-")) != sorted(ORDER.split("-")):
        raise PlanError(
            f"order={shortened(text)} does not name each axis once, the one that changes fastest over the "
            f"devices first, as {ORDER} does"
        )


def parse_cp_kind(text: object) -> tuple[str, int]:
    """Return the kind of context parallelism and how many ranks exchange heads; 1 if not some of them do.

    Raises :class:`PlanError` for one that is unknown.

    >>> parse_cp_kind("ring"), parse_cp_kind("usp:4")
    (('ring', 1), ('ring', 4))
    """
    name, _, count = text.partition(":") if isinstance(text, str) else ("", "", "")
    if name == "usp" and re.fullmatch(r"[1-9][0-9]{0,6}", count, re.ASCII):
        return "ring", int(count)
    if text not in CP_KINDS[:-1]:
        raise PlanError(
            f"cp_kind={shortened(text)} is unknown; choose one of {', '.join(CP_KINDS)}, as in usp:4"
            f"{did_you_mean(text, CP_KINDS)}"
        )
    return str(text), 1


class ExpertRanks(NamedTuple):
    """Along how many ranks of dp, of cp and of tp experts are divided: over the product of the three."""

    dp: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks that have different experts."""
        return math.prod(self)


class Degrees(NamedTuple):
    """What the ranks of experts depend on; ``etp``: of each expert, a divisor of ``tp``, 0 being that."""

    dp: int
    cp: int
    tp: int
    ep: int = 1
    etp: int = 0


def expert_ranks(degrees: Degrees, order: str = ORDER) -> ExpertRanks:
    """Return which ranks have experts each: of the ranks that lie next to each other, as Megatron-LM's do
    (parallel_state.py, the groups of experts: cp is 1 there, so that these are the ones that change fastest).

    Where experts are divided over ``etp`` ranks of tp only, the others of tp have different ones; then come
    neighbours of cp, as many as there can be, and neighbours of dp, or first those of dp where ``order`` says
    that these change faster.
    Raises :class:`PlanError` where ep does not divide the ranks that there are.

    >>> expert_ranks(Degrees(dp=4, cp=2, tp=2, ep=4)), expert_ranks(Degrees(dp=4, cp=3, tp=2, ep=4, etp=1))
    (ExpertRanks(dp=2, cp=2, tp=1), ExpertRanks(dp=2, cp=1, tp=2))
    >>> expert_ranks(Degrees(dp=2, cp=4, tp=4, ep=4, etp=2))
    ExpertRanks(dp=1, cp=2, tp=2)
    """
    dp, cp, tp, ep, etp = degrees
    etp = etp or tp
    if tp % etp:
        raise PlanError(
            f"etp={etp} does not divide tp={tp}, over so many of whose ranks an expert is divided; choose "
            f"one of {', '.join(map(str, divisors(tp)))}"
        )
    apart = tp // etp
    if ep % apart:
        raise PlanError(
            f"ep={ep} with etp={etp} and tp={tp}: ranks of tp have {apart} different experts, so that "
            f"divides ep; use an ep that is a multiple of {apart}, or etp={tp}"
        )
    rest, axes = ep // apart, order.split("-")
    if dp * cp % rest:
        # What divides ep divides experts that ep divides; of others none is known here.
        common = math.gcd(rest, dp * cp)
        usable = [apart * n for n in divisors(common if common > 1 else dp * cp)]
        ranks = f"dp={dp}" + (f" times cp={cp}" if cp > 1 else "")
        ranks += f", with {apart} of tp={tp}" if apart > 1 else ""
        raise PlanError(
            f"ep={ep} does not divide {ranks}, over whose ranks experts are divided; choose one of "
            f"{', '.join(map(str, usable))}"
        )
    if axes.index("cp") < axes.index("dp"):
        near = math.gcd(rest, cp)
        return ExpertRanks(rest // near, near, apart)
    near = math.gcd(rest, dp)
    return ExpertRanks(near, rest // near, apart)


def check_experts_apart(degrees: Degrees, sp: bool) -> None:
    """Raise :class:`PlanError` where ranks of tp would have the same tokens and different experts."""
    if 0 < degrees.etp < degrees.tp and not sp:
        raise PlanError(
            f"etp={degrees.etp} with tp={degrees.tp}: each rank of tp sends its own tokens to experts, and "
            f"with sp=off all have the same; use sp=on, as Megatron-LM does, or etp={degrees.tp}"
        )


def check_experts_of_context(experts: ExpertRanks, cp: int, ulysses: int) -> None:
    """Raise :class:`PlanError` where neighbours of a context with an expert each are no ranks of its kind."""
    if ulysses % experts.cp and experts.cp % ulysses:
        usable = [n for n in divisors(cp) if n % experts.cp == 0 or experts.cp % n == 0]
        raise PlanError(
            f"cp_kind=usp:{ulysses} with experts over {experts.cp} neighbouring ranks of cp={cp}: neither "
            f"divides the other; use usp:U with a U of {', '.join(map(str, usable))}, or another ep"
        )


def divisors(n: int) -> list[int]:
    """Return the divisors of a degree, the first thousands.

    >>> divisors(6)
    [1, 2, 3, 6]
    """
    return [d for d in range(1, min(n, 4096) + 1) if n % d == 0]


def check_zero_ranks(zero: int, zero_ranks: int, dp: int, experts: ExpertRanks) -> None:
    """Raise :class:`PlanError` where what ``zero`` divides cannot be over ``zero_ranks`` ranks of dp.

    With ``experts`` over ranks of dp, as many of the neighbours have each (torchtitan's dp_shard,
    Megatron-LM's num-distributed-optimizer-instances), or no two have the same.
    """
    if not zero:
        raise PlanError(
            f"zero_ranks={zero_ranks} are the ranks over which zero divides, and zero=0 divides "
            "nothing; use zero=1, 2 or 3, or zero_ranks=0"
        )
    usable = [n for n in divisors(dp)[1:] if n % experts.dp == 0 or experts.dp % n == 0]
    if zero_ranks in usable:
        return
    choices = f"choose one of {', '.join(map(str, [0, *usable]))}"
    if zero_ranks > 1 and dp % zero_ranks == 0:
        raise PlanError(
            f"zero_ranks={zero_ranks} with experts over {experts.dp} neighbouring ranks of dp: neither "
            f"divides the other; {choices}"
        )
    raise PlanError(
        f"zero_ranks={zero_ranks} neighbours, of whom each has a part, do not divide dp={dp}; {choices}"
    )
