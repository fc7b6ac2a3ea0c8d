"""set_precision: the same function in another floating-point type."""

from __future__ import annotations

from typing import Any

import onnx.helper

from distsim.ir import Attributes, DType, Float32, Function, FunctionMaker, Literal, Op, Tensor, Type, Value


def set_precision(function: Function, dtype: DType, source: DType = Float32()) -> Function:  # noqa: B008
    """Return ``function`` with every tensor, constant and cast of type ``source`` turned to ``dtype``.

    An export is usually float32; training runs in bfloat16. Callees are rewritten once each.
    """
    done: dict[int, Function] = {}

    def convert(current: Function) -> Function:
        if id(current) not in done:
            done[id(current)] = _Precision(dtype, source, convert).function(current)
        return done[id(current)]

    return convert(function)


class _Precision:
    def __init__(self, dtype: DType, source: DType, convert: Any) -> None:
        self.dtype, self.source, self.convert = dtype, source, convert

    def function(self, function: Function) -> Function:
        maker = FunctionMaker(function.name, function.notes)
        copies: dict[Value, Value] = {}
        for value in function.inputs:
            copies[value] = maker.add_input_value(value.name, self.type(value.type), value.role)
        for op in function.ops:
            callees = tuple(self.convert(callee) for callee in op.subfunctions)
            made = maker.copy(op, copies, self.attributes(op), callees)
            copies.update(zip(op.outputs, made, strict=True))
        maker.set_outputs([copies[v] for v in function.outputs])
        return maker.finalize()

    def type(self, type_: Type) -> Type:
        if isinstance(type_, Tensor) and type_.dtype == self.source:
            return Tensor(self.dtype, type_.shape, type_.device)
        return type_

    def attributes(self, op: Op) -> Attributes:
        changed = {key: self.attribute(value) for key, value in op.attributes.items()}
        if op.op_type == "Cast" and op.attributes.get("to") == _onnx_number(self.source):
            changed["to"] = _onnx_number(self.dtype)
        return Attributes(changed)

    def attribute(self, value: Any) -> Any:
        if isinstance(value, Literal) and value.array.dtype == self.source.np:
            return Literal(value.array.astype(self.dtype.np))
        return value


def _onnx_number(dtype: DType) -> int:
    return int(onnx.helper.np_dtype_to_tensor_dtype(dtype.np))
