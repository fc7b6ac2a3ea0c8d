"""Checks of a model before it is evaluated: operator sets, local functions, unknown operators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx
import onnx.defs

from distsim.errors import ImportModelError, ModelLimitError
from distsim.importer.limits import MAX_DEPTH, MAX_NODES, MAX_VERSION
from distsim.importer.nodes import FunctionKey, describe, key_of, main_domain, operator_name
from distsim.ops.onnx_bridge import schema_of
from distsim.ops.operator import operator

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
