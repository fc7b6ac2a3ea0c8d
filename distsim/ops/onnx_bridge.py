"""ONNX operators from the ``onnx`` package: schema, type rule and NumPy meaning.

A *static operand* (the shape of a Reshape, the axes of an Unsqueeze, a scalar factor) is an attribute
under the operand's formal name. Older operator sets that have the same thing as an attribute and
newer ones that have it as an input thus look the same to every rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx.checker
import onnx.helper
import onnx.numpy_helper
import onnx.shape_inference
from onnx.reference import ReferenceEvaluator

from distsim.cache import cached
from distsim.errors import TypeRuleError, UnknownOperatorError
from distsim.ir.device import Device, Mesh
from distsim.ir.type import BFloat16, DType, Float8E4M3FN, Float8E5M2, Float16, Tensor, UInt8, from_numpy
from distsim.ir.value import Attributes, Literal
from distsim.ops.operator import Array, common_device

OPSET = 20
"""The house version of the ONNX operator set: what an op without a version means."""

_STAND_INS: dict[DType, tuple[DType, str]] = {
    BFloat16(): (Float16(), "tensor(float16)"),
    Float8E4M3FN(): (UInt8(), "tensor(string)"),
    Float8E5M2(): (UInt8(), "tensor(string)"),
}
"""ONNX took up these types operator by operator. Here bfloat16 may be wherever float16 may, and those of 8
bits wherever texts may, for what takes texts only moves them; what stands in for them there."""


def split_name(op_type: str) -> tuple[str, str]:
    """Return (domain, name): operators outside ONNX's main domain are written ``domain.Name``."""
    domain, _, name = op_type.rpartition(".")
    return domain, name


@cached("ONNX schemas, by operator and version", 1024)
def schema_of(op_type: str, version: int | None) -> Any:
    """Return the ONNX schema, or None when ONNX has no such operator at that version."""
    domain, name = split_name(op_type)
    try:
        if domain:
            return onnx.defs.get_schema(name, domain=domain)
        return onnx.defs.get_schema(name, max_inclusive_version=version or OPSET, domain="")
    except onnx.defs.SchemaError:
        return None


def house_version(op_type: str, opset: int) -> int | None:
    """Return None when an op of that opset means the same as in the house opset, else the opset."""
    theirs, ours = schema_of(op_type, opset), schema_of(op_type, None)
    if theirs is None or (ours is not None and theirs.since_version == ours.since_version):
        return None
    return opset


@cached("types by ONNX, by operator, attributes, types of inputs and version", 65536)
def onnx_types(
    op_type: str, attributes: Attributes, inputs: tuple[Tensor, ...], version: int | None
) -> tuple[Tensor, ...]:
    """Return the output types of an ONNX operator; shapes must follow from the input types."""
    schema = schema_of(op_type, version)
    if schema is None:
        raise UnknownOperatorError(
            f"operator {op_type!r} is neither ONNX's (opset {version or OPSET}) nor distsim's; register "
            "it in distsim.ops or check the spelling"
        )
    unknown = _unknown_type(schema, inputs)
    if unknown is not None:
        return _with_stand_in(op_type, attributes, inputs, version, unknown)
    device = common_device(op_type, inputs) or attributes.get("device")
    node, static = _node(schema, op_type, attributes, len(inputs), inputs[0].dtype if inputs else None)
    names = [name for name in node.input if name]
    given = dict(zip([n for n in names if n not in static], inputs, strict=True))
    dtypes = {name: tensor.dtype for name, tensor in given.items()}
    dtypes |= {name: from_numpy(array.dtype) for name, array in static.items()}
    _check_constraints(schema, node, dtypes)
    types = {name: _type_proto(tensor.dtype, tensor.shape) for name, tensor in given.items()}
    types |= {n: _type_proto(from_numpy(a.dtype), a.shape) for n, a in static.items()}
    data = {name: onnx.numpy_helper.from_array(array, name) for name, array in static.items()}
    try:
        made: dict[str, Any] = onnx.shape_inference.infer_node_outputs(
            schema, node, types, data, opset_imports=[onnx.helper.make_opsetid("", version or OPSET)]
        )
    except (
        onnx.shape_inference.InferenceError,
        onnx.checker.ValidationError,
        RuntimeError,
        ValueError,
    ) as error:
        raise TypeRuleError(f"{op_type} does not fit its inputs: {str(error).strip()}") from error
    constant = [f.name for f in schema.inputs if f.name not in static and f.type_str == "tensor(int64)"]
    example = (
        f"; if its {constant[0]} is a constant, give it as the attribute {constant[0]}" if constant else ""
    )
    return tuple(_tensor(op_type, made.get(name), device, example) for name in node.output)


