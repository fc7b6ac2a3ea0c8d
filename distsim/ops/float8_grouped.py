"""Products of 8-bit rows that lie in groups: ``Float8GroupedMatMul`` and its two gradients.

:mod:`distsim.ops.grouped`, of operands as in :mod:`distsim.ops.float8`: rows and matrices are e4m3, the
gradient of what comes out e5m2. So Transformer Engine runs the experts of a mixture (``GroupedLinear``
under ``fp8_autocast``), and DeepSeek-V3 all three products of each (DeepSeek-AI 2024, section 3.3), which
sends rows to experts, and gradients, as they are cast. An operator is that of :mod:`distsim.ops.grouped`
but for the type ``to`` of what it makes, and ``scale``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distsim.ir.type import Float8E5M2, Tensor, as_tensor
from distsim.ir.value import Attributes, Value
from distsim.ops.float8 import GRADIENT_SCALE, check_eight_bits, made_type, number_of
from distsim.ops.grouped import of_forward
from distsim.ops.operator import (
    Array,
    ComputeRule,
    GradientContext,
    GradientRule,
    Operator,
    TypesRule,
    operator,
    register,
)


def _types(name: str, of_sixteen: TypesRule | None) -> TypesRule | None:
    if of_sixteen is None:
        return None

    def types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        check_eight_bits(name, [tensor for tensor in inputs if tensor.dtype.is_floating])
        (made,) = of_sixteen(attributes, inputs)
        return (Tensor(made_type(attributes), made.shape, made.device),)

    return types


def _compute(of_sixteen: ComputeRule | None) -> ComputeRule | None:
    if of_sixteen is None:
        return None

    def compute(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
        """Multiply in float32; whole numbers say how many rows groups have."""
        wide = [a if np.issubdtype(a.dtype, np.integer) else a.astype(np.float32) for a in arrays]
        (made,) = of_sixteen(attributes, wide)
        return [(made / np.float32(attributes.get("scale", 1.0))).astype(made_type(attributes).np)]

    return compute


def _gradient(ctx: GradientContext) -> Sequence[Value | None]:
    x, w, rows = ctx.inputs
    to = number_of(as_tensor(ctx.grad.type, "the gradient").dtype)
    dy = ctx.add("Float8Cast", ctx.grad, to=number_of(Float8E5M2()), scale=GRADIENT_SCALE)
    options = of_forward(ctx.attributes) | {"to": to}
    options["scale"] = GRADIENT_SCALE * ctx.attributes.get("scale", 1.0)
    dx = ctx.add("Float8GroupedMatMulGradA", w, rows, dy, **options) if ctx.wanted[0] else None
    dw = ctx.add("Float8GroupedMatMulGradB", x, rows, dy, **options) if ctx.wanted[1] else None
    return [dx, dw, None]


def _register(name: str, gradient: GradientRule | None = None) -> None:
    known = operator(name)
    register(
        Operator(
            f"Float8{name}",
            types=_types(f"Float8{name}", known.types),
            compute=_compute(known.compute),
            work=known.work,
            gradient=gradient,
            sharding=known.sharding,
        )
    )


_register("GroupedMatMul", _gradient)
_register("GroupedMatMulGradA")
_register("GroupedMatMulGradB")
