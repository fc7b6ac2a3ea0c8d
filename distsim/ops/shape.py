"""Operators that keep every element and change the shape, or repeat what is there.

``Reshape``, ``Flatten``, ``Squeeze`` and ``Unsqueeze`` are views, and so is ``Unflatten(x; shape)``, the
first elements of a flat tensor under a shape. ``Transpose``, ``Expand`` and ``Tile`` write a new tensor.
``Shape`` and ``Size`` are folded at import and cost nothing where one is left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from distsim.errors import TypeRuleError
from distsim.ir.type import Tensor
from distsim.ir.value import Attributes, Value
from distsim.ops.onnx_bridge import onnx_types
from distsim.ops.operator import Array, Bounds, GradientContext, Operator, Signature, arity, register
from distsim.ops.places import Localize, ints, move_work, resizing, shape_of, view_work, whole_rule
from distsim.ops.sharding_rule import Dim, Label, Pieces, ShardingRule, letters


def reshape_labels(
    source: tuple[int, ...], target: tuple[int, ...]
) -> tuple[tuple[Dim, ...], tuple[Dim, ...]]:
    """Return the labels of the dimensions of a reshape from ``source`` to ``target``.

    Both shapes are cut into the smallest groups of equal size. The leading dimension of a group
    carries its factor on both sides: parts of it are the same contiguous elements. Where one side of a
    group is a single dimension, those behind the leading one on the other side are divided as pieces
    of it. Nothing of an empty tensor is labelled.

    >>> reshape_labels((2, 6, 5), (12, 5))
    (('d0', 'd0.1', 'd1'), (('d0', Pieces(factor='d0.1', sizes=(6, 6))), 'd1'))
    """
    left: list[Dim] = [None] * len(source)
    right: list[Dim] = [None] * len(target)
    i = j = 0
    names = iter(letters(len(source)))
    while 0 not in source and i < len(source) and j < len(target):
        if source[i] != target[j] and 1 in (source[i], target[j]):
            i, j = i + (source[i] == 1), j + (target[j] == 1)
            continue
        start, begin = i, j
        size_left, size_right = source[i], target[j]
        i, j = i + 1, j + 1
        while size_left != size_right:
            if size_left < size_right:
                size_left, i = size_left * source[i], i + 1
            else:
                size_right, j = size_right * target[j], j + 1
        name = next(names)
        left[start] = right[begin] = name
        if j == begin + 1:
            right[begin] = _merged(name, source, start, i, left)
        elif i == start + 1:
            left[start] = _merged(name, target, begin, j, right)
    return tuple(left), tuple(right)


MOST_PIECES = 4096


def _merged(name: str, shape: tuple[int, ...], start: int, end: int, labels: list[Dim]) -> Dim:
    """Label the dimensions behind the leading one of a group; return the label of their merged dimension."""
    found: list[Label] = [name]
    for place in range(start + 1, end):
        count = math.prod(shape[start:place])
        if shape[place] > 1 and count <= MOST_PIECES:
            own = f"{name}.{place - start}"
            labels[place] = own
            found.append(Pieces(own, (math.prod(shape[place:end]),) * count))
    return tuple(found) if len(found) > 1 else name


def reshaped(ctx: GradientContext, value: Value, shape: tuple[int, ...]) -> Value:
    """Return ``value`` under another shape."""
    if shape_of(value) == shape:
        return value
    zero = {"allowzero": 1} if 0 in shape else {}
    return ctx.add("Reshape", value, shape=shape, **zero)


def summed(ctx: GradientContext, value: Value, shape: tuple[int, ...]) -> Value:
    """Return ``value`` summed over the dimensions along which ``shape`` was broadcast to its shape."""
    full = shape_of(value)
    lead = len(full) - len(shape)
    axes = tuple(i for i, n in enumerate(full) if i < lead or (shape[i - lead] == 1 and n != 1))
    if axes:
        value = ctx.add("ReduceSum", value, axes=axes, keepdims=1)
    return reshaped(ctx, value, shape)


def _reshape_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    return [reshaped(ctx, ctx.grad, shape_of(ctx.inputs[0]))]


def _reshape_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """ONNX's rule, which does not compare the numbers of elements."""
    made = onnx_types("Reshape", attributes, inputs, None)
    if inputs and made[0].size != inputs[0].size:
        raise TypeRuleError(f"makes {made[0]} of {inputs[0]}: the number of elements must stay the same")
    return made


