"""Where the updates of parameters stand: those of one layer in one Call.

Of which types gradients are: as they are made, as they are summed, and as the optimizer reads them.

The factor by which all gradients are multiplied before the update: clipping and loss scaling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from distsim.errors import PlanError
from distsim.ir import DType, Function, FunctionMaker, Op, Role, Type, Value
from distsim.ir.type import as_tensor
from distsim.ops.onnx_bridge import type_number
from distsim.transforms.autodiff.optimizers import Optimizer
from distsim.transforms.autodiff.precision import Precision

Pairs = Sequence[tuple[Value, Value]]
"""(parameter, gradient) in the order of the parameters."""

Owners = Mapping[Value, tuple[Op, str]]
"""Parameter -> the Call that reads it, and the name that its callee gives it."""


def cast_gradients(maker: FunctionMaker, pairs: Pairs, precision: Precision) -> list[tuple[Value, Value]]:
    """Return the (parameter, gradient) pairs with gradients in the type in which the optimizer reads them.

    Each is cast to the type of its sum (``GradientCast``), right after the op or Call that completes it: what
    reduces it over ranks starts while backward goes on, and only the cast one stays. A Cast that makes a
    gradient becomes that cast, or goes, where it was of that type before. Where the optimizer reads another
    type it has a copy (``GradientCopy``).
    """
    place = {value: number for number, op in enumerate(maker.ops) for value in op.outputs}
    follows: dict[int, list[Op]] = {}
    read = {value for op in maker.ops for value in op.inputs}
    gone: set[int] = set()

    def summed(weight: Value, grad: Value) -> Value:
        op = maker.ops[place[grad]] if grad in place else None
        if op is not None and op.op_type == "Cast":
            (source,) = op.inputs
            if as_tensor(source.type, source.name).dtype == precision.gradient_sum:
                gone.update(() if grad in read else (place[grad],))
                return source
        if as_tensor(grad.type, grad.name).dtype != precision.gradient_sum:
            made = _cast(maker, "GradientCast", weight, grad, precision.gradient_sum)
            if op is not None and maker.ops[-1].outputs[0] is made:  # no number
                follows.setdefault(place[grad], []).append(maker.ops.pop())
            return made
        if op is not None and op.op_type == "Cast":
            maker.ops[place[grad]] = replace(op, op_type="GradientCast")
        return grad

    sums = [(weight, summed(weight, grad)) for weight, grad in pairs]
    kept = [(number, op) for number, op in enumerate(maker.ops) if number not in gone]
    maker.ops = [each for number, op in kept for each in (op, *follows.get(number, ()))]
    return [(weight, _cast(maker, "GradientCopy", weight, grad, precision.update)) for weight, grad in sums]


def _cast(maker: FunctionMaker, op_type: str, weight: Value, grad: Value, dtype: DType) -> Value:
    if as_tensor(grad.type, grad.name).dtype == dtype:
        return grad
    return maker.add(op_type, [grad], {"to": type_number(dtype)}, output_names=[f"d{weight.name}"])[0]


def add_updates(
    maker: FunctionMaker,
    optimizer: Optimizer,
    pairs: Pairs,
    owners: Owners,
    precision: Precision | None = None,
    factor: Value | None = None,
) -> list[Value]:
    """Add the update of every parameter to a joint function; return the new parameters, then the state.

    Each gradient is multiplied by ``factor`` first, if there is one.

    Parameters of one owner are updated by one Call of a callee ``update``, which is the same for all
    owners whose parameters have the same types in the same order: a layer that repeats has an update
    that repeats. Parameters without an owner are updated one by one. The inputs of role STATE that the
    optimizer asks for are added in the order of the parameters.
    """
    groups: dict[Op, list[tuple[Value, Value]]] = {}
    for weight, grad in pairs:
        if weight in owners:
            groups.setdefault(owners[weight][0], []).append((weight, grad))
    updates = _UpdateCallees(optimizer, precision, factor)
    made: dict[Value, tuple[Value, ...]] = {}
    state: dict[Value, list[Value]] = {}
    for weight, grad in pairs:
        if weight not in owners:
            scaled = scaled_gradient(maker, grad, factor, f"d{weight.name}")
            made[weight] = optimizer.update(maker, weight, scaled, precision)
            continue
        owner, _ = owners[weight]
        group = groups[owner]
        update = updates.of([(owners[w][1], w.type, g.type) for w, g in group])
        place = next(i for i, (member, _) in enumerate(group) if member is weight)
        state[weight] = update.add_state(maker, place, weight)
        if place == len(group) - 1:
            made |= update.call(maker, group, state, factor, owner.name)
    new = [made[weight][0] for weight, _ in pairs]
    return [*new, *(value for weight, _ in pairs for value in made[weight][1:])]


@dataclass(frozen=True)
class _UpdateCallee:
    """A callee, the callee's name for each parameter, and how many outputs and which state it has."""

    function: Function
    names: tuple[str, ...]
    state: tuple[tuple[Value, ...], ...]
    outputs: tuple[int, ...]

    def add_state(self, maker: FunctionMaker, place: int, weight: Value) -> list[Value]:
        """Add the state of one parameter to the inputs of the caller, under the parameter's own name."""
        prefix = self.names[place]
        return [
            maker.add_input_value(f"{weight.name}{v.name.removeprefix(prefix)}", v.type, v.role)
            for v in self.state[place]
        ]

    def call(
        self,
        maker: FunctionMaker,
        group: Pairs,
        state: Mapping[Value, Sequence[Value]],
        factor: Value | None,
        name: str,
    ) -> dict[Value, tuple[Value, ...]]:
        """Add the Call, of the factor first if there is one; return what it makes of each parameter."""
        inputs = [] if factor is None else [factor]
        inputs += [value for weight, grad in group for value in (weight, grad, *state[weight])]
        names: list[str] = []
        inner = iter(self.function.outputs)
        for (weight, _), own, count in zip(group, self.names, self.outputs, strict=True):
            names += [f"{weight.name}{next(inner).name.removeprefix(own)}" for _ in range(count)]
        outputs = iter(maker.add("Call", inputs, None, (self.function,), names, None, name))
        return {
            weight: tuple([next(outputs) for _ in range(count)])
            for (weight, _), count in zip(group, self.outputs, strict=True)
        }


