"""Which operands of an op are values and which are attributes; attributes of ONNX nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx.helper

from distsim.cache import cached
from distsim.errors import ImportModelError, ModelLimitError
from distsim.importer.limits import MAX_NEEDED, STATIC_ELEMENTS
from distsim.importer.tensors import embedded_array, is_external
from distsim.ir.type import as_tensor
from distsim.ir.value import Literal, Value
from distsim.ops.onnx_bridge import schema_of
from distsim.ops.operator import Array

Entry = Value | Array
"""What a name of the model stands for: a value of the function, or a constant known at import."""

_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
NEEDED: Mapping[str, tuple[str, ...]] = {
    "AffineGrid": ("size",),
    "BlackmanWindow": ("size",),
    "CenterCropPad": ("shape",),
    "Clip": ("min", "max"),
    "Col2Im": ("image_shape", "block_shape"),
    "ConstantOfShape": ("input",),
    "CumSum": ("axis",),
    "Expand": ("shape",),
    "HammingWindow": ("size",),
    "HannWindow": ("size",),
    "OneHot": ("depth",),
    "Pad": ("pads", "axes"),
    "Range": ("start", "limit", "delta"),
    "Reshape": ("shape",),
    "Resize": ("roi", "scales", "sizes"),
    "Slice": ("starts", "ends", "axes", "steps"),
    "Split": ("split",),
    "Squeeze": ("axes",),
    "Tile": ("repeats",),
    "TopK": ("K",),
    "Unsqueeze": ("axes",),
    "Upsample": ("scales",),
} | {f"Reduce{name}": ("axes",) for name in _REDUCTIONS}
"""The operands on whose numbers the type of the output depends; they must be known at import."""

_STATIC_FIRST = frozenset(
    {"Add", "And", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Div", "Equal", "Gather", "Gemm"}
    | {"GatherElements", "GatherND", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "MatMul", "Mod"}
    | {"Mul", "OneHot", "Or", "Pow", "Sub", "Where", "Xor"}
)
"""The operators whose rules take a known first operand as an attribute."""

_PLAIN = {
    onnx.AttributeProto.FLOAT: "f",
    onnx.AttributeProto.INT: "i",
    onnx.AttributeProto.FLOATS: "floats",
    onnx.AttributeProto.INTS: "ints",
}


@dataclass(frozen=True, slots=True)
class Formals:
    """The operand places of an operator: names, and whether the last may be repeated."""

    names: tuple[str, ...]
    variadic: bool
    min_outputs: int
    variadic_outputs: bool

    def name(self, index: int) -> str | None:
        """Return the name of a place that takes one operand; None for a repeated place."""
        fixed = len(self.names) - self.variadic
        return self.names[index] if index < fixed else None


@cached("operand places of ONNX operators, by operator and version", 1024)
def formals_of(op_type: str, version: int | None) -> Formals | None:
    """Return the operand places of an ONNX operator, or None when ONNX has no such operator."""
    schema = schema_of(op_type, version)
    if schema is None:
        return None
    repeated = onnx.defs.OpSchema.FormalParameterOption.Variadic
    return Formals(
        tuple(formal.name for formal in schema.inputs),
        bool(schema.inputs) and schema.inputs[-1].option == repeated,
        schema.min_output,
        bool(schema.outputs) and schema.outputs[-1].option == repeated,
    )


def function_body(node: Any, op_type: str, opset: int, entries: Sequence[Entry | None]) -> Any:
    """Return what ONNX defines an operator to be in terms of others, or None when it does not.

    Raises :class:`ImportModelError` with ONNX's reason where attributes or types do not allow it.
    """
    schema: Any = schema_of(op_type, opset)
    if schema is None:
        return None
    plain = [v for v in schema.function_opset_versions if v <= opset]
    by_types = [v for v in schema.context_dependent_function_opset_versions if v <= opset]
    body = onnx.FunctionProto()
    if plain:
        body.ParseFromString(schema.get_function_with_opset_version(plain[-1]))
    elif by_types:
        types = [b"" if entry is None else _type_proto(entry) for entry in entries]
        written = node.SerializeToString()
        try:
            made = schema.get_context_dependent_function_with_opset_version(by_types[-1], written, types)
        except onnx.shape_inference.InferenceError as error:
            raise ImportModelError(str(error)) from error
        body.ParseFromString(made)
    else:
        return None
    given = {attribute.name for attribute in body.attribute_proto}
    for name, attribute in schema.attributes.items():
        if name not in given and attribute.default_value.name:
            body.attribute_proto.append(attribute.default_value)
    return body


def _type_proto(entry: Entry) -> bytes:
    if isinstance(entry, Value):
        type_ = as_tensor(entry.type, entry.name)
        shape, dtype = type_.shape, type_.dtype.np
    else:
        shape, dtype = entry.shape, entry.dtype
    number = onnx.helper.np_dtype_to_tensor_dtype(dtype)
    return onnx.helper.make_tensor_type_proto(number, shape).SerializeToString()


def split_operands(
    op_type: str, formals: Formals | None, entries: Sequence[Entry | None]
) -> tuple[list[Entry], dict[str, Any]]:
    """Return the operands that stay operands, and the attributes that stand for the others.

    A small constant becomes a static operand under its formal name. The first stays an operand when all
    are constants, or when the operator's rules start from it. The attribute ``absent`` names places left
    empty before the last operand.
    """
    if formals is None:
        if None in entries:
            raise ImportModelError("leaves out an operand of an operator that ONNX does not define")
        return [entry for entry in entries if entry is not None], {}
    if len(entries) > len(formals.names) and not formals.variadic:
        raise ImportModelError(f"has {len(entries)} operands, {op_type} takes {len(formals.names)}")
    stays = op_type not in _STATIC_FIRST or not any(isinstance(entry, Value) for entry in entries)
    kept: list[Entry] = []
    static: dict[str, Any] = {}
    absent: list[str] = []
    skipped = 0
    for index, entry in enumerate(entries):
        name = formals.name(index)
        if name is None:
            if entry is None:
                raise ImportModelError(f"leaves out one of the repeated operands of {op_type}")
            kept.append(entry)
        elif entry is None:
            absent.append(name)
        elif isinstance(entry, np.ndarray) and _is_static(op_type, name, entry, index == 0 and stays):
            static[name] = Literal(entry)
        else:
            kept.append(entry)
            skipped = len(absent)
    if skipped:
        static["absent"] = tuple(absent[:skipped])
    return kept, static


def _is_static(op_type: str, name: str, array: Array, must_stay: bool) -> bool:
    if name in NEEDED.get(op_type, ()):
        if array.size > MAX_NEEDED:
            raise ModelLimitError(f"has {array.size} numbers in its operand {name}; no tensor needs so many")
        return True
    vector = array.dtype.kind in "iub" and array.ndim <= 1 and array.size <= STATIC_ELEMENTS
    return not must_stay and (array.size == 1 or vector)


def output_count(formals: Formals | None, names: Sequence[str], used: Mapping[str, int]) -> int:
    """Return how many outputs an op has: as listed, less the optional ones at the end nobody reads."""
    count = len(names)
    while count and not names[count - 1]:
        count -= 1
    least = 1 if formals is None else max(1, formals.min_outputs)
    if formals is not None and not formals.variadic_outputs:
        while count > least and names[count - 1] not in used:
            count -= 1
    return max(count, least)


def attributes_of(node: Any) -> dict[str, Any]:
    """Return a node's attributes as Python numbers, strings, tuples and Literals."""
    made: dict[str, Any] = {}
    for attribute in node.attribute:
        name, kind = attribute.name, attribute.type
        what = f"attribute {name!r}"
        if name in made:
            raise ImportModelError(f"{what} is given twice")
        if kind in _PLAIN:
            value = getattr(attribute, _PLAIN[kind])
            made[name] = value if isinstance(value, (int, float)) else tuple(value)
        elif kind == onnx.AttributeProto.STRING:
            made[name] = _text(attribute.s, what)
        elif kind == onnx.AttributeProto.STRINGS:
            made[name] = tuple(_text(item, what) for item in attribute.strings)
        elif kind == onnx.AttributeProto.TENSOR:
            if is_external(attribute.t):
                raise ImportModelError(f"{what} keeps its values in another file; only weights may")
            made[name] = Literal(embedded_array(attribute.t, what))
        else:
            label = onnx.AttributeProto.AttributeType.Name(kind)
            raise ImportModelError(f"{what} is a {label}, which has no counterpart in a function of tensors")
    return made


def _text(content: bytes, what: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ImportModelError(f"{what} is not text: {error}") from error


def constant_array(attributes: Mapping[str, Any]) -> Array:
    """Return the value of a ``Constant`` node."""
    if len(attributes) != 1:
        raise ImportModelError(f"a Constant has one value, this one has {len(attributes)}")
    ((name, value),) = attributes.items()
    if name == "value" and isinstance(value, Literal):
        return value.array
    if name in ("value_int", "value_ints"):
        return np.asarray(value, np.int64)
    if name in ("value_float", "value_floats"):
        return np.asarray(value, np.float32)
    raise ImportModelError(f"a Constant of {name!r} is not a tensor of numbers")
