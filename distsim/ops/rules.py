"""Asking for the rules of an op: types, meaning, work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from distsim.cache import cached
from distsim.errors import PlanError, TypeRuleError
from distsim.ir.registry import set_rules
from distsim.ir.type import Tensor, Type
from distsim.ir.value import Attributes
from distsim.ops.bounds import check_bounds
from distsim.ops.conversion import ONCE
from distsim.ops.onnx_bridge import onnx_compute, onnx_types, schema_of
from distsim.ops.operator import AGAIN, Array, Signature, Work, operator, read_again, registered
from distsim.suggestions import did_you_mean


def types(
    op_type: str, attributes: Attributes, inputs: tuple[Type, ...], version: int | None
) -> tuple[Type, ...]:
    """Return the output types of an op; the rule that the IR asks through its registry."""
    return _types(op_type, attributes, inputs, version)


@cached("types of outputs, by operator, attributes, types of inputs and version", 65536)
def _types(
    op_type: str, attributes: Attributes, inputs: tuple[Type, ...], version: int | None
) -> tuple[Tensor, ...]:
    tensors: list[Tensor] = []
    for index, type_ in enumerate(inputs):
        if not isinstance(type_, Tensor):
            raise TypeRuleError(f"{op_type}: input {index} must be a tensor, not {type_}")
        tensors.append(type_)
    check_bounds(op_type, attributes, tensors)
    rule = operator(op_type).types
    if rule is None:
        return onnx_types(op_type, attributes, tuple(tensors), version)
    return rule(attributes, tuple(tensors))


def compute(
    op_type: str, attributes: Attributes, version: int | None, arrays: Sequence[Array], outputs: int
) -> tuple[Array, ...]:
    """Compute one op on one device with NumPy; ``outputs`` is how many results are wanted."""
    meaning = operator(op_type)
    rule = meaning.compute
    if version is not None:  # rules that changed their meaning ask for it
        attributes = Attributes({**attributes, "version": version})
    if attributes.get("rate") == "tfloat32":
        exact = () if meaning.exact is None else meaning.exact(attributes, len(arrays))
        arrays = [array if place in exact else _tfloat32(array) for place, array in enumerate(arrays)]
    if rule is None:
        return onnx_compute(op_type, attributes, version, arrays, outputs)
    return tuple(np.asarray(array) for array in rule(attributes, arrays))


def _tfloat32(array: Array) -> Array:
    """Return what matrix units read of float32 numbers: 10 bits after the point, rounded to even."""
    if array.dtype != np.float32:
        return array
    bits = np.ascontiguousarray(array).view(np.uint32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & np.uint32(0xFFFFE000)).view(np.float32)


@cached("work, by signature", 65536)
def work(signature: Signature) -> Work | None:
    """Return the work of an op, or None when its operator has no work rule."""
    rule = operator(signature.op_type).work
    found = None if rule is None else rule(signature)
    if found is None or AGAIN not in signature.attributes:
        return found
    return replace(found, bytes_read=found.bytes_read + read_again(signature.attributes, signature.inputs))


MARKS = frozenset({AGAIN, ONCE, "absent", "device", "num_outputs", "outputs", "rate", "version"})
"""Attributes that an op may have besides those of its operator."""


def check_attributes(op_type: str, attributes: Attributes, version: int | None) -> None:
    """Raise :class:`TypeRuleError` for an attribute that ONNX's operator has not, with those that it has.

    Operands that are constants are attributes too, by their names. Operators of the house check their own.
    """
    schema = schema_of(op_type, version)
    if schema is None:
        return
    operands = [formal.name for formal in schema.inputs]
    known = [*schema.attributes, *operands, *operator(op_type).beside]
    for name in attributes:
        if name not in known and name not in MARKS:
            raise TypeRuleError(
                f"{op_type} has no attribute {name!r:.40}; it has "
                f"{', '.join(sorted(schema.attributes)) or 'none'}, and its operands {', '.join(operands)} "
                f"where they are constants{did_you_mean(name, known)}"
            )


set_rules(types, check_attributes)


def check_op_types(what: str, op_types: Iterable[str], otherwise: str) -> None:
    """Raise :class:`PlanError`, which begins with ``what``, if one of these is no operator.

    It names those of like spelling, or else says ``otherwise``.
    """
    known = registered()
    for op_type in op_types:
        if op_type not in known and schema_of(op_type, None) is None:
            hint = did_you_mean(op_type, known) or f"; {otherwise}"
            raise PlanError(f"{what}: there is no op {op_type}{hint}")
