"""Writing recomputation into a joint function: copies of forward ops, where backward first needs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from distsim.ir import Op, Value
from distsim.transforms.recompute.joint import Joint


def recompute(
    joint: Joint,
    saved: AbstractSet[Value],
    stages: Mapping[Op, int] | None = None,
    runs: Mapping[Op, Sequence[Op]] | None = None,
) -> Joint:
    """Return the function in which backward reads of the forward pass only what is ``saved``.

    What it needs besides is computed again from saved values, inputs and constants: a copy of each op
    that takes part, once, right before the first backward op for which it is needed. A copy that follows
    from no other barrier reads one of its operands through an ``OptimizationBarrier``, which waits for the
    gradients that this op reads, or, if it reads none, for those that were waited for before: backward does
    not begin to recompute before its gradient has arrived. What follows from parameters alone (an all-gather
    of weights) waits for nothing. With the pipeline ``stages`` of the ops, an op reads as it is what another
    stage makes: it was received in forward.

    ``runs`` are forward ops that run again together, whoever reads their results, by the backward op before
    which they do. That op waits for all of them, through a barrier on an operand: so a checkpointed block
    runs again before its backward pass begins. They are of the stage of that op.
    """
    writer = _RecomputeWriter(joint, saved, stages or {}, runs or {})
    for op in joint.function.ops:
        writer.add(op)
    function = replace(joint.function, ops=tuple(writer.ops))
    return replace(joint, function=function, copies=writer.copies)


class _RecomputeWriter:
    """Writes the ops again; ``again`` maps a forward value to the copy that backward reads."""

    def __init__(
        self,
        joint: Joint,
        saved: AbstractSet[Value],
        stages: Mapping[Op, int],
        runs: Mapping[Op, Sequence[Op]],
    ) -> None:
        self.joint, self.saved, self.stages, self.runs = joint, saved, stages, runs
        self.made = joint.made
        self.place = {op: number for number, op in enumerate(joint.function.ops)}
        self.ops: list[Op] = []
        self.again: dict[Value, Value] = {}
        self.copies: dict[Op, Op] = {}
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
        run = self.runs.get(op, ())
        own = {v for each in run for v in each.outputs}
        for missing in self._missing(op, run):
            self._copy(missing, stage, own)
        inputs = self._read(op, stage)
        if run:
            self._wait(op, inputs, run)
        self.ops.append(_reading(op, inputs))

    def _missing(self, reader: Op, run: Sequence[Op]) -> list[Op]:
        """Return the forward ops to run again before an op can run, those of its run too, in order."""
        stage = self.stages.get(reader, 0)
        found = {op for op in run if op.outputs[0] not in self.again}
        todo = [v for op in (reader, *found) for v in op.inputs if self._dropped(v, stage)]
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

    def _read(self, op: Op, stage: int, own: AbstractSet[Value] = frozenset()) -> list[Value]:
        """Return what an op reads: of ``own``, what ops make that run again with it, the copies."""
        return [self.again[v] if v in own or self._dropped(v, stage) else v for v in op.inputs]

    def _wait(self, reader: Op, inputs: list[Value], run: Sequence[Op]) -> None:
        """Let an op read one of its operands, a gradient if there is one, once all of a run has ended."""
        read = {v for op in run for v in op.inputs}
        place = next((i for i, v in enumerate(reader.inputs) if v in self.late), 0)
        ends = [self.again[v] for op in run for v in op.outputs if v in self.again and v not in read]
        if ends:
            ready = Value(inputs[place].name, inputs[place].type)
            self.ops.append(Op("OptimizationBarrier", (inputs[place], *ends), (ready,)))
            inputs[place] = ready

    def _add(self, copy: Op, original: Op) -> None:
        self.ops.append(copy)
        self.copies[copy] = original

    def _copy(self, op: Op, stage: int, own: AbstractSet[Value]) -> None:
        inputs = self._read(op, stage, own)
        if self.waiting.isdisjoint(inputs):
            early = [
                v is given and v not in self.joint.free for v, given in zip(inputs, op.inputs, strict=True)
            ]
            if any(early):
                first = early.index(True)
                kept = inputs[first]
                inputs[first] = Value(kept.name, kept.type)
                read = (kept, *self.arrived.get(stage, ()))
                self._add(Op("OptimizationBarrier", read, (inputs[first],)), op)
                self.waiting.add(inputs[first])
        outputs = tuple([Value(v.name, v.type) for v in op.outputs])
        self._add(replace(op, inputs=tuple(inputs), outputs=outputs), op)
        self.again.update(zip(op.outputs, outputs, strict=True))
        if not self.waiting.isdisjoint(inputs):
            self.waiting.update(outputs)


def _reading(op: Op, inputs: Sequence[Value]) -> Op:
    return op if tuple(inputs) == op.inputs else replace(op, inputs=tuple(inputs))
