"""How a plan lays its ranks out: the order of axes over the devices, and the kinds of context parallelism."""

from __future__ import annotations

import re

from distsim.errors import PlanError, shortened

ORDER = "tp-cp-ep-dp-pp"
"""Which axis of ranks changes fastest over the devices, which next, as in Megatron-LM (parallel_state.py)."""

CP_KINDS = ("allgather", "ring", "ulysses", "usp:U")
"""How ranks of a context divide attention (:mod:`distsim.ops.attention_sharding`): keys and values of all
are brought together; they pass around a ring; heads are divided, by all-to-alls; U ranks exchange heads,
rings are of the others (Fang and Zhao 2024, USP)."""


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
        )
    return str(text), 1
