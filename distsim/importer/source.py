"""load_model: the forward function that a short text names."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import as_file, files
from typing import Any

from distsim.errors import ImportModelError, wrong_type
from distsim.importer.decoders import config_in, load_decoder, model_names
from distsim.importer.decoders.described import (
    read_coefficient,
    read_decimal,
    read_flag,
    read_number,
    split_options,
)
from distsim.importer.onnx_file import import_from_onnx, symbolic_dimensions
from distsim.ir import Function
from distsim.ir.type import dtype_named
from distsim.models import deepseek, gpt, llama, mlp, moe
from distsim.models.mixture import WEIGHTED
from distsim.suggestions import did_you_mean

BUILDERS: dict[str, Callable[..., Function]] = {
    "gpt": gpt,
    "llama": llama,
    "mlp": mlp,
    "moe": moe,
    "deepseek": deepseek,
}
BUNDLED = {"gpt2-onnx": "gpt2.onnx"}
"""Exports that come with distsim, in ``distsim/models/data``."""


Source = str | os.PathLike[str] | Mapping[str, object]
"""What names a model: a text, the path of a file, or the table that a ``config.json`` holds."""


def load_model(
    source: Source,
    batch: int | None = None,
    bindings: str = "",
    parameters: Sequence[str] = (),
    groups: int = 1,
    vocabulary_multiple: int = 1,
    weighted: str = WEIGHTED[0],
) -> Function:
    """Return the forward function of a model.

    ``source``: the path of an ``.onnx`` file; ``gpt2-onnx``, an export that comes with distsim; the name of
    a published model or the path of a Hugging Face ``config.json``, or of the folder that it is in, each with
    options that override its fields (``llama3-8b:layers=4``), or the table that it holds; or a builder with
    its options, ``mlp:layers=16,width=8192``. ``batch`` binds the symbolic dimension of that name (of an
    export), the batch of a named model or the builder's option; ``bindings`` (``seq=128,...``) binds others.
    ``parameters`` are patterns of graph inputs that are parameters. ``groups``: in how many groups a sequence
    is routed to experts, and ``weighted``, of :data:`distsim.models.mixture.WEIGHTED`, where its rows are
    multiplied by gates, if the text does not say. The vocabulary of a named or configured model is padded to
    a multiple of ``vocabulary_multiple``.

    >>> load_model("mlp:layers=2,width=8", batch=4).inputs[0]
    x: f32[4, 8]
    """
    sizes = _pairs(bindings, "the sizes to bind")
    if isinstance(source, Mapping):
        return load_decoder(source, batch, sizes, parameters, groups, vocabulary_multiple, weighted)
    if not isinstance(source, str | os.PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise wrong_type("model", source, "text, a path, or a config.json as a mapping")
    source = os.fspath(source)
    name, _, options = source.partition(":")
    if name in BUILDERS:
        own = {"seq"} & inspect.signature(BUILDERS[name]).parameters.keys()
        others = [*(["parameters"] if parameters else []), *[size for size in sizes if size not in own]]
        if others:
            raise ImportModelError(
                f"{source}: a builder takes its sizes as options, {name}:option=number,..., "
                f"and no {others[0]}"
            )
        return _build(name, options, batch, sizes, {"groups": groups, "weighted": weighted})
    if source in BUNDLED:
        with as_file(files("distsim.models") / "data" / BUNDLED[source]) as path:
            return _import(path, batch, sizes, parameters)
    if name.endswith(".onnx") or source.endswith(".onnx"):
        return _import(source, batch, sizes, parameters)
    if not is_decoder(source):
        known = ", ".join([*BUNDLED, *(f"{builder}:..." for builder in BUILDERS)])
        raise ImportModelError(
            f"model {source!r} is not an .onnx file, a config.json, one of {known} nor a name that "
            f"`distsim models` lists{did_you_mean(name, [*model_names(), *BUILDERS, *BUNDLED])}"
        )
    return load_decoder(source, batch, sizes, parameters, groups, vocabulary_multiple, weighted)


def is_decoder(source: Source) -> bool:
    """Whether it is the name of a published model, or a Hugging Face ``config.json``: its path, the folder
    that it is in, or what it holds.

    These say sizes, and nothing of the types in which a model is trained, as an export does, or a builder
    (``dtype=``).

    >>> is_decoder("llama3-8b:layers=4"), is_decoder("gpt:layers=4"), is_decoder("step.onnx")
    (True, False, False)
    """
    if isinstance(source, Mapping):
        return True
    source = os.fspath(source)
    name = source.partition(":")[0]
    if name in BUILDERS or source in BUNDLED or name.endswith(".onnx") or source.endswith(".onnx"):
        return False
    return bool(source.partition(".json")[1]) or name in model_names() or config_in(name) is not None


def is_named(source: str) -> bool:
    """Whether a text names a model that comes with distsim, by itself or with options: it is in no file.

    >>> is_named("llama3-8b:layers=4"), is_named("mlp:layers=2"), is_named("config.json")
    (True, True, False)
    """
    name = source.partition(":")[0]
    return name in BUILDERS or name in BUNDLED or name in model_names()


def _import(path: Any, batch: int | None, sizes: dict[str, int], parameters: Sequence[str]) -> Function:
    if batch is not None and sizes.get("batch", batch) != batch:
        raise ImportModelError(f"batch is given twice, {batch} and {sizes['batch']}; give it once")
    if batch is not None:
        symbols = symbolic_dimensions(path)
        if symbols and "batch" not in symbols:
            raise ImportModelError(
                f"{path}: no dimension is called batch; bind the one that is the batch among "
                f"{', '.join(symbols)} with --bind instead of --batch"
            )
        sizes = {**sizes, "batch": batch}
    return import_from_onnx(path, parameters=tuple(parameters), bindings=sizes)


def _build(
    name: str, options: str, batch: int | None, sizes: dict[str, int], usual: Mapping[str, object]
) -> Function:
    builder = BUILDERS[name]
    known = {
        key: _READERS[str(parameter.annotation)]
        for key, parameter in inspect.signature(builder).parameters.items()
        if str(parameter.annotation) in _READERS
    }
    given: dict[str, Any] = {}
    for key, text in split_options(options, name).items():
        if key not in known:
            hint = did_you_mean(key, known)
            raise ImportModelError(f"{name} has no option {key!r}; it has {', '.join(known)}{hint}")
        given[key] = known[key](key, text)
    for key, size in sizes.items():
        if given.setdefault(key, size) != size:
            raise ImportModelError(f"{key} is given twice, {given[key]} and {size}; give it once")
    if batch is not None:
        given["batch"] = read_number("batch", str(batch))
    return builder(**{key: value for key, value in usual.items() if key in known} | given)


def chosen_experts(source: str) -> tuple[int, int]:
    """Return how many experts a token goes to, and of how many, by the text of a builder; 1 of 1 without any.

    >>> chosen_experts("moe:experts=4"), chosen_experts("gpt:layers=2")
    ((2, 4), (1, 1))
    """
    name, _, options = source.partition(":")
    usual, given = inspect.signature(BUILDERS[name]).parameters, split_options(options, name)
    if not {"top_k", "experts"} <= usual.keys():
        return 1, 1
    top_k, experts = (int(given[key] if key in given else usual[key].default) for key in ("top_k", "experts"))
    return (top_k, experts) if experts else (1, 1)


def _pairs(text: str, what: str) -> dict[str, int]:
    return {key: read_number(key, value) for key, value in split_options(text, what).items()}


_READERS: dict[str, Callable[[str, str], Any]] = {
    "int": read_number,
    "int | None": read_number,
    "str": lambda key, text: text,
    "float": read_coefficient,
    "float | None": read_decimal,
    "bool | None": read_flag,
    "DType | str": lambda key, text: dtype_named(text),
}
"""How the text of a builder's option is read, by the annotation of its parameter; others are for Python."""