def _reshape_localize(attributes: Attributes, outputs: tuple[tuple[int, ...], ...]) -> Attributes:
    zero = {"allowzero": 1} if 0 in outputs[0] else {}
    return Attributes({**attributes, "shape": outputs[0], **zero})


def _view_rule(signature: Signature, localize: Localize | None = None) -> ShardingRule:
    source, target = reshape_labels(signature.inputs[0].shape, signature.outputs[0].shape)
    return ShardingRule((source,), (target,), ((0,),), localize=localize)


def _squeeze_rule(signature: Signature) -> ShardingRule:
    # Without axes every dimension of size 1 goes, on a rank also those that became 1 by division.
    axes = tuple(i for i, n in enumerate(signature.inputs[0].shape) if n == 1)

    def localize(attributes: Attributes, outputs: tuple[tuple[int, ...], ...]) -> Attributes:
        return attributes if "axes" in attributes else Attributes({**attributes, "axes": axes})

    return _view_rule(signature, localize)


def _unflatten_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    arity("Unflatten", inputs, 1)
    tensor, shape = inputs[0], attributes["shape"]
    if tensor.rank != 1 or math.prod(shape) > tensor.size:
        raise TypeRuleError(
            f"Unflatten: {tensor} must be flat and have the {math.prod(shape)} elements of {shape}"
        )
    return (tensor.with_shape(shape),)


