"""ONNX files to functions.

Checks of a model before it is evaluated: operator sets, local functions, unknown operators.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import onnx
import onnx.defs
from google.protobuf.message import DecodeError

from distsim.errors import DistsimError, ImportModelError, ModelLimitError
from distsim.importer.dimensions import (
    check_bindings,
    check_declared,
    input_type,
    merge_bindings,
    symbols_of,
)
from distsim.importer.evaluate import PartialEvaluator
from distsim.importer.limits import MAX_DEPTH, MAX_FILE_BYTES, MAX_NODES, MAX_VERSION
from distsim.importer.nodes import FunctionKey, describe, key_of, main_domain, operator_name
from distsim.importer.tensors import read_bytes
from distsim.importer.values.scope import Scope, used_names
from distsim.ir.dead import trim
from distsim.ir.function import Function
from distsim.ir.maker import FunctionMaker
from distsim.ir.type import as_tensor
from distsim.ir.value import Role, Value
from distsim.ops.onnx_bridge import schema_of
from distsim.ops.operator import Array, operator

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


_FLOW = ("If", "Loop", "Scan")


def opsets_of(model: Any) -> dict[str, int]:
    """Return the version of each operator set that a model imports."""
    opsets = _versions(model.opset_import, "the model")
    if not opsets and model.ir_version < 3:
        opsets[""] = 1
    return opsets


def _versions(imports: Sequence[Any], what: str) -> dict[str, int]:
    """Return the version of each operator set that a model or a local function imports."""
    opsets: dict[str, int] = {}
    for entry in imports:
        domain = main_domain(entry.domain)
        if opsets.setdefault(domain, entry.version) != entry.version:
            raise ImportModelError(
                f"{what} imports the operator set {domain or 'ai.onnx'!r} in versions {opsets[domain]} "
                f"and {entry.version}; it must say which"
            )
        if domain and not 1 <= entry.version <= MAX_VERSION:
            raise ModelLimitError(
                f"{what} imports the operator set {domain!r} in version {entry.version}; versions are from 1 "
                f"to {MAX_VERSION}"
            )
    latest = onnx.defs.onnx_opset_version()
    if not 1 <= opsets.get("", 1) <= latest:
        raise ImportModelError(
            f"{what} uses ONNX's operator set {opsets['']}; the installed onnx {onnx.__version__} knows "
            f"1 to {latest}: upgrade onnx, or export with an older opset"
        )
    return opsets


def check_names(model: Any) -> None:
    """Raise unless all names are text: protobuf hands out those that are not UTF-8 as bytes."""
    graph = model.graph
    tensors = [*graph.initializer, *graph.input, *graph.output]
    _check_text("the graph", [each.name for each in tensors])
    _check_text("the operator sets", [entry.domain for entry in model.opset_import])
    for body in (graph, *model.functions):
        if body is not graph:
            imported = [entry.domain for entry in body.opset_import]
            own = (body.name, body.domain, body.overload)
            formals = [*body.attribute, *(attribute.name for attribute in body.attribute_proto)]
            _check_text("a local function", [*own, *body.input, *body.output, *imported, *formals])
        for node in _nodes(body.node):
            notes = [text for entry in node.metadata_props for text in (entry.key, entry.value)]
            own = (node.name, node.op_type, node.domain, node.overload)
            _check_text("a node", [*own, *node.input, *node.output, *notes])
            for attribute in node.attribute:
                names = [attribute.name, attribute.ref_attr_name, attribute.t.name]
                if attribute.type == onnx.AttributeProto.GRAPH:
                    names += [each.name for each in (*attribute.g.initializer, *attribute.g.output)]
                _check_text("an attribute", names)


def _check_text(what: str, names: Sequence[Any]) -> None:
    for name in names:
        if not isinstance(name, str):
            raise ImportModelError(f"{what} has a name that is not text: {name!r}")


def local_functions(model: Any) -> dict[FunctionKey, Any]:
    """Return the local functions, after checking that writing them out ends and stays reasonable."""
    functions: dict[FunctionKey, Any] = {}
    for function in model.functions:
        key = (function.domain, function.name, function.overload)
        if key in functions:
            raise ImportModelError(f"the local function {_label(key)} is defined twice")
        for what, names in (("inputs", function.input), ("outputs", function.output)):
            if len(set(names)) != len(names):
                raise ImportModelError(f"the local function {_label(key)} has two {what} of the same name")
        functions[key] = function
    sizes: dict[FunctionKey, int] = {}
    total = sum(_size(key_of(node), functions, sizes, ()) for node in _nodes(model.graph.node))
    if total > MAX_NODES:
        raise ModelLimitError(
            f"the model has {total} nodes with its local functions written out, the limit is {MAX_NODES}"
        )
    return functions


def _size(
    key: FunctionKey,
    functions: Mapping[FunctionKey, Any],
    sizes: dict[FunctionKey, int],
    path: tuple[FunctionKey, ...],
) -> int:
    function = functions.get(key)
    if function is None:
        return 1
    if key in path:
        raise ImportModelError(
            f"the local function {_label(key)} calls itself: {' -> '.join(map(_label, (*path, key)))}"
        )
    if len(path) >= MAX_DEPTH:
        raise ModelLimitError(
            f"local functions call each other more than {MAX_DEPTH} deep: {_label(path[0])}"
        )
    if key not in sizes:
        inner = (*path, key)
        sizes[key] = 1 + sum(_size(key_of(n), functions, sizes, inner) for n in _nodes(function.node))
    return sizes[key]


def check_operators(model: Any, opsets: Mapping[str, int], functions: Mapping[FunctionKey, Any]) -> None:
    """Raise one error that names every operator that neither ONNX nor distsim defines."""
    unknown: dict[str, list[str]] = {}
    bodies = [(model.graph.node, opsets)]
    for key, function in functions.items():
        imported = _versions(function.opset_import, f"the local function {_label(key)}")
        bodies.append((function.node, imported or opsets))
    for nodes, versions in bodies:
        for node in _nodes(nodes):
            name = operator_name(node)
            if key_of(node) not in functions and not _is_known(name, node, versions):
                unknown.setdefault(name, []).append(describe(node))
    if unknown:
        listed = "; ".join(f"{name} ({len(at)} times, first in {at[0]})" for name, at in unknown.items())
        raise ImportModelError(
            f"neither ONNX's operator set {opsets.get('', 'none')} nor distsim.ops defines {listed}: check "
            "the spelling and the opset, or register the operator in distsim.ops"
        )


def _is_known(name: str, node: Any, versions: Mapping[str, int]) -> bool:
    if node.op_type in _FLOW and name == node.op_type:
        return True  # told apart, and refused with the reason, where the condition is known
    main = name == node.op_type
    version = versions.get("", 0)
    if main:
        return version > 0 and schema_of(name, version) is not None
    return operator(name).types is not None or schema_of(name, None) is not None


def _nodes(nodes: Sequence[Any]) -> Iterator[Any]:
    """Yield the nodes, and those of their subgraphs; protobuf limits how deep these can be."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _nodes(attribute.g.node)


def _label(key: FunctionKey) -> str:
    domain, name, overload = key
    return ".".join(filter(None, (domain, name, overload)))
