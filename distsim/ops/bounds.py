"""Bounds of attributes and shapes: asking for them, what operators share, and those of ONNX's others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from distsim.errors import BoundsError
from distsim.ir.type import Tensor
from distsim.ir.value import Attributes
from distsim.ops.onnx_bridge import static_array
from distsim.ops.operator import Bounds, BoundsRule, Operator, Shapes, operator, register
from distsim.ops.places import ints, places

Shape = tuple[int, ...]


def check_bounds(op_type: str, attributes: Attributes, inputs: Sequence[Tensor]) -> None:
    """Raise :class:`BoundsError` where attributes and shapes of operands make no sense together."""
    bounds = operator(op_type).bounds
    if bounds is None:
        return
    if bounds.axes is not None and inputs and "axis" in attributes:
        _check_axis(op_type, attributes, inputs[0].shape, bounds.axes)
    if bounds.check is not None:
        shapes = _shapes(op_type, bounds.formals, attributes, inputs)
        if bounds.formals[0] in shapes:
            bounds.check(attributes, shapes)


def _check_axis(op_type: str, attributes: Attributes, shape: Shape, more: tuple[int, int]) -> None:
    rank = max(len(shape), 1)
    low, high = -rank - more[0], rank - 1 + more[1]
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


# --- what several share --------------------------------------------------------------------------------


def require(fits: bool, text: str) -> None:
    """Raise :class:`BoundsError` with a text unless something fits."""
    if not fits:
        raise BoundsError(text)


def at_least(op_type: str, name: str, value: Any, least: int) -> None:
    """Raise unless the numbers of an attribute, or of a static operand, are at least so large."""
    for number in ints(value):
        require(number >= least, f"{op_type}: {name}={number} must be at least {least}")


def broadcasts_to(shape: Shape, whole: Shape) -> bool:
    """Return whether ``shape`` broadcasts to ``whole`` without changing it."""
    pairs = zip(reversed(shape), reversed(whole), strict=False)
    return len(shape) <= len(whole) and all(a in (1, b) for a, b in pairs)


def broadcast_bounds(op_type: str, *names: str) -> BoundsRule:
    """Return the check that these operands broadcast to the first one without changing it."""

    def check(attributes: Attributes, shapes: Shapes) -> None:
        whole = next(iter(shapes.values()))
        for name in names:
            if name in shapes:
                fits_to(op_type, name, shapes[name], whole)

    return check


def fits_to(op_type: str, name: str, shape: Shape, whole: Shape) -> None:
    """Raise unless an operand broadcasts to a shape without changing it."""
    require(
        broadcasts_to(shape, whole), f"{op_type}: {name} {list(shape)} does not broadcast to {list(whole)}"
    )


def single_bounds(op_type: str, *names: str) -> BoundsRule:
    """Return the check that each of these operands is one number."""

    def check(attributes: Attributes, shapes: Shapes) -> None:
        for name in names:
            size = math.prod(shapes.get(name, ()))
            require(size == 1, f"{op_type}: {name} has {size} numbers, it takes one")

    return check


# --- operators that have no other rules than ONNX's ---------------------------------------------------


def _recurrent(op_type: str, gates: int) -> BoundsRule:
    def check(attributes: Attributes, shapes: Shapes) -> None:
        w, r = shapes.get("W", ()), shapes.get("R", ())
        hidden = attributes.get("hidden_size", r[-1] if r else 0)
        ways = 2 if attributes.get("direction", "forward") == "bidirectional" else 1
        for name, given, last in (("W", w, shapes["X"][-1:]), ("R", r, (hidden,))):
            wanted = (ways, gates * hidden, *last)
            require(
                given == wanted,
                f"{op_type}: {name} is {list(given)}; hidden_size={hidden} and X {list(shapes['X'])} ask for "
                f"{list(wanted)}",
            )

    return check


def _quantize(op_type: str, scale: str, zero: str) -> Bounds:
    def check(attributes: Attributes, shapes: Shapes) -> None:
        x, given = shapes["x"], shapes.get(scale, ())
        if given not in ((), (1,)):  # one for the whole tensor has no axis
            axis = int(attributes.get("axis", 1))
            inside = -len(x) <= axis < len(x)
            require(
                inside and (len(given) == len(x) > 1 or given == (x[axis],)),
                f"{op_type}: {scale} {list(given)} does not fit axis {axis} of {list(x)}",
            )
        other = shapes.get(zero, given)
        same = other == given or math.prod(other) == math.prod(given) == 1
        require(same, f"{op_type}: {zero} {list(other)} must be as {scale} {list(given)}")

    return Bounds(("x", scale, zero), check)


def _crop(attributes: Attributes, shapes: Shapes) -> None:
    if "shape" in attributes:
        at_least("CenterCropPad", "a size", attributes["shape"], 0)


def _col2im(attributes: Attributes, shapes: Shapes) -> None:
    if "image_shape" not in attributes or "block_shape" not in attributes:
        return
    image, block = ints(attributes["image_shape"]), ints(attributes["block_shape"])
    rank = len(image)
    steps = {name: ints(attributes.get(name, (1,) * rank)) for name in ("strides", "dilations")}
    pads = ints(attributes.get("pads", (0,) * 2 * rank))
    for name, values in (("block_shape", block), *steps.items()):
        require(len(values) == rank, f"Col2Im: {name} {list(values)} for {rank} dimensions")
        at_least("Col2Im", name, values, 1)
    require(len(pads) == 2 * rank, f"Col2Im: {len(pads)} pads for {rank} dimensions; it takes two for each")
    given = shapes["input"]
    counts = [
        (n + pads[i] + pads[rank + i] - (k - 1) * d - 1) // s + 1
        for i, (n, k, s, d) in enumerate(zip(image, block, steps["strides"], steps["dilations"], strict=True))
    ]
    fits = len(given) == 3 and given[1] % math.prod(block) == 0 and given[2] == math.prod(counts)
    require(fits, f"Col2Im: {list(given)} is not blocks {list(block)} at {counts} places")


def _grid(attributes: Attributes, shapes: Shapes) -> None:
    if "size" in attributes:
        size, theta = ints(attributes["size"]), shapes["theta"]
        at_least("AffineGrid", "a size", size, 1)
        fits = len(size) in (4, 5) and theta == (size[0], len(size) - 2, len(size) - 1)
        require(fits, f"AffineGrid: theta {list(theta)} does not fit size {list(size)}")


def _window(op_type: str) -> BoundsRule:
    def check(attributes: Attributes, shapes: Shapes) -> None:
        if "size" in attributes:
            at_least(op_type, "size", attributes["size"], 1)

    return check


for _name in ("Compress", "CumProd", "DFT", "Hardmax", "LpNormalization", "TensorScatter", "Unique"):
    register(Operator(_name, bounds=Bounds(axes=(0, 0))))
for _name in ("BlackmanWindow", "HammingWindow", "HannWindow"):
    register(Operator(_name, bounds=Bounds(("size",), _window(_name))))
for _name, _bounds in {
    "AffineGrid": Bounds(("theta", "size"), _grid),
    "CenterCropPad": Bounds(("input_data", "shape"), _crop),
    "Col2Im": Bounds(("input", "image_shape", "block_shape"), _col2im),
    "DequantizeLinear": _quantize("DequantizeLinear", "x_scale", "x_zero_point"),
    "GRU": Bounds(("X", "W", "R", "B", "sequence_lens", "initial_h"), _recurrent("GRU", 3)),
    "LSTM": Bounds(
        ("X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P"), _recurrent("LSTM", 4)
    ),
    "QuantizeLinear": _quantize("QuantizeLinear", "y_scale", "y_zero_point"),
    "RNN": Bounds(("X", "W", "R", "B", "sequence_lens", "initial_h"), _recurrent("RNN", 1)),
}.items():
    register(Operator(_name, bounds=_bounds))
