"""Operators that move blocks of elements: Concat, Split, Slice, Pad, DepthToSpace, SpaceToDepth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from distsim.errors import TypeRuleError
from distsim.ir.type import as_tensor
from distsim.ir.value import Attributes, Value
from distsim.ops.bounds import at_least, require, single_bounds
from distsim.ops.operator import Array, Bounds, GradientContext, Operator, Shapes, Signature, register
from distsim.ops.places import (
    by_place,
    copy_work,
    ints,
    like_shape,
    move_work,
    operands,
    picked,
    places,
    resizing,
    shape_of,
    wanted,
)
from distsim.ops.sharding_rule import Pieces, ShardingRule, letters

# Concat and Split: every piece of the axis is divided.


def _along(signature: Signature, axis: int, middle: str | Pieces | None) -> tuple[str | Pieces | None, ...]:
    dims = letters(signature.outputs[0].rank)
    return (*dims[:axis], middle, *dims[axis + 1 :])


def _concat_axis(attributes: Attributes, rank: int) -> int:
    return attributes["axis"] % rank


def _concat_rule(signature: Signature) -> ShardingRule:
    axis = _concat_axis(signature.attributes, signature.outputs[0].rank)
    pieces = Pieces("part", tuple(tensor.shape[axis] for tensor in signature.inputs))
    inputs = (_along(signature, axis, "part"),) * len(signature.inputs)
    return ShardingRule(inputs, (_along(signature, axis, pieces),), (tuple(range(len(signature.inputs))),))


def _concat_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    axis = _concat_axis(ctx.attributes, len(shape_of(ctx.grad)))
    sizes = tuple(shape_of(value)[axis] for value in ctx.inputs)
    ends = np.cumsum(sizes)
    needed = [i for i, want in enumerate(ctx.wanted) if want]
    if len(needed) > 1:
        return ctx.add_many("Split", ctx.grad, axis=axis, split=sizes)
    made: list[Value | None] = [None] * len(sizes)
    for i in needed:
        bounds = {"starts": (int(ends[i]) - sizes[i],), "ends": (int(ends[i]),), "axes": (axis,)}
        made[i] = ctx.add("Slice", ctx.grad, **bounds)
    return made


def _split_rule(signature: Signature) -> ShardingRule:
    axis: int = signature.attributes.get("axis", 0) % signature.outputs[0].rank
    sizes = tuple(tensor.shape[axis] for tensor in signature.outputs)

    def localize(attributes: Attributes, outputs: tuple[tuple[int, ...], ...]) -> Attributes:
        if "split" not in attributes and len(set(sizes)) == 1:
            return attributes
        kept = {name: item for name, item in attributes.items() if name not in ("num_outputs", "outputs")}
        return Attributes({**kept, "split": tuple(shape[axis] for shape in outputs)})

    outputs = (_along(signature, axis, "part"),) * len(sizes)
    inputs = (_along(signature, axis, Pieces("part", sizes)),)
    return ShardingRule(inputs, outputs, ((0,),), localize=localize)


def _split_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    """Concat of the gradients; where some are missing, each run of the others is padded with zeros."""
    rank = len(shape_of(ctx.inputs[0]))
    axis: int = ctx.attributes.get("axis", 0) % rank
    total, start = shape_of(ctx.inputs[0])[axis], 0
    runs: list[tuple[int, list[Value]]] = []
    open_run = False
    for output, grad in zip(ctx.outputs, ctx.grads, strict=True):
        if grad is not None:
            if not open_run:
                runs.append((start, []))
            runs[-1][1].append(grad)
        open_run = grad is not None
        start += shape_of(output)[axis]
    sums: Value | None = None
    for begin, grads in runs:
        run = grads[0] if len(grads) == 1 else ctx.add("Concat", *grads, axis=axis)
        rest = total - begin - shape_of(run)[axis]
        if begin or rest:
            pads = [0] * (2 * rank)
            pads[axis], pads[rank + axis] = begin, rest
            run = ctx.add("Pad", run, pads=tuple(pads))
        sums = run if sums is None else ctx.add("Add", sums, run)
    return [sums]


def _split_bounds(attributes: Attributes, shapes: Shapes) -> None:
    if "num_outputs" not in attributes:
        return
    count, shape, axis = int(attributes["num_outputs"]), shapes["input"], int(attributes.get("axis", 0))
    size = shape[axis] if shape else 0
    require(
        1 <= count <= max(size, 1), f"Split: num_outputs={count} of axis {axis}, which has {size} elements"
    )


register(
    Operator(
        "Concat", work=move_work, gradient=_concat_gradient, sharding=_concat_rule, bounds=Bounds(axes=(0, 0))
    )
)
register(
    Operator(
        "Split",
        beside=("microbatches",),
        work=move_work,
        gradient=_split_gradient,
        sharding=_split_rule,
        bounds=Bounds(("input", "split"), _split_bounds, axes=(0, 0)),
    )
)


# Slice: a dimension of which it takes the whole may be divided; begins and ends clamp to the local size.

_BOUNDS = ("starts", "ends", "axes", "steps")


def slices(attributes: Attributes, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Return the slice that a ``Slice`` takes of each dimension."""
    missing = [name for name in ("starts", "ends") if name not in attributes]
    if missing:
        raise TypeRuleError(
            f"Slice: {', '.join(missing)} must be known; distsim needs every size before it runs"
        )
    starts, ends = ints(attributes["starts"]), ints(attributes["ends"])
    axes = ints(attributes["axes"]) if "axes" in attributes else tuple(range(len(starts)))
    steps = ints(attributes["steps"]) if "steps" in attributes else (1,) * len(starts)
    found = [slice(None)] * len(shape)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        found[axis] = slice(start, end, step)
    return tuple(found)


