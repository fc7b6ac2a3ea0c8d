"""The sizes of a decoder as options: each has one name, whichever record it is in."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import fields, replace
from typing import Any

from distsim.errors import PlanError
from distsim.models.decoder_sizes import DecoderSizes
from distsim.suggestions import choices_for

WHERE: dict[str, tuple[str, str]] = {
    **{name: ("", name) for name in ("layers", "hidden", "vocab", "tied")},
    **{name: ("attention", name) for name in ("heads", "kv_heads", "head_dim", "window")},
    **{name: ("attention", name) for name in ("q_lora", "kv_lora", "nope", "rope", "value")},
    "ffn": ("feed_forward", "ffn"),
    **{name: ("experts", name) for name in ("experts", "top_k", "shared", "n_group", "topk_group")},
    **{name: ("experts", name) for name in ("groups", "aux_loss", "aux_over", "dispatcher", "weighted")},
    "expert_ffn": ("experts", "ffn"),
    "dense": ("expert_layers", "dense"),
    **{name: ("positions", name) for name in ("context", "theta")},
    **{f"{name}_dropout": ("dropout", name) for name in ("embedding", "attention", "residual")},
}
"""The record of a decoder's sizes, or the sizes themselves, and the field that an option sets."""


def options_of(sizes: DecoderSizes) -> tuple[str, ...]:
    """Return the options that these sizes have: none of experts without a mixture, say.

    >>> from distsim.models.parts.attention import GroupedHeads
    >>> options_of(DecoderSizes(2, 16, 32, GroupedHeads(4)))[:7]
    ('layers', 'hidden', 'vocab', 'tied', 'heads', 'kv_heads', 'head_dim')
    """
    return tuple(name for name in WHERE if _has(sizes, name))


def _has(sizes: DecoderSizes, option: str) -> bool:
    record, field = WHERE[option]
    if option == "ffn":
        return not all(map(sizes.has_experts, range(sizes.layers)))
    if option == "dense":
        return sizes.experts is not None
    if option == "theta":
        return not sizes.positions.learned
    owner: Any = getattr(sizes, record) if record else sizes
    return owner is not None and field in {each.name for each in fields(owner)}


def override(sizes: DecoderSizes, options: dict[str, Any]) -> DecoderSizes:
    """Return the sizes with other values for some options; raise :class:`PlanError` where they do not fit.

    >>> from distsim.models.parts.attention import GroupedHeads
    >>> override(DecoderSizes(2, 16, 32, GroupedHeads(4)), {"layers": 3, "heads": 2}).attention.heads
    2
    """
    changes: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for name, value in options.items():
        if not _has(sizes, name) and name != "ffn":
            raise PlanError(f"there is no option {name!r}; there are {choices_for(name, options_of(sizes))}")
        record, field = WHERE[name]
        changes[record][field] = value
    own = changes.pop("", {})
    parts: dict[str, Any] = {
        record: replace(getattr(sizes, record), **new) for record, new in changes.items()
    }
    made = replace(sizes, **own, **parts)
    if "ffn" in options and not _has(made, "ffn"):
        raise PlanError(f"ffn={options['ffn']} is for dense layers, of which there are none: use expert_ffn")
    return made
