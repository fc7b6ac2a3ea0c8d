"""Families of Hugging Face that are not read, and what comes near to them, with the sizes of a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, cast


class _Near(NamedTuple):
    """A model by which a family may be stood for: options and the fields that say them, and what is other."""

    model: str
    fields: Mapping[str, str]
    other: str


_SIZES = {"layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads"}
_FFN = {"ffn": "intermediate_size", "vocab": "vocab_size"}
_KEYS = {"kv_heads": "num_key_value_heads"}
_NEAR: Mapping[str, _Near] = {
    "bloom": _Near(
        "gpt",
        {"layers": "n_layer", "hidden": "hidden_size", "heads": "n_head", "vocab": "vocab_size"},
        "with learned positions in place of ALiBi",
    ),
    "mllama": _Near(
        "llama", {**_SIZES, **_KEYS, **_FFN}, "text alone: without images and what attends to them"
    ),
}


def near_family(config: Mapping[str, object]) -> str:
    """Return what comes near to a config of a family that is not read, for the end of an error, or nothing.

    >>> near_family({"model_type": "bloom", "n_layer": 24, "hidden_size": 1024})
    '; near it comes gpt:layers=24,hidden=1024, with learned positions in place of ALiBi'
    """
    family = config.get("model_type")
    near = _NEAR.get(family) if isinstance(family, str) else None
    if near is None:
        return ""
    inner = config.get("text_config")
    sizes = cast(Mapping[str, object], inner) if isinstance(inner, Mapping) else config
    given = {option: sizes.get(field) for option, field in near.fields.items()}
    options = [f"{option}={size}" for option, size in given.items() if type(size) is int and 0 < size < 2**31]
    return f"; near it comes {near.model}:{','.join(options) or 'layers=N,...'}, {near.other}"
