"""What ONNX's type rules take on trust: counts, axes and shapes, checked before anything is sized by them.

``onnx.shape_inference`` cuts an axis to 32 bits, divides by a count of 0, and does not look at operands
that its result does not depend on (the C of a Gemm, the scale of a normalization). Each check here raises
:class:`BoundsError` with the numbers; what ONNX checks itself is not repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distsim.errors import BoundsError
from distsim.ir.type import Tensor
from distsim.ir.value import Attributes
from distsim.ops.onnx_bridge import static_array
from distsim.ops.places import ints, places

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
Check = Callable[[Attributes, Shapes], None]


def check_bounds(op_type: str, attributes: Attributes, inputs: Sequence[Tensor]) -> None:
    """Raise :class:`BoundsError` where attributes and shapes of operands make no sense together."""
    if op_type in _AXES and inputs:
        _check_axis(op_type, attributes, inputs[0].shape)
    found = _CHECKS.get(op_type)
    if found is not None:
        formals, check = found
        shapes = _shapes(op_type, formals, attributes, inputs)
        if formals[0] in shapes:
            check(attributes, shapes)


_AXES: Mapping[str, int] = {
    # How many axes an op may count beyond those of its first operand.
    **dict.fromkeys(("ArgMax", "ArgMin", "Compress", "Concat", "Gather"), 0),
    **dict.fromkeys(("GatherElements", "Hardmax", "LayerNormalization", "LogSoftmax", "LpNormalization"), 0),
    **dict.fromkeys(("RMSNormalization", "Scatter", "ScatterElements", "Softmax", "Split", "TopK"), 0),
    **dict.fromkeys(("Unique", "TensorScatter", "CumSum", "CumProd", "DFT"), 0),
    **dict.fromkeys(("Flatten", "OneHot"), 1),
}


def _check_axis(op_type: str, attributes: Attributes, shape: Shape) -> None:
    if "axis" not in attributes:
        return
    rank = max(len(shape), 1)
    low, high = -rank - (op_type == "OneHot"), rank - 1 + _AXES[op_type]
    for axis in ints(attributes["axis"]):
        if not low <= axis <= high:
            raise BoundsError(f"{op_type}: axis={axis} must be from {low} to {high} for {list(shape)}")


def _shapes(
    op_type: str, formals: Sequence[str], attributes: Attributes, inputs: Sequence[Tensor]
) -> dict[str, Shape]:
    """Return the shape of each operand that is given, static or not, by formal name."""
    absent: tuple[str, ...] = attributes.get("absent", ())
    free = [name for name in formals if name not in attributes and name not in absent]
    if len(inputs) > len(free):
        raise BoundsError(f"{op_type} takes {', '.join(formals)}, {len(inputs)} values given")
    index = places(formals, attributes, len(inputs))
    found = {name: inputs[i].shape for name, i in index.items()}
    return found | {
        name: static_array(attributes[name], None).shape for name in formals if name in attributes
    }


def _require(fits: bool, text: str) -> None:
    if not fits:
        raise BoundsError(text)


def _at_least(op_type: str, name: str, value: Any, least: int) -> None:
    for number in ints(value):
        _require(number >= least, f"{op_type}: {name}={number} must be at least {least}")


def broadcasts_to(shape: Shape, whole: Shape) -> bool:
    """Return whether ``shape`` broadcasts to ``whole`` without changing it."""
    pairs = zip(reversed(shape), reversed(whole), strict=False)
    return len(shape) <= len(whole) and all(a in (1, b) for a, b in pairs)


def _one_way(op_type: str, *names: str) -> Check:
    def check(attributes: Attributes, shapes: Shapes) -> None:
        whole = next(iter(shapes.values()))
        for name in names:
            if name in shapes:
                _fits(op_type, name, shapes[name], whole)

    return check


def _fits(op_type: str, name: str, shape: Shape, whole: Shape) -> None:
    _require(
        broadcasts_to(shape, whole), f"{op_type}: {name} {list(shape)} does not broadcast to {list(whole)}"
    )


def _single(op_type: str, *names: str) -> Check:
    def check(attributes: Attributes, shapes: Shapes) -> None:
        for name in names:
            size = math.prod(shapes.get(name, ()))
            _require(size == 1, f"{op_type}: {name} has {size} numbers, it takes one")

    return check


# Products, convolutions


def _gemm(attributes: Attributes, shapes: Shapes) -> None:
    a, b = shapes["A"], shapes.get("B", ())
    _require(len(a) == len(b) == 2, f"Gemm multiplies matrices, not {list(a)} by {list(b)}")
    made = (a[1 if attributes.get("transA", 0) else 0], b[0 if attributes.get("transB", 0) else 1])
    if "C" in shapes:
        _fits("Gemm", "C", shapes["C"], made)


def _conv(op_type: str) -> Check:
    first, second = (1, 0) if op_type == "ConvTranspose" else (0, 1)
    """The weight's dimensions of the output's and the input's channels."""

    def check(attributes: Attributes, shapes: Shapes) -> None:
        x, w = shapes["X"], shapes.get("W", ())
        group = attributes.get("group", 1)
        _at_least(op_type, "group", group, 1)
        if not w:  # a static weight is one number
            return
        _require(len(w) == len(x) >= 2, f"{op_type}: the weight {list(w)} does not fit {list(x)}")
        transposed = op_type == "ConvTranspose"
        channels = w[second] if transposed else w[second] * group
        made = w[first] * group if transposed else w[first]
        _require(
            x[1] == channels and channels % group == made % group == 0,
            f"{op_type}: {x[1]} channels do not fit the weight {list(w)} in {group} groups",
        )
        kernel = attributes.get("kernel_shape", w[2:])
        _require(tuple(kernel) == w[2:], f"{op_type}: kernel_shape={list(kernel)}, the weight is {list(w)}")
        if "B" in shapes:
            _fits(op_type, "B", shapes["B"], (made,))
        limits = {"output_shape": (1, 2**31), "strides": (1, 2**16), "dilations": (1, 2**16)}
        for name, (least, most) in {**limits, "output_padding": (0, 2**16)}.items():
            sizes = attributes.get(name, (1,) * len(kernel))
            fits = len(sizes) == len(kernel) and all(least <= n <= most for n in sizes)
            text = f"{op_type}: {name}={list(sizes)} must be {len(kernel)} numbers from {least} to {most}"
            _require(fits, text)

    return check


