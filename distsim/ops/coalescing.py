"""Several tensors moved as one message: NCCL's coalesced calls, or views of one contiguous buffer.

An op with n results has n groups of operands, one after the other; the first of each group is what is moved.
The message starts up once, and has the bytes of all.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from distsim.errors import TypeRuleError
from distsim.ir.function import Op
from distsim.ir.type import Tensor, as_tensor
from distsim.ir.value import Attributes, Value
from distsim.ops.operator import OperandRule, Signature, TypesRule, operator


def alike(attributes: Attributes, place: int) -> Attributes:
    """Return the attributes of one of several tensors: those of the op."""
    return attributes


def one_of_shapes(attributes: Attributes, place: int) -> Attributes:
    """Return the attributes of one of several tensors: the op's, with its own of the ``shapes``."""
    return Attributes({**attributes, "shapes": attributes["shapes"][place : place + 1]})


def coalesced(op_type: str, rule: TypesRule, size: int = 1, operand: OperandRule = alike) -> TypesRule:
    """Return the type rule of an op that moves several tensors, each a group of ``size`` operands.

    ``rule`` is that of one. Raises :class:`TypeRuleError` for operands that do not make whole groups, or that
    are of several element types or in several places.
    """

    def types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not inputs or len(inputs) % size:
            raise TypeRuleError(f"{op_type} takes {size} inputs for each tensor, {len(inputs)} given")
        groups = [inputs[start : start + size] for start in range(0, len(inputs), size)]
        kinds = {(group[0].dtype, group[0].device) for group in groups}
        if len(kinds) > 1:
            raise TypeRuleError(f"{op_type} moves tensors of one element type and place, not {kinds}")
        return tuple([made for i, group in enumerate(groups) for made in rule(operand(attributes, i), group)])

    return types


def moved_values(op: Op) -> Sequence[Value]:
    """Return the operands of a communication op that are moved, one for each of its results."""
    meaning = operator(op.op_type).communication
    if meaning is None or meaning.operand is None:
        return op.inputs[:1]
    return op.inputs[:: len(op.inputs) // len(op.outputs)]


def moved_tensors(signature: Signature) -> Sequence[Tensor]:
    """Return the same of a signature."""
    return signature.inputs[:: len(signature.inputs) // len(signature.outputs)]


def in_messages(ops: Iterable[Op]) -> list[Op]:
    """Return ops that each move one tensor as few that move several: those of one kind and element type."""
    kinds: dict[Hashable, list[Op]] = {}
    for op in ops:
        type_ = as_tensor(op.inputs[0].type, op.inputs[0].name)
        shapeless = {key: item for key, item in op.attributes.items() if key != "shapes"}
        key = op.op_type, Attributes(shapeless), type_.dtype, type_.device
        kinds.setdefault(key, []).append(op)
    return list(map(_as_one, kinds.values()))


def _as_one(ops: Sequence[Op]) -> Op:
    if len(ops) == 1:
        return ops[0]
    attributes = ops[0].attributes
    if "shapes" in attributes:
        shapes = tuple([shape for op in ops for shape in op.attributes["shapes"]])
        attributes = Attributes({**attributes, "shapes": shapes})
    inputs = tuple([value for op in ops for value in op.inputs])
    outputs = tuple([value for op in ops for value in op.outputs])
    return replace(ops[0], inputs=inputs, outputs=outputs, attributes=attributes)
