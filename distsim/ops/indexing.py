"""Operators that read or write where integer tensors say: Gather and Scatter in their ONNX kinds.

The axis that indices point along is whole on every rank, but for Gather, of which ranks may have rows of
their own, as of a vocabulary (Megatron-LM's VocabParallelEmbedding): each takes zeros for those of others,
and the sum over ranks is the embedding. Dimensions of the data that are copied, and dimensions of the
indices, may be divided. The gradient of a gather adds into zeros, so dividing the indices makes it
partial: the gradient of an embedding is all-reduced over data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from distsim.ir.function import Op
from distsim.ir.maker import FunctionMaker
from distsim.ir.value import Attributes, Value
from distsim.ops.bounds import require
from distsim.ops.onnx_bridge import static_array
from distsim.ops.operator import (
    Array,
    Bounds,
    ComputeRule,
    GradientContext,
    Operator,
    Shapes,
    ShardRule,
    Signature,
    Work,
    bytes_of,
    register,
)
from distsim.ops.parts import Groups
from distsim.ops.places import (
    by_place,
    like_shape,
    operands,
    picked,
    places,
    resizing,
    select,
    shape_of,
    wanted,
    whole_rule,
)
from distsim.ops.sharding_rule import Decomposition, Dim, Pieces, ShardingRule, letters

_DATA = ("data", "indices")
_GRAD = ("indices", "dy")


def linear_in(names: tuple[str, ...], signature: Signature, *members: str) -> tuple[tuple[int, ...], ...]:
    """Return the linear set of these operands; none when one of them is static."""
    index = places(names, signature.attributes, len(signature.inputs))
    if not all(name in index for name in members):
        return ()
    return (tuple(index[name] for name in members),)


def _gather_work(signature: Signature) -> Work:
    """Only what is taken is read, and the indices."""
    written = bytes_of(signature.outputs)
    indices = sum(tensor.nbytes for tensor in signature.inputs if not tensor.dtype.is_floating)
    return Work(0.0, written + indices, written)


def _scatter_add_work(signature: Signature) -> Work:
    """Write zeros, then read, add and write back one element for every element of dy (the last input)."""
    grad = signature.inputs[-1]
    read = bytes_of(signature.inputs) + grad.nbytes
    return Work(float(grad.size), read, bytes_of(signature.outputs) + grad.nbytes)


# Gather: data[..., indices, ...] along one axis; an embedding along axis 0.


def _gather_labels(
    attributes: Attributes, data_rank: int, indices_rank: int
) -> tuple[tuple[Dim, ...], tuple[Dim, ...], tuple[Dim, ...]]:
    """Return the labels of the data, the indices and the output. Static indices are whole."""
    rows = None if "data" in attributes or "indices" in attributes else "rows"
    axis = attributes.get("axis", 0) % data_rank
    data: list[Dim] = list(letters(data_rank))
    if "data" in attributes:
        data = [None] * data_rank
    data[axis] = rows
    indices: tuple[Dim, ...] = letters(indices_rank, "i")
    if "indices" in attributes:
        indices = (None,) * indices_rank
    return tuple(data), indices, (*data[:axis], *indices, *data[axis + 1 :])


def _own_rows(op_type: str, given: int) -> Mapping[str, Decomposition]:
    """Return how a Gather or its gradient runs on ranks that have rows of their own of the data.

    Not at all, unless both operands are given as values.
    """
    if given < 2:
        return {}

    def build(maker: FunctionMaker, op: Op, inputs: Sequence[Value], axis: str) -> Sequence[Value]:
        attributes, names = op.attributes, [value.name for value in op.outputs]
        gathers = op_type == "Gather"
        data, indices, rest = (inputs[0], inputs[1], ()) if gathers else (None, inputs[0], inputs[1:])
        shape: tuple[int, ...] = attributes["shape"] if data is None else shape_of(data)
        place: int = attributes.get("axis", 0)
        size = shape[place % len(shape)]
        own = maker.add("LocalIndices", [indices], {"axis": axis, "size": size})
        given = [*own, *rest] if data is None else [data, *own]
        return maker.add(op_type, given, {**attributes, "own_rows": 1}, (), names, op.version, op.name)

    return {"rows": Decomposition(build)}


def _gather_rule(signature: Signature) -> ShardingRule:
    attributes = signature.attributes
    index = places(_DATA, attributes, len(signature.inputs))
    ranks = [
        signature.inputs[index[name]].rank if name in index else (static_array(attributes[name], None).ndim)
        for name in _DATA
    ]
    data, indices, output = _gather_labels(attributes, ranks[0], ranks[1])
    inputs = select(_DATA, signature, data=data, indices=indices)
    linear = linear_in(_DATA, signature, "data")
    own = _own_rows("Gather", len(index))
    return ShardingRule(inputs, (output,), linear, decompositions=own)


def _gather(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    given = operands(_DATA, attributes, arrays)
    data, indices, axis = given["data"], given["indices"], attributes.get("axis", 0)
    if attributes.get("own_rows", 0):  # and a row of zeros for those of others
        edge = [(0, int(i == axis % data.ndim)) for i in range(data.ndim)]
        data = np.pad(data, edge)
    return [np.take(data, indices, axis=axis)]


def _scattered(ctx: GradientContext, op_type: str, option: str) -> Value | None:
    """Return the gradient of the data of a gather: the output's, added where it was taken from."""
    if not wanted(_DATA, ctx, "data"):
        return None
    index = places(_DATA, ctx.attributes, len(ctx.inputs))
    shape = shape_of(ctx.inputs[index["data"]])
    indices = (ctx.inputs[index["indices"]],) if "indices" in index else ()
    options = picked(ctx.attributes, option, "indices", "groups")
    return ctx.add(op_type, *indices, ctx.grad, shape=shape, **options)