def _slice_labels(signature: Signature, data: tuple[int, ...]) -> tuple[str | None, ...]:
    taken = slices(signature.attributes, data)
    whole = [part.indices(size) == (0, size, 1) for part, size in zip(taken, data, strict=True)]
    return tuple(name if full else None for name, full in zip(letters(len(data)), whole, strict=True))


def _slice_rule(signature: Signature) -> ShardingRule:
    dims = _slice_labels(signature, signature.inputs[0].shape)
    return ShardingRule((dims,), (dims,), ((0,),))


def _slice_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    bounds = picked(ctx.attributes, *_BOUNDS)
    return [ctx.add("SliceGrad", ctx.grad, shape=shape_of(ctx.inputs[0]), **bounds)]


def _slice_grad(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    made = np.zeros(attributes["shape"], arrays[0].dtype)
    made[slices(attributes, made.shape)] = arrays[0]
    return [made]


def _slice_grad_rule(signature: Signature) -> ShardingRule:
    dims = _slice_labels(signature, signature.outputs[0].shape)
    return ShardingRule((dims,), (dims,), ((0,),), localize=resizing("shape"))


register(Operator("Slice", work=copy_work, gradient=_slice_gradient, sharding=_slice_rule))
register(
    Operator(
        "SliceGrad",
        types=like_shape("SliceGrad", 1),
        compute=_slice_grad,
        work=move_work,
        sharding=_slice_grad_rule,
    )
)


# Pad: each padded axis is read through a map from output positions to input positions (-1: the constant).

_PAD = ("data", "pads", "constant_value", "axes")


def _amounts(attributes: Attributes, rank: int) -> tuple[tuple[int, int], ...]:
    """Return what is added (if negative, taken away) before and after each dimension."""
    pads = ints(attributes["pads"] if "pads" in attributes else attributes["paddings"])
    axes = ints(attributes["axes"]) if "axes" in attributes else tuple(range(rank))
    found = [(0, 0)] * rank
    for i, axis in enumerate(axes):
        found[axis] = (pads[i], pads[i + len(axes)])
    return tuple(found)


def _pad_map(size: int, before: int, after: int, mode: str) -> Array:
    """Return for every output position the input position it copies; -1 for the constant."""
    kept = np.arange(size)[max(0, -before) : size - max(0, -after)]
    added = (max(0, before), max(0, after))
    if mode == "constant":
        return np.pad(kept, added, constant_values=-1)
    pad: Any = np.pad  # its stubs want the mode as a literal
    return pad(kept, added, mode=mode)


def _pad_maps(attributes: Attributes, shape: tuple[int, ...]) -> list[tuple[int, Array]]:
    """Return (axis, map) of every axis that is padded."""
    mode = attributes.get("mode", "constant")
    amounts = enumerate(_amounts(attributes, len(shape)))
    return [(axis, _pad_map(shape[axis], *pair, mode)) for axis, pair in amounts if pair != (0, 0)]


def _pad(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    given = operands(_PAD, attributes, arrays)
    made = given["data"]
    fill = np.asarray(given.get("constant_value", attributes.get("value", 0))).astype(made.dtype).reshape(())
    for axis, source in _pad_maps(attributes, made.shape):
        column = (slice(None), *(None,) * (made.ndim - axis - 1))
        shape = (*made.shape[:axis], len(source), *made.shape[axis + 1 :])
        taken = np.take(made, source, axis) if made.shape[axis] else np.zeros(shape, made.dtype)
        made = np.where((source < 0)[column], fill, taken)
    return [made]


def _pad_labels(signature: Signature, rank: int) -> tuple[str | None, ...]:
    amounts = _amounts(signature.attributes, rank)
    return tuple(name if pair == (0, 0) else None for name, pair in zip(letters(rank), amounts, strict=True))


def _pad_rule(signature: Signature) -> ShardingRule:
    attributes = signature.attributes
    index = places(_PAD, attributes, len(signature.inputs))
    dims = _pad_labels(signature, signature.outputs[0].rank)
    inputs = tuple(
        dims if name == "data" else (None,) * signature.inputs[i].rank for name, i in index.items()
    )
    fill = attributes.get("constant_value", attributes.get("value", 0.0))
    fill = 1.0 if "constant_value" in index else float(np.asarray(getattr(fill, "array", fill)).reshape(()))
    linear = attributes.get("mode", "constant") != "constant" or fill == 0
    return ShardingRule(inputs, (dims,), ((index["data"],),) if linear else ())


def _pad_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    index = places(_PAD, ctx.attributes, len(ctx.inputs))
    data = ctx.inputs[index["data"]]
    kept = picked(ctx.attributes, "pads", "paddings", "axes", "mode")
    grads = {"data": ctx.add("PadGrad", ctx.grad, shape=shape_of(data), **kept)}
    if wanted(_PAD, ctx, "constant_value"):  # it went where no element of the data did
        whole, copied = (ctx.add("ReduceSum", grad, keepdims=0) for grad in (ctx.grad, grads["data"]))
        grads["constant_value"] = ctx.add("Sub", whole, copied)
    return by_place(_PAD, ctx, grads)


def _pad_grad(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    made, shape = arrays[0], attributes["shape"]
    for axis, source in _pad_maps(attributes, shape):
        wide = np.moveaxis(made, axis, 0)
        small = np.zeros((shape[axis], *wide.shape[1:]), made.dtype)
        np.add.at(small, source[source >= 0], wide[source >= 0])
        made = np.moveaxis(small, 0, axis)
    return [made]


def _pad_grad_rule(signature: Signature) -> ShardingRule:
    dims = _pad_labels(signature, signature.outputs[0].rank)
    return ShardingRule((dims,), (dims,), ((0,),), localize=resizing("shape"))


def _pad_bounds(attributes: Attributes, shapes: Shapes) -> None:
    rank, mode = len(shapes["data"]), attributes.get("mode", "constant")
    modes = ("constant", "reflect", "edge", "wrap")
    require(mode in modes, f"Pad: mode {mode!r} is not one of {', '.join(modes)}")
    pads = ints(attributes.get("pads", attributes.get("paddings", (0,) * 2 * rank)))
    axes = ints(attributes["axes"]) if "axes" in attributes else tuple(range(rank))
    inside = all(-rank <= axis < rank for axis in axes) and len({axis % rank for axis in axes}) == len(axes)
    require(inside, f"Pad: axes {list(axes)} must be different ones of {list(shapes['data'])}")
    require(len(pads) == 2 * len(axes), f"Pad: {len(pads)} pads for {len(axes)} axes; it takes two for each")
    single_bounds("Pad", "constant_value")(attributes, shapes)
    if mode != "constant":
        sizes = [(shapes["data"][axis], max(pads[i], pads[i + len(axes)])) for i, axis in enumerate(axes)]
        require(all(size or pad <= 0 for size, pad in sizes), f"Pad: mode {mode} of an empty dimension")


register(
    Operator(
        "Pad",
        compute=_pad,
        work=move_work,
        gradient=_pad_gradient,
        sharding=_pad_rule,
        bounds=Bounds(_PAD, _pad_bounds),
    )
)
register(
    Operator(
        "PadGrad",
        types=like_shape("PadGrad", 1),
        compute=_pad_grad,
        work=move_work,
        sharding=_pad_grad_rule,
    )
)


# DepthToSpace and SpaceToDepth move blocks of b x b positions between the channels and the plane.


def _block_rule(signature: Signature, deep: tuple[int, ...], blocks_first: bool) -> ShardingRule:
    """``deep``: the shape of the side with many channels, which has b*b pieces, or b*b in each channel."""
    block = signature.attributes["blocksize"] ** 2
    channels = Pieces("c", (deep[1] // block,) * block) if blocks_first else "c"
    many, few = ("n", channels, "h", "w"), ("n", "c", "h", "w")
    forward = signature.inputs[0].shape == deep
    return ShardingRule((many if forward else few,), (few if forward else many,), ((0,),))


def _depth_to_space_rule(signature: Signature) -> ShardingRule:
    blocks_first = signature.attributes.get("mode", "DCR") == "DCR"
    return _block_rule(signature, signature.inputs[0].shape, blocks_first)


def _depth_to_space_gradient(ctx: GradientContext) -> Sequence[Value | None]:
    block = ctx.attributes["blocksize"]
    if ctx.attributes.get("mode", "DCR") == "DCR":
        return [ctx.add("SpaceToDepth", ctx.grad, blocksize=block)]
    n, c, h, w = as_tensor(ctx.inputs[0].type, "DepthToSpace").shape
    parts = ctx.add("Reshape", ctx.grad, shape=(n, c // block**2, h, block, w, block))
    return [ctx.add("Reshape", ctx.add("Transpose", parts, perm=(0, 1, 3, 5, 2, 4)), shape=(n, c, h, w))]


def _block_bounds(op_type: str) -> Bounds:
    def check(attributes: Attributes, shapes: Shapes) -> None:
        shape, block = shapes["input"], attributes.get("blocksize", 0)
        at_least(op_type, "blocksize", block, 1)
        require(len(shape) == 4, f"{op_type} takes [N, C, H, W], not {list(shape)}")
        sizes = shape[1:2] if op_type == "DepthToSpace" else shape[2:]
        unit = block**2 if op_type == "DepthToSpace" else block
        require(
            all(size % unit == 0 for size in sizes),
            f"{op_type}: blocksize={block} does not divide {list(shape)}",
        )

    return Bounds(("input",), check)


register(
    Operator(
        "DepthToSpace",
        work=move_work,
        gradient=_depth_to_space_gradient,
        sharding=_depth_to_space_rule,
        bounds=_block_bounds("DepthToSpace"),
    )
)
register(
    Operator(
        "SpaceToDepth",
        work=move_work,
        gradient=lambda ctx: ([ctx.add("DepthToSpace", ctx.grad, blocksize=ctx.attributes["blocksize"])]),
        sharding=lambda signature: _block_rule(signature, signature.outputs[0].shape, blocks_first=True),
        bounds=_block_bounds("SpaceToDepth"),
    )
)