class _UpdateCallees:
    """Makes the callee of each distinct sequence of parameter types once."""

    def __init__(self, optimizer: Optimizer, precision: Precision | None, factor: Value | None) -> None:
        self.optimizer, self.precision, self.factor = optimizer, precision, factor
        self._made: dict[tuple[tuple[Type, Type], ...], _UpdateCallee] = {}

    def of(self, members: Sequence[tuple[str, Type, Type]]) -> _UpdateCallee:
        key = tuple([(weight, grad) for _, weight, grad in members])
        if key not in self._made:
            self._made[key] = self._make(members)
        return self._made[key]

    def _make(self, members: Sequence[tuple[str, Type, Type]]) -> _UpdateCallee:
        maker = FunctionMaker("update")
        outputs: list[tuple[Value, ...]] = []
        state: list[tuple[Value, ...]] = []
        factor = None if self.factor is None else maker.add_input_value("factor", self.factor.type)
        for name, weight_type, grad_type in members:
            weight = maker.add_input_value(name, weight_type, Role.PARAMETER)
            grad = maker.add_input_value(f"d{name}", grad_type)
            scaled = scaled_gradient(maker, grad, factor, f"d{name}.scaled")
            before = len(maker.inputs)
            outputs.append(self.optimizer.update(maker, weight, scaled, self.precision))
            state.append(tuple(maker.inputs[before:]))
        maker.set_outputs([value for values in outputs for value in values])
        names = tuple([name for name, _, _ in members])
        return _UpdateCallee(maker.finalize(), names, tuple(state), tuple(map(len, outputs)))


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
    to = {"to": type_number(as_tensor(grad.type, grad.name).dtype)}
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
