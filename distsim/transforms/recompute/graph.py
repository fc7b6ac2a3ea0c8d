"""A joint function as the joint graph that :mod:`distsim.transforms.recompute.saves` reads."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from distsim.cost.cost_model import DeviceCosts
from distsim.ir import Op, Value, all_ops, callees
from distsim.ops import operator, signature_of, work
from distsim.transforms.recompute.joint import Joint, Pair
from distsim.transforms.recompute.saves import (
    EVERY_OUTPUT,
    JointGraph,
    JointNode,
    NodeKind,
    NodeRole,
    Phase,
    Tag,
    Trait,
)


@dataclass(frozen=True, eq=False)
class Marks:
    """What a user asks of values: tags, the numbers of the checkpointing regions that they belong to, and
    those that a first partition saved, to be saved again."""

    tags: Mapping[Value, Tag]
    regions: Mapping[Value, int]
    replay: AbstractSet[Value]

    def of(self, pair: Pair) -> Hashable:
        """Return what is asked of the values of a pair, as a key."""
        if not (self.tags or self.regions or self.replay):
            return ()
        functions = [each for callee in pair.callees for each in (*callees(callee), callee)]
        inside = [v for each in functions for op in each.ops for v in op.outputs]
        inside += [v for callee in pair.callees for v in callee.inputs]
        return tuple(
            [
                (value, self.tags.get(value), self.regions.get(value), value in self.replay)
                for value in dict.fromkeys(inside)
                if value in self.tags or value in self.regions or value in self.replay
            ]
        )


@dataclass(frozen=True, eq=False)
class ValueGraph:
    """A joint graph and the value that each node stands for; None for a tuple."""

    graph: JointGraph
    values: tuple[Value | None, ...]

    def chosen(self, nodes: Iterable[int]) -> set[Value]:
        """Return the values of these nodes."""
        return {value for value in map(self.values.__getitem__, nodes) if value is not None}


def graph_of(joint: Joint, marks: Marks, costs: DeviceCosts) -> ValueGraph:
    """Return the graph of a joint function; ``costs`` say how long it takes to compute a value again.

    A node per value, and one for the tuple that an op with several results makes. The pass in which an op
    is recorded is that of the joint function; what runs once per step has no nodes. Backward ops that read
    no gradient (the gradient of the loss is made of forward values) read a tangent of no size, with which
    the backward pass begins. What a Call returns is to be saved unless it is tagged otherwise.
    """
    return _Grapher(joint, marks, costs).run()


class _Grapher:
    def __init__(self, joint: Joint, marks: Marks, costs: DeviceCosts) -> None:
        self.joint, self.marks, self.costs = joint, marks, costs
        self.nodes: list[JointNode] = []
        self.values: list[Value | None] = []
        self.number: dict[Value, int] = {}

    def run(self) -> ValueGraph:
        function = self.joint.function
        for value in function.inputs:
            tangent = value in self.joint.tangents
            self.add(value, role=NodeRole.TANGENT if tangent else NodeRole.PRIMAL, traits=self.free(value))
        self.nodes.append(JointNode(f"{len(self.nodes)}.begin", role=NodeRole.TANGENT))
        self.values.append(None)
        begin = len(self.nodes) - 1
        late = set(self.joint.tangents)
        for op in function.ops:
            if op in self.joint.constants:
                for value in op.outputs:
                    self.add(value, role=NodeRole.CONSTANT, traits=Trait.FREE)
                continue
            if op in self.joint.steps:
                continue
            ahead = op in self.joint.forward
            inputs = tuple([self.number[v] for v in op.inputs])
            if not ahead:
                inputs = inputs if any(v in late for v in op.inputs) else (*inputs, begin)
                late.update(op.outputs)
            self.op(op, inputs, Phase.FORWARD if ahead else Phase.BACKWARD)
        front, back = self.outputs()
        graph = JointGraph(tuple(self.nodes), (*front, *back), len(front))
        return ValueGraph(graph, tuple(self.values))

    def outputs(self) -> tuple[list[int], list[int]]:
        """Return what each pass returns, to the caller or to what runs once per step."""
        joint, made = self.joint, self.joint.made
        given = joint.function.outputs
        front = [given[i] for i in joint.outputs]
        back = [v for i, v in enumerate(given) if i not in joint.outputs]
        for op in joint.function.ops:
            for value in op.inputs if op in joint.steps else ():
                (front if value in made else back).append(value)
        known = [
            dict.fromkeys([self.number[v] for v in values if v in self.number]) for values in (front, back)
        ]
        return list(known[0]), list(known[1])

    def free(self, value: Value) -> Trait:
        return Trait.FREE if value in self.joint.free else Trait.NONE

    def add(
        self,
        value: Value,
        inputs: tuple[int, ...] = (),
        role: NodeRole = NodeRole.OP,
        phase: Phase | None = None,
        item: int | None = None,
        seconds: float = 0.0,
        traits: Trait = Trait.NONE,
        maker: str = "",
    ) -> None:
        """Add the node of a value, which an op of the type ``maker`` makes, if one does."""
        self.number[value] = len(self.nodes)
        region = self.marks.regions.get(value)
        tag = self.marks.tags.get(value, self.own_tag(phase, maker))
        self.nodes.append(
            JointNode(
                f"{len(self.nodes)}.{value.name}",
                inputs,
                value.type.nbytes,
                role=role,
                phase=phase,
                tag=tag,
                replay=EVERY_OUTPUT if value in self.marks.replay else None,
                region=region,
                item=item,
                seconds=seconds,
                traits=traits,
                op=maker,
            )
        )
        self.values.append(value)

    def own_tag(self, phase: Phase | None, maker: str) -> Tag | None:
        """Return the tag of what nobody tagged."""
        return Tag.MUST_SAVE if maker == "Call" and phase is Phase.FORWARD else None

    def op(self, op: Op, inputs: tuple[int, ...], phase: Phase) -> None:
        traits, seconds, maker = traits_of(op), self.costs.seconds(op), op.op_type
        if len(op.outputs) == 1:
            self.add(op.outputs[0], inputs, phase=phase, seconds=seconds, traits=traits, maker=maker)
            return
        tuple_ = len(self.nodes)
        again = tuple([i for i, value in enumerate(op.outputs) if value in self.marks.replay])
        self.nodes.append(
            JointNode(
                f"{tuple_}.{op.op_type}",
                inputs,
                kind=NodeKind.TUPLE,
                phase=phase,
                tag=self.own_tag(phase, maker),
                replay=again or None,
                seconds=seconds,
                traits=traits,
                op=maker,
            )
        )
        self.values.append(None)
        for index, value in enumerate(op.outputs):
            self.add(value, (tuple_,), phase=phase, item=index, maker=maker)


def traits_of(op: Op) -> Trait:
    """Return what the rules that ban recomputation ask of an op.

    Work on the matrix units is compute-intensive, a Call is when something in it is. All else but
    communication is bound by memory: it may be recomputed, and runs in one kernel with its like.
    """
    if op.is_call:
        inside = [traits_of(inner) for inner in all_ops(op.callee)]
        both = Trait.COLLECTIVE | Trait.COMPUTE_INTENSIVE
        found = Trait.NONE
        for traits in inside:
            found |= traits & both
        return found
    meaning = operator(op.op_type)
    if meaning.communication is not None:
        return Trait.ALLOWED if meaning.communication.kind == "local" else Trait.COLLECTIVE
    if meaning.view:
        return Trait.VIEW | Trait.ALLOWED | Trait.FUSIBLE
    demand = work(signature_of(op))
    if demand is not None and demand.matrix:
        return Trait.COMPUTE_INTENSIVE
    extra = Trait.CONCATENATION if op.op_type == "Concat" else Trait.NONE
    return Trait.ALLOWED | Trait.FUSIBLE | extra