def _unknown_type(schema: Any, inputs: tuple[Tensor, ...]) -> DType | None:
    """Return the type of an input that a schema has not been extended to, but should have been."""
    kinds = [set(c.allowed_type_strs) for c in schema.type_constraints]
    for dtype, (_, where) in _STAND_INS.items():
        given = any(tensor.dtype == dtype for tensor in inputs)
        if given and any(where in kind and _type_str(dtype) not in kind for kind in kinds):
            return dtype
    return None


def _with_stand_in(
    op_type: str, attributes: Attributes, inputs: tuple[Tensor, ...], version: int | None, dtype: DType
) -> tuple[Tensor, ...]:
    """Return the types of an operator that does not know one of its inputs, another standing in for that."""
    other, _ = _STAND_INS[dtype]

    def swap(tensor: Tensor, old: DType, new: DType) -> Tensor:
        return replace(tensor, dtype=new) if tensor.dtype == old else tensor

    alike = [each for each, (stand_in, _) in _STAND_INS.items() if stand_in == other and each != dtype]
    both = [tensor.dtype for tensor in inputs if tensor.dtype in (other, *alike)]
    if both:
        raise TypeRuleError(f"{op_type} cannot take {dtype.name} and {both[0].name} together; cast one")
    stand_ins = {
        key: Literal(value.array.astype(other.np))
        if isinstance(value, Literal) and from_numpy(value.array.dtype) == dtype
        else value
        for key, value in attributes.items()
    }
    made = onnx_types(op_type, Attributes(stand_ins), tuple(swap(t, dtype, other) for t in inputs), version)
    return tuple(swap(tensor, other, dtype) for tensor in made)


def onnx_compute(
    op_type: str, attributes: Attributes, version: int | None, arrays: Sequence[Array], outputs: int
) -> tuple[Array, ...]:
    """Compute an ONNX operator with ``onnx.reference``."""
    first = from_numpy(arrays[0].dtype) if arrays else None
    evaluator, names = _evaluator(op_type, attributes, version, len(arrays), first, outputs)
    made = evaluator.run(None, dict(zip(names, arrays, strict=True)))
    return tuple(np.asarray(array) for array in made)


@cached("reference implementations, by operator, attributes, version and arity", 4096)
def _evaluator(
    op_type: str, attributes: Attributes, version: int | None, count: int, first: DType | None, outputs: int
) -> tuple[Any, tuple[str, ...]]:
    schema = schema_of(op_type, version)
    if schema is None:
        raise UnknownOperatorError(f"operator {op_type!r} has no NumPy meaning; register one in distsim.ops")
    node, static = _node(schema, op_type, attributes, count, first)
    del node.output[outputs:]
    names = tuple(name for name in node.input if name and name not in static)
    undefined = onnx.TypeProto()
    graph = onnx.helper.make_graph(
        [node],
        op_type,
        [onnx.helper.make_value_info(name, undefined) for name in names],
        [onnx.helper.make_value_info(name, undefined) for name in node.output],
        [onnx.numpy_helper.from_array(array, name) for name, array in static.items()],
    )
    imports = [onnx.helper.make_opsetid("", version or OPSET)]
    domain = split_name(op_type)[0]
    if domain:
        imports.append(onnx.helper.make_opsetid(domain, onnx.defs.onnx_opset_version()))
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=10)
    return ReferenceEvaluator(model), names


def _node(
    schema: Any, op_type: str, attributes: Attributes, count: int, first: DType | None
) -> tuple[Any, dict[str, Array]]:
    """Return the NodeProto and the arrays of the static operands by name.

    Values take the formal places that no static operand takes, in order; the attribute ``absent``
    lists formal places left empty before the last value. ``first`` is the element type of the first
    value: the one that plain numbers take where the schema says that the operand is of type T.
    """
    names: list[str] = []
    static: dict[str, Array] = {}
    absent: tuple[str, ...] = attributes.get("absent", ())
    left = count
    variadic = schema.inputs and schema.inputs[-1].option == onnx.defs.OpSchema.FormalParameterOption.Variadic
    for formal in schema.inputs[: -1 if variadic else None]:
        if formal.name in attributes and formal.name not in schema.attributes:
            static[formal.name] = static_array(
                attributes[formal.name], first if formal.type_str == "T" else None
            )
            names.append(formal.name)
        elif left and formal.name not in absent:
            names.append(f"in{count - left}")
            left -= 1
        else:
            names.append("")
    if variadic:
        names.extend(f"in{count - left + i}" for i in range(left))
        left = 0
    while names and not names[-1]:
        names.pop()
    if left or not schema.min_input <= len(names) <= schema.max_input:
        raise TypeRuleError(
            f"{op_type} takes {schema.min_input} to {schema.max_input} operands, "
            f"{count} values and {len(static)} static operands given"
        )
    domain, name = split_name(op_type)
    results = attributes.get("num_outputs") or _output_count(schema, attributes)
    plain = {k: v for k, v in attributes.items() if k in schema.attributes}
    node = onnx.helper.make_node(
        name, names, [f"out{i}" for i in range(results)], domain=domain, **_onnx_attributes(schema, plain)
    )
    return node, static


