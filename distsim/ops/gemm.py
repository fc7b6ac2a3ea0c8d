"""``Gemm``: alpha A' B' + beta C, where ' transposes if transA, transB say so; and its gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distsim.errors import TypeRuleError
from distsim.ir.type import Tensor
from distsim.ir.value import Attributes, Value
from distsim.ops.bounds import fits_to, require
from distsim.ops.matmul import Dims, Shape, signature_shapes, unlabel
from distsim.ops.operator import (
    Array,
    Bounds,
    GradientContext,
    Operator,
    OutputPart,
    Shapes,
    Signature,
    Work,
    arity,
    bytes_of,
    common_device,
    register,
    work_of,
)
from distsim.ops.places import by_place, operands, picked, places, select, shape_of, wanted
from distsim.ops.shape import summed
from distsim.ops.sharding_rule import ShardingRule

_ABC = ("A", "B", "C")


def _gemm_flags(attributes: Mapping[str, Any]) -> tuple[bool, bool, float, float]:
    flags = bool(attributes.get("transA", 0)), bool(attributes.get("transB", 0))
    return (*flags, float(attributes.get("alpha", 1.0)), float(attributes.get("beta", 1.0)))


def _gemm(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    trans_a, trans_b, alpha, beta = _gemm_flags(attributes)
    given = operands(_ABC, attributes, arrays)
    a = given["A"].T if trans_a else given["A"]
    b = given["B"].T if trans_b else given["B"]
    made = a @ b if alpha == 1 else alpha * (a @ b)
    if "C" in given:
        made = made + (given["C"] if beta == 1 else beta * given["C"])
    return [made.astype(arrays[0].dtype, copy=False)]


def _gemm_inner(attributes: Mapping[str, Any], a: Shape) -> int:
    return a[0 if attributes.get("transA", 0) else 1]


def _gemm_work(signature: Signature) -> Work:
    """The bias is added, and the product scaled, as it is written: an epilogue of the same kernel."""
    shapes = signature_shapes(_ABC, signature)
    inner = _gemm_inner(signature.attributes, shapes["A"])
    size = signature.outputs[0].size
    return work_of(signature, 2.0 * size * inner, matrix=True, added=size if "C" in shapes else 0)


def _gemm_labels(attributes: Mapping[str, Any]) -> tuple[Dims, Dims]:
    trans_a, trans_b, _, _ = _gemm_flags(attributes)
    return (("k", "m") if trans_a else ("m", "k")), (("n", "k") if trans_b else ("k", "n"))


def _gemm_sharding(signature: Signature) -> ShardingRule:
    shapes = signature_shapes(_ABC, signature)
    a, b = _gemm_labels(signature.attributes)
    out: Dims = ("m", "n")
    bias: Dims = ()
    if "C" in shapes:
        lead = 2 - len(shapes["C"])
        whole = signature.outputs[0].shape
        bias = tuple(out[lead + i] if n == whole[lead + i] else None for i, n in enumerate(shapes["C"]))
    if "C" in signature.attributes:  # ranks that divide k would each add the whole bias
        bias = (*bias, "k")
    labels = unlabel({"A": a, "B": b, "C": bias, "Y": out}, signature.attributes)
    index = places(_ABC, signature.attributes, len(signature.inputs))
    inputs = select(_ABC, signature, **labels)
    added = (index["C"],) if "C" in index else ()
    linear = (
        () if "C" in signature.attributes else tuple((index[n], *added) for n in ("A", "B") if n in index)
    )
    return ShardingRule(inputs, (labels["Y"],), linear, addends=added)


def _factors(attributes: Attributes, name: str) -> tuple[tuple[str, int], tuple[str, int]]:
    """Return the two factors of the gradient of A or B, each with whether to transpose it.

    dA' = alpha dy B'^T and dB' = alpha A'^T dy, where A' and B' are A and B as they are multiplied.
    """
    trans_a, trans_b, _, _ = _gemm_flags(attributes)
    own, other = (trans_a, "B") if name == "A" else (trans_b, "A")
    operand, dy = (other, int(trans_a == trans_b)), ("dy", int(own))
    return (operand, dy) if own == (name == "A") else (dy, operand)


def _options(attributes: Attributes, factors: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """Return the attributes of the Gemm that multiplies these factors."""
    flags = {f"trans{place}": 1 for place, (_, flag) in zip("AB", factors, strict=True) if flag}
    return flags | picked(attributes, "alpha")


def _product(ctx: GradientContext, name: str) -> Value:
    """Add the gradient of A or B; the other one is an operand or static."""
    index = places(_ABC, ctx.attributes, len(ctx.inputs))
    factors = _factors(ctx.attributes, name)
    values: list[Value] = []
    options = _options(ctx.attributes, factors)
    for place, (operand, _) in zip("AB", factors, strict=True):
        if operand == "dy":
            values.append(ctx.grad)
        elif operand in index:
            values.append(ctx.inputs[index[operand]])
        else:
            options[place] = ctx.attributes[operand]
    return ctx.add("Gemm", *values, **options)


def _gemm_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    beta = _gemm_flags(ctx.attributes)[3]
    index = places(_ABC, ctx.attributes, len(ctx.inputs))
    grads: dict[str, Value | None] = {}
    for_a, for_b, for_c = (wanted(_ABC, ctx, name) for name in _ABC)
    if for_a and for_b:
        pair = (ctx.inputs[index["A"]], ctx.inputs[index["B"]])
        options = picked(ctx.attributes, "transA", "transB", "alpha")
        grads["A"], grads["B"] = ctx.add_many("GemmGrad", *pair, ctx.grad, **options)
    elif for_a or for_b:
        name = "A" if for_a else "B"
        grads[name] = _product(ctx, name)
    if for_c:
        total = summed(ctx, ctx.grad, shape_of(ctx.inputs[index["C"]]))
        grads["C"] = total if beta == 1 else ctx.add("Mul", total, B=beta)
    return by_place(_ABC, ctx, grads)


def _gemm_grad(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    trans_a, trans_b, alpha, _ = _gemm_flags(attributes)
    a, b, dy = arrays
    da = dy @ (b if trans_b else b.T)
    db = (a if trans_a else a.T) @ dy
    made = (da.T if trans_a else da), (db.T if trans_b else db)
    return [(grad if alpha == 1 else alpha * grad).astype(dy.dtype, copy=False) for grad in made]


def _gemm_grad_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    arity("GemmGrad", inputs, 3)
    a, b, dy = inputs
    trans_a, trans_b, _, _ = _gemm_flags(attributes)
    left, right = (t.shape[::-1] if flip else t.shape for t, flip in ((a, trans_a), (b, trans_b)))
    if len(left) != 2 or len(right) != 2 or left[1] != right[0] or dy.shape != (left[0], right[1]):
        raise TypeRuleError(f"GemmGrad: gradient {dy.shape} does not fit the product of {left} by {right}")
    device = common_device("GemmGrad", inputs)
    return (a.on(device), b.on(device))


def _gemm_grad_work(signature: Signature) -> Work:
    dy = signature.inputs[2]
    flops = 4.0 * dy.size * _gemm_inner(signature.attributes, signature.inputs[0].shape)
    return Work(flops, bytes_of(signature.inputs) + dy.nbytes, bytes_of(signature.outputs), matrix=True)


def _gemm_grad_part(signature: Signature, output: int) -> OutputPart:
    factors = _factors(signature.attributes, "AB"[output])
    read = tuple(["A", "B", "dy"].index(operand) for operand, _ in factors)
    return OutputPart("Gemm", read, Attributes(_options(signature.attributes, factors)))


def _gemm_grad_sharding(signature: Signature) -> ShardingRule:
    a, b = _gemm_labels(signature.attributes)
    return ShardingRule((a, b, ("m", "n")), (a, b), ((2,),))


def _gemm_bounds(attributes: Attributes, shapes: Shapes) -> None:
    a, b = shapes["A"], shapes.get("B", ())
    require(len(a) == len(b) == 2, f"Gemm multiplies matrices, not {list(a)} by {list(b)}")
    made = (a[1 if attributes.get("transA", 0) else 0], b[0 if attributes.get("transB", 0) else 1])
    if "C" in shapes:
        fits_to("Gemm", "C", shapes["C"], made)


def _gemm_exact(attributes: Attributes, count: int) -> Sequence[int]:
    return [place for name, place in places(_ABC, attributes, count).items() if name == "C"]


register(
    Operator(
        "Gemm",
        compute=_gemm,
        work=_gemm_work,
        gradient=_gemm_gradient,
        sharding=_gemm_sharding,
        formals=_ABC,
        exact=_gemm_exact,
        bounds=Bounds(_ABC, _gemm_bounds),
    )
)
register(
    Operator(
        "GemmGrad",
        types=_gemm_grad_types,
        compute=_gemm_grad,
        work=_gemm_grad_work,
        sharding=_gemm_grad_sharding,
        part=_gemm_grad_part,
    )
)
