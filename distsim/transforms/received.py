"""Recomputation stays within a stage: what a stage received in the forward pass it keeps."""

from __future__ import annotations

from dataclasses import replace

from distsim.ir import Function, Op
from distsim.transforms.numbered import Numbered
from distsim.transforms.rematerialize.phases import Joint
from distsim.transforms.rematerialize.recompute import recompute
from distsim.transforms.stages import StageMap


def keep_received(function: Numbered, assigned: StageMap) -> Numbered | None:
    """Return the function in which no stage reads what another one computes again; None: it is so already.

    A backward op on another stage than the forward one reads the forward value, which its stage received in
    forward. What is computed again is so for the ops of its own stage only: right before the first of
    them, once the gradients have arrived that this one reads.
    """
    if not _misplaced(function, assigned):
        return None
    stage, again = assigned.stage, function.originals
    ops: list[Op] = []
    stages: dict[Op, int] = {}
    for number, op in enumerate(function.ops):
        if number in function.copies:
            continue
        read = tuple([function.values[again.get(value, value)] for value in function.reads[number]])
        ops.append(op if read == op.inputs else replace(op, inputs=read))
        stages[ops[-1]] = stage[number]
    outputs = tuple([function.values[value] for value in function.outputs])
    plain = Joint.of(Function(function.name, tuple(function.inputs), tuple(ops), outputs))
    dropped = {function.values[value] for value in again.values()}
    saved = {value for value in plain.made if value not in dropped}
    return Numbered(recompute(plain, saved, stages).function)


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
