"""The types of a model's inputs: symbolic dimensions and what they are bound to."""

from __future__ import annotations

import keyword
import operator
from collections.abc import Mapping, Sequence
from typing import Any, cast

from distsim.errors import ImportModelError
from distsim.importer.limits import MAX_SIZE, check_shape
from distsim.importer.tensors import dtype_of
from distsim.ir.type import Tensor

OPTIONS = ("path", "parameters", "load_values", "name", "max_bytes", "bindings")
"""The other arguments of ``import_from_onnx``: a dimension with such a name is bound in the mapping."""


def symbols_of(inputs: Sequence[Any]) -> tuple[str, ...]:
    """Return the names of the symbolic dimensions of these inputs, in order, each once."""
    names = dict.fromkeys(dim.dim_param for info in inputs for dim in _dims(info) if dim.dim_param)
    for name in names:
        if not isinstance(name, str):  # protobuf hands out bytes that are not UTF-8 as they are
            raise ImportModelError(f"the name of the symbolic dimension {name!r} is not text")
    return tuple(names)


def merge_bindings(bindings: Any, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the mapping and the keywords bind together; raise when a name is in both."""
    if bindings is None:
        return dict(sizes)
    if not isinstance(bindings, Mapping):
        raise ImportModelError(f"bindings={bindings!r} must map names of dimensions to sizes")
    given = dict(cast(Mapping[str, Any], bindings))
    for name in sizes:
        if name in given:
            raise ImportModelError(f"{name} is bound twice, {given[name]} and {sizes[name]}; bind it once")
    return given | dict(sizes)


def check_bindings(inputs: Sequence[Any], bindings: Mapping[str, Any]) -> dict[str, int]:
    """Return the bindings as integers; raise unless they are exactly the symbols, with usable sizes."""
    symbols = symbols_of(inputs)
    unknown = [name for name in bindings if name not in symbols]
    if unknown:
        shapes = "; ".join(f"{info.name} {_written(info)}" for info in inputs[:8])
        there = f"the symbolic dimensions are {', '.join(symbols)}" if symbols else "all dimensions are fixed"
        raise ImportModelError(
            f"there is no symbolic dimension {', '.join(unknown)}: {there} ({shapes}). A fixed dimension "
            "is built into the model's arithmetic and cannot be changed here; export again with it dynamic"
        )
    sizes = {name: _size(name, value) for name, value in bindings.items()}
    unbound = [name for name in symbols if name not in sizes]
    if unbound:
        shapes = "; ".join(f"{info.name} {_written(info)}" for info in inputs if symbols_of([info]))
        keywords = [f"{name}=..." for name in unbound if _is_keyword(name)]
        others = [f"{name!r}: ..." for name in unbound if not _is_keyword(name)]
        keywords += [f"bindings={{{', '.join(others)}}}"] if others else []
        raise ImportModelError(
            f"the symbolic dimensions {', '.join(unbound)} have no size ({shapes}): "
            f"bind them with import_from_onnx(path, {', '.join(keywords)}), or --batch and --bind on the "
            "command line"
        )
    return sizes


def _is_keyword(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name) and name not in OPTIONS


def input_type(info: Any, sizes: Mapping[str, int]) -> Tensor:
    """Return the type of a graph input with its symbols bound."""
    what = f"input {info.name!r}"
    kind = info.type.WhichOneof("value")
    if kind != "tensor_type":
        raise ImportModelError(f"{what} is a {kind or 'value without a type'}; only tensors can be imported")
    if not info.type.tensor_type.HasField("shape"):
        raise ImportModelError(f"{what} has no shape, not even a rank; export the model with one")
    shape: list[int] = []
    for axis, dim in enumerate(_dims(info)):
        if dim.dim_param:
            shape.append(sizes[dim.dim_param])
        elif dim.HasField("dim_value") and dim.dim_value >= 0:
            shape.append(int(dim.dim_value))
        else:
            found = f"the size {dim.dim_value}" if dim.HasField("dim_value") else "neither a size nor a name"
            raise ImportModelError(
                f"{what}: dimension {axis} of {_written(info)} has {found}, so nothing can be bound to it; "
                "give it a size or a name (dim_param) in the file"
            )
    check_shape(what, shape)
    return Tensor(dtype_of(info.type.tensor_type.elem_type, what), tuple(shape))


def check_declared(info: Any, type_: Tensor, sizes: Mapping[str, int]) -> None:
    """Raise when an output's declared type contradicts the type that its ops give."""
    declared = info.type.tensor_type
    if info.type.WhichOneof("value") != "tensor_type" or not declared.elem_type:
        return
    what = f"output {info.name!r}"
    if dtype_of(declared.elem_type, what) != type_.dtype:
        raise ImportModelError(f"{what} is declared {_written(info)} of another element type than {type_}")
    if not declared.HasField("shape"):
        return
    dims = _dims(info)
    told = [sizes.get(d.dim_param, -1) if d.dim_param else d.dim_value or -1 for d in dims]
    if len(dims) != type_.rank or any(t not in (-1, n) for t, n in zip(told, type_.shape, strict=True)):
        bound = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ImportModelError(
            f"{what} is declared {_written(info)}, but with {bound or 'its fixed sizes'} its ops give "
            f"{type_}: the model does not keep the meaning of its dimensions, so its sizes cannot be trusted"
        )


def _dims(info: Any) -> Any:
    return info.type.tensor_type.shape.dim


def _written(info: Any) -> str:
    names = [d.dim_param or (str(d.dim_value) if d.HasField("dim_value") else "?") for d in _dims(info)]
    return f"[{', '.join(names)}]"


def _size(name: str, value: Any) -> int:
    try:
        size = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        size = None
    if size is None or not 1 <= size <= MAX_SIZE:
        raise ImportModelError(f"{name}={value!r} must be an integer from 1 to {MAX_SIZE}")
    return size