def _recurrent(op_type: str, gates: int) -> Check:
    def check(attributes: Attributes, shapes: Shapes) -> None:
        w, r = shapes.get("W", ()), shapes.get("R", ())
        hidden = attributes.get("hidden_size", r[-1] if r else 0)
        ways = 2 if attributes.get("direction", "forward") == "bidirectional" else 1
        for name, given, last in (("W", w, shapes["X"][-1:]), ("R", r, (hidden,))):
            wanted = (ways, gates * hidden, *last)
            _require(
                given == wanted,
                f"{op_type}: {name} is {list(given)}; hidden_size={hidden} and X {list(shapes['X'])} ask for "
                f"{list(wanted)}",
            )

    return check


# Normalizations, quantization


def _layer(op_type: str, *names: str) -> tuple[tuple[str, ...], Check]:
    return ("X", *names), _one_way(op_type, *names)


def _channels(op_type: str, *names: str) -> tuple[tuple[str, ...], Check]:
    """A vector with a number for each channel, or, before operator set 21, each group."""

    def check(attributes: Attributes, shapes: Shapes) -> None:
        groups = attributes.get("num_groups", 1)
        _at_least(op_type, "num_groups", groups, 1)
        shape = shapes[names[0]]
        _require(len(shape) > 1, f"{op_type} takes [N, C, ...], not {list(shape)}")
        sizes = {shape[1], groups} if op_type == "GroupNormalization" else {shape[1]}
        for name in names[1:]:
            given = shapes.get(name, shape[1:2])
            _require(
                len(given) == 1 and given[0] in sizes,
                f"{op_type}: {name} {list(given)} must be a vector for the channels of {list(shape)}",
            )

    return names, check


def _class_loss(op_type: str, *names: str) -> tuple[tuple[str, ...], Check]:
    def check(attributes: Attributes, shapes: Shapes) -> None:
        scores, labels, weights = (shapes.get(name) for name in names)
        if scores is None or len(scores) < 2:
            raise BoundsError(f"{op_type} takes [N, C, ...], not {list(scores or ())}")
        for name, given, wanted in (
            (names[1], labels, (scores[0], *scores[2:])),
            (names[2], weights, scores[1:2]),
        ):
            fits = given is None or given == wanted
            _require(fits, f"{op_type}: {name} {list(given or ())} must be {list(wanted)}")
        modes = ("none", "mean", "sum")
        mode = attributes.get("reduction", "mean")
        _require(mode in modes, f"{op_type}: reduction {mode!r} is not one of {', '.join(modes)}")

    return names, check


