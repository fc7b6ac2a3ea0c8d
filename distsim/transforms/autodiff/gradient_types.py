"""Of which types gradients are: as they are made, as they are summed, and as the optimizer reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from distsim.ir import DType, FunctionMaker, Op, Value
from distsim.ir.type import as_tensor
from distsim.transforms.autodiff.precision import Precision
from distsim.transforms.autodiff.set_precision import cast_number

Pairs = Sequence[tuple[Value, Value]]
"""(parameter, gradient) in the order of the parameters."""

Owners = Mapping[Value, tuple[Op, str]]
"""Parameter -> the Call that reads it, and the name that its callee gives it."""


def cast_gradients(maker: FunctionMaker, pairs: Pairs, precision: Precision) -> list[tuple[Value, Value]]:
    """Return the (parameter, gradient) pairs with gradients in the type in which the optimizer reads them.

    Each is cast to the type of its sum (``GradientCast``), right after the op or Call that completes it: what
    reduces it over ranks starts while backward goes on, and only the cast one stays. A Cast that makes a
    gradient becomes that cast, or goes, where it was of that type before. Where the optimizer reads another
    type it has a copy (``GradientCopy``).
    """
    place = {value: number for number, op in enumerate(maker.ops) for value in op.outputs}
    follows: dict[int, list[Op]] = {}
    read = {value for op in maker.ops for value in op.inputs}
    gone: set[int] = set()

    def summed(weight: Value, grad: Value) -> Value:
        op = maker.ops[place[grad]] if grad in place else None
        if op is not None and op.op_type == "Cast":
            (source,) = op.inputs
            if as_tensor(source.type, source.name).dtype == precision.gradient_sum:
                gone.update(() if grad in read else (place[grad],))
                return source
        if as_tensor(grad.type, grad.name).dtype != precision.gradient_sum:
            made = _cast(maker, "GradientCast", weight, grad, precision.gradient_sum)
            if op is not None and maker.ops[-1].outputs[0] is made:  # no number
                follows.setdefault(place[grad], []).append(maker.ops.pop())
            return made
        if op is not None and op.op_type == "Cast":
            maker.ops[place[grad]] = replace(op, op_type="GradientCast")
        return grad

    sums = [(weight, summed(weight, grad)) for weight, grad in pairs]
    kept = [(number, op) for number, op in enumerate(maker.ops) if number not in gone]
    maker.ops = [each for number, op in kept for each in (op, *follows.get(number, ()))]
    return [(weight, _cast(maker, "GradientCopy", weight, grad, precision.update)) for weight, grad in sums]


def _cast(maker: FunctionMaker, op_type: str, weight: Value, grad: Value, dtype: DType) -> Value:
    if as_tensor(grad.type, grad.name).dtype == dtype:
        return grad
    return maker.add(op_type, [grad], {"to": cast_number(dtype)}, output_names=[f"d{weight.name}"])[0]