def _output_count(schema: Any, attributes: Attributes) -> int:
    if "outputs" in attributes:
        return int(attributes["outputs"])
    if schema.name == "Split" and "split" in attributes:
        return len(np.atleast_1d(static_array(attributes["split"], None)))
    return max(1, schema.min_output)


def static_array(value: Any, dtype: DType | None) -> Array:
    """Return a static operand as an array; plain Python numbers take ``dtype`` (int64, float32)."""
    if isinstance(value, Literal):
        return value.array
    array = np.asarray(value)
    if dtype is not None and array.dtype.kind in "fi" and dtype.np.kind != "b":
        return array.astype(dtype.np)
    return array.astype(np.int64 if array.dtype.kind in "iu" or not array.size else np.float32)


def _onnx_attributes(schema: Any, attributes: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in attributes.items():
        if value == ():  # ONNX has no empty attributes: leaving it out means the same
            continue
        kind = schema.attributes[name].type
        if isinstance(value, Literal):
            value = onnx.numpy_helper.from_array(value.array)
        elif kind == onnx.defs.OpSchema.AttrType.FLOAT:
            value = float(value)
        elif kind == onnx.defs.OpSchema.AttrType.FLOATS:
            value = [float(item) for item in value]
        elif isinstance(value, bool):
            value = int(value)
        made[name] = value
    return made


def type_number(dtype: DType) -> int:
    """Return ONNX's number of an element type."""
    return int(onnx.helper.np_dtype_to_tensor_dtype(dtype.np))


def made_type(attributes: Attributes) -> DType:
    """Return the type that an op makes, its attribute ``to``."""
    return from_numpy(onnx.helper.tensor_dtype_to_np_dtype(attributes["to"]))


def _type_proto(dtype: DType, shape: Sequence[int]) -> Any:
    return onnx.helper.make_tensor_type_proto(type_number(dtype), shape)


def _check_constraints(schema: Any, node: Any, dtypes: dict[str, DType]) -> None:
    allowed = {c.type_param_str: set(c.allowed_type_strs) for c in schema.type_constraints}
    bound: dict[str, tuple[str, str]] = {}
    for index, name in enumerate(node.input):
        if not name:
            continue
        formal = schema.inputs[min(index, len(schema.inputs) - 1)]
        text = _type_str(dtypes[name])
        choices = allowed.get(formal.type_str, {formal.type_str})
        if text not in choices:
            raise TypeRuleError(f"{schema.name}: operand {formal.name} cannot be {text}")
        if formal.type_str in allowed and formal.is_homogeneous:
            other = bound.setdefault(formal.type_str, (formal.name, text))
            if other[1] != text:
                raise TypeRuleError(
                    f"{schema.name}: operand {formal.name} is {text} but {other[0]} is {other[1]}; "
                    "they must agree, cast one"
                )


@cached("names of ONNX types, by element type", 64)
def _type_str(dtype: DType) -> str:
    names = {"float32": "float", "float64": "double"}
    return f"tensor({names.get(dtype.name, dtype.name)})"


def _tensor(op_type: str, proto: Any, device: Device | Mesh | None, otherwise: str) -> Tensor:
    if proto is None or not proto.HasField("tensor_type") or not proto.tensor_type.HasField("shape"):
        raise TypeRuleError(
            f"{op_type}: the shape of an output does not follow from the input types{otherwise}"
        )
    dims = proto.tensor_type.shape.dim
    if not all(dim.HasField("dim_value") for dim in dims):
        raise TypeRuleError(
            f"{op_type}: an output has a size that depends on data; distsim needs every size before it runs"
            f"{otherwise}"
        )
    numpy = onnx.helper.tensor_dtype_to_np_dtype(proto.tensor_type.elem_type)
    return Tensor(from_numpy(numpy), tuple(dim.dim_value for dim in dims), device)