def _quantize(op_type: str, scale: str, zero: str) -> tuple[tuple[str, ...], Check]:
    def check(attributes: Attributes, shapes: Shapes) -> None:
        x, given = shapes["x"], shapes.get(scale, ())
        if given not in ((), (1,)):  # one for the whole tensor has no axis
            axis = int(attributes.get("axis", 1))
            inside = -len(x) <= axis < len(x)
            _require(
                inside and (len(given) == len(x) > 1 or given == (x[axis],)),
                f"{op_type}: {scale} {list(given)} does not fit axis {axis} of {list(x)}",
            )
        other = shapes.get(zero, given)
        same = other == given or math.prod(other) == math.prod(given) == 1
        _require(same, f"{op_type}: {zero} {list(other)} must be as {scale} {list(given)}")

    return ("x", scale, zero), check


# What moves elements


def _split(attributes: Attributes, shapes: Shapes) -> None:
    if "num_outputs" not in attributes:
        return
    count, shape, axis = int(attributes["num_outputs"]), shapes["input"], int(attributes.get("axis", 0))
    size = shape[axis] if shape else 0
    _require(
        1 <= count <= max(size, 1), f"Split: num_outputs={count} of axis {axis}, which has {size} elements"
    )


def _pad(attributes: Attributes, shapes: Shapes) -> None:
    rank, mode = len(shapes["data"]), attributes.get("mode", "constant")
    modes = ("constant", "reflect", "edge", "wrap")
    _require(mode in modes, f"Pad: mode {mode!r} is not one of {', '.join(modes)}")
    pads = ints(attributes.get("pads", attributes.get("paddings", (0,) * 2 * rank)))
    axes = ints(attributes["axes"]) if "axes" in attributes else tuple(range(rank))
    inside = all(-rank <= axis < rank for axis in axes) and len({axis % rank for axis in axes}) == len(axes)
    _require(inside, f"Pad: axes {list(axes)} must be different ones of {list(shapes['data'])}")
    _require(len(pads) == 2 * len(axes), f"Pad: {len(pads)} pads for {len(axes)} axes; it takes two for each")
    _single("Pad", "constant_value")(attributes, shapes)
    if mode != "constant":
        sizes = [(shapes["data"][axis], max(pads[i], pads[i + len(axes)])) for i, axis in enumerate(axes)]
        _require(all(size or pad <= 0 for size, pad in sizes), f"Pad: mode {mode} of an empty dimension")


def _gather_nd(attributes: Attributes, shapes: Shapes) -> None:
    data, indices, batch = shapes["data"], shapes.get("indices", ()), attributes.get("batch_dims", 0)
    ranks = min(len(data), len(indices))
    _require(0 <= batch < max(ranks, 1), f"GatherND: batch_dims={batch} must be from 0 to {ranks - 1}")
    depth = indices[-1] if indices else 0
    _require(
        1 <= depth <= len(data) - batch and data[:batch] == indices[:batch],
        f"GatherND: indices {list(indices)} do not fit {list(data)} with batch_dims={batch}",
    )


def _scatter_nd(attributes: Attributes, shapes: Shapes) -> None:
    data, indices, updates = shapes["data"], shapes.get("indices", ()), shapes.get("updates", ())
    depth = indices[-1] if indices else 0
    _require(1 <= depth <= len(data), f"ScatterND: indices {list(indices)} do not fit {list(data)}")
    wanted = (*indices[:-1], *data[depth:])
    _require(updates == wanted, f"ScatterND: updates {list(updates)} must be {list(wanted)}")


def _elements(op_type: str) -> Check:
    """Indices have the rank of the data; where the axis is not they may be shorter, not longer."""

    def check(attributes: Attributes, shapes: Shapes) -> None:
        data, indices = shapes["data"], shapes.get("indices", ())
        axis = attributes.get("axis", 0) % max(len(data), 1)
        fits = len(data) == len(indices) and all(
            i == axis or a <= b for i, (a, b) in enumerate(zip(indices, data, strict=True))
        )
        _require(fits, f"{op_type}: indices {list(indices)} do not fit {list(data)}, axis {axis}")
        updates = shapes.get("updates", indices)
        _require(updates == indices, f"{op_type}: updates {list(updates)} must be as indices {list(indices)}")

    return check


def _blocks(op_type: str) -> Check:
    def check(attributes: Attributes, shapes: Shapes) -> None:
        shape, block = shapes["input"], attributes.get("blocksize", 0)
        _at_least(op_type, "blocksize", block, 1)
        _require(len(shape) == 4, f"{op_type} takes [N, C, H, W], not {list(shape)}")
        sizes = shape[1:2] if op_type == "DepthToSpace" else shape[2:]
        unit = block**2 if op_type == "DepthToSpace" else block
        _require(
            all(size % unit == 0 for size in sizes),
            f"{op_type}: blocksize={block} does not divide {list(shape)}",
        )

    return check


def _crop(attributes: Attributes, shapes: Shapes) -> None:
    if "shape" in attributes:
        _at_least("CenterCropPad", "a size", attributes["shape"], 0)


