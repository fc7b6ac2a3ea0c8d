"""``Resize`` and ``Upsample``: interpolation. There is no gradient rule.

A dimension that keeps its size is copied as it is, so it may be divided.
"""

from __future__ import annotations

import math

from distsim.ir.value import Attributes
from distsim.ops.operator import Operator, Signature, Work, register, work_of
from distsim.ops.places import ints, places
from distsim.ops.sharding_rule import Dim, ShardingRule, letters

_TAPS = {"nearest": 1, "linear": 2, "cubic": 4}


def _formals(signature: Signature) -> tuple[str, ...]:
    if signature.op_type == "Upsample" or signature.version == 10:
        return ("X", "scales")
    return ("X", "roi", "scales", "sizes")


def _work(signature: Signature) -> Work:
    """A multiply-add for each neighbour: 1, 2 or 4 along every dimension that changes its size."""
    source, target = signature.inputs[0].shape, signature.outputs[0].shape
    changed = sum(a != b for a, b in zip(source, target, strict=True))
    taps = _TAPS.get(signature.attributes.get("mode", "nearest"), 2) ** changed
    flops = 0.0 if taps == 1 else 2.0 * taps * math.prod(target)
    return work_of(signature, flops)


def _copied(signature: Signature) -> tuple[Dim, ...]:
    """Return the labels: of the dimensions that are copied element by element."""
    attributes, rank = signature.attributes, signature.outputs[0].rank
    transform = attributes.get("coordinate_transformation_mode", "half_pixel")
    stretched = attributes.get("keep_aspect_ratio_policy", "stretch") == "stretch"
    # The first crops, the second reads half a pixel away even where nothing is resized.
    plain = stretched and transform not in ("tf_crop_and_resize", "tf_half_pixel_for_nn")
    axes = {axis % rank for axis in ints(attributes["axes"])} if "axes" in attributes else set(range(rank))
    source, target = signature.inputs[0].shape, signature.outputs[0].shape
    return tuple(
        name if i not in axes or (plain and source[i] == target[i]) else None
        for i, name in enumerate(letters(rank))
    )


def _rule(signature: Signature) -> ShardingRule:
    attributes = signature.attributes
    index = places(_formals(signature), attributes, len(signature.inputs))
    dims = _copied(signature)
    axes = ints(attributes["axes"]) if "axes" in attributes else tuple(range(len(dims)))

    def localize(given: Attributes, outputs: tuple[tuple[int, ...], ...]) -> Attributes:
        if "sizes" not in given or given.get("keep_aspect_ratio_policy", "stretch") != "stretch":
            return given
        return Attributes({**given, "sizes": tuple(outputs[0][axis] for axis in axes)})

    inputs = tuple(dims if name == "X" else (None,) * signature.inputs[i].rank for name, i in index.items())
    crops = attributes.get("coordinate_transformation_mode") == "tf_crop_and_resize"
    return ShardingRule(inputs, (dims,), () if crops else ((index["X"],),), localize=localize)


register(Operator("Resize", work=_work, sharding=_rule))
register(Operator("Upsample", work=_work, sharding=_rule))
