"""The decoders that have a name: published models, each by the fields of its ``config.json``."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from distsim.errors import ImportModelError
from distsim.importer.decoders.huggingface import sizes_from_hf
from distsim.models.decoder_sizes import DecoderSizes
from distsim.suggestions import did_you_mean


@cache
def _table() -> dict[str, dict[str, Any]]:
    return tomllib.loads((files("distsim.models") / "data" / "named.toml").read_text(encoding="utf-8"))


def model_names() -> tuple[str, ...]:
    """Return the names of the models, family by family.

    >>> model_names()[:4]
    ('llama3-8b', 'llama3-70b', 'llama3-405b', 'llama2-7b')
    """
    return tuple(_table())


def named_sizes(name: str) -> DecoderSizes:
    """Return the sizes of a model. Raises :class:`ImportModelError` for an unknown name.

    >>> named_sizes("llama3-8b").layers
    32
    """
    if name not in _table():
        raise ImportModelError(f"no model is named {name!r}{did_you_mean(name, model_names())}")
    fields = _table()[name]
    return sizes_from_hf(fields | dict.fromkeys(fields.get("null", ())), name)
