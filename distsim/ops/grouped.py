"""``GroupedMatMul``: rows that lie in groups, each multiplied by the matrix of its group.

The experts of a mixture are the example (MegaBlocks, Gale et al. 2023; ``ragged_dot`` of JAX). ``rows[g]``
is how many rows group g has; it is a value, so ranks that hold other experts may have other sizes of one
total. Rows beyond the last group are zero. x [..., n, k], w [groups, k, m], rows [groups] -> y [..., n, m].
All n rows are paid for, 2 n k m flops for each of the leading places: what is padded is not free.

``sizes``: what ``rows`` will be, where that is known before. Only then may ranks have groups each.
``chosen``: how many rows the model asks for where that is not their sum (routers whose experts have a
capacity: rows of padding, or choices that are dropped); so many count as the model's flops.
``exchange``: the kind of collective that brings rows to these ranks, if it is no plain all-to-all.
``counted``: no rank knows before how many rows others have for its groups, so they tell each other before
the rows are sent: each ``RowCounts``, what it has for every group, a number of 8 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from distsim.errors import TypeRuleError
from distsim.ir.type import Int64, Tensor
from distsim.ir.value import Attributes, Value
from distsim.ops.float8 import amax_labels
from distsim.ops.operator import (
    Array,
    GradientContext,
    Operator,
    Signature,
    Work,
    arity,
    common_device,
    register,
    work_of,
)
from distsim.ops.parts import Groups, shown_sizes
from distsim.ops.sharding_rule import Dim, Pieces, ShardingRule, letters


def _spans(rows: Array, count: int) -> list[slice]:
    """Return where the rows of each group lie among ``count``."""
    ends = np.minimum(np.cumsum(rows), count).tolist()
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _product(x: Array, w: Array, rows: Array) -> Array:
    made = np.zeros((*x.shape[:-1], w.shape[-1]), x.dtype)
    for group, span in enumerate(_spans(rows, x.shape[-2])):
        made[..., span, :] = x[..., span, :] @ w[group]
    return made


def _weight_gradient(x: Array, rows: Array, dy: Array) -> Array:
    made = np.zeros((len(rows), x.shape[-1], dy.shape[-1]), dy.dtype)
    for group, span in enumerate(_spans(rows, x.shape[-2])):
        a, b = x[..., span, :], dy[..., span, :]
        made[group] = a.reshape(-1, a.shape[-1]).T @ b.reshape(-1, b.shape[-1])
    return made


def _check(op_type: str, attributes: Attributes, ranked: Tensor, w: Tensor | None, rows: Tensor) -> None:
    if ranked.rank < 2 or (w is not None and w.rank != 3) or rows.rank != 1 or rows.dtype.is_floating:
        raise TypeRuleError(
            f"{op_type} takes rows [..., n, k], matrices [groups, k, m] and whole numbers [groups]; not "
            f"{ranked}, {w} and {rows}"
        )
    if w is not None and w.shape[0] != rows.shape[0]:
        raise TypeRuleError(f"{op_type}: {w.shape[0]} matrices for {rows.shape[0]} groups")
    sizes = attributes.get("sizes")
    if "chosen" in attributes and (sizes is None or attributes["chosen"] < 0):
        raise TypeRuleError(
            f"{op_type}: chosen={attributes['chosen']} rows are a part of all: give sizes, and 0 or more"
        )
    if sizes is not None and (len(sizes) != rows.shape[0] or sum(sizes) != ranked.shape[-2]):
        raise TypeRuleError(
            f"{op_type}: {ranked} are not the rows of {rows.shape[0]} groups of sizes {shown_sizes(sizes)}"
        )


def _types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    arity("GroupedMatMul", inputs, 3)
    x, w, rows = inputs
    _check("GroupedMatMul", attributes, x, w, rows)
    if x.shape[-1] != w.shape[1]:
        raise TypeRuleError(
            f"GroupedMatMul: {x.shape[-1]} columns of {x} do not fit {w.shape[1]} rows of {w}"
        )
    device = common_device("GroupedMatMul", inputs)
    return (Tensor(x.dtype, (*x.shape[:-1], w.shape[-1]), device),)


def _types_a(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    arity("GroupedMatMulGradA", inputs, 3)
    w, rows, dy = inputs
    _check("GroupedMatMulGradA", attributes, dy, w, rows)
    if dy.shape[-1] != w.shape[-1]:
        raise TypeRuleError(f"GroupedMatMulGradA: {dy} is not the gradient of a product with {w}")
    device = common_device("GroupedMatMulGradA", inputs)
    return (Tensor(dy.dtype, (*dy.shape[:-1], w.shape[1]), device),)


def _types_b(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    arity("GroupedMatMulGradB", inputs, 3)
    x, rows, dy = inputs
    _check("GroupedMatMulGradB", attributes, x, None, rows)
    if x.shape[:-1] != dy.shape[:-1]:
        raise TypeRuleError(f"GroupedMatMulGradB: {dy} is not the gradient of a product of {x}")
    device = common_device("GroupedMatMulGradB", inputs)
    return (Tensor(dy.dtype, (rows.shape[0], x.shape[-1], dy.shape[-1]), device),)


def _matrix_work(signature: Signature, narrow: Tensor, wide: Tensor) -> Work:
    """Each of the n rows is multiplied once: [n, k] beside [n, m] is 2 n k m flops, whatever is sought."""
    flops = 2.0 * narrow.size * wide.shape[-1]
    made, chosen = work_of(signature, flops, matrix=True), signature.attributes.get("chosen")
    if chosen is None:
        return made
    return replace(made, model_flops=flops * chosen / max(sum(signature.attributes["sizes"]), 1))


def _gradient(ctx: GradientContext) -> Sequence[Value | None]:
    """Backward knows how many rows there are: forward has counted them."""
    x, w, rows = ctx.inputs
    known = {name: item for name, item in ctx.attributes.items() if name != "counted"}
    dx = ctx.add("GroupedMatMulGradA", w, rows, ctx.grad, **known) if ctx.wanted[0] else None
    dw = ctx.add("GroupedMatMulGradB", x, rows, ctx.grad, **known) if ctx.wanted[1] else None
    return [dx, dw, None]


def grouped_rule(signature: Signature, inputs: str, output: str) -> ShardingRule:
    """Return the rule for operands that are called x, w, y and r(ows). Rows divide by whole groups only.

    Further inputs are the largest elements of the first ones but the numbers of rows.
    """
    leading = next(t.rank for t, name in zip(signature.inputs, inputs, strict=False) if name in "xy") - 2
    sizes = signature.attributes.get("sizes")
    batch, group = letters(leading, "b"), None if sizes is None else "groups"
    kind: str = signature.attributes.get("exchange", "")
    row: Dim = None if sizes is None else Pieces("groups", Groups(sizes, kind))
    labels: dict[str, tuple[Dim, ...]] = {
        "x": (*batch, row, "k"),
        "w": (group, "k", "m"),
        "y": (*batch, row, "m"),
        "r": (group,),
    }
    linear = tuple([(place,) for place, name in enumerate(inputs) if name != "r"])
    experts = "" if group is None else group
    operands = [(name, each) for name, each in zip(inputs, signature.inputs, strict=False) if name != "r"]
    amaxes = zip(operands, signature.inputs[len(inputs) :], strict=False)
    return ShardingRule(
        (
            *[labels[name] for name in inputs],
            *[amax_labels(labels[name], operand, amax) for (name, operand), amax in amaxes],
        ),
        (labels[output],),
        linear,
        localize=_localize,
        whole=(experts,) if experts else (),
        experts=experts,
    )


def group_matrix(signature: Signature) -> Tensor | None:
    """Return the matrices [groups, k, m] that an op multiplies rows by, or makes; None if it is no grouped
    product."""
    place = _MATRIX.get(signature.op_type.removeprefix("Float8"))
    return None if place is None else (*signature.inputs[:3], *signature.outputs)[place]


_MATRIX = {"GroupedMatMul": 1, "GroupedMatMulGradA": 0, "GroupedMatMulGradB": 3}
"""Where the matrices are among three inputs and the result."""


def _localize(attributes: Attributes, outputs: tuple[tuple[int, ...], ...]) -> Attributes:
    """Of a part of the groups it is not known before which they are."""
    return Attributes({name: item for name, item in attributes.items() if name not in _OF_ALL})


_OF_ALL = ("sizes", "chosen", "exchange", "counted")


def _counts_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    arity("RowCounts", inputs, 1)
    (rows,), sizes = inputs, attributes["sizes"]
    if rows.rank < 2 or sum(sizes) != rows.shape[-2]:
        raise TypeRuleError(f"RowCounts: {rows} are not the rows of groups of sizes {shown_sizes(sizes)}")
    return (Tensor(Int64(), (len(sizes),), rows.device),)


def _counts(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    return [np.array(attributes["sizes"], np.int64) * math.prod(arrays[0].shape[:-2])]


def _counts_work(signature: Signature) -> Work:
    """A kernel adds up which group each row goes to, a number of 8 bytes a row; it reads no row."""
    rows = signature.inputs[0].size // max(signature.inputs[0].shape[-1], 1)
    return Work(float(rows), 8.0 * rows, float(signature.outputs[0].nbytes))


register(Operator("RowCounts", types=_counts_types, compute=_counts, work=_counts_work))


register(
    Operator(
        "GroupedMatMul",
        types=_types,
        compute=lambda attributes, a: [_product(a[0], a[1], a[2])],
        work=lambda s: _matrix_work(s, s.inputs[0], s.outputs[0]),
        gradient=_gradient,
        sharding=lambda s: grouped_rule(s, "xwr", "y"),
    )
)
register(
    Operator(
        "GroupedMatMulGradA",
        types=_types_a,
        compute=lambda attributes, a: [_product(a[2], np.swapaxes(a[0], 1, 2), a[1])],
        work=lambda s: _matrix_work(s, s.outputs[0], s.inputs[2]),
        sharding=lambda s: grouped_rule(s, "wry", "x"),
    )
)
register(
    Operator(
        "GroupedMatMulGradB",
        types=_types_b,
        compute=lambda attributes, a: [_weight_gradient(a[0], a[1], a[2])],
        work=lambda s: _matrix_work(s, s.inputs[0], s.inputs[2]),
        sharding=lambda s: grouped_rule(s, "xry", "w"),
    )
)
