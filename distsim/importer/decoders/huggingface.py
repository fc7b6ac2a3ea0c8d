"""import_from_hf: the decoder that a Hugging Face ``config.json`` describes.

What each field means is what transformers (5.23) makes of it for the family, ``model_type``, and so is what
one that is left out means (:mod:`.class_defaults`). Not built, as
none of it changes a step's ops or parameters: rescaled rotary frequencies (``rope_scaling``), the element
type of the checkpoint and its quantization (the step's precision says what is used), the choice of experts
by groups (loads are drawn). Not built either, which a note says: multi-token prediction
(``num_nextn_predict_layers``), an optional module of DeepSeek-V3 that its published count leaves out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from distsim.errors import ImportModelError, PlanError, wrong_type
from distsim.importer.decoders.class_defaults import CLASS_DEFAULTS
from distsim.importer.decoders.config_fields import ConfigFields, read_config
from distsim.importer.decoders.families import FAMILIES
from distsim.importer.decoders.near_families import near_family
from distsim.ir import DType, Float32, Function
from distsim.models.decoder import decoder
from distsim.models.decoder_sizes import DecoderSizes
from distsim.suggestions import did_you_mean, slips

Config = str | os.PathLike[str] | Mapping[str, object]

DEFAULT_BATCH, MAX_DEFAULT_SEQ = 8, 8192

_LONGEST_FIELD = 60


def import_from_hf(
    config: Config,
    batch: int = DEFAULT_BATCH,
    seq: int | None = None,
    dtype: DType | str = Float32(),  # noqa: B008
    attention: str = "flash",
) -> Function:
    """Return the forward function, with a loss, of a ``config.json`` or of the table that it holds.

    ``seq``: by default the longest sequence that the model was made for, at most 8,192 tokens;
    ``attention``: ``flash`` or ``math``. The families are those of :data:`FAMILIES`. Raises
    :class:`ImportModelError` naming the field, its value and what is usable where a field is missing or makes
    no sense; :class:`PlanError` for a sequence that is too long.

    >>> config = dict(model_type="llama", hidden_size=16, intermediate_size=24, num_hidden_layers=2,
    ...               num_attention_heads=4, num_key_value_heads=2, vocab_size=32)
    >>> function = import_from_hf(config, batch=2, seq=8)
    >>> sum(value.type.size for value in function.parameters)
    4944
    """
    sizes = sizes_from_hf(config)
    length = default_seq(sizes) if seq is None else seq
    function = decoder(sizes, batch, length, dtype, name="model", attention=attention)
    return replace(function, notes=(*function.notes, *sizes.left_out))


def default_seq(sizes: DecoderSizes) -> int:
    """Return how long sequences are unless that is given: as the model was made for, up to 8,192 tokens."""
    return min(sizes.positions.context, MAX_DEFAULT_SEQ)


def sizes_from_hf(config: Config, origin: str = "") -> DecoderSizes:
    """Return the sizes of the decoder that a ``config.json``, or the table that it holds, describes.

    ``origin`` begins the errors about a table.
    """
    if isinstance(config, Mapping):
        origin, table = origin or "config", config
    else:
        if not isinstance(config, str | os.PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise wrong_type("config", config, "the path of a config.json, or what it holds as a mapping")
        origin, table = os.fspath(config), read_config(config)
    left_out: list[str] = []
    inner = table.get("text_config")
    if table.get("model_type") == "gemma3" and isinstance(inner, Mapping):
        table = {**cast(Mapping[str, object], inner), "model_type": "gemma3_text"}
        left_out.append("text_config alone: what reads images (vision_config) is not built")
    family = table.get("model_type")
    defaults = CLASS_DEFAULTS.get(family, {}) if isinstance(family, str) else {}
    fields = ConfigFields(origin, table, defaults)
    fields.finite()
    if not isinstance(family, str) or family not in FAMILIES:
        known = ", ".join(FAMILIES)
        instead = near_family(table) or did_you_mean(family, FAMILIES)
        raise fields.refusal("model_type", f"one of {known}{instead}")
    try:
        sizes = FAMILIES[family](fields)
        return replace(sizes, left_out=(*left_out, *_left_out(fields)))
    except PlanError as error:  # sizes that do not fit each other
        raise ImportModelError(f"{fields.origin}: {error}") from error


def _left_out(fields: ConfigFields) -> tuple[str, ...]:
    """Say what the file names that is not built, or is a slip of another field."""
    found: list[str] = []
    missing = [name for name in fields.defaults if name not in fields.table]
    for given in fields.unasked():
        if len(given) <= _LONGEST_FIELD and (near := [name for name in missing if slips(given, name) <= 2]):
            found.append(f"{given} is not read; did you mean {near[0]}? It is as in transformers' class")
    if layers := fields.table.get("num_nextn_predict_layers"):
        found.append(f"num_nextn_predict_layers={layers!r:.20}: multi-token prediction is not built")
    if fields.table.get("quantization_config"):
        found.append("quantization_config is of the checkpoint; --precision says how it is trained")
    return tuple(found)
