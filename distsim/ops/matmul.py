"""``MatMul`` of vectors, matrices and stacks of them, and its gradients.

A product of [m, k] and [k, n] takes 2 m k n flops. The gradients are two such products, so the fused
``MatMulGrad`` reads the gradient of the output twice. Where only one is wanted, ``MatMulGradA`` or
``MatMulGradB`` makes it.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np

from distsim.errors import TypeRuleError
from distsim.ir.type import Tensor
from distsim.ir.value import Attributes, Value
from distsim.ops.broadcast import sum_to
from distsim.ops.onnx_bridge import static_array
from distsim.ops.operator import (
    Array,
    GradientContext,
    Operator,
    OutputPart,
    Signature,
    Work,
    arity,
    bytes_of,
    common_device,
    register,
    work_of,
)
from distsim.ops.places import by_place, operands, picked, places, resizing, select, shape_of, wanted
from distsim.ops.sharding_rule import Dim, ShardingRule, letters

Shape = tuple[int, ...]
Dims = tuple[Dim, ...]

_AB = ("A", "B")

GROUP = "group"
"""The attribute that says which products of one operand a model may have as one: those of queries, keys and
values, those of a gate and what it gates. Whether they run so is for the kernels to say
(:mod:`distsim.transforms.kernels.products`); gradients have it from their product."""


def matmul_shape(a: Shape, b: Shape) -> Shape:
    """Return the shape of the product of arrays of two shapes, by the rules of ``numpy.matmul``.

    >>> matmul_shape((8, 1, 2, 3), (5, 3, 4))
    (8, 5, 2, 4)
    """
    if not a or not b:
        raise TypeRuleError(f"MatMul multiplies vectors, matrices and stacks of them, not {a} by {b}")
    inner = b[max(len(b) - 2, 0)]
    if a[-1] != inner:
        raise TypeRuleError(f"MatMul of {a} by {b}: {a[-1]} columns do not fit {inner} rows")
    try:
        batch = np.broadcast_shapes(a[:-2], b[:-2])
    except ValueError as error:
        raise TypeRuleError(f"MatMul of {a} by {b}: {a[:-2]} and {b[:-2]} do not broadcast") from error
    return (*batch, *a[-2:-1], *(b[-1:] if len(b) > 1 else ()))


def matmul_labels(a: Shape, b: Shape) -> tuple[Dims, Dims, Dims]:
    """Return the labels of the dimensions of two operands and of their product.

    The factors are m, k, n and one for each dimension of the stack; a dimension of size 1 that is
    repeated has none.
    """
    batch = np.broadcast_shapes(a[:-2], b[:-2])
    names = letters(len(batch), "b")

    def stack(shape: Shape) -> Dims:
        own = shape[:-2]
        start = len(batch) - len(own)
        pairs = zip(own, batch[start:], names[start:], strict=True)
        return tuple(name if size == whole else None for size, whole, name in pairs)

    rows, columns = ("m",) * (len(a) > 1), ("n",) * (len(b) > 1)
    return (*stack(a), *rows, "k"), (*stack(b), "k", *columns), (*names, *rows, *columns)


def operand_shapes(
    names: Sequence[str], attributes: Mapping[str, Any], values: Sequence[Shape]
) -> dict[str, Shape]:
    """Return the shapes of the operands, static or not."""
    index = places(names, attributes, len(values))
    shapes = {name: values[i] for name, i in index.items()}
    static = {name: static_array(attributes[name], None).shape for name in names if name in attributes}
    return shapes | static


def signature_shapes(names: Sequence[str], signature: Signature) -> dict[str, Shape]:
    """Return the shapes of the operands of a signature, static or not."""
    return operand_shapes(names, signature.attributes, [tensor.shape for tensor in signature.inputs])


def unlabel(labels: Mapping[str, Dims], static: Container[str]) -> dict[str, Dims]:
    """Take away the factors of static operands, which every rank has whole."""
    whole = {dim for name, dims in labels.items() if name in static for dim in dims}
    return {name: tuple(None if dim in whole else dim for dim in dims) for name, dims in labels.items()}


def _to_matrices(a: Array, b: Array, dy: Array) -> tuple[Array, Array, Array]:
    """Return operands and gradient with the dimensions that a vector lacks."""
    if b.ndim == 1:
        b, dy = b[:, None], dy[..., None]
    if a.ndim == 1:
        a, dy = a[None, :], dy[..., None, :]
    return a, b, dy


def grad_a(b: Array, dy: Array, shape: Shape) -> Array:
    """Return the gradient of the first operand, which has this shape."""
    _, b, dy = _to_matrices(np.empty(shape, bool), b, dy)
    full = shape if len(shape) > 1 else (1, *shape)
    return sum_to(dy @ np.swapaxes(b, -1, -2), full).reshape(shape).astype(dy.dtype, copy=False)


def grad_b(a: Array, dy: Array, shape: Shape) -> Array:
    """Return the gradient of the second operand, which has this shape."""
    a, _, dy = _to_matrices(a, np.empty(shape, bool), dy)
    full = shape if len(shape) > 1 else (*shape, 1)
    return sum_to(np.swapaxes(a, -1, -2) @ dy, full).reshape(shape).astype(dy.dtype, copy=False)


# MatMul


def _matmul(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    given = operands(_AB, attributes, arrays)
    return [np.asarray(np.matmul(given["A"], given["B"])).astype(arrays[0].dtype, copy=False)]


def _matmul_work(signature: Signature) -> Work:
    inner = signature_shapes(_AB, signature)["A"][-1]
    flops = 2.0 * signature.outputs[0].size * inner
    return work_of(signature, flops, matrix=True)


def _matmul_sharding(signature: Signature) -> ShardingRule:
    shapes = signature_shapes(_AB, signature)
    dims: dict[str, Dims] = dict(zip((*_AB, "Y"), matmul_labels(shapes["A"], shapes["B"]), strict=True))
    labels = unlabel(dims, signature.attributes)
    inputs = select(_AB, signature, **labels)
    return ShardingRule(inputs, (labels["Y"],), tuple((i,) for i in range(len(inputs))))


def _matmul_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    index = places(_AB, ctx.attributes, len(ctx.inputs))
    kept = picked(ctx.attributes, GROUP)
    if all(ctx.wanted) and len(index) == 2:
        return ctx.add_many("MatMulGrad", *ctx.inputs, ctx.grad, **kept)
    grads: dict[str, Value | None] = {}
    for name, other in (("A", "B"), ("B", "A")):
        if wanted(_AB, ctx, name):
            values = [ctx.inputs[index[other]]] if other in index else []
            shape = shape_of(ctx.inputs[index[name]])
            static = picked(ctx.attributes, other)
            grads[name] = ctx.add(f"MatMulGrad{name}", *values, ctx.grad, shape=shape, **static, **kept)
    return by_place(_AB, ctx, grads)


register(
    Operator(
        "MatMul",
        beside=(GROUP,),
        compute=_matmul,
        work=_matmul_work,
        gradient=_matmul_gradient,
        sharding=_matmul_sharding,
        formals=_AB,
    )
)


# MatMulGrad(x, w, dy) -> (dx, dw)


def _matmul_grad_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    arity("MatMulGrad", inputs, 3)
    x, w, dy = inputs
    made = matmul_shape(x.shape, w.shape)
    if dy.shape != made:
        raise TypeRuleError(f"MatMulGrad: the product has shape {made}, its gradient {dy.shape}")
    device = common_device("MatMulGrad", inputs)
    return (x.on(device), w.on(device))


def _matmul_grad_work(signature: Signature) -> Work:
    x, _, dy = signature.inputs
    flops = 4.0 * dy.size * x.shape[-1]
    return Work(flops, bytes_of(signature.inputs) + dy.nbytes, bytes_of(signature.outputs), matrix=True)


def _matmul_grad_sharding(signature: Signature) -> ShardingRule:
    x, w, dy = matmul_labels(signature.inputs[0].shape, signature.inputs[1].shape)
    return ShardingRule((x, w, dy), (x, w), ((2,),))


def _matmul_grad_part(signature: Signature, output: int) -> OutputPart:
    name, shape = _AB[output], signature.inputs[output].shape
    kept = picked(signature.attributes, "rate", GROUP)
    return OutputPart(f"MatMulGrad{name}", (1 - output, 2), Attributes({"shape": shape, **kept}))


register(
    Operator(
        "MatMulGrad",
        types=_matmul_grad_types,
        compute=lambda attributes, a: [grad_a(a[1], a[2], a[0].shape), grad_b(a[0], a[2], a[1].shape)],
        work=_matmul_grad_work,
        sharding=_matmul_grad_sharding,
        part=_matmul_grad_part,
    )
)


# MatMulGradA(b, dy; shape) -> da and MatMulGradB(a, dy; shape) -> db: where only one is wanted.


def _register_half(name: str, other: str) -> None:
    op_type = f"MatMulGrad{name}"
    formals = (other, "dy")

    def shapes(attributes: Attributes, inputs: Sequence[Tensor]) -> dict[str, Shape]:
        found = operand_shapes(formals, attributes, [tensor.shape for tensor in inputs])
        return {**found, name: tuple(attributes["shape"])}

    def types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        arity(op_type, inputs, 2 - (other in attributes))
        found = shapes(attributes, inputs)
        made = matmul_shape(found["A"], found["B"])
        if found["dy"] != made:
            raise TypeRuleError(f"{op_type}: the product has shape {made}, its gradient {found['dy']}")
        return (Tensor(inputs[-1].dtype, found[name], common_device(op_type, inputs)),)

    def meaning(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
        given = operands(formals, attributes, arrays)
        rule = grad_a if name == "A" else grad_b
        return [rule(given[other], given["dy"], tuple(attributes["shape"]))]

    def work(signature: Signature) -> Work:
        inner = shapes(signature.attributes, signature.inputs)["A"][-1]
        flops = 2.0 * signature.inputs[-1].size * inner
        return work_of(signature, flops, matrix=True)

    def sharding(signature: Signature) -> ShardingRule:
        found = shapes(signature.attributes, signature.inputs)
        dims: dict[str, Dims] = dict(zip((*_AB, "dy"), matmul_labels(found["A"], found["B"]), strict=True))
        labels = unlabel(dims, signature.attributes)
        inputs = select(formals, signature, **labels)
        linear = tuple((i,) for i in range(len(inputs)))
        return ShardingRule(inputs, (labels[name],), linear, localize=resizing("shape"))

    register(Operator(op_type, types=types, compute=meaning, work=work, sharding=sharding, formals=formals))


_register_half("A", "B")
_register_half("B", "A")
