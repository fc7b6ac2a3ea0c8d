"""The parts of a tensor that ranks have: of a dimension, its pieces or groups, or of all elements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from distsim.errors import TypeRuleError
from distsim.ir.device import Mesh
from distsim.ir.type import Tensor

Array = npt.NDArray[Any]


MOST_SHOWN = 8
"""Sizes, or slots, that an error lists; a mixture has hundreds."""


def shown_sizes(sizes: Sequence[int]) -> str:
    """Return sizes as an error lists them: where they are many the first ones, the last, and how many.

    >>> shown_sizes((6, 2, 3)), shown_sizes((128,) * 64)
    ('(6, 2, 3)', '(128, 128, 128, ..., 128: 64 that sum to 8192)')
    """
    if len(sizes) <= MOST_SHOWN:
        return f"({', '.join(map(str, sizes))})"
    first = ", ".join(map(str, sizes[:3]))
    return f"({first}, ..., {sizes[-1]}: {len(sizes)} that sum to {sum(sizes)})"


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of these ``sizes`` one behind the other, of which each rank holds equally many neighbours.

    The parts of the ranks are padded at their ends to the largest: the rows of experts are the example.
    ``kind``: the kind of the collective that exchanges them, if it is no plain all-to-all (the text of a
    :class:`distsim.token_choice.TokenChoice`).

    >>> Groups((6, 2, 3, 6)).spans(2), Groups((6, 2, 3, 6)).largest(2)
    (((0, 8), (8, 17)), 9)
    """

    sizes: tuple[int, ...]
    kind: str = ""

    def __str__(self) -> str:
        return f"groups of sizes {shown_sizes(self.sizes)}"

    def spans(self, ranks: int) -> tuple[tuple[int, int], ...]:
        """Return where the part of each rank begins and ends."""
        ends = [0, *accumulate(self.sizes)][:: len(self.sizes) // ranks]
        return tuple(pairwise(ends))

    def largest(self, ranks: int) -> int:
        """Return the size of a rank's part, padding included."""
        return max([end - start for start, end in self.spans(ranks)])

    def is_even(self, ranks: int) -> bool:
        """Return whether the parts of the ranks are equal, so that none is padded."""
        return self.largest(ranks) * ranks == sum(self.sizes)


Parts = tuple[int, ...] | Groups | None
"""How a dimension is divided: as a whole, each of these pieces, or by groups."""


Shard = tuple[int | None, str, Parts]
"""How a tensor is divided over a mesh axis.

(dim, axis, pieces): dimension ``dim`` is, with ``pieces`` each of them, one of negative size in the reverse
order of the ranks, or by :class:`Groups`. (None, axis, shape): all of a tensor of this shape is, flat: its
elements in order, with zeros behind them up to a multiple of the ranks.
"""


def flat_part(size: int, count: int) -> int:
    """Return how many elements each of ``count`` ranks has of a flat tensor of ``size``, padding included.

    >>> flat_part(13, 3)
    5
    """
    return -(-size // count)


def take_part(array: Array, dim: int | None, index: int, count: int, pieces: Parts) -> Array:
    """Return part ``index`` of ``count``, divided as a :data:`Shard` of these ``dim`` and ``pieces`` says."""
    if dim is None:
        size = flat_part(array.size, count)
        part = array.reshape(-1)[index * size : (index + 1) * size]
        return np.pad(part, (0, size - part.size))
    if isinstance(pieces, Groups):
        start, end = pieces.spans(count)[index]
        padding = [(0, 0)] * array.ndim
        padding[dim] = 0, pieces.largest(count) - (end - start)
        return np.pad(np.take(array, range(start, end), axis=dim), padding)
    picks: list[Array] = []
    start = 0
    for n in pieces or (array.shape[dim],):
        place = index if n > 0 else count - 1 - index
        picks.append(np.arange(abs(n) // count) + start + place * (abs(n) // count))
        start += abs(n)
    return np.take(array, np.concatenate(picks), axis=dim)


def join_parts(parts: Sequence[Array], dim: int | None, pieces: Parts) -> Array:
    """Return the whole of which ``parts`` were taken (the inverse of :func:`take_part`)."""
    if isinstance(pieces, Groups):
        spans = zip(parts, pieces.spans(len(parts)), strict=True)
        return np.concatenate(
            [np.take(p, range(end - start), axis=dim) for p, (start, end) in spans], axis=dim
        )
    if dim is None:
        shape = pieces or ()
        return np.concatenate(parts)[: math.prod(shape)].reshape(shape)
    if not pieces:
        return np.concatenate(parts, axis=dim)
    ends = np.cumsum([abs(n) // len(parts) for n in pieces])[:-1]
    split = [np.split(part, ends, axis=dim) for part in parts]
    joined = [part[i] for i, n in enumerate(pieces) for part in (split if n > 0 else reversed(split))]
    return np.concatenate(joined, axis=dim)


def divided_size(op_type: str, tensor: Tensor, dim: int, count: int, pieces: Parts) -> int:
    """Return the size of a rank's part of a dimension; one that ranks do not divide is refused."""
    if not 0 <= dim < tensor.rank:
        raise TypeRuleError(f"{op_type}: there is no dimension {dim} in {tensor}")
    if isinstance(pieces, Groups):
        if len(pieces.sizes) % count or sum(pieces.sizes) != tensor.shape[dim]:
            raise TypeRuleError(
                f"{op_type}: {count} ranks do not divide dimension {dim} of {tensor} by {pieces}"
            )
        return pieces.largest(count)
    sizes = pieces or (tensor.shape[dim],)
    if any(size % count for size in sizes) or sum(map(abs, sizes)) != tensor.shape[dim]:
        raise TypeRuleError(
            f"{op_type}: {count} ranks do not divide dimension {dim} of {tensor} in {shown_sizes(sizes)}"
        )
    return tensor.shape[dim] // count


def joined_size(tensor: Tensor, dim: int, count: int, pieces: Parts) -> int:
    """Return the size of a dimension of which ranks have such parts."""
    return sum(pieces.sizes) if isinstance(pieces, Groups) else tensor.shape[dim] * count


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
    return _assembled(by_place, dict.fromkeys((name for name, _ in mesh.axes), 0), mesh, shards)


def _assembled(
    by_place: Mapping[tuple[tuple[str, int], ...], Array],
    place: dict[str, int],
    mesh: Mesh,
    remaining: Sequence[Shard],
) -> Array:
    if not remaining:
        return by_place[tuple(place.items())]
    dim, axis, pieces = remaining[0]
    parts: list[Array] = []
    for index in range(mesh.axis_size(axis)):
        place.update(mesh.split(axis, index))
        parts.append(_assembled(by_place, place, mesh, remaining[1:]))
    place.update(mesh.split(axis, 0))
    return join_parts(parts, dim, pieces)
