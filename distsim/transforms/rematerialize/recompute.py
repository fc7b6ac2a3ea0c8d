"""Writing recomputation into a joint function: copies of forward ops, where backward first needs them."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from distsim.ir import Function, Op, Value
from distsim.transforms.rematerialize.phases import Joint


def recompute(joint: Joint, saved: AbstractSet[Value]) -> Joint:
    """Return the function in which backward reads of the forward pass only what is ``saved``.

    What it needs besides is computed again from saved values, inputs and constants: a copy of each op
    that takes part, once, right before the first backward op for which it is needed. A copy that reads no
    other copy reads one of its operands through an ``OptimizationBarrier``, which waits for the gradients
    that this op reads, or, if it reads none, for those that were waited for before: backward does not begin
    to recompute before its gradient has arrived. What follows from parameters alone (an all-gather of
    weights) waits for nothing.
    """
    writer = _Writer(joint, saved)
    for op in joint.function.ops:
        writer.add(op)
    function = replace(joint.function, ops=tuple(writer.ops))
    return replace(joint, function=function)


class _Writer:
    """Writes the ops again; ``again`` maps a forward value to the copy that backward reads."""

    def __init__(self, joint: Joint, saved: AbstractSet[Value]) -> None:
        self.joint, self.saved = joint, saved
        self.made = joint.made
        self.place = {op: number for number, op in enumerate(joint.function.ops)}
        self.ops: list[Op] = []
        self.again: dict[Value, Value] = {}
        self.late = set(joint.tangents)
        self.arrived: tuple[Value, ...] = tuple([v for v in joint.function.inputs if v in joint.tangents])

    def add(self, op: Op) -> None:
        """Take an op over; one of the backward pass reads copies of what is not saved."""
        if op in self.joint.forward or op in self.joint.constants:
            self.ops.append(op)
            return
        late = tuple(dict.fromkeys([v for v in op.inputs if v in self.late]))
        self.arrived = late or self.arrived
        self.late.update(op.outputs)
        for missing in self._missing(op.inputs):
            self._copy(missing)
        self.ops.append(_reading(op, [self.again.get(v, v) for v in op.inputs]))

    def _missing(self, wanted: Sequence[Value]) -> list[Op]:
        """Return the forward ops to run again before these values can be read, in order."""
        found: set[Op] = set()
        todo = [v for v in wanted if self._dropped(v)]
        while todo:
            op = self.made[todo.pop()]
            if op not in found:
                found.add(op)
                todo += [v for v in op.inputs if self._dropped(v)]
        return sorted(found, key=self.place.__getitem__)

    def _dropped(self, value: Value) -> bool:
        return value in self.made and value not in self.saved and value not in self.again

    def _copy(self, op: Op) -> None:
        inputs = [v if v in self.saved else self.again.get(v, v) for v in op.inputs]
        first = next((i for i, v in enumerate(inputs) if v not in self.joint.free), None)
        if (
            first is not None
            and self.arrived
            and all(v is own for v, own in zip(inputs, op.inputs, strict=True))
        ):
            kept = inputs[first]
            inputs[first] = Value(kept.name, kept.type)
            self.ops.append(Op("OptimizationBarrier", (kept, *self.arrived), (inputs[first],)))
        outputs = tuple([Value(v.name, v.type) for v in op.outputs])
        self.ops.append(replace(op, inputs=tuple(inputs), outputs=outputs))
        for value, copy in zip(op.outputs, outputs, strict=True):
            if value not in self.saved:
                self.again[value] = copy


def _reading(op: Op, inputs: Sequence[Value]) -> Op:
    return op if tuple(inputs) == op.inputs else replace(op, inputs=tuple(inputs))
