"""Weights that stages update while the pipeline runs on: what makes their next version, and who may read it.

Each stage updates its own weights after the backward passes of a batch of microbatches (PipeDream, Narayanan
et al. 2019; PipeDream-2BW, Narayanan et al. 2021). So its update blocks are taken apart: what makes new
weights and state of the sums of a batch runs once a batch; the rest, such as a loss reduced over replicas,
once a step. Nothing of this depends on the schedule.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from distsim.errors import ScheduleError
from distsim.ir import Role, Value, needed_ops
from distsim.ops.replaced import replaced_inputs
from distsim.program.block import FIRST_CALL, Block, StageBlocks
from distsim.program.links import Maker

Updates = tuple[tuple[int, Block], ...]


@dataclass(frozen=True, eq=False)
class WeightVersions:
    """``successor`` maps the keys of parameters and state to those of their new values.

    ``each`` has per stage the blocks that run after each batch, ``last`` those that run at the end of the
    step, by round. ``sent`` has per stage what of a batch the updates of earlier stages read: where a stage
    begins within a layer, a gradient may be summed by the stage after.
    """

    successor: Mapping[Value, Value]
    each: tuple[tuple[Block, ...], ...]
    last: tuple[Updates, ...]
    sent: tuple[tuple[tuple[Value, int], ...], ...]


def weight_versions(
    name: str, blocks: Sequence[StageBlocks], makers: Mapping[Value, Maker], inputs: Collection[Value]
) -> WeightVersions:
    """Return the versions of the weights of some stages; ``inputs`` are the keys of the program's inputs.

    Raises :class:`ScheduleError` where no stage can update its weights alone: for parameters that stages
    share, for sums of a batch that a pass makes beside those of a step, and where nothing is updated.
    """
    for _, _, updates in blocks:
        if any(block.place == FIRST_CALL and replaced_inputs(block.function) for _, block in updates):
            raise ScheduleError(
                f"{name}: new weights are gathered in the first forward pass of a step, and without a flush "
                "they are new before that: use overlap_params=off, or 1f1b"
            )
    successor: dict[Value, Value] = {}
    later = [[(n, block) for n, block in own if block.place != FIRST_CALL] for _, _, own in blocks]
    for block in [block for own in later for _, block in own]:
        successor.update(_replaced(block, inputs))
    read = {*successor.values()}  # what is made after each batch, and what that is made of
    each: list[tuple[Block, ...]] = [() for _ in blocks]
    last: list[list[tuple[int, Block]]] = [[] for _ in blocks]
    updates = [
        (n, stage, place, block) for stage, own in enumerate(later) for place, (n, block) in enumerate(own)
    ]
    for number, stage, _, block in sorted(updates, key=lambda update: update[:3], reverse=True):
        places = _of_batch(block, read)
        rest = [place for place in range(len(block.outputs)) if place not in places]
        if places:
            each[stage] = (_part(block, places), *each[stage])
            read.update(each[stage][0].inputs)
        if rest:
            last[stage].insert(0, (number, _part(block, rest)))
    sent: list[dict[tuple[Value, int], None]] = [{} for _ in blocks]
    for stage, own in enumerate(each):
        for key in [key for block in own for key in block.inputs]:
            if makers[key].place >= 0 and makers[key].stage != stage:
                sent[makers[key].stage][key, stage] = None
    found = WeightVersions(successor, tuple(each), tuple(map(tuple, last)), tuple(map(tuple, sent)))
    _verify(name, blocks, makers, found)
    return found


def _replaced(block: Block, inputs: Collection[Value]) -> dict[Value, Value]:
    """Return the keys of weights and state, by which a block makes their new values, and those of these."""
    roles = (Role.PARAMETER, Role.STATE)
    pairs = [(block.inputs[old], block.outputs[new]) for new, old in replaced_inputs(block.function).items()]
    return {old: new for old, new in pairs if old in inputs and old.role in roles}


def _of_batch(block: Block, read: Collection[Value]) -> set[int]:
    """Return the places of the outputs of an update block that are made after each batch.

    These are those that are ``read`` then, and what has an op or an input in common with them.
    """
    function = block.function
    places = {place for place, key in enumerate(block.outputs) if key in read}
    ops = set(needed_ops(function.ops, [function.outputs[place] for place in places]))
    given = {value for op in ops for value in op.inputs} & {*function.inputs}
    for place, value in enumerate(function.outputs if places else ()):
        own = needed_ops(function.ops, [value])
        if not ops.isdisjoint(own) or not given.isdisjoint([value, *[v for op in own for v in op.inputs]]):
            places.add(place)
    return places


def _part(block: Block, places: Collection[int]) -> Block:
    """Return the block that makes some of the outputs of an update block."""
    if len(places) == len(block.outputs):
        return block
    function = block.function
    outputs = [function.outputs[place] for place in sorted(places)]
    ops = needed_ops(function.ops, outputs)
    read = {*outputs, *[value for op in ops for value in op.inputs]}
    given = [place for place, value in enumerate(function.inputs) if value in read]
    chosen = set(ops)
    names = zip(function.ops, block.names, strict=False)
    return Block(
        replace(
            function,
            inputs=tuple([function.inputs[place] for place in given]),
            ops=tuple(ops),
            outputs=tuple(outputs),
        ),
        tuple([block.inputs[place] for place in given]),
        tuple([block.outputs[place] for place in sorted(places)]),
        names=tuple([own for op, own in names if op in chosen]),
    )


def _verify(
    name: str, blocks: Sequence[StageBlocks], makers: Mapping[Value, Maker], versions: WeightVersions
) -> None:
    if not versions.successor:
        raise ScheduleError(
            f"{name}: no stage updates a weight, and a schedule without a flush is about the versions of "
            "weights; use 1f1b, or train with an optimizer"
        )
    home = {key: makers[new].stage for key, new in versions.successor.items()}
    for stage, (forward, backward, updates) in enumerate(blocks):
        ahead = [key for _, block in updates if block.place == FIRST_CALL for key in block.inputs]
        shared = [key for key in (*forward.inputs, *backward.inputs, *ahead) if home.get(key, stage) != stage]
        if shared:
            raise _shared(name, shared[0], stage, home[shared[0]])
        for update in versions.each[stage]:
            _verify_update(name, stage, update, makers)
    read = {key for updates in versions.each for update in updates for key in update.inputs}
    for forward, backward, _ in blocks:
        _verify_sums(name, forward, read, of_batch=False)
        _verify_sums(name, backward, read, of_batch=True)


def _shared(name: str, key: Value, stage: int, other: int) -> ScheduleError:
    return ScheduleError(
        f"{name}: {key.name!r} passes between stages {other} and {stage} for an update: of weights that "
        "both share (tied embeddings), or by the norm of all gradients; without a flush each stage updates "
        "its own weights alone: use 1f1b, or untie them, or clip nothing (clip=0)"
    )


def _verify_update(name: str, stage: int, update: Block, makers: Mapping[Value, Maker]) -> None:
    """Verify that an update reads weights, state and sums, of its stage or one that ends a batch before."""
    for key in update.inputs:
        maker = makers[key]
        if maker.place >= 0 and maker.stage < stage:
            raise _shared(name, key, stage, maker.stage)
        if not maker.once:
            raise ScheduleError(
                f"{name}: the update of stage {stage} reads {key.name!r}, of which each microbatch has a "
                "value; without a flush an update reads sums over microbatches: use 1f1b"
            )


def _verify_sums(name: str, block: Block, read: Collection[Value], of_batch: bool) -> None:
    """Verify that what a pass sums is all of a batch, which an update reads, or all of the step."""
    for key in block.accumulated:
        if (key in read) != of_batch:
            raise ScheduleError(
                f"{name}: {key.name!r}, a sum of {block.function.name}, is not to be had without a flush: "
                "sums of backward start again with each update, which must read them, those of forward with "
                "the step; use 1f1b"
            )
