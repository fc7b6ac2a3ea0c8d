"""Static sequences: a tensor cut into pieces known at import, of which one is taken at a known place.

What ``SplitToSequence`` and ``SequenceAt`` leave are the outputs of a ``Split``. Sequences that grow, or of
which data say what is taken, have no counterpart in a function of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from distsim.errors import ImportModelError, ModelLimitError
from distsim.importer.limits import MAX_PIECES
from distsim.importer.values.operands import Entry
from distsim.ir.maker import FunctionMaker
from distsim.ir.type import as_tensor
from distsim.ir.value import Literal, Value

Pieces = tuple[Entry, ...]
"""The elements of a sequence."""


class SequenceSplitter:
    """Makes the pieces of all sequences of a model; together they are limited in number."""

    def __init__(self, maker: FunctionMaker) -> None:
        self.maker = maker
        self._left = MAX_PIECES

    def pieces(self, inputs: Sequence[Entry | None], attributes: Mapping[str, Any], name: str) -> Pieces:
        """Return what a ``SplitToSequence`` makes; values are called ``name`` and their number."""
        source, split = (*inputs, None)[:2]
        if source is None:
            raise ImportModelError("splits nothing")
        shape = as_tensor(source.type, source.name).shape if isinstance(source, Value) else source.shape
        axis = int(attributes.get("axis", 0))
        if not -len(shape) <= axis < len(shape):
            raise ImportModelError(f"splits along axis {axis} of a tensor of shape {list(shape)}")
        sizes = self._sizes(shape[axis], split)
        found = self._cut(source, axis, sizes, name)
        if split is not None or attributes.get("keepdims", 1):
            return found
        return tuple([self._squeezed(piece, axis) for piece in found])

    def _sizes(self, whole: int, split: Entry | None) -> list[int]:
        """Return how many entries along the axis each piece has."""
        if split is None:
            split = np.asarray(1)
        if isinstance(split, Value):
            raise ImportModelError(
                "splits a tensor as its data say; distsim needs to know every size before the model runs: "
                "export the model with constant sizes"
            )
        if split.ndim == 0 and int(split) < 1:
            raise ImportModelError(f"splits into pieces of {int(split)}")
        count = split.size if split.ndim else -(-whole // int(split))
        if count > self._left:
            raise ModelLimitError(f"splits into {count} pieces; all sequences may have {MAX_PIECES} together")
        self._left -= count
        if split.ndim:
            sizes = [int(size) for size in split.reshape(-1)]
        else:
            sizes = [min(int(split), whole - start) for start in range(0, whole, int(split))]
        if sum(sizes) != whole or min(sizes, default=0) < 0:
            raise ImportModelError(f"splits {whole} entries into pieces of {sizes}")
        return sizes

    def _cut(self, source: Entry, axis: int, sizes: Sequence[int], name: str) -> Pieces:
        if len(sizes) == 1:
            return (source,)
        if not isinstance(source, Value):
            ends = [0, *[int(end) for end in np.cumsum(sizes)]]
            return tuple([source.take(range(a, b), axis) for a, b in pairwise(ends)])
        options = {"axis": axis, "split": Literal(np.asarray(sizes, np.int64))}
        names = [f"{name}_{place}" for place in range(len(sizes))]
        return self.maker.add("Split", [source], options, output_names=names, name=name) if sizes else ()

    def _squeezed(self, piece: Entry, axis: int) -> Entry:
        if not isinstance(piece, Value):
            return piece.squeeze(axis)
        return self.maker.add("Squeeze", [piece], {"axes": (axis,)}, output_names=[piece.name])[0]


def element_of(pieces: Pieces, position: Entry | None) -> Entry:
    """Return what a ``SequenceAt`` takes."""
    if position is None or isinstance(position, Value) or position.size != 1:
        raise ImportModelError(
            "takes the element of a sequence that data say; distsim needs to know every op before the model "
            "runs: export the model with constant positions"
        )
    place = int(position.reshape(-1)[0])
    if not -len(pieces) <= place < len(pieces):
        raise ImportModelError(f"takes element {place} of a sequence of {len(pieces)}")
    return pieces[place]
