"""Sliding windows over the spatial dimensions: sizes, padding, and their NumPy view.

ONNX, operators Conv and MaxPool: with kernel k and dilation d a window spans (k - 1) d + 1 positions;
with stride s there are floor((size + pads - span) / s) + 1 of them, or the ceiling under ``ceil_mode``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from distsim.errors import TypeRuleError
from distsim.ir.value import Attributes
from distsim.ops.operator import Array
from distsim.ops.places import ints


@dataclass(frozen=True, slots=True)
class Windows:
    """Where the windows of a convolution or a pooling lie, per spatial dimension."""

    sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def padded(self) -> tuple[int, ...]:
        """The sizes that the windows reach over: with padding, and beyond it under ``ceil_mode``."""
        return tuple(
            max(b + n + a, (c - 1) * s + (k - 1) * d + 1)
            for n, k, s, d, b, a, c in zip(
                self.sizes,
                self.kernel,
                self.strides,
                self.dilations,
                self.before,
                self.after,
                self.counts,
                strict=True,
            )
        )

    def inside(self) -> tuple[slice, ...]:
        """Return where the unpadded tensor lies in the padded one."""
        return tuple(slice(b, b + n) for b, n in zip(self.before, self.sizes, strict=True))

    def places(self) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
        """Yield each position in the kernel with the padded positions that it meets over all windows."""
        for offset in itertools.product(*map(range, self.kernel)):
            yield (
                offset,
                tuple(
                    slice(o * d, o * d + (c - 1) * s + 1, s)
                    for o, d, s, c in zip(offset, self.dilations, self.strides, self.counts, strict=True)
                ),
            )

    def pad(self, array: Array, fill: float) -> Array:
        """Return [n, c, *sizes] padded with ``fill`` to [n, c, *padded]."""
        made = np.full((*array.shape[:2], *self.padded), fill, array.dtype)
        made[(..., *self.inside())] = array
        return made

    def stack(self, padded: Array) -> Array:
        """Return [n, c, *counts, *kernel]: what each window sees (a view)."""
        rank = len(self.kernel)
        spans = tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True))
        seen = np.lib.stride_tricks.sliding_window_view(padded, spans, tuple(range(2, 2 + rank)))
        starts = tuple(slice(0, (c - 1) * s + 1, s) for c, s in zip(self.counts, self.strides, strict=True))
        taps = tuple(slice(None, None, d) for d in self.dilations)
        return seen[(slice(None), slice(None), *starts, *taps)]

    def unstack(self, stacked: Array) -> Array:
        """Return [n, c, *sizes]: each position with the sum of all that windows put there."""
        made = np.zeros((*stacked.shape[:2], *self.padded), stacked.dtype)
        for offset, where in self.places():
            made[(..., *where)] += stacked[(..., *offset)]
        return made[(..., *self.inside())]


def windows(attributes: Attributes, sizes: tuple[int, ...], kernel: tuple[int, ...]) -> Windows:
    """Return the windows over spatial ``sizes``, from ONNX's attributes.

    >>> windows(Attributes({"pads": (1, 1), "strides": (2,)}), (8,), (3,)).counts
    (4,)
    """
    rank = len(sizes)
    strides = ints(attributes.get("strides", (1,) * rank))
    dilations = ints(attributes.get("dilations", (1,) * rank))
    pads = ints(attributes.get("pads", (0,) * (2 * rank)))
    if not len(kernel) == len(strides) == len(dilations) == rank or len(pads) != 2 * rank:
        raise TypeRuleError(
            f"kernel {kernel}, strides {strides}, dilations {dilations}, pads {pads} do not fit {rank} "
            "spatial dimensions"
        )
    before, after = pads[:rank], pads[rank:]
    spans = tuple((k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True))
    auto = attributes.get("auto_pad", "NOTSET")
    if auto == "VALID":
        before = after = (0,) * rank
    elif auto in ("SAME_UPPER", "SAME_LOWER"):
        total = [
            max(0, (-(-n // s) - 1) * s + span - n) for n, s, span in zip(sizes, strides, spans, strict=True)
        ]
        small, large = tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)
        before, after = (small, large) if auto == "SAME_UPPER" else (large, small)
    ceiling = bool(attributes.get("ceil_mode", 0)) and auto == "NOTSET"
    counts = tuple(
        _count(n, b, a, span, s, ceiling)
        for n, b, a, span, s in zip(sizes, before, after, spans, strides, strict=True)
    )
    return Windows(sizes, kernel, strides, dilations, before, after, counts)


def _count(size: int, before: int, after: int, span: int, stride: int, ceiling: bool) -> int:
    rest = size + before + after - span
    if not ceiling:
        return rest // stride + 1
    count = -(-rest // stride) + 1
    # A window that would start in the padding behind the tensor is left out.
    return count - 1 if (count - 1) * stride >= size + before else count
