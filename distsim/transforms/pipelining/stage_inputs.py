"""Recomputation stays within a stage: what a stage received in the forward pass it keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from distsim.ir import Function, Op
from distsim.ops import operator
from distsim.transforms.op_graph import Numbered, StageMap
from distsim.transforms.recompute.joint import Joint
from distsim.transforms.recompute.recompute import recompute


def keep_received(function: Numbered, assigned: StageMap) -> tuple[Numbered, StageMap]:
    """Return the function in which no stage reads what another one computes again, and its stages.

    Ops stay on their stages, and what is computed again is so on the stage of the forward op. A backward op
    on another stage than that reads the forward value, which its stage received in forward. What is computed
    again is so for the ops of its own stage only: right before the first of them, once the gradients have
    arrived that this one reads. Of what runs again together each stage runs its own ops, before its part of
    the backward pass, if it has one. A function that is so already is returned as it is.
    """
    if not _misplaced(function, assigned):
        return function, assigned
    again, values = function.originals, function.values
    plain = {value: values[original] for value, original in again.items()}
    runs: list[tuple[int, set[int]]] = []  # the place of the op that waits for a run, and its forward ops
    kept: dict[int, Op] = {}
    for number, op in enumerate(function.ops):
        if number in function.copies:
            continue
        read = function.reads[number]
        ends = [value for value in read if value in again]
        if ends and operator(op.op_type).waits:
            runs.append((number, _run(function, ends)))
            (made,) = function.makes[number]
            plain[made] = plain.get(read[0], values[read[0]])
            continue
        inputs = tuple([plain.get(value, values[value]) for value in read])
        kept[number] = op if inputs == op.inputs else replace(op, inputs=inputs)
    outputs = tuple([plain.get(value, values[value]) for value in function.outputs])
    joint = Joint.of(Function(function.name, tuple(function.inputs), tuple(kept.values()), outputs))
    behind = [op for op, ahead in enumerate(function.forward) if not ahead]
    dropped = {
        values[value] for value in {*again.values()} - {v for op in behind for v in function.reads[op]}
    }
    saved = {value for value in joint.made if value not in dropped}
    stages = {op: assigned.stage[number] for number, op in kept.items()}
    made = recompute(joint, saved, stages, _by_stage(joint, kept, assigned, runs))
    return Numbered(made.function), StageMap(_stages(made, stages), assigned.homes)


def _stages(made: Joint, stages: Mapping[Op, int]) -> list[int]:
    """Return the stage of each op: of a copy that of its original, of a barrier that of what waits there."""
    known = {op.outputs[0]: stage for op, stage in stages.items()}
    found: list[int] = []
    for op in reversed(made.function.ops):
        original = made.copies.get(op, op)
        found.append(known.get(original.outputs[0], found[-1] if found else -1))
    return found[::-1]


def _run(function: Numbered, ends: Sequence[int]) -> set[int]:
    """Return the forward ops whose copies lead to these values, which are copies."""
    found, todo = set[int](), list(ends)
    while todo:
        maker = function.producer[todo.pop()]
        original = function.copies.get(maker, -1)
        if original >= 0 and maker not in found:
            found.add(maker)
            todo += function.reads[maker]
    return {function.copies[maker] for maker in found}


def _by_stage(
    joint: Joint, kept: Mapping[int, Op], assigned: StageMap, runs: Sequence[tuple[int, AbstractSet[int]]]
) -> dict[Op, list[Op]]:
    """Return the ops of each run by the backward op before which they run: the next one of their stage."""
    waiting: dict[int, dict[int, None]] = {}  # by stage
    found: dict[Op, list[Op]] = {}
    starts = dict(runs)
    for number in sorted({*kept, *starts}):
        for each in sorted(starts.get(number, ())):
            waiting.setdefault(assigned.stage[each], {})[each] = None
        if number in kept and joint.behind(kept[number]) and assigned.stage[number] in waiting:
            found[kept[number]] = [kept[each] for each in waiting.pop(assigned.stage[number])]
    return found


def _misplaced(function: Numbered, assigned: StageMap) -> bool:
    """Whether an op reads what another stage computes again, or what the backward pass of one before makes.

    Where nobody knew of stages a barrier waits for the gradient read last. That may be one of a stage before,
    as with several losses, and this stage's backward pass would wait for one that waits for it.
    """
    stage, again = assigned.stage, function.originals
    for op, read in enumerate(function.reads if again else ()):
        own = stage[op]
        if own < 0 or function.forward[op]:
            continue
        for value in read:
            maker = function.producer[value]
            if maker < 0 or function.forward[maker]:
                continue
            if stage[maker] != own if value in again else 0 <= stage[maker] < own:
                return True
    return False
