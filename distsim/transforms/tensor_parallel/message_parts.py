"""Messages between stages in parts: each tensor-parallel rank sends its part of what all of them hold alike.

What they send is then gathered by the ranks that receive it, over the faster links within a node: the
scatter/gather optimization of Narayanan et al. 2021 (section 4.1). Megatron-LM's
``scatter_gather_tensors_in_pipeline`` does so since 27fc4689 of January 2021, by default since 72e4230b of
February 2021, until 3c92fa93 of March 2023 (megatron/p2p_communication.py: a view of the flat tensor,
``split_tensor_into_1d_equal_chunks``, and ``gather_split_1d_tensor``; whole where the ranks do not divide its
elements); DeepSpeed's pipeline engine does (runtime/pipe/engine.py: ``is_pipe_partitioned``,
``is_grad_partitioned``). What ranks hold in parts already, as beside sequence parallelism, goes as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from distsim.hardware.rank_axes import TENSOR, over_tensor
from distsim.ir import Attributes, Function, Mesh, Op, Tensor, Value, place_of
from distsim.ir.type import as_tensor
from distsim.ops import operator
from distsim.ops.coalescing import moved_values
from distsim.program.block import FIRST_CALL, Block, StageBlocks
from distsim.transforms.sharding.layout import REPLICATED, Placement

_AXIS = Attributes({"axis": TENSOR})
_WHOLE_AGAIN = ("MPIAllreduce", "MPIAllgather")
"""What every rank has alike that is summed, or gathered, over them."""

MessageKeys = Mapping[tuple[Value, int], Value]
"""Of the key of a message that of its part (-1), and of what a stage gathers of it."""


def send_parts(
    stages: Sequence[StageBlocks], inputs: Mapping[Value, Placement], outputs: Collection[Value], ranks: int
) -> tuple[tuple[StageBlocks, ...], MessageKeys]:
    """Return the blocks of all stages, of which passes send parts of what ``ranks`` of tp hold alike, and the
    keys that were made for that.

    ``inputs`` are the keys of the inputs of the whole, with how each lies on the ranks, ``outputs`` those of
    its outputs.
    """
    alike = {
        key: all(
            state == REPLICATED or not over_tensor(axis.name)
            for axis, state in zip(place.axes, place.states, strict=True)
        )
        for key, place in inputs.items()
    }
    passes = [(stage, forward) for stage, (forward, _, _) in enumerate(stages)]
    passes += [(stage, backward) for stage, (_, backward, _) in enumerate(stages)][::-1]
    ahead = [(stage, block) for stage, own in enumerate(stages) for _, block in own[2]]
    ahead = [(stage, block) for stage, block in ahead if block.place == FIRST_CALL]
    ranks_alike, maker = _RanksAlike(), dict[Value, int]()
    for stage, block in (*ahead, *passes):
        given = tuple([alike.get(key, False) for key in block.inputs])
        alike.update(zip(block.outputs, ranks_alike.outputs(block.function, given), strict=True))
        maker.update(dict.fromkeys(block.outputs, stage))
    sent = {
        key
        for stage, block in passes
        for key in block.inputs
        if maker.get(key, stage) != stage and alike[key] and _divides(key, ranks)
    }
    read = [{*outputs, *blocks[0].inputs, *blocks[1].inputs} for blocks in stages]
    rewriter = _Rewriter(sent, maker, ranks)
    made = tuple([rewriter.stage(stage, blocks, read[stage]) for stage, blocks in enumerate(stages)])
    return made, rewriter.keys


def carried_keys(values: Mapping[Value, Value], one: MessageKeys, two: MessageKeys) -> dict[Value, Value]:
    """Return the keys of messages of two functions that differ in sizes alone, as ``values`` do."""
    return {key: two[values.get(message, message), how] for (message, how), key in one.items()}


def _divides(key: Value, ranks: int) -> bool:
    return isinstance(key.type, Tensor) and key.type.rank > 1 and key.type.size % ranks == 0


class _RanksAlike:
    """Tells which results of functions all ranks of tp have alike, given which operands they have so."""

    def __init__(self) -> None:
        self.known: dict[tuple[Function, tuple[bool, ...]], tuple[bool, ...]] = {}

    def outputs(self, function: Function, given: tuple[bool, ...]) -> tuple[bool, ...]:
        """Return it of each output of a function."""
        found = self.known.get((function, given))
        if found is None:
            alike = dict(zip(function.inputs, given, strict=True))
            for op in function.ops:
                operands = tuple([alike[value] for value in op.inputs])
                if op.subfunctions:
                    alike.update(zip(op.outputs, self.outputs(op.callee, operands), strict=True))
                    continue
                alike.update(_made_alike(op, alike))
            found = self.known[function, given] = tuple([alike[value] for value in function.outputs])
        return found


def _made_alike(op: Op, alike: Mapping[Value, bool]) -> dict[Value, bool]:
    """Return which results of an op, which calls nothing, all ranks of tp have alike."""
    axis, mesh = op.attributes.get("axis"), place_of(op.inputs[0]) if op.inputs else None
    if operator(op.op_type).communication is None or not isinstance(mesh, Mesh) or not isinstance(axis, str):
        return dict.fromkeys(op.outputs, all(alike[value] for value in op.inputs))
    over = [each for each in mesh.axes_of(axis) if over_tensor(each)]
    if over:  # all of the ranks of tp, or some, which have other experts
        whole = axis == TENSOR and op.op_type in _WHOLE_AGAIN
        return dict.fromkeys(op.outputs, whole)
    return {made: alike[value] for value, made in zip(moved_values(op), op.outputs, strict=True)}


@dataclass(frozen=True)
class _MessageChange:
    """What becomes of a function: outputs that are sent, and whether each is returned whole as well; inputs
    that are gathered, and those of them that are returned."""

    sent: tuple[tuple[int, bool], ...]
    gathered: tuple[int, ...]
    handed: tuple[int, ...]


class _Rewriter:
    def __init__(self, sent: set[Value], maker: Mapping[Value, int], ranks: int) -> None:
        self.sent, self.maker, self.ranks = sent, maker, ranks
        self.keys: dict[tuple[Value, int], Value] = {}
        self.made: dict[tuple[Function, _MessageChange], Function] = {}

    def stage(self, stage: int, blocks: StageBlocks, read: set[Value]) -> StageBlocks:
        """Return the blocks of a stage, whose passes read these keys."""
        forward, backward, updates = blocks
        both = {*forward.inputs} & {*backward.inputs}
        return (
            self._block(forward, stage, read, both, ()),
            self._block(backward, stage, read, (), both),
            updates,
        )

    def _block(
        self,
        block: Block,
        stage: int,
        read: Collection[Value],
        handed: Collection[Value],
        there: Collection[Value],
    ) -> Block:
        """Return a pass; it hands on what it gathers that is ``handed``, what is ``there`` it reads whole."""
        arriving = [key in self.sent and self.maker[key] != stage for key in block.inputs]
        gathered = [i for i, key in enumerate(block.inputs) if arriving[i] and key not in there]
        leaving = [i for i, key in enumerate(block.outputs) if key in self.sent]
        change = _MessageChange(
            tuple([(i, block.outputs[i] in read) for i in leaving]),
            tuple(gathered),
            tuple([i for i in gathered if block.inputs[i] in handed]),
        )
        inputs = [
            (self._key(key, stage) if key in there else self._key(key, -1)) if own else key
            for key, own in zip(block.inputs, arriving, strict=True)
        ]
        outputs = list(block.outputs)
        for place, whole in change.sent:
            part = self._key(block.outputs[place], -1)
            outputs[place : place + 1] = [block.outputs[place] if whole else part]
            outputs += [part] if whole else []
        outputs += [self._key(block.inputs[i], stage) for i in change.handed]
        if not (change.sent or gathered or any(arriving)):
            return block
        ahead, behind = ("",) * (2 * len(gathered)), ("",) * len(change.sent)
        return replace(
            block,
            function=self._function(block.function, change),
            accumulating=block.accumulating and self._function(block.accumulating, change),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            names=(*ahead, *block.names, *behind) if block.names else (),
            accumulating_names=(*ahead, *block.accumulating_names, *behind)
            if block.accumulating_names
            else (),
        )

    def _key(self, key: Value, how: int) -> Value:
        """Return the key of the part of a message (-1), or of what a stage gathers of it."""
        if (key, how) not in self.keys:
            self.keys[key, how] = Value(key.name, self._part(key) if how < 0 else key.type)
        return self.keys[key, how]

    def _part(self, value: Value) -> Tensor:
        whole = as_tensor(value.type, value.name)
        return whole.with_shape((whole.size // self.ranks,))

    def _function(self, function: Function, change: _MessageChange) -> Function:
        if not (change.sent or change.gathered):
            return function
        found = self.made.get((function, change))
        if found is None:
            inputs, ops, outputs = list(function.inputs), list[Op](), list(function.outputs)
            for place in change.gathered:
                whole = inputs[place]
                type_ = self._part(whole)
                part = inputs[place] = Value(whole.name, type_)
                flat = Value(whole.name, type_.with_shape((self.ranks * type_.size,)))
                ops.append(Op("MPIAllgather", (part,), (flat,), Attributes({"axis": TENSOR, "dim": 0})))
                shape = Attributes({"shape": as_tensor(whole.type, whole.name).shape})
                ops.append(Op("Unflatten", (flat,), (whole,), shape))
            ops += function.ops
            for place, kept in change.sent:
                whole = function.outputs[place]
                part = Value(whole.name, self._part(whole))
                ops.append(Op("LocalPart", (whole,), (part,), _AXIS))
                if kept:
                    outputs.append(part)
                else:
                    outputs[place] = part
            outputs += [function.inputs[place] for place in change.handed]
            found = replace(function, inputs=tuple(inputs), ops=tuple(ops), outputs=tuple(outputs))
            self.made[function, change] = found
        return found
