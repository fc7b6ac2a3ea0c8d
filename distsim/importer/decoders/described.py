"""Decoders by name or by configuration, with options that override their fields.

The decoders that have a name: published models, each by the fields of its ``config.json``.

Options in the text that names a model: ``name=value,...``, each value read as what it must be.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from distsim.errors import ImportModelError, PlanError
from distsim.importer.decoders.huggingface import DEFAULT_BATCH, default_seq, sizes_from_hf
from distsim.ir import Function
from distsim.models.decoder import decoder
from distsim.models.decoder_sizes import DecoderSizes
from distsim.models.mixture import WEIGHTED
from distsim.models.overrides import WHERE, options_of, override
from distsim.models.routing import Loads
from distsim.suggestions import choices_for, did_you_mean

_LOADS = ("concentration", "capacity", "pad", "seed")

_COUNTS_FROM_ZERO = ("window", "q_lora", "shared", "dense")


def _read(key: str, text: str) -> Any:
    if key in _INPUT:
        return _INPUT[key](key, text)
    if key.endswith("_dropout"):
        return read_rate(key, text)
    if key in ("dispatcher", "weighted"):
        return text
    if key == "aux_loss":
        return read_coefficient(key, text)
    if key == "tied":
        return read_flag(key, text)
    if key == "theta":
        return read_decimal(key, text)
    return read_number(key, text, 0 if key in _COUNTS_FROM_ZERO else 1)


Source = str | Mapping[str, object]
"""A decoder: a text that names it, or the table that its ``config.json`` holds."""


def config_label(config: Mapping[str, object]) -> str:
    """Return what the table of a ``config.json`` is called.

    >>> config_label({"model_type": "llama"})
    'llama config'
    """
    family = config.get("model_type")
    return f"{family[:40]} config" if isinstance(family, str) else "config"


def decoder_sizes(source: Source, weighted: str = WEIGHTED[0]) -> tuple[DecoderSizes, dict[str, Any]]:
    """Return the sizes of the decoder that a text names, and its options that are none of them.

    ``source``: one of :func:`model_names`, or the path of a ``config.json`` or of the folder that it is in,
    with ``:option=value,...`` behind it; or the table that such a file holds. ``weighted``: where rows of
    experts are, if the text does not say. Raises :class:`ImportModelError` when it is neither, or has no such
    option.

    >>> sizes, given = decoder_sizes("llama3-8b:layers=4,seq=4096")
    >>> sizes.layers, given
    (4, {'seq': 4096})
    """
    if isinstance(source, Mapping):
        name, options, sizes = config_label(source), "", sizes_from_hf(source)
    else:
        name, options = _name_and_options(source)
        folder = config_in(name)
        sizes = sizes_from_hf(folder or name) if folder or name.endswith(".json") else named_sizes(name)
    given: dict[str, Any] = {}
    for key, text in split_options(options, name).items():
        if key not in WHERE and key not in _INPUT:
            inputs = [each for each in _INPUT if sizes.experts is not None or each not in _LOADS]
            known = choices_for(key, [*options_of(sizes), *inputs])
            raise ImportModelError(f"{name} has no option {key!r}; it has {known}")
        given[key] = _read(key, text)
    if sizes.experts is None and (unused := [key for key in _LOADS if key in given]):
        raise ImportModelError(f"{name} has no experts, of whose loads {unused[0]} is: leave it out")
    if sizes.experts is not None:
        given.setdefault("weighted", weighted)
    try:
        sizes = override(sizes, {key: value for key, value in given.items() if key in WHERE})
    except PlanError as error:
        raise ImportModelError(f"{name}: {error}") from error
    return sizes, {key: value for key, value in given.items() if key in _INPUT}


def _name_and_options(source: str) -> tuple[str, str]:
    """Return the name or path in a text, and the options behind it."""
    match = re.fullmatch(r"(.+\.json|[^:]*)(?::(.*))?", source, re.DOTALL)
    return (match[1], match[2] or "") if match else (source, "")


def config_in(name: str) -> Path | None:
    """Return the ``config.json`` in a folder; None for what is no folder, and for the name of a model."""
    try:
        if not name or name in model_names() or not Path(name).is_dir():
            return None
    except (OSError, ValueError):  # no path: too long, or with a null byte
        return None
    found = Path(name) / "config.json"
    if not found.is_file():
        raise ImportModelError(
            f"{name} is a folder without a config.json, as a model of Hugging Face has one"
        )
    return found


def load_decoder(
    source: Source,
    batch: int | None,
    bindings: Mapping[str, int],
    parameters: Sequence[str],
    groups: int = 1,
    vocabulary_multiple: int = 1,
    weighted: str = WEIGHTED[0],
) -> Function:
    """Return the function of the decoder that a text names (:func:`decoder_sizes`), on a batch of sequences.

    Batch and seq are bindings, which the text may give too; by default 8 sequences, as long as the model was
    made for, up to 8,192 tokens. A note says how long they are. A mixture of experts that does not say
    otherwise routes a sequence in so many ``groups``, and has its rows ``weighted`` there. The vocabulary is
    padded to a multiple of ``vocabulary_multiple``, with a note: rows of the embedding and the head that no
    token names.
    """
    sizes, given = decoder_sizes(source, weighted)
    if isinstance(source, Mapping):
        source = config_label(source)
    if parameters:
        raise ImportModelError(f"{source}: its parameters are known; --parameters is for graph inputs")
    bound = {**bindings} if batch is None else {**bindings, "batch": batch}
    for key, size in bound.items():
        if key not in ("batch", "seq"):
            raise ImportModelError(f"{source} has no dimension {key!r} to bind; it has batch and seq")
        read_number(key, str(size))
        other = next((each[key] for each in (given, bindings) if each.get(key, size) != size), None)
        if other is not None:
            raise ImportModelError(f"{key} is given twice, {other} and {size}; give it once")
        given[key] = size
    file = _name_and_options(source)[0].rstrip("/").rpartition("/")[2].removesuffix(" config")
    return decoder_of(sizes, given, file.removesuffix(".json"), groups, vocabulary_multiple)


def decoder_of(
    sizes: DecoderSizes,
    given: Mapping[str, Any],
    name: str,
    groups: int = 1,
    vocabulary_multiple: int = 1,
) -> Function:
    """Return the function of a decoder by what it is ``given``: batch, seq, and the loads of its experts.

    The rest is as in :func:`load_decoder`.
    """
    seq = given.get("seq", default_seq(sizes))
    # A sequence that ranks do not divide is refused by the plan, which knows the degrees that do.
    if sizes.experts is not None and sizes.experts.groups == 1 and seq % groups == 0:
        sizes = replace(sizes, experts=replace(sizes.experts, groups=groups))
    said = sizes.positions.context  # rotary ones go on, and may be rescaled to
    notes = [f"sequences of {seq} tokens" + (f", past the {said} of its configuration" if seq > said else "")]
    padded = -(-sizes.vocab // vocabulary_multiple) * vocabulary_multiple
    if padded != sizes.vocab:
        notes.append(f"vocabulary of {sizes.vocab} padded to {padded}, a multiple of {vocabulary_multiple}")
        sizes = replace(sizes, vocab=padded)
    loads = Loads(**{key: given[key] for key in _LOADS if key in given})
    function = decoder(
        sizes, given.get("batch", DEFAULT_BATCH), seq, loads=loads, name=re.sub(r"\W+", "_", name)
    )
    return replace(function, notes=(*notes, *sizes.left_out, *function.notes))


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


MAX_SIZE = 2**31


def split_options(text: str, what: str) -> dict[str, str]:
    """Return the options in a text; ``what`` begins the errors."""
    found: dict[str, str] = {}
    for item in text.split(",") if text else ():
        key, equals, value = item.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ImportModelError(f"{what}: {item!r} must be name=number")
        if found.setdefault(key, value.strip()) != value.strip():
            raise ImportModelError(f"{what}: {item!r} after {key}={found[key]}; give {key} once")
    return found


def read_number(key: str, text: str, least: int = 1) -> int:
    """Return a whole number."""
    if not text.isascii() or not text.isdigit() or len(text) > 12 or not least <= int(text) <= MAX_SIZE:
        raise ImportModelError(f"{key}={text} must be a whole number from {least} to {MAX_SIZE}")
    return int(text)


def read_decimal(key: str, text: str) -> float:
    """Return a positive number."""
    if not _is_decimal(text) or not 0 < float(text) <= MAX_SIZE:
        raise ImportModelError(f"{key}={text} must be a positive decimal number of at most {MAX_SIZE}")
    return float(text)


def read_coefficient(key: str, text: str) -> float:
    """Return a number of at least 0."""
    if not _is_decimal(text) or not float(text) <= MAX_SIZE:
        raise ImportModelError(f"{key}={text} must be a decimal number from 0 to {MAX_SIZE}")
    return float(text)


def read_rate(key: str, text: str) -> float:
    """Return a number from 0 to below 1."""
    if not _is_decimal(text) or not float(text) < 1:
        raise ImportModelError(f"{key}={text} must be a decimal number from 0 to below 1")
    return float(text)


def read_flag(key: str, text: str) -> bool:
    """Return true or false."""
    if text not in ("true", "false"):
        raise ImportModelError(f"{key}={text} must be true or false")
    return text == "true"


def _is_decimal(text: str) -> bool:
    return len(text) <= 12 and re.fullmatch(r"[0-9]+(\.[0-9]+)?", text, re.ASCII) is not None


_INPUT: dict[str, Callable[[str, str], Any]] = {
    "batch": read_number,
    "seq": read_number,
    "concentration": read_decimal,
    "capacity": read_decimal,
    "pad": read_flag,
    "seed": lambda key, text: read_number(key, text, 0),
}
"""Options that are no sizes of a model: what it is given, and the loads of its experts."""
