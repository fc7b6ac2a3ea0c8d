"""Products of 8-bit operands: ``Float8Cast``, ``Float8MatMul`` and its two gradients.

As Transformer Engine runs a linear layer (Micikevicius et al. 2022, "FP8 formats for deep learning"): the
operands are e4m3, the gradient of the output e5m2; each is cast by a kernel that takes its largest element on
the way. Scaling is delayed: the factor of a tensor is known from earlier steps, here the attribute ``scale``,
a power of two. A product adds in float32 and makes the type ``to``; ``scale`` of a product is that of both
operands. The gradient of an 8-bit value is of the type in which its product is made, that of a cast goes
straight through.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx.helper

from distsim.errors import TypeRuleError
from distsim.ir.type import DType, Float8E4M3FN, Float8E5M2, Tensor, as_tensor, from_numpy
from distsim.ir.value import Attributes, Value
from distsim.ops.matmul import grad_a, grad_b, matmul_labels, matmul_shape
from distsim.ops.operator import (
    Array,
    GradientContext,
    Operator,
    Signature,
    Work,
    arity,
    bytes_of,
    common_device,
    memory_bound,
    register,
)
from distsim.ops.places import resizing, same_shape_rule, shape_of
from distsim.ops.sharding_rule import ShardingRule

GRADIENT_SCALE = 1024.0
"""Of the gradient of an output: e5m2 has no numbers between 0 and 1.5e-5."""

_LARGEST: dict[DType, float] = {Float8E4M3FN(): 448.0, Float8E5M2(): 57344.0}
EIGHT_BITS = tuple(_LARGEST)


def number_of(dtype: DType) -> int:
    """Return ONNX's number of an element type."""
    return int(onnx.helper.np_dtype_to_tensor_dtype(dtype.np))


def made_type(attributes: Attributes) -> DType:
    """Return the element type that an op makes: its attribute ``to``."""
    return from_numpy(onnx.helper.tensor_dtype_to_np_dtype(attributes["to"]))


# Float8Cast(x; to, scale): x * scale, rounded; what is out of range becomes the largest number there is.


def _cast_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    arity("Float8Cast", inputs, 1)
    to = made_type(attributes)
    if to not in EIGHT_BITS or not inputs[0].dtype.is_floating:
        raise TypeRuleError(f"Float8Cast makes float8e4m3fn or float8e5m2 of real numbers, not {to.name}")
    return (Tensor(to, inputs[0].shape, inputs[0].device),)


def _cast(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    to = made_type(attributes).np
    most = _LARGEST[made_type(attributes)]
    scaled = arrays[0].astype(np.float32) * attributes.get("scale", 1.0)
    return [np.clip(scaled, -most, most).astype(to)]


register(
    Operator(
        "Float8Cast",
        types=_cast_types,
        compute=_cast,
        work=lambda s: memory_bound(s, 3.0),  # scale, largest element, round
        gradient=lambda ctx: [ctx.grad],
        sharding=same_shape_rule,
    )
)


# Float8MatMul(a, b; to, scale)


def check_eight_bits(op_type: str, inputs: Sequence[Tensor]) -> None:
    """Refuse operands that are no 8-bit numbers."""
    for tensor in inputs:
        if tensor.dtype not in EIGHT_BITS:
            raise TypeRuleError(
                f"{op_type} multiplies 8-bit numbers, not {tensor}; cast them with Float8Cast"
            )


def _wide(attributes: Attributes, arrays: Sequence[Array]) -> list[Array]:
    first, second = [array.astype(np.float32) for array in arrays]
    return [first / np.float32(attributes.get("scale", 1.0)), second]


def _product_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    arity("Float8MatMul", inputs, 2)
    check_eight_bits("Float8MatMul", inputs)
    shape = matmul_shape(inputs[0].shape, inputs[1].shape)
    return (Tensor(made_type(attributes), shape, common_device("Float8MatMul", inputs)),)


def _product(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    a, b = _wide(attributes, arrays)
    return [np.asarray(np.matmul(a, b)).astype(made_type(attributes).np)]


def _product_work(signature: Signature) -> Work:
    flops = 2.0 * signature.outputs[0].size * signature.inputs[0].shape[-1]
    return Work(flops, bytes_of(signature.inputs), bytes_of(signature.outputs), matrix=True)


def _product_sharding(signature: Signature) -> ShardingRule:
    a, b, y = matmul_labels(signature.inputs[0].shape, signature.inputs[1].shape)
    return ShardingRule((a, b), (y,))


def _product_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    a, b = ctx.inputs
    to = number_of(as_tensor(ctx.grad.type, "the gradient").dtype)
    dy = ctx.add("Float8Cast", ctx.grad, to=number_of(Float8E5M2()), scale=GRADIENT_SCALE)
    options: dict[str, Any] = {"to": to, "scale": GRADIENT_SCALE * ctx.attributes.get("scale", 1.0)}
    grads: list[Value | None] = [None, None]
    if ctx.wanted[0]:
        grads[0] = ctx.add("Float8MatMulGradA", b, dy, shape=shape_of(a), **options)
    if ctx.wanted[1]:
        grads[1] = ctx.add("Float8MatMulGradB", a, dy, shape=shape_of(b), **options)
    return grads


register(
    Operator(
        "Float8MatMul",
        types=_product_types,
        compute=_product,
        work=_product_work,
        gradient=_product_gradient,
        sharding=_product_sharding,
    )
)


# Float8MatMulGradA(b, dy; shape, to, scale) and Float8MatMulGradB(a, dy; shape, to, scale)


def _register_half(name: str) -> None:
    op_type = f"Float8MatMulGrad{name}"
    of_a = name == "A"

    def operands(attributes: Attributes, inputs: Sequence[Tensor]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        other, own = inputs[0].shape, tuple(attributes["shape"])
        return (own, other) if of_a else (other, own)

    def types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        arity(op_type, inputs, 2)
        check_eight_bits(op_type, inputs)
        made = matmul_shape(*operands(attributes, inputs))
        if inputs[1].shape != made:
            raise TypeRuleError(f"{op_type}: the product has shape {made}, its gradient {inputs[1].shape}")
        return (Tensor(made_type(attributes), tuple(attributes["shape"]), common_device(op_type, inputs)),)

    def compute(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
        dy, other = _wide(attributes, (arrays[1], arrays[0]))
        made = (grad_a if of_a else grad_b)(other, dy, tuple(attributes["shape"]))
        return [made.astype(made_type(attributes).np)]

    def work(signature: Signature) -> Work:
        inner = operands(signature.attributes, signature.inputs)[0][-1]
        flops = 2.0 * signature.inputs[1].size * inner
        return Work(flops, bytes_of(signature.inputs), bytes_of(signature.outputs), matrix=True)

    def sharding(signature: Signature) -> ShardingRule:
        a, b, dy = matmul_labels(*operands(signature.attributes, signature.inputs))
        other, own = (b, a) if of_a else (a, b)
        return ShardingRule((other, dy), (own,), localize=resizing("shape"))

    register(Operator(op_type, types=types, compute=compute, work=work, sharding=sharding))


_register_half("A")
_register_half("B")
