"""Writing recomputation into a joint function: copies of forward ops, where backward first needs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from distsim.ir import Op, Value
from distsim.transforms.rematerialize.phases import Joint


def recompute(joint: Joint, saved: AbstractSet[Value], stages: Mapping[Op, int] | None = None) -> Joint:
    """Return the function in which backward reads of the forward pass only what is ``saved``.

    What it needs besides is computed again from saved values, inputs and constants: a copy of each op
    that takes part, once, right before the first backward op for which it is needed. A copy that follows
    from no other barrier reads one of its operands through an ``OptimizationBarrier``, which waits for the
    gradients that this op reads, or, if it reads none, for those that were waited for before: backward does
    not begin to recompute before its gradient has arrived. What follows from parameters alone (an all-gather
    of weights) waits for nothing. With the pipeline ``stages`` of the ops, an op reads as it is what another
    stage makes: it was received in forward.
    """
    writer = _Writer(joint, saved, stages or {})
    for op in joint.function.ops:
        writer.add(op)
    function = replace(joint.function, ops=tuple(writer.ops))
    return replace(joint, function=function)


class _Writer:
    """Writes the ops again; ``again`` maps a forward value to the copy that backward reads."""

    def __init__(self, joint: Joint, saved: AbstractSet[Value], stages: Mapping[Op, int]) -> None:
        self.joint, self.saved, self.stages = joint, saved, stages
        self.made = joint.made
        self.place = {op: number for number, op in enumerate(joint.function.ops)}
        self.ops: list[Op] = []
        self.again: dict[Value, Value] = {}
        self.waiting: set[Value] = set()  # what follows from a barrier
        self.late = set(joint.tangents)
        first = tuple([v for v in joint.function.inputs if v in joint.tangents])
        self.arrived: dict[int, tuple[Value, ...]] = {0: first}  # by stage

    def add(self, op: Op) -> None:
        """Take an op over; one of the backward pass reads copies of what is not saved."""
        if not self.joint.behind(op):
            self.ops.append(op)
            return
        stage = self.stages.get(op, 0)
        late = tuple(dict.fromkeys([v for v in op.inputs if v in self.late]))
        if late:
            self.arrived[stage] = late
        self.late.update(op.outputs)
        for missing in self._missing(op):
            self._copy(missing, stage)
        self.ops.append(_reading(op, self._read(op, stage)))

    def _missing(self, reader: Op) -> list[Op]:
        """Return the forward ops to run again before an op can run, in order."""
        stage = self.stages.get(reader, 0)
        found: set[Op] = set()
        todo = [v for v in reader.inputs if self._dropped(v, stage)]
        while todo:
            op = self.made[todo.pop()]
            if op not in found and op.outputs[0] not in self.again:
                found.add(op)
                todo += [v for v in op.inputs if self._dropped(v, stage)]
        return sorted(found, key=self.place.__getitem__)

    def _dropped(self, value: Value, stage: int) -> bool:
        """Whether an op on a stage cannot read a value as forward made it."""
        return (
            value in self.made and value not in self.saved and self.stages.get(self.made[value], 0) == stage
        )

    def _read(self, op: Op, stage: int) -> list[Value]:
        return [self.again[v] if self._dropped(v, stage) else v for v in op.inputs]

    def _copy(self, op: Op, stage: int) -> None:
        inputs = self._read(op, stage)
        if self.waiting.isdisjoint(inputs):
            own = [
                v is given and v not in self.joint.free for v, given in zip(inputs, op.inputs, strict=True)
            ]
            if any(own):
                first = own.index(True)
                kept = inputs[first]
                inputs[first] = Value(kept.name, kept.type)
                read = (kept, *self.arrived.get(stage, ()))
                self.ops.append(Op("OptimizationBarrier", read, (inputs[first],)))
                self.waiting.add(inputs[first])
        outputs = tuple([Value(v.name, v.type) for v in op.outputs])
        self.ops.append(replace(op, inputs=tuple(inputs), outputs=outputs))
        self.again.update(zip(op.outputs, outputs, strict=True))
        if not self.waiting.isdisjoint(inputs):
            self.waiting.update(outputs)


def _reading(op: Op, inputs: Sequence[Value]) -> Op:
    return op if tuple(inputs) == op.inputs else replace(op, inputs=tuple(inputs))
