"""How a tensor is divided over the ranks of a mesh, and its parts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from distsim.ir.device import Mesh
from distsim.ops.operator import Array

Shard = tuple[int | None, str, tuple[int, ...] | None]
"""How a tensor is divided over a mesh axis.

(dim, axis, pieces): dimension ``dim`` is, with ``pieces`` each of them, one of negative size in the reverse
order of the ranks. (None, axis, shape): all of a tensor of this shape is, flat: its elements in order, with
zeros behind them up to a multiple of the ranks.
"""


def flat_part(size: int, count: int) -> int:
    """Return how many elements each of ``count`` ranks has of a flat tensor of ``size``, padding included.

    >>> flat_part(13, 3)
    5
    """
    return -(-size // count)


def take_part(array: Array, dim: int | None, index: int, count: int, pieces: tuple[int, ...] | None) -> Array:
    """Return part ``index`` of ``count``, divided as a :data:`Shard` of these ``dim`` and ``pieces`` says."""
    if dim is None:
        size = flat_part(array.size, count)
        part = array.reshape(-1)[index * size : (index + 1) * size]
        return np.pad(part, (0, size - part.size))
    picks: list[Array] = []
    start = 0
    for n in pieces or (array.shape[dim],):
        place = index if n > 0 else count - 1 - index
        picks.append(np.arange(abs(n) // count) + start + place * (abs(n) // count))
        start += abs(n)
    return np.take(array, np.concatenate(picks), axis=dim)


def join_parts(parts: Sequence[Array], dim: int | None, pieces: tuple[int, ...] | None) -> Array:
    """Return the whole of which ``parts`` were taken (the inverse of :func:`take_part`)."""
    if dim is None:
        shape = pieces or ()
        return np.concatenate(parts)[: math.prod(shape)].reshape(shape)
    if not pieces:
        return np.concatenate(parts, axis=dim)
    ends = np.cumsum([abs(n) // len(parts) for n in pieces])[:-1]
    split = [np.split(part, ends, axis=dim) for part in parts]
    joined = [part[i] for i, n in enumerate(pieces) for part in (split if n > 0 else reversed(split))]
    return np.concatenate(joined, axis=dim)


def scatter(array: Array, mesh: Mesh, shards: Sequence[Shard]) -> list[Array]:
    """Return the local array of every device of ``mesh``, in the order of its devices."""
    made: list[Array] = []
    for device in mesh.devices:
        local = array
        for dim, axis, pieces in shards:
            local = take_part(local, dim, mesh.coordinate(device, axis), mesh.axis_size(axis), pieces)
        made.append(local)
    return made


def gather(ranks: Sequence[Array], mesh: Mesh, shards: Sequence[Shard]) -> Array:
    """Return the whole array of which the devices of ``mesh`` hold parts (inverse of scatter)."""
    by_place = {tuple(mesh.coordinates(d).items()): a for d, a in zip(mesh.devices, ranks, strict=True)}
    place = dict.fromkeys((name for name, _ in mesh.axes), 0)

    def assemble(remaining: Sequence[Shard]) -> Array:
        if not remaining:
            return by_place[tuple(place.items())]
        dim, axis, pieces = remaining[0]
        parts: list[Array] = []
        for index in range(mesh.axis_size(axis)):
            place.update(mesh.split(axis, index))
            parts.append(assemble(remaining[1:]))
        place.update(mesh.split(axis, 0))
        return join_parts(parts, dim, pieces)

    return assemble(shards)
