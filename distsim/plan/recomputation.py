"""What backward computes again: the field ``remat`` of a plan, as text."""

from __future__ import annotations

import re
from typing import NamedTuple

from distsim.errors import PlanError, shortened
from distsim.plan.rank_layout import MAX_DEGREE
from distsim.suggestions import choices_for

REMAT = (
    "none",
    "full",
    "full_early",
    "every:N",
    "every_early:N",
    "block:N",
    "uniform:N",
    "attention",
    "ops:LIST",
    "parts:LIST",
    "names:LIST",
    "matmuls",
    "min_cut",
    "budget:X",
)
"""What backward computes again: nothing; each block from its inputs, all of it, or up to the last op that
backward needs; every N-th block so; the first N layers of each stage; the layers of each stage in groups of
N, each group from its input; core attention, from queries, keys and values; all of a block but what ops of
the types listed make, as in ops:MatMul+Attention, or all but each N-th of them, as in ops:MatMul/2; the parts
listed, of PARTS; all of a block but the values listed, of NAMES; all but matrix products; what a minimum cut
does not save; what does not fit into the share X, 0 to 1, of the bytes that the minimum cut of each block
saves beyond its inputs."""

PARTS = ("norms", "activations", "up_projections", "attention")
"""Parts of a layer that may run again, as in parts:norms+activations: normalizations; activations between two
products, with the product of both halves of a gated one; what lies between attention and compressed queries,
keys and values (multi-head latent attention); core attention."""


NAMES = ("qkv_proj", "context", "out_proj", "mlpwi", "mlpwo")
"""Values of a layer that may be saved, as in names:qkv_proj+out_proj, called as MaxText calls them for JAX's
``save_only_these_names`` (MaxText/layers: ``checkpoint_name``): queries, keys and values as attention reads
them; what attention makes; the product behind it; the first products of the feed-forward; its last."""


class Remat(NamedTuple):
    """A way to save or recompute, one of REMAT, with its number, its types of ops, or its parts or names.

    Of a type (name, N) all but each N-th are saved, all where N is 0.
    """

    name: str
    number: float = 0.0
    ops: tuple[tuple[str, int], ...] = ()
    parts: tuple[str, ...] = ()

    @property
    def counts_layers(self) -> bool:
        """Whether it depends on which layers a stage has."""
        return self.name in ("block", "uniform")


def parse_remat(text: object) -> Remat:
    """Return what ``remat`` of a plan says.

    Raises :class:`PlanError` for an unknown name, for a number that is missing or out of range, and for a
    list that is none or names a type twice. Whether there are such ops is not known here.

    >>> parse_remat("every:2")
    Remat(name='every', number=2.0, ops=(), parts=())
    >>> parse_remat("ops:MatMul/2+Attention").ops
    (('MatMul', 2), ('Attention', 0))
    """
    name, colon, given = text.partition(":") if isinstance(text, str) else ("", "", "")
    known = {choice.partition(":")[0]: choice for choice in REMAT}.get(name, "")
    if not known or bool(colon) != (":" in known):
        raise PlanError(f"remat={shortened(text)} is unknown; choose one of {choices_for(text, REMAT)}")
    if not colon:
        return Remat(name)
    kind = known.partition(":")[2]
    if name in _LISTS:
        return Remat(name, parts=_parse_list(text, given, *_LISTS[name]))
    if kind == "LIST":
        return Remat(name, ops=_parse_ops(text, given))
    whole, low, high = (True, 1, MAX_DEGREE) if kind == "N" else (False, 0, 1)
    pattern = r"[0-9]{1,7}" if whole else r"[0-9]{1,7}(\.[0-9]{1,12})?"
    if not re.fullmatch(pattern, given, re.ASCII) or not low <= float(given) <= high:
        what = "an integer" if whole else "a number"
        example = f"{name}:2" if whole else f"{name}:0.5"
        raise PlanError(f"remat={shortened(text)}: {name} takes {what} in {low}..{high}, as in {example}")
    return Remat(name, float(given))


_LISTS = {"parts": (PARTS, "part"), "names": (NAMES, "name")}


def _parse_list(text: object, given: str, usable: tuple[str, ...], what: str) -> tuple[str, ...]:
    names = given.split("+")
    for place, name in enumerate(names):
        if name not in usable:
            known = choices_for(name, usable)
            raise PlanError(f"remat={shortened(text)}: {shortened(name)} is no {what}; choose from {known}")
        if name in names[:place]:
            raise PlanError(f"remat={shortened(text)} names {name} twice; name each {what} once")
    return tuple(names)


def _parse_ops(text: object, given: str) -> tuple[tuple[str, int], ...]:
    items = given.split("+")
    if not all(
        re.fullmatch(r"[A-Za-z][A-Za-z0-9]{0,63}(/([2-9]|[1-9][0-9]{1,3}))?", op, re.ASCII) for op in items
    ):
        raise PlanError(
            f"remat={shortened(text)}: ops takes the types of ops whose results are saved, as in "
            "ops:MatMul+Attention, or of all but each N-th, as in ops:MatMul/2"
        )
    ops = tuple([(name, int(every or 0)) for name, _, every in (item.partition("/") for item in items)])
    names = [name for name, _ in ops]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise PlanError(f"remat={shortened(text)} names {twice[0]} twice; name each type once")
    return ops
