"""set_precision: the same function in another floating-point type."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import onnx.helper

from distsim.ir import (
    Attributes,
    DType,
    Environment,
    Float32,
    Function,
    Literal,
    Op,
    Tensor,
    Value,
    callees,
    retype_op,
    rewrite,
)


def set_precision(function: Function, dtype: DType, source: DType = Float32()) -> Function:  # noqa: B008
    """Return ``function`` with every tensor, constant and cast of type ``source`` turned to ``dtype``.

    An export is usually float32; training runs in bfloat16. Callees are rewritten once each.
    """

    def attribute(value: Any) -> Any:
        stays = not isinstance(value, Literal) or value.array.dtype != source.np
        return value if stays else Literal(value.array.astype(dtype.np))

    def change(op: Op, env: Environment) -> tuple[Op]:
        attributes = {key: attribute(value) for key, value in op.attributes.items()}
        if op.op_type == "Cast" and attributes.get("to") == _onnx_number(source):
            attributes["to"] = _onnx_number(dtype)
        called = tuple([done[callee] for callee in op.subfunctions])
        return (retype_op(op, env, function.name, Attributes(attributes), called),)

    def converted(value: Value) -> Value:
        type_ = value.type
        if isinstance(type_, Tensor) and type_.dtype == source:
            return replace(value, type=Tensor(dtype, type_.shape, type_.device))
        return value

    done: dict[Function, Function] = {}
    for current in (*callees(function), function):
        done[current] = rewrite(current, change, [converted(value) for value in current.inputs])
    return done[function]


def _onnx_number(dtype: DType) -> int:
    return int(onnx.helper.np_dtype_to_tensor_dtype(dtype.np))
