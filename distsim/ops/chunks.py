"""Rows of a tensor that products and the collectives beside them work on chunk by chunk: where chunks lie.

``RankRows(x; axis, dim, chunk, count, pieces)`` are the rows of chunk ``chunk`` of ``count`` of each rank's
part of dimension ``dim``, rank by rank: what is reduce-scattered of it is a chunk of each part.
``PutChunk(rows, whole; dim, chunk, count)`` writes such a chunk into the rank's part, ``PutPart(part, owner,
whole; dim, count, pieces)`` the part of the rank ``owner`` [1] of ``count`` into the whole. The first of them
has no ``whole`` yet and makes one. All three are addresses that a kernel, or a copy, is given: they take no
time, and no memory but the first's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distsim.errors import TypeRuleError
from distsim.ir.type import Int64, Tensor
from distsim.ir.value import Attributes
from distsim.ops.communication import mesh_and_ranks
from distsim.ops.operator import Array, Communication, Operator, register
from distsim.ops.parts import divided_size, joined_size, take_part
from distsim.ops.places import view_work


def _sized(tensor: Tensor, dim: int, size: int) -> Tensor:
    return tensor.with_shape((*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]))


def _rank_rows_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    tensor, ranks = mesh_and_ranks("RankRows", attributes, inputs)
    dim, count = attributes["dim"], attributes["count"]
    part = divided_size("RankRows", tensor, dim, ranks, attributes.get("pieces"))
    if part % count or not 0 <= attributes["chunk"] < count:
        raise TypeRuleError(f"RankRows: there is no chunk {attributes['chunk']} of {count} of {part} rows")
    return (_sized(tensor, dim, part // count * ranks),)


def _rank_rows(attributes: Attributes, ranks: Sequence[Array]) -> Sequence[Array]:
    dim, chunk, count = (attributes[name] for name in ("dim", "chunk", "count"))
    size: int = ranks[0].shape[dim]
    every: Array = np.arange(size)
    parts = [take_part(every, 0, i, len(ranks), attributes.get("pieces")) for i in range(len(ranks))]
    rows: Array = np.concatenate([part.reshape(count, -1)[chunk] for part in parts])
    return [np.take(array, rows, axis=dim) for array in ranks]


def _put(op_type: str, inputs: Sequence[Tensor], made: Tensor, given: int) -> tuple[Tensor, ...]:
    """Check what ``given`` operands are written into, if anything, and return it."""
    if inputs[given:] not in ((), (made,)):
        raise TypeRuleError(f"{op_type} writes into {made}, not {', '.join(map(str, inputs[given:]))}")
    return (made,)


def _put_chunk_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    dim: int = attributes["dim"]
    size: int = inputs[0].shape[dim] * attributes["count"]
    return _put("PutChunk", inputs, _sized(inputs[0], dim, size), 1)


def _put_part_types(attributes: Attributes, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    part, owner = inputs[:2]
    if (owner.dtype, owner.shape) != (Int64(), (1,)):
        raise TypeRuleError(f"PutPart: the owner of a part is one number, not {owner}")
    dim: int = attributes["dim"]
    count: int = attributes["count"]
    size = joined_size(part, dim, count, attributes.get("pieces"))
    return _put("PutPart", inputs, _sized(part, dim, size), 2)


def _written(rows: Array, whole: Sequence[Array], dim: int, size: int, places: Array) -> Array:
    """Return the whole, of this size in a dimension, with rows at these places of it."""
    shape = (*rows.shape[:dim], size, *rows.shape[dim + 1 :])
    made = whole[0].copy() if whole else np.zeros(shape, rows.dtype)
    made[(*[slice(None)] * dim, places)] = rows
    return made


def _put_chunk(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    (rows, *whole), dim = arrays, attributes["dim"]
    size: int = rows.shape[dim]
    places: Array = np.arange(size) + attributes["chunk"] * size
    return [_written(rows, whole, dim, size * attributes["count"], places)]


def _put_part(attributes: Attributes, arrays: Sequence[Array]) -> Sequence[Array]:
    (part, owner, *whole), dim, count = arrays, attributes["dim"], attributes["count"]
    size: int = part.shape[dim] * count
    every: Array = np.arange(size)
    places = take_part(every, 0, int(owner[0]), count, attributes.get("pieces"))
    return [_written(part, whole, dim, size, places)]


register(
    Operator(
        "RankRows",
        types=_rank_rows_types,
        work=view_work,
        communication=Communication("local", _rank_rows, lambda _: 0),
        view=True,
    )
)
register(
    Operator(
        "PutChunk",
        types=_put_chunk_types,
        compute=_put_chunk,
        work=view_work,
        view=True,
        overwrites={0: 1},
    )
)
register(
    Operator(
        "PutPart",
        types=_put_part_types,
        compute=_put_part,
        work=view_work,
        view=True,
        overwrites={0: 2},
    )
)
