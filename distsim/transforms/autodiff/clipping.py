"""The factor by which all gradients are multiplied before the update: clipping and loss scaling."""

from __future__ import annotations

from collections.abc import Sequence

from distsim.errors import PlanError
from distsim.ir import Function, FunctionMaker, Type, Value
from distsim.ir.type import as_tensor
from distsim.transforms.autodiff.gradient_types import Owners, Pairs
from distsim.transforms.autodiff.set_precision import cast_number


def check_clip(clip: float | None) -> None:
    """Raise :class:`PlanError` for a norm that nothing can be clipped to."""
    if clip is not None and not 0 < clip < float("inf"):
        raise PlanError(f"clip={clip} must be a finite norm over 0; give 0 to clip nothing")


def gradient_factor(
    maker: FunctionMaker, pairs: Pairs, owners: Owners, clip: float | None, loss_scale: float | None
) -> Value | None:
    """Return what all gradients are multiplied by, clipped to the norm ``clip`` and unscaled; None: nothing.

    The squares are summed from the last parameter to the first, as the stages of a pipeline end: each stage
    adds its own to the sum that it is sent, and sends on one number; the factor comes back to all. What tp
    or dp divides is summed over its ranks once, at the end. Those of one owner are summed in one Call, of
    which layers with parameters of the same types share the callee.
    """
    if not pairs or (clip is None and loss_scale is None):
        return None
    groups: dict[object, list[Value]] = {}
    for weight, grad in reversed(pairs):
        groups.setdefault(owners[weight][0] if weight in owners else weight, []).append(grad)
    callees: dict[tuple[Type, ...], Function] = {}
    parts: list[Value] = []
    for grads in groups.values():
        types = tuple([grad.type for grad in grads])
        if len(grads) > 1 and types not in callees:
            callees[types] = _sum_of_squares(types)
        parts.append(
            maker.add("Call", grads, None, (callees[types],), ["squares"])[0]
            if len(grads) > 1
            else _square_sum(maker, grads[0])
        )
    given = {"clip": clip, "loss_scale": loss_scale}
    options = {name: number for name, number in given.items() if number is not None}
    return maker.add("GradientFactor", [_sum(maker, parts)], options, output_names=["factor"])[0]


def scaled_gradient(maker: FunctionMaker, grad: Value, factor: Value | None, name: str) -> Value:
    """Return a gradient times the factor, of the same type; itself if there is none."""
    if factor is None:
        return grad
    to = {"to": cast_number(as_tensor(grad.type, grad.name).dtype)}
    return maker.add("ScaleGradient", [grad, factor], to, output_names=[name])[0]


def _sum_of_squares(types: Sequence[Type]) -> Function:
    """Return the function that sums the squares of several gradients."""
    maker = FunctionMaker("squares")
    grads = [maker.add_input_value(f"g{place}", own) for place, own in enumerate(types)]
    maker.set_outputs([_sum(maker, [_square_sum(maker, grad) for grad in grads])])
    return maker.finalize()


def _sum(maker: FunctionMaker, parts: Sequence[Value]) -> Value:
    total = parts[0]
    for part in parts[1:]:
        total = maker.add("Add", [total, part], output_names=["squares"])[0]
    return total


def _square_sum(maker: FunctionMaker, grad: Value) -> Value:
    return maker.add("SquareSum", [grad], output_names=[f"{grad.name}.squares"])[0]