def _unflatten(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    shape = attributes["shape"]
    return [arrays[0][: math.prod(shape)].reshape(shape)]


def _unflatten_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    flat = reshaped(ctx, ctx.grad, (math.prod(shape_of(ctx.grad)),))
    rest = shape_of(ctx.inputs[0])[0] - shape_of(flat)[0]
    return [ctx.add("Pad", flat, pads=(0, rest)) if rest else flat]


def _transpose_perm(attributes: Attributes, rank: int) -> tuple[int, ...]:
    return ints(attributes["perm"]) if "perm" in attributes else tuple(reversed(range(rank)))


def _transpose_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    perm = _transpose_perm(ctx.attributes, len(shape_of(ctx.inputs[0])))
    inverse = tuple(perm.index(i) for i in range(len(perm)))
    return [ctx.add("Transpose", ctx.grad, perm=inverse)]


def _transposed(attributes: Attributes, tensor: Tensor) -> Tensor:
    perm = _transpose_perm(attributes, tensor.rank)
    return tensor.with_shape(tuple([tensor.shape[axis] for axis in perm]))


def _transpose(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    return [arrays[0].transpose(_transpose_perm(attributes, arrays[0].ndim))]


def _transpose_rule(signature: Signature) -> ShardingRule:
    dims = letters(signature.inputs[0].rank)
    perm = _transpose_perm(signature.attributes, len(dims))
    return ShardingRule((dims,), (tuple(dims[i] for i in perm),), ((0,),))


# Expand and Tile: a dimension made by repeating one element may be divided; nothing of the input is.


def _repeat_labels(
    source: tuple[int, ...], target: tuple[int, ...]
) -> tuple[tuple[Dim, ...], tuple[Dim, ...]]:
    names = letters(len(target))
    padded = (1,) * (len(target) - len(source)) + source
    same = [a == b for a, b in zip(padded, target, strict=True)]
    left = tuple(name if equal else None for name, equal in zip(names, same, strict=True))
    right = tuple(
        name if equal or a == 1 else None for name, equal, a in zip(names, same, padded, strict=True)
    )
    return left[len(target) - len(source) :], right


def _expand_rule(signature: Signature) -> ShardingRule:
    source, target = _repeat_labels(signature.inputs[0].shape, signature.outputs[0].shape)
    return ShardingRule((source,), (target,), ((0,),), localize=resizing("shape"))


def _expand_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    return [summed(ctx, ctx.grad, shape_of(ctx.inputs[0]))]


def _tile_rule(signature: Signature) -> ShardingRule:
    given = signature.inputs[0].shape
    source, target = _repeat_labels(given, signature.outputs[0].shape)
    if "repeats" not in signature.attributes:  # Tile of opset 1 repeats one axis
        target = tuple(b if a == b else None for a, b in zip(source, target, strict=True))
        return ShardingRule((source,), (target,), ((0,),))
    repeats = ints(signature.attributes["repeats"])

    def localize(attributes: Attributes, outputs: tuple[tuple[int, ...], ...]) -> Attributes:
        local = [
            made if size == 1 else count for size, made, count in zip(given, outputs[0], repeats, strict=True)
        ]
        return Attributes({**attributes, "repeats": local})

    return ShardingRule((source,), (target,), ((0,),), localize=localize)


def _tile_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    shape, full = shape_of(ctx.inputs[0]), shape_of(ctx.grad)
    if math.prod(shape) == 0:
        return [reshaped(ctx, ctx.grad, shape)]
    repeats = [b // a for a, b in zip(shape, full, strict=True)]
    repeated = tuple(i for i, count in enumerate(repeats) if count > 1)
    if not repeated:
        return [ctx.grad]
    split: list[int] = []
    axes: list[int] = []
    for size, count in zip(shape, repeats, strict=True):
        if count > 1:
            axes.append(len(split))
            split.append(count)
        split.append(size)
    parts = reshaped(ctx, ctx.grad, tuple(split))
    return [ctx.add("ReduceSum", parts, axes=tuple(axes), keepdims=0)]


register(
    Operator(
        "Reshape",
        types=_reshape_types,
        work=view_work,
        gradient=_reshape_gradient,
        sharding=lambda signature: _view_rule(signature, _reshape_localize),
        view=True,
    )
)
register(
    Operator(
        "Flatten",
        work=view_work,
        gradient=_reshape_gradient,
        sharding=_view_rule,
        view=True,
        bounds=Bounds(axes=(0, 1)),
    )
)
register(Operator("Squeeze", work=view_work, gradient=_reshape_gradient, sharding=_squeeze_rule, view=True))
register(Operator("Unsqueeze", work=view_work, gradient=_reshape_gradient, sharding=_view_rule, view=True))
register(
    Operator(
        "Unflatten",
        types=_unflatten_types,
        compute=_unflatten,
        work=view_work,
        gradient=_unflatten_gradient,
        sharding=lambda s: ShardingRule(((None,),), ((None,) * s.outputs[0].rank,), ((0,),)),
        view=True,
    )
)
register(
    Operator(
        "Transpose",
        compute=_transpose,
        work=move_work,
        gradient=_transpose_gradient,
        sharding=_transpose_rule,
    )
)
register(
    Operator(
        "TransposedView",  # read where the operand lies: written for kernels, of a finished function
        types=lambda attributes, inputs: (_transposed(attributes, inputs[0]),),
        compute=_transpose,
        work=view_work,
        view=True,
    )
)
register(Operator("Expand", work=move_work, gradient=_expand_gradient, sharding=_expand_rule))
register(Operator("Tile", work=move_work, gradient=_tile_gradient, sharding=_tile_rule))
# Metadata: what they give is known from the type.
register(Operator("Shape", work=view_work, sharding=whole_rule))
register(Operator("Size", work=view_work, sharding=whole_rule))