def _col2im(attributes: Attributes, shapes: Shapes) -> None:
    if "image_shape" not in attributes or "block_shape" not in attributes:
        return
    image, block = ints(attributes["image_shape"]), ints(attributes["block_shape"])
    rank = len(image)
    steps = {name: ints(attributes.get(name, (1,) * rank)) for name in ("strides", "dilations")}
    pads = ints(attributes.get("pads", (0,) * 2 * rank))
    for name, values in (("block_shape", block), *steps.items()):
        _require(len(values) == rank, f"Col2Im: {name} {list(values)} for {rank} dimensions")
        _at_least("Col2Im", name, values, 1)
    _require(len(pads) == 2 * rank, f"Col2Im: {len(pads)} pads for {rank} dimensions; it takes two for each")
    given = shapes["input"]
    counts = [
        (n + pads[i] + pads[rank + i] - (k - 1) * d - 1) // s + 1
        for i, (n, k, s, d) in enumerate(zip(image, block, steps["strides"], steps["dilations"], strict=True))
    ]
    fits = len(given) == 3 and given[1] % math.prod(block) == 0 and given[2] == math.prod(counts)
    _require(fits, f"Col2Im: {list(given)} is not blocks {list(block)} at {counts} places")


def _grid(attributes: Attributes, shapes: Shapes) -> None:
    if "size" in attributes:
        size, theta = ints(attributes["size"]), shapes["theta"]
        _at_least("AffineGrid", "a size", size, 1)
        fits = len(size) in (4, 5) and theta == (size[0], len(size) - 2, len(size) - 1)
        _require(fits, f"AffineGrid: theta {list(theta)} does not fit size {list(size)}")


def _window(op_type: str) -> Check:
    def check(attributes: Attributes, shapes: Shapes) -> None:
        if "size" in attributes:
            _at_least(op_type, "size", attributes["size"], 1)

    return check


def _near(attributes: Attributes, shapes: Shapes) -> None:
    _at_least("LRN", "size", attributes.get("size", 0), 1)


_CHECKS: Mapping[str, tuple[tuple[str, ...], Check]] = {
    "AffineGrid": (("theta", "size"), _grid),
    "CenterCropPad": (("input_data", "shape"), _crop),
    "Clip": (("input", "min", "max"), _single("Clip", "min", "max")),
    "Col2Im": (("input", "image_shape", "block_shape"), _col2im),
    "Conv": (("X", "W", "B"), _conv("Conv")),
    "ConvTranspose": (("X", "W", "B"), _conv("ConvTranspose")),
    "DepthToSpace": (("input",), _blocks("DepthToSpace")),
    "DequantizeLinear": _quantize("DequantizeLinear", "x_scale", "x_zero_point"),
    "GRU": (("X", "W", "R", "B", "sequence_lens", "initial_h"), _recurrent("GRU", 3)),
    "GatherElements": (("data", "indices"), _elements("GatherElements")),
    "GatherND": (("data", "indices"), _gather_nd),
    "Gemm": (("A", "B", "C"), _gemm),
    "GroupNormalization": _channels("GroupNormalization", "X", "scale", "bias"),
    "InstanceNormalization": _channels("InstanceNormalization", "input", "scale", "B"),
    "LRN": (("X",), _near),
    "LSTM": (("X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P"), _recurrent("LSTM", 4)),
    "LayerNormalization": _layer("LayerNormalization", "Scale", "B"),
    "NegativeLogLikelihoodLoss": _class_loss("NegativeLogLikelihoodLoss", "input", "target", "weight"),
    "SoftmaxCrossEntropyLoss": _class_loss("SoftmaxCrossEntropyLoss", "scores", "labels", "weights"),
    "PRelu": (("X", "slope"), _one_way("PRelu", "slope")),
    "Pad": (("data", "pads", "constant_value", "axes"), _pad),
    "QuantizeLinear": _quantize("QuantizeLinear", "y_scale", "y_zero_point"),
    "RMSNormalization": _layer("RMSNormalization", "scale"),
    "RNN": (("X", "W", "R", "B", "sequence_lens", "initial_h"), _recurrent("RNN", 1)),
    "Scatter": (("data", "indices", "updates"), _elements("Scatter")),
    "ScatterElements": (("data", "indices", "updates"), _elements("ScatterElements")),
    "ScatterND": (("data", "indices", "updates"), _scatter_nd),
    "SpaceToDepth": (("input",), _blocks("SpaceToDepth")),
    "Split": (("input", "split"), _split),
    **{name: (("size",), _window(name)) for name in ("BlackmanWindow", "HammingWindow", "HannWindow")},
}
