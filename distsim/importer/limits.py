"""What a model file may ask of the machine that reads it: every limit of the importer.

A file comes from anyone, so each count, size and depth in it is compared with one of these before anything
is sized by it; what passes one is refused with :class:`ModelLimitError`, or, where a constant would be
computed, is left to the op that computes it in the model. Together they keep an import, beside twice the
size of the file, below 4 GiB of memory, and on one core of 2020 below 10 s for what it computes and 0.5 ms
for each node with every local function written out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from distsim.errors import ModelLimitError

MAX_FILE_BYTES = 2**31
"""What a protobuf message can hold; weights beyond it are in files of their own."""

MAX_ELEMENTS = 2**46
"""More elements than any machine's memory holds: such a size is a mistake."""

MAX_RANK = 64
"""Dimensions of a tensor: what NumPy can hold."""

MAX_SIZE = 2**31 - 1
"""The largest size that a symbolic dimension may be bound to."""

MAX_VERSION = 2**31 - 1
"""Of an operator set."""

MAX_NODES = 500_000
"""Nodes with every local function written out: 100 times a large transformer layer by layer."""

MAX_DEPTH = 64
"""Local functions that call each other, one inside another."""

MAX_NAMES = 2**28
"""Characters of all names together that calls of local functions, one inside another, put before others."""

FOLD_ELEMENTS = 2**16
"""Constants up to this size are read from the file and written into the function."""

COMPUTED_ELEMENTS = 2**24
"""Constants up to this size are computed at import; larger ones are computed when the model runs. The
mask arithmetic of an export touches a few times batch x positions elements: 2,048 x 2,048 is 2**22."""

TOTAL_ELEMENTS = 2**27
"""All constants of one import together; beyond, only those of a few elements are computed. An element has
8 bytes and is held up to three times (the array, and the copy and the key of a constant): 3 GiB."""

STATIC_ELEMENTS = 64
"""Integer vectors up to this length are static operands: axes, shapes, a few indices."""

MAX_NEEDED = 2**16
"""The longest operand that a type rule looks into."""


MAX_PIECES = 2**16
"""Elements of all sequences together."""


def check_shape(what: str, shape: Sequence[int]) -> None:
    """Raise when no machine could hold a tensor of this shape; ``what`` begins the error."""
    if len(shape) > MAX_RANK:
        raise ModelLimitError(f"{what} has {len(shape)} dimensions, the limit is {MAX_RANK}")
    if math.prod(shape) > MAX_ELEMENTS:
        raise ModelLimitError(f"{what} has the shape {list(shape)}: more than 2^46 elements")
