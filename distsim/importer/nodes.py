"""Single nodes: their names, and checks of what they are and of what they would do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.checker

from distsim.errors import ImportModelError
from distsim.importer.folding import Folder, shape_constant
from distsim.importer.limits import check_shape
from distsim.importer.tensors import is_external
from distsim.importer.values.operands import Entry
from distsim.ir.type import Tensor, as_tensor
from distsim.ir.value import Value

FunctionKey = tuple[str, str, str]
"""Domain, name and overload of a local function."""


def main_domain(domain: str) -> str:
    """Return the domain of an operator set; ONNX's own has two names."""
    return "" if domain == "ai.onnx" else domain


def operator_name(node: Any) -> str:
    """Return a node's operator: ``Name``, or ``domain.Name`` outside ONNX's main domain."""
    return node.op_type if not main_domain(node.domain) else f"{node.domain}.{node.op_type}"


def key_of(node: Any) -> FunctionKey:
    """Return the key of the local function that a node would call."""
    return (node.domain, node.op_type, node.overload)


def describe(node: Any, prefix: str = "") -> str:
    """Return a node as errors write it."""
    output = next((name for name in node.output if name), "")
    name = repr(prefix + node.name) if node.name else f"making {prefix + output!r}"
    return f"node {name} ({operator_name(node)})"


def check_node(node: Any, opsets: Mapping[str, int]) -> None:
    """Raise unless a node fits ONNX's schema of its operator, and has neither graphs nor files."""
    for attribute in node.attribute:
        if attribute.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS):
            raise ImportModelError(
                "runs a graph of its own as often as its data say; distsim needs to know every op before "
                "the model runs: export the model with the loop unrolled"
            )
        if attribute.type == onnx.AttributeProto.TENSOR and is_external(attribute.t):
            raise ImportModelError(f"attribute {attribute.name!r} keeps its values in another file")
    context: Any = onnx.checker.C.CheckerContext()
    context.ir_version = onnx.IR_VERSION
    context.opset_imports = dict(opsets)
    try:
        onnx.checker.check_node(node, context)
    except onnx.checker.ValidationError as error:
        text = str(error).strip().splitlines()
        raise ImportModelError(f"is malformed: {text[0] if text else error!r}") from error


def resolved(node: Any, given: Mapping[str, Any] | None) -> Any:
    """Return a node of a local function with the call's attributes in place of references to them."""
    if given is None or not any(attribute.ref_attr_name for attribute in node.attribute):
        return node
    made = onnx.NodeProto()
    made.CopyFrom(node)
    del made.attribute[:]
    for attribute in node.attribute:
        source = given.get(attribute.ref_attr_name) if attribute.ref_attr_name else attribute
        if source is not None:
            copy = made.attribute.add()
            copy.CopyFrom(source)
            copy.name = attribute.name
    return made


def op_name(node: Any, prefix: str) -> str:
    """Return the module path that the exporter noted, if any, and the node's name."""
    path = next((p.value for p in node.metadata_props if p.key == "namespace"), "")
    modules = [part.split(": ")[0] for part in path.split("/")[:-1]]
    module = modules[-1] if modules and not modules[-1].startswith("_empty_nn_module") else ""
    own = prefix + node.name
    return f"{module}/{own}" if module and own else module or own


def check_indices(inputs: Sequence[Entry | None], attributes: Mapping[str, Any], folder: Folder) -> None:
    """Known indices must be inside: positions beyond the table, say, when ``seq`` is too long."""
    data, indices = inputs[0], inputs[1]
    if data is None or not isinstance(indices, np.ndarray) or not indices.size or indices.dtype.kind != "i":
        return
    shape = as_tensor(data.type, data.name).shape if isinstance(data, Value) else data.shape
    axis = attributes.get("axis", 0)
    if not -len(shape) <= axis < len(shape):
        raise ImportModelError(f"gathers along axis {axis} of a tensor of shape {list(shape)}")
    low, high = folder.bounds(indices)
    if low < -shape[axis] or high >= shape[axis]:
        raise ImportModelError(
            f"takes the indices {low} to {high} of {data if isinstance(data, Value) else list(shape)!r}, "
            f"which has {shape[axis]} entries on axis {axis}; "
            "a symbolic dimension is bound to more than the model was made for"
        )


def check_legacy(inputs: Sequence[Entry | None], axis: int) -> None:
    """Before operator set 7 the second operand could stand anywhere; today it stands at the end."""
    ranks = [len(shape_constant("Shape", entry, {})) for entry in inputs if entry is not None]
    if len(ranks) == 2 and axis not in (ranks[0] - ranks[1], -ranks[1]):
        raise ImportModelError(
            f"broadcasts from axis {axis} as operator sets before 7 did; convert the model with "
            "onnx.version_converter"
        )


def check_size(type_: Tensor) -> None:
    """Raise when no machine could hold a tensor."""
    check_shape("makes a tensor that", type_.shape)