def _gather_grad(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    given = operands(_GRAD, attributes, arrays)
    shape, indices, dy = attributes["shape"], given["indices"], given["dy"]
    axis = attributes.get("axis", 0) % len(shape)
    # Bring the dimensions of the indices to the front: rows of dy are added to rows of the data.
    rows = np.moveaxis(dy, range(axis, axis + indices.ndim), range(indices.ndim))
    others = attributes.get("own_rows", 0)  # a row for what belongs to other ranks
    made = np.zeros((shape[axis] + others, *shape[:axis], *shape[axis + 1 :]), dy.dtype)
    np.add.at(made, indices, rows)
    return [np.moveaxis(made[: shape[axis]], 0, axis)]


def _gather_grad_rule(signature: Signature) -> ShardingRule:
    attributes = signature.attributes
    rank = len(attributes["shape"])
    data, indices, output = _gather_labels(attributes, rank, signature.inputs[-1].rank - rank + 1)
    inputs = select(_GRAD, signature, indices=indices, dy=output)
    linear = linear_in(_GRAD, signature, "dy")
    own = _own_rows("GatherGrad", len(signature.inputs))
    return ShardingRule(inputs, (data,), linear, localize=resizing("shape"), decompositions=own)


# GatherElements: data and indices have one rank; out[i][j] = data[indices[i][j]][j] for axis 0.


def elements_labels(
    attributes: Attributes, data: tuple[int, ...], indices: tuple[int, ...]
) -> tuple[tuple[Dim, ...], tuple[Dim, ...]]:
    """Return the labels of the data, and of the indices and whatever has their shape."""
    axis = attributes.get("axis", 0) % len(data)
    names = letters(len(data))
    # A dimension that the indices do not cover is read from its beginning: all ranks would read there.
    same = [i != axis and a == b for i, (a, b) in enumerate(zip(data, indices, strict=True))]
    source = tuple(name if equal else None for name, equal in zip(names, same, strict=True))
    target = tuple(
        name if equal or i == axis else None for i, (name, equal) in enumerate(zip(names, same, strict=True))
    )
    if "indices" in attributes:
        return (None,) * len(data), (None,) * len(data)
    return source, target


def _gather_elements_rule(signature: Signature) -> ShardingRule:
    output = signature.outputs[0].shape
    index = places(_DATA, signature.attributes, len(signature.inputs))
    shape = signature.inputs[index["data"]].shape if "data" in index else (-1,) * len(output)
    data, indices = elements_labels(signature.attributes, shape, output)
    inputs = select(_DATA, signature, data=data, indices=indices)
    return ShardingRule(inputs, (indices,), linear_in(_DATA, signature, "data"))


Where = Callable[[Array, Attributes, int], tuple[Array, ...]]
"""(indices, attributes, rank of the data) -> where in the data they point, one array per dimension."""


def element_places(indices: Array, attributes: Attributes, rank: int) -> tuple[Array, ...]:
    """Return for each element of ``indices`` where in the data it points."""
    where: list[Array] = list(np.indices(indices.shape, sparse=True))
    where[attributes.get("axis", 0) % rank] = indices
    return tuple(where)


def _taken(where: Where) -> tuple[ComputeRule, ComputeRule]:
    """Return what a gather from these places means, and its gradient."""

    def take(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
        given = operands(_DATA, attributes, arrays)
        return [given["data"][where(given["indices"], attributes, given["data"].ndim)]]

    def add(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
        given = operands(_GRAD, attributes, arrays)
        made = np.zeros(attributes["shape"], given["dy"].dtype)
        np.add.at(made, where(given["indices"], attributes, made.ndim), given["dy"])
        return [made]

    return take, add


def _gather_elements_grad_rule(signature: Signature) -> ShardingRule:
    attributes = signature.attributes
    data, indices = elements_labels(attributes, attributes["shape"], signature.inputs[-1].shape)
    inputs = select(_GRAD, signature, indices=indices, dy=indices)
    return ShardingRule(inputs, (data,), linear_in(_GRAD, signature, "dy"), localize=resizing("shape"))


def elements_bounds(op_type: str, formals: tuple[str, ...]) -> Bounds:
    """Indices have the rank of the data; where the axis is not they may be shorter, not longer."""

    def check(attributes: Attributes, shapes: Shapes) -> None:
        data, indices = shapes["data"], shapes.get("indices", ())
        axis = attributes.get("axis", 0) % max(len(data), 1)
        fits = len(data) == len(indices) and all(
            i == axis or a <= b for i, (a, b) in enumerate(zip(indices, data, strict=True))
        )
        require(fits, f"{op_type}: indices {list(indices)} do not fit {list(data)}, axis {axis}")
        updates = shapes.get("updates", indices)
        require(updates == indices, f"{op_type}: updates {list(updates)} must be as indices {list(indices)}")

    return Bounds(formals, check, axes=(0, 0))


# GatherND: out[b, i, j, k] = data[b, indices[b, i, j], k], the last dimension of the indices being a tuple.


# With ``groups`` the last dimension of places, rows of experts, consists of groups of these sizes: ranks of
# experts divide it by them, whatever is sent for that. The data of all are brought together, each rank takes
# the rows of its experts, and what these add up to is reduce-scattered: an all-gather dispatcher.

_ROWS = "groups"


def _nd_labels(
    attributes: Attributes, data_rank: int, indices: tuple[int, ...]
) -> tuple[tuple[Dim, ...], tuple[Dim, ...], tuple[Dim, ...]]:
    """Return the labels of the data, of indices of this shape, and of the output."""
    batch, depth, sizes = attributes.get("batch_dims", 0), indices[-1], attributes.get("groups")
    first = letters(batch, "b")
    middle: tuple[Dim, ...] = letters(len(indices) - 1 - batch, "i")
    if sizes is not None:
        middle = (*middle[:-1], Pieces(_ROWS, Groups(sizes)))
    rest = letters(data_rank - batch - depth)
    return (*first, *(None,) * depth, *rest), (*first, *middle, None), (*first, *middle, *rest)


def _nd_rule(
    attributes: Attributes, inputs: tuple[tuple[Dim, ...], ...], output: tuple[Dim, ...], shape: str
) -> ShardingRule:
    """Return the rule of a GatherND, or of its gradient, whose attribute ``shape`` is a shape."""
    rows = _ROWS if "groups" in attributes else ""

    def localize(attributes: Attributes, outputs: tuple[tuple[int, ...], ...]) -> Attributes:
        """Of a part of the groups it is not known before which they are."""
        known = {name: item for name, item in attributes.items() if name != "groups"}
        return Attributes(known | ({shape: outputs[0]} if shape else {}))

    linear = ((1 if shape else 0,),)
    return ShardingRule(
        inputs, (output,), linear, localize=localize, whole=(rows,) if rows else (), rows=rows
    )


def _gather_nd_rule(signature: Signature) -> ShardingRule:
    if len(signature.inputs) == 2:
        data, indices, output = _nd_labels(
            signature.attributes, signature.inputs[0].rank, signature.inputs[1].shape
        )
        return _nd_rule(signature.attributes, (data, indices), output, "")
    return whole_rule(signature)


def nd_places(indices: Array, attributes: Attributes, rank: int) -> tuple[Array, ...]:
    """Return an index of the data for each index tuple."""
    lead = np.indices(indices.shape[:-1], sparse=True)[: attributes.get("batch_dims", 0)]
    return (*lead, *np.moveaxis(indices, -1, 0))


def _gather_nd_grad_rule(signature: Signature) -> ShardingRule:
    if "indices" in signature.attributes:
        whole = (None,) * signature.inputs[0].rank
        return ShardingRule((whole,), ((None,) * signature.outputs[0].rank,), ((0,),))
    shape = signature.inputs[0].shape
    data, where, output = _nd_labels(signature.attributes, signature.outputs[0].rank, shape)
    return _nd_rule(signature.attributes, (where, output), data, "shape")


def _gather_nd_bounds(attributes: Attributes, shapes: Shapes) -> None:
    data, indices, batch = shapes["data"], shapes.get("indices", ()), attributes.get("batch_dims", 0)
    ranks = min(len(data), len(indices))
    require(0 <= batch < max(ranks, 1), f"GatherND: batch_dims={batch} must be from 0 to {ranks - 1}")
    depth = indices[-1] if indices else 0
    require(
        1 <= depth <= len(data) - batch and data[:batch] == indices[:batch],
        f"GatherND: indices {list(indices)} do not fit {list(data)} with batch_dims={batch}",
    )


def _register_gather(
    name: str,
    option: str,
    meanings: tuple[ComputeRule, ComputeRule],
    rules: tuple[ShardRule, ShardRule],
    bounds: Bounds,
) -> None:
    def gradient(ctx: GradientContext) -> Sequence[Value | None]:
        return by_place(_DATA, ctx, {"data": _scattered(ctx, f"{name}Grad", option)})

    def of_gradient(ctx: GradientContext) -> Sequence[Value | None]:
        """What is added at a place has the gradient of that place: a gather again."""
        index = places(_GRAD, ctx.attributes, len(ctx.inputs))
        indices = (ctx.inputs[index["indices"]],) if "indices" in index else ()
        made = ctx.add(name, ctx.grad, *indices, **picked(ctx.attributes, option, "indices", "groups"))
        return by_place(_GRAD, ctx, {"dy": made})

    register(
        Operator(
            name,
            compute=meanings[0],
            work=_gather_work,
            gradient=gradient,
            sharding=rules[0],
            formals=_DATA,
            bounds=bounds,
        )
    )
    register(
        Operator(
            f"{name}Grad",
            types=like_shape(f"{name}Grad", 2),
            compute=meanings[1],
            work=_scatter_add_work,
            gradient=of_gradient,
            sharding=rules[1],
            formals=_GRAD,
        )
    )


_register_gather(
    "Gather", "axis", (_gather, _gather_grad), (_gather_rule, _gather_grad_rule), Bounds(axes=(0, 0))
)
_register_gather(
    "GatherElements",
    "axis",
    _taken(element_places),
    (_gather_elements_rule, _gather_elements_grad_rule),
    elements_bounds("GatherElements", _DATA),
)
_register_gather(
    "GatherND",
    "batch_dims",
    _taken(nd_places),
    (_gather_nd_rule, _gather_nd_grad_rule),
    Bounds(_DATA, _gather_nd_bounds),
)

register(Operator("Gather", beside=("own_rows",)))
register(Operator("GatherND", beside=(_ROWS,)))
