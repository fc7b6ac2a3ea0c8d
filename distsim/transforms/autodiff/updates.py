"""Where the updates of parameters stand: those of one layer in one Call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distsim.ir import Function, FunctionMaker, Op, Role, Type, Value
from distsim.transforms.autodiff.clipping import scaled_gradient
from distsim.transforms.autodiff.gradient_types import Owners, Pairs
from distsim.transforms.autodiff.optimizers import Optimizer
from distsim.transforms.autodiff.precision import Precision


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
