"""ONNX files to functions."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import onnx
from google.protobuf.message import DecodeError

from distsim.errors import DistsimError, ImportModelError, ModelLimitError
from distsim.importer.checks import check_names, check_operators, local_functions, opsets_of
from distsim.importer.dimensions import (
    check_bindings,
    check_declared,
    input_type,
    merge_bindings,
    symbols_of,
)
from distsim.importer.evaluate import PartialEvaluator
from distsim.importer.limits import MAX_FILE_BYTES
from distsim.importer.tensors import read_bytes
from distsim.importer.values.scope import Scope, used_names
from distsim.ir.dead import trim
from distsim.ir.function import Function
from distsim.ir.maker import FunctionMaker
from distsim.ir.type import as_tensor
from distsim.ir.value import Role, Value
from distsim.ops.operator import Array

Path_ = str | os.PathLike[str]


def symbolic_dimensions(path: Path_, *, max_bytes: int = MAX_FILE_BYTES) -> tuple[str, ...]:
    """Return the names of a model's symbolic dimensions: what :func:`import_from_onnx` has to bind."""
    return symbols_of(_graph_inputs(_read_model(path, max_bytes)))


@overload
def import_from_onnx(
    path: Path_,
    *,
    parameters: Sequence[str] = (),
    load_values: Literal[False] = False,
    name: str | None = None,
    max_bytes: int = MAX_FILE_BYTES,
    bindings: Mapping[str, int] | None = None,
    **sizes: int,
) -> Function: ...
@overload
def import_from_onnx(
    path: Path_,
    *,
    parameters: Sequence[str] = (),
    load_values: Literal[True],
    name: str | None = None,
    max_bytes: int = MAX_FILE_BYTES,
    bindings: Mapping[str, int] | None = None,
    **sizes: int,
) -> tuple[Function, dict[str, Array]]: ...
def import_from_onnx(
    path: Path_,
    *,
    parameters: Sequence[str] = (),
    load_values: bool = False,
    name: str | None = None,
    max_bytes: int = MAX_FILE_BYTES,
    bindings: Mapping[str, int] | None = None,
    **sizes: int,
) -> Any:
    """Return the function in an ONNX file, every size known and shape arithmetic computed away.

    Each symbolic dimension gets its size by keyword (``batch=8, seq=128``) or in the mapping
    ``bindings``, which takes names that are no keywords too (``{"path": 4}``). Floating-point
    initializers of rank 1 or more become inputs with ``Role.PARAMETER``; ``parameters`` are patterns
    (``p_*``) of graph inputs that are parameters too. Small constants are part of the ops that read
    them. Weights in other files are not opened, unless ``load_values`` asks for them: then the
    function comes with a dict of the stored values by input name. Ops are named
    ``module.path/node``, where the path is the exporter's ``namespace`` metadata, if there is any.

    Raises :class:`ImportModelError`, which names the thing, when the file is malformed, needs
    something that distsim cannot represent, or when bindings and symbolic dimensions do not match.
    Files larger than ``max_bytes`` are refused.

    >>> from importlib.resources import files
    >>> path = str(files("distsim") / "models" / "data" / "gpt2.onnx")
    >>> symbolic_dimensions(path)
    ('batch', 'seq')
    >>> import_from_onnx(path, batch=2, seq=16)
    Function('gpt2', 149 inputs, 526 ops, 1 outputs)
    """
    try:
        given = merge_bindings(bindings, sizes)
        return _import(_read_model(path, max_bytes), Path(path), parameters, load_values, name, given)
    except DistsimError:
        raise
    except MemoryError as error:
        raise ModelLimitError(f"{path}: this machine has too little memory to read it") from error
    except Exception as error:
        raise ImportModelError(f"{path} is malformed: {type(error).__name__}: {error}") from error


def _import(
    model: Any,
    path: Path,
    parameters: Sequence[str],
    load_values: bool,
    name: str | None,
    bindings: Mapping[str, int],
) -> Any:
    graph = model.graph
    check_names(model)
    opsets = opsets_of(model)
    functions = local_functions(model)
    check_operators(model, opsets, functions)
    inputs = _graph_inputs(model)
    sizes = check_bindings(inputs, bindings)
    maker = FunctionMaker(name if name is not None else path.stem)
    evaluator = PartialEvaluator(maker, functions, path.parent, load_values)
    scope = Scope(graph.node, opsets, used_names(graph.node, [info.name for info in graph.output]))
    marked = _marked(inputs, parameters)
    for info in inputs:
        type_ = input_type(info, sizes)
        if info.name in marked and not type_.dtype.is_floating:
            raise ImportModelError(
                f"input {info.name!r} is {type_}; only floating-point inputs are parameters"
            )
        role = Role.PARAMETER if info.name in marked else Role.INPUT
        scope.define(info.name, maker.add_input_value(info.name, type_, role))
    for tensor in graph.initializer:
        evaluator.add_stored(tensor.name, tensor, scope)
    evaluator.run(scope)
    _set_outputs(evaluator, graph, scope, sizes)
    names = frozenset(info.name for info in inputs)
    whole = maker.finalize()
    function = trim(whole, stay=[value for value in whole.inputs if value.name in names]).function
    if not load_values:
        return function
    return function, {v.name: evaluator.stored[v]() for v in function.inputs if v in evaluator.stored}


def _read_model(path: Path_, max_bytes: int) -> Any:
    content = read_bytes(path, max_bytes)
    model: Any = onnx.ModelProto()
    try:
        model.ParseFromString(content)
    except DecodeError as error:
        raise ImportModelError(f"{path} is not an ONNX model, or not all of one: {error}") from error
    if not model.HasField("graph") or not model.graph.output:
        raise ImportModelError(f"{path} has no graph with outputs; it is not a whole ONNX model")
    if model.graph.sparse_initializer:
        name = model.graph.sparse_initializer[0].values.name
        raise ImportModelError(
            f"initializer {name!r} in {path} is sparse; export the model with dense weights"
        )
    return model


def _graph_inputs(model: Any) -> list[Any]:
    """Return the inputs without those that are initializers too, as files of IR version 3 list them."""
    stored = {tensor.name for tensor in model.graph.initializer}
    return [info for info in model.graph.input if info.name not in stored]


def _marked(inputs: Sequence[Any], patterns: Sequence[str]) -> set[str]:
    if isinstance(patterns, str):
        raise ImportModelError(f"parameters must be a list of patterns: [{patterns!r}]")
    names = [info.name for info in inputs]
    found: set[str] = set()
    for pattern in patterns:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            raise ImportModelError(f"no graph input matches the parameter pattern {pattern!r}: {listed}")
        found.update(matching)
    return found


def _set_outputs(evaluator: PartialEvaluator, graph: Any, scope: Scope, sizes: Mapping[str, int]) -> None:
    outputs: list[Value] = []
    for info in graph.output:
        entry = scope.entries.get(info.name)
        if entry is None:
            raise ImportModelError(f"output {info.name!r} is made by no node")
        value = evaluator.value_of(entry, info.name)
        if value.name != info.name:  # the model hands on a value that has another name
            value = evaluator.maker.add("Identity", [value], output_names=[info.name], name=info.name)[0]
        check_declared(info, as_tensor(value.type, value.name), sizes)
        outputs.append(value)
    evaluator.maker.set_outputs(outputs)
