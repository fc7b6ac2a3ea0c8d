"""``Float8GroupedMatMul`` and its gradients: grouped products of 8-bit operands.

They are those of :mod:`distsim.ops.grouped` with operands as :mod:`distsim.ops.float8` has them, of the type
``to``; in place of the attribute ``scale`` the largest elements of both operands may follow the inputs. So
Transformer Engine's GroupedLinear runs experts (transformer_engine/pytorch/module/grouped_linear.py). The
operands of all groups are cast by one kernel, with one factor where it has one for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distsim.ir.type import Tensor
from distsim.ir.value import Attributes, Value
from distsim.ops.float8 import cast_gradient, check_operands, wide
from distsim.ops.grouped import grouped_rule
from distsim.ops.onnx_bridge import made_type
from distsim.ops.operator import Array, GradientContext, Operator, operator, register


def _register(suffix: str, names: str, made: str) -> None:
    """Register an op with inputs of these names, as in :func:`grouped_rule`."""
    op_type, like = f"Float8GroupedMatMul{suffix}", operator(f"GroupedMatMul{suffix}")
    types_like, compute_like = like.types, like.compute
    if types_like is None or compute_like is None:
        raise ValueError(f"{like.name} has no types or no meaning; give it both before this")
    first, second = [place for place, name in enumerate(names) if name != "r"]

    def plain(attributes: Attributes, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the inputs of the op that this is like, of the type of the result."""
        to = made_type(attributes)
        return tuple(
            [
                replace(tensor, dtype=to) if place in (first, second) else tensor
                for place, tensor in enumerate(inputs[: len(names)])
            ]
        )

    def types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        operands = (inputs[first], inputs[second], *inputs[len(names) :])
        check_operands(op_type, [tensor.shape for tensor in operands[:2]], operands)
        return types_like(attributes, plain(attributes, inputs))

    def compute(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
        given = list(arrays[: len(names)])
        read = [given[first], given[second], *arrays[len(names) :]]
        given[first], given[second] = wide(attributes, read)
        (result,) = compute_like(attributes, given)
        return [result.astype(made_type(attributes).np)]

    register(
        Operator(
            op_type,
            types=types,
            compute=compute,
            work=like.work,
            gradient=None if suffix else _gradient,
            sharding=lambda s: grouped_rule(s, names, made),
        )
    )


def _gradient(ctx: GradientContext) -> Sequence[Value | None]:
    x, w, rows, *amaxes = ctx.inputs
    (dy, *largest), options = cast_gradient(ctx, amaxes)
    grads: list[Value | None] = [None] * len(ctx.inputs)
    known = {name: item for name, item in ctx.attributes.items() if name in ("sizes", "exchange")}
    for place, (name, other) in enumerate((("A", w), ("B", x))):
        if ctx.wanted[place]:
            more = [amaxes[1 - place], *largest] if amaxes else []
            read = (other, rows, dy, *more)
            grads[place] = ctx.add(f"Float8GroupedMatMulGrad{name}", *read, **known, **options)
    return grads


_register("", "xwr", "y")
_register("GradA", "wry", "x")
_register("GradB", "xry", "w")
