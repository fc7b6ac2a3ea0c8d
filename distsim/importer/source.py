"""load_model: the forward function that a short text names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from importlib.resources import as_file, files
from typing import Any

from distsim.errors import ImportModelError
from distsim.importer.onnx_file import import_from_onnx, symbolic_dimensions
from distsim.ir import Function
from distsim.ir.type import dtype_named
from distsim.models import deepseek, gpt, llama, mlp, moe

BUILDERS: dict[str, Callable[..., Function]] = {
    "gpt": gpt,
    "llama": llama,
    "mlp": mlp,
    "moe": moe,
    "deepseek": deepseek,
}
BUNDLED = ("gpt2",)
MAX_SIZE = 2**31


def load_model(
    source: str, batch: int | None = None, bindings: str = "", parameters: Sequence[str] = ()
) -> Function:
    """Return the forward function of a model.

    ``source``: the path of an ``.onnx`` file; ``gpt2``, the export that comes with distsim; or a
    builder with its options, ``mlp:layers=16,width=8192``. ``batch`` binds the symbolic dimension of
    that name (of an export) or the builder's option; ``bindings`` (``seq=128,...``) binds others.
    ``parameters`` are patterns of graph inputs that are parameters.
    """
    sizes = _pairs(bindings, "the sizes to bind")
    name, _, options = source.partition(":")
    if name in BUILDERS:
        if sizes or parameters:
            raise ImportModelError(
                f"{source}: a builder takes its sizes as options, {name}:option=number,..."
            )
        return _build(name, options, batch)
    if source in BUNDLED:
        with as_file(files("distsim.models") / "data" / f"{source}.onnx") as path:
            return _import(path, batch, sizes, parameters)
    if not source.endswith(".onnx"):
        known = ", ".join([*BUNDLED, *(f"{builder}:..." for builder in BUILDERS)])
        raise ImportModelError(f"model {source!r} is not an .onnx file nor one of {known}")
    return _import(source, batch, sizes, parameters)


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


def _build(name: str, options: str, batch: int | None) -> Function:
    builder = BUILDERS[name]
    known = {
        key: _READERS[str(parameter.annotation)]
        for key, parameter in inspect.signature(builder).parameters.items()
        if str(parameter.annotation) in _READERS
    }
    given: dict[str, Any] = {}
    for key, text in _split(options, name).items():
        if key not in known:
            raise ImportModelError(f"{name} has no option {key!r}; it has {', '.join(known)}")
        given[key] = known[key](key, text)
    if batch is not None:
        given["batch"] = _number("batch", str(batch))
    return builder(**given)


def _pairs(text: str, what: str) -> dict[str, int]:
    return {key: _number(key, value) for key, value in _split(text, what).items()}


def _split(text: str, what: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for item in text.split(",") if text else ():
        key, equals, value = item.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ImportModelError(f"{what}: {item!r} must be name=number")
        if found.setdefault(key, value.strip()) != value.strip():
            raise ImportModelError(f"{what}: {item!r} after {key}={found[key]}; give {key} once")
    return found


def _number(key: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 12 or not 1 <= int(text) <= MAX_SIZE:
        raise ImportModelError(f"{key}={text} must be a whole number from 1 to {MAX_SIZE}")
    return int(text)


def _decimal(key: str, text: str) -> float:
    if (
        len(text) > 12
        or not re.fullmatch(r"[0-9]+(\.[0-9]+)?", text, re.ASCII)
        or not 0 < float(text) <= MAX_SIZE
    ):
        raise ImportModelError(f"{key}={text} must be a positive decimal number of at most {MAX_SIZE}")
    return float(text)


_READERS: dict[str, Callable[[str, str], Any]] = {
    "int": _number,
    "int | None": _number,
    "float | None": _decimal,
    "DType": lambda key, text: dtype_named(text),
}
"""How the text of a builder's option is read, by the annotation of its parameter; others are for Python."""
