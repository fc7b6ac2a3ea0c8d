"""offload: a joint function that keeps saved activations on the host between forward and backward.

As NVIDIA's Transformer Engine does it with two buffers (``pytorch/cpu_offload_v1.py``,
``AsyncDoubleBufferGroupOffloadHandler``; ``cpu_offloading_num_layers`` of Megatron-LM): what a layer saves is
copied in one go after its forward pass, while the next layer runs, and back while the layer runs that comes
before it in backward. (Where few of many layers are offloaded, Transformer Engine gives a copy the time of
several layers, and the device holds for as long what is copied; here it is always one.)
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple

from distsim.errors import PlanError
from distsim.ir import Function, Op, Value
from distsim.ir.maker import FunctionMaker
from distsim.ir.rewrite import rewire_op, substitute
from distsim.transforms.recompute.joint import Joint, find_pairs

Layer = tuple[Value, Value]
"""A block by a result of its forward Call that others than its backward Call read, and one of this."""


def layers_of(function: Function) -> tuple[Layer, ...]:
    """Return the blocks of a joint function, a forward Call with its backward Call each, in order.

    They are known by the same values after :func:`rematerialize`, when a Call may save nothing of its own.
    """
    pairs = find_pairs(Joint.of(function))
    return tuple([(pair.forward.outputs[pair.required[0]], pair.backward.outputs[0]) for pair in pairs])


def offload(function: Function, count: int, layers: Sequence[Layer], stages: Sequence[int] = ()) -> Function:
    """Return the joint function in which the first ``count`` blocks of each stage are offloaded.

    ``layers`` are all of its blocks, as they were before it was rematerialized: one that runs again saves its
    inputs. What a block saves are the values of the forward pass, but for what follows from parameters alone,
    that its forward Call reads or makes last and its backward Call first. ``Offload`` copies them when the
    Call has run, and the block after the next one does not begin before that is done: saved values of two
    blocks are on the device at a time. Nor does what follows on the last block of a stage, so that with all
    blocks of a stage offloaded the last copy is waited for. ``Fetch`` brings them back when the backward Call
    of the block before it (in the order of backward) begins, or its own at the end of a stage. ``stages``
    says how many blocks each pipeline stage will have: by default one has all.

    Inputs and outputs are those of ``function``. Raises :class:`PlanError` for more blocks than a stage has,
    where none of them saves anything, and for stages of other blocks.
    """
    joint = Joint.of(function)
    stages = stages or (len(layers),)
    if sum(stages) != len(layers):
        raise PlanError(
            f"offload={count}: the stages have {sum(stages)} layers, {function.name} has {len(layers)} "
            "blocks with a backward pass; use stages=layers, stages=default or layers as in 3-4-4-3"
        )
    if count > max(stages):
        where = f", at most {max(stages)} a stage" if len(stages) > 1 else ""
        raise PlanError(
            f"offload={count}: {function.name} has {len(layers)} blocks that repeat{where}; use at most "
            f"offload={max(stages)}"
        )
    makers = {value: op for op in function.ops for value in op.outputs}
    blocks = [_LayerCalls(makers[ahead], makers[behind]) for ahead, behind in layers]
    plan = _CopyPlan(joint)
    end = 0
    for number in stages:
        begin, end = end, end + number
        plan.stage(blocks[begin:end], count)
    if not plan.saved:
        raise PlanError(
            f"offload={count}: of the {len(layers)} blocks of {function.name} those to be offloaded save no "
            "activations; use offload=0"
        )
    return _CopyWriter(plan).run()


class _LayerCalls(NamedTuple):
    forward: Op
    backward: Op


@dataclass
class _CopyPlan:
    """What is offloaded, and by the op of the function after or before which what is done.

    ``saved`` are the values of a block by its forward Call. After a Call in ``offloads`` those of the Calls
    listed are copied and waited for; before one in ``fetches`` they are fetched.
    """

    joint: Joint
    saved: dict[Op, list[Value]] = field(default_factory=dict[Op, list[Value]])
    offloads: dict[Op, list[Op]] = field(default_factory=dict[Op, list[Op]])
    fetches: dict[Op, list[Op]] = field(default_factory=dict[Op, list[Op]])

    def __post_init__(self) -> None:
        joint = self.joint
        self.place = {op: number for number, op in enumerate(joint.function.ops)}
        self.carried = {value for op in joint.forward for value in op.inputs}
        fixed = _fixed(joint)
        ends: dict[Value, Op] = {}  # the op of the forward pass that reads or makes a value last
        first: dict[Value, int] = {}  # where it is read first after the forward pass
        for op in joint.function.ops:
            if op in joint.forward:
                ends.update(dict.fromkeys((*op.inputs, *op.outputs), op))
            elif op not in joint.constants:
                for value in op.inputs:
                    first.setdefault(value, self.place[op] if joint.behind(op) else -1)
        first.update(dict.fromkeys(joint.function.outputs, -1))
        self.ending: dict[Op, list[tuple[Value, int]]] = {}
        for value in joint.made:
            if value in first and value not in fixed:
                self.ending.setdefault(ends[value], []).append((value, first[value]))

    def stage(self, blocks: Sequence[_LayerCalls], count: int) -> None:
        """Take a stage of these blocks into account."""
        for number, (forward, backward) in enumerate(blocks[:count]):
            begins = self.place[backward]
            saved = [value for value, read in self.ending.get(forward, ()) if read >= begins]
            if saved:
                self.saved[forward] = saved
                after = blocks[min(number + 1, len(blocks) - 1)].forward
                self.offloads.setdefault(after, []).append(forward)
        back = sorted(blocks, key=lambda block: self.place[block.backward])
        for number, block in enumerate(back):
            if block.forward in self.saved:
                before = back[max(number - 1, 0)].backward
                self.fetches.setdefault(before, []).append(block.forward)


class _CopyWriter:
    """Writes the ops again; ``again`` maps a value to what backward reads in its place."""

    def __init__(self, plan: _CopyPlan) -> None:
        self.plan, self.joint = plan, plan.joint
        self.maker = FunctionMaker(self.joint.function.name)
        self.later: dict[Value, Value] = {}  # what waited for a copy
        self.ready: dict[Op, list[Value]] = {}  # what is copied of a block
        self.held: dict[Op, tuple[Value, ...]] = {}  # what was copied of it
        self.again: dict[Value, Value] = {}
        self.late: set[Value] = set()

    def run(self) -> Function:
        function, plan = self.joint.function, self.plan
        self.maker.adopt_inputs(function.inputs)
        for op in function.ops:
            for block in plan.fetches.get(op, ()):
                self._fetch(block, op)
            behind = self.joint.behind(op)
            self.maker.adopt(rewire_op(op, self.later | self.again if behind else self.later))
            if behind:
                self.late.update(op.outputs)
            if op in plan.saved:
                self._begin(op)
            if op in plan.offloads:
                self._offload(plan.offloads[op], op)
        self.maker.set_outputs(function.outputs)
        return self.maker.finalize()

    def _wait(self, value: Value, *others: Value) -> Value:
        return self.maker.add("OptimizationBarrier", [value, *others], output_names=[value.name])[0]

    def _result(self, block: Op) -> Value:
        """Return what the forward pass goes on with after a block."""
        return [value for value in block.outputs if value in self.plan.carried][-1]

    def _begin(self, block: Op) -> None:
        """Let what is copied of a block wait for its end, on its stage, wherever it was made."""
        first, *rest = substitute(self.plan.saved[block], self.later)
        self.ready[block] = [self._wait(first, self._result(block)), *rest]

    def _offload(self, blocks: Sequence[Op], last: Op) -> None:
        """Copy what blocks save; what follows on the last one waits for it."""
        for block in blocks:
            names = [value.name for value in self.ready[block]]
            self.held[block] = self.maker.add("Offload", self.ready.pop(block), output_names=names)
        result = self._result(last)
        waited = [self.held[block][0] for block in blocks]
        self.later[result] = self._wait(self.later.get(result, result), *waited)

    def _fetch(self, block: Op, reader: Op) -> None:
        """Copy what a block saves back, once the gradients have arrived that an op reads."""
        first, *rest = self.held[block]
        arrived = [value for value in dict.fromkeys(reader.inputs) if value in self.late]
        saved = self.plan.saved[block]
        names = [value.name for value in saved]
        made = self.maker.add("Fetch", [self._wait(first, *arrived), *rest], output_names=names)
        self.again.update(zip(saved, made, strict=True))


def _fixed(joint: Joint) -> set[Value]:
    """Return what follows from parameters, state and constants alone, such as weights that were gathered."""
    found = set(joint.free)
    for op in joint.function.ops:
        if op in joint.forward:
            found.update(_fixed_outputs(op, found))
    return found


def _fixed_outputs(op: Op, fixed: AbstractSet[Value]) -> list[Value]:
    if all(value in fixed for value in op.inputs):
        return list(op.outputs)
    if not op.is_call:
        return []
    inner = {own for own, value in zip(op.callee.inputs, op.inputs, strict=True) if value in fixed}
    for each in op.callee.ops:
        inner.update(_fixed_outputs(each, inner))
    return [value for value, own in zip(op.outputs, op.callee.outputs, strict=True) if own in inner]
