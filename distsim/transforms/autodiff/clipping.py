"""The factor by which all gradients are multiplied before the update: clipping and loss scaling."""

from __future__ import annotations

from distsim.errors import PlanError
from distsim.ir import FunctionMaker, Value
from distsim.ir.type import as_tensor
from distsim.transforms.autodiff.set_precision import cast_number
from distsim.transforms.autodiff.updates import Pairs


def check_clip(clip: float | None) -> None:
    """Raise :class:`PlanError` for a norm that nothing can be clipped to."""
    if clip is not None and not 0 < clip < float("inf"):
        raise PlanError(f"clip={clip} must be a finite norm over 0; leave it out to clip nothing")


def scale_gradients(
    maker: FunctionMaker, pairs: Pairs, clip: float | None, loss_scale: float | None
) -> list[tuple[Value, Value]]:
    """Return the (parameter, gradient) pairs with gradients clipped to the norm ``clip``, and unscaled.

    The squares are summed from the last parameter to the first, as the stages of a pipeline end: each stage
    adds its own to the sum that it is sent, and sends on one number; the factor comes back to all. What tp
    or dp divides is summed over its ranks once, at the end.
    """
    if clip is None and loss_scale is None:
        return list(pairs)
    total: Value | None = None
    for weight, grad in reversed(pairs):
        part = maker.add("SquareSum", [grad], output_names=[f"d{weight.name}.squares"])[0]
        total = part if total is None else maker.add("Add", [total, part], output_names=["squares"])[0]
    if total is None:
        return []
    given = {"clip": clip, "loss_scale": loss_scale}
    options = {name: number for name, number in given.items() if number is not None}
    factor = maker.add("GradientFactor", [total], options, output_names=["factor"])[0]
    made: list[tuple[Value, Value]] = []
    for weight, grad in pairs:
        to = {"to": cast_number(as_tensor(grad.type, grad.name).dtype)}
        scaled = maker.add("ScaleGradient", [grad, factor], to, output_names=[f"d{weight.name}"])[0]
        made.append((weight, scaled))
    return made
