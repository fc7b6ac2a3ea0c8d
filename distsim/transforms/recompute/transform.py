"""rematerialize: a joint function that saves less and computes again what it does not save."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial

from distsim.cost.cost_model import CostModel, DeviceCosts
from distsim.errors import PlanError
from distsim.ir import Device, Function, Op, Topology, Value, all_ops, trim
from distsim.ir.device import devices_of
from distsim.ir.type import Tensor
from distsim.ops import operator
from distsim.ops.conversion import ONCE
from distsim.transforms.recompute.graph import Marks, graph_of
from distsim.transforms.recompute.joint import ChangedPair, Joint, Pair, changed_pair, find_pairs, with_calls
from distsim.transforms.recompute.policies import Policy, Rule, Run, as_read, by_region, policy_named
from distsim.transforms.recompute.recompute import recompute
from distsim.transforms.recompute.saves import Tag


def rematerialize(
    function: Function,
    policy: Policy | str = "none",
    tags: Mapping[Value, Tag] | None = None,
    regions: Mapping[Value, int] | None = None,
    replay: Iterable[Value] = (),
    costs: DeviceCosts | None = None,
    stages: Sequence[int] = (),
) -> Function:
    """Return the joint function in which backward reads what the policy saves, and recomputes the rest.

    ``function`` is forward, backward and perhaps the optimizer; the loss, its first scalar output, tells
    what is forward. A *block* is a forward Call and the backward Call that reads what it saves: the pair
    is rewritten as one, once for all Calls of the same callees wired alike. Of other Calls no part is
    recomputed. The copies stand right before the first op that needs them, those of a block that runs again
    as a whole (:class:`Run`) before the first op of its backward pass, behind an ``OptimizationBarrier`` that
    waits for the gradient there, so that the recomputation of a block begins when its backward pass does.

    ``tags`` and ``regions`` say of values of ``function`` and of its callees what a user asks of them. Where
    the policy has no rule, what is tagged so, or is of a region, is recomputed. What is made once a step
    (:data:`ONCE`) is saved unless it is tagged. ``replay`` are the values that a first partition saved; they
    are for the policy :data:`REPLAY`. ``costs`` say how long ops take: by default those of a
    :class:`CostModel` on one of the devices of the function. ``stages`` says how many blocks each pipeline
    stage will have, for policies that count them: by default one has all.

    Inputs and outputs are those of ``function``. Raises :class:`PlanError` for a policy that is unknown,
    or that is for blocks where there are none.

    >>> from distsim.models import gpt
    >>> from distsim.transforms import SGD, differentiate
    >>> step = differentiate(gpt(layers=4, hidden=64, heads=4, seq=32, batch=4, vocab=128), SGD())
    >>> again = rematerialize(step, "full")
    >>> len(again.ops) >= len(step.ops), [v.name for v in again.outputs] == [v.name for v in step.outputs]
    (True, True)
    """
    policy = policy_named(policy) if isinstance(policy, str) else policy
    idle = policy.blocks is None and policy.rest is None and not policy.group
    if idle and not (tags or regions):
        return function
    once = _made_once(function) if policy.rest is not None or tags else {}
    marks = Marks({**once, **(tags or {})}, regions or {}, frozenset(replay))
    costs = costs or CostModel(Topology()).on(_some_device(function))
    return _Rematerializer(policy, marks, costs).run(function, stages)


class _Rematerializer:
    def __init__(self, policy: Policy, marks: Marks, costs: DeviceCosts) -> None:
        self.policy, self.marks, self.costs = policy, marks, costs
        self.found = False  # a part that runs again

    def run(self, function: Function, stages: Sequence[int]) -> Function:
        joint = Joint.of(function)
        calls: dict[Op, Op] = {}
        pairs = find_pairs(joint)
        stages = stages or (len(pairs),)
        self.check(function, pairs, stages)
        if self.policy.group:
            return self.grouped(joint, pairs, stages)
        places = [place for count in stages for place in range(count)]
        for number, pair in enumerate(pairs):
            rule = self.rule(self.policy.rule(number, places[number]))
            if rule is None:
                continue
            change = partial(self.rewrite, rule=rule, run=self.policy.run)
            how = self.policy, rule, self.marks.of(pair), self.costs.key
            replaced = changed_pair(pair, how, change)
            calls |= replaced.calls
            self.found = self.found or replaced.again
        if calls:
            function = with_calls(function, calls)
            joint = Joint.of(function)
        rule = self.rule(self.policy.rest)
        if rule is None:
            return function
        changed = self.rewrite(joint, rule)
        self.found = self.found or changed.again
        if self.policy.named and not self.found:
            raise PlanError(
                f"remat={self.policy}: {function.name} has no {self.policy.named}, so nothing would be "
                "recomputed; use matmuls, min_cut or full"
            )
        if self.policy.parts is not None and not self.found:
            raise PlanError(
                f"remat={self.policy}: {function.name} has no attention (a softmax between two products of "
                "activations, or the op Attention), so nothing would be recomputed; use matmuls, min_cut or "
                "full"
            )
        return changed.joint.function

    def check(self, function: Function, pairs: Sequence[Pair], stages: Sequence[int]) -> None:
        """Refuse a policy for blocks where there are none, or too few, and stages of other blocks."""
        policy, most = self.policy, max(stages)
        if sum(stages) != len(pairs):
            raise PlanError(
                f"remat={policy}: the stages have {sum(stages)} layers, {function.name} has {len(pairs)} "
                "blocks with a backward pass; use full, which counts none"
            )
        only_blocks = policy.group or (policy.blocks is not None and policy.rest is None)
        if only_blocks and most < policy.fewest:
            name = policy.text.partition(":")[0]
            fewer = f"at most {name}:{most}; or " if most else ""
            where = f"{function.name} has {len(pairs)} blocks that repeat"
            where += f", at most {most} a stage" if len(stages) > 1 else ""
            raise PlanError(
                f"remat={policy}: {where}, so nothing would be recomputed; use {fewer}min_cut or budget:X, "
                "which take single ops as well, or none"
            )
        own = {op.op_type for pair in pairs for op in all_ops(pair.forward.callee)}
        if policy.types and own.isdisjoint(policy.types):
            named = ", ".join(sorted(each for each in own if not operator(each).view))
            written = "; attention is written out: attention=flash has it as one op"
            raise PlanError(
                f"remat={policy}: the blocks of {function.name} have no {' or '.join(policy.types)}, so "
                f"nothing would be saved; name some of {named}, or use full"
                + (written if "Attention" in policy.types and "Softmax" in own else "")
            )

    def grouped(self, joint: Joint, pairs: Sequence[Pair], stages: Sequence[int]) -> Function:
        """Return the function in which groups of blocks run again, and return what others read, no more."""
        view = graph_of(joint, self.marks, self.costs)
        saved = view.chosen(as_read(view.graph))
        runs: dict[Op, list[Op]] = {}
        position = {op: number for number, op in enumerate(joint.function.ops)}
        readers: dict[Value, set[Op]] = {}
        for op in joint.function.ops:
            for value in op.inputs:
                readers.setdefault(value, set()).add(op)
        end = 0
        for count in stages:
            begin, end = end, end + count
            for at in range(begin, end, self.policy.group):
                group = pairs[at : min(at + self.policy.group, end)]
                again = [pair.forward for pair in group]
                own = {*again, *(pair.backward for pair in group)}
                first = min((pair.backward for pair in group), key=position.__getitem__)
                runs[first] = again
                saved -= {v for op in again for v in op.outputs if readers.get(v, own) <= own}
        return trim(recompute(joint, saved, runs=runs).function).function

    def rule(self, rule: Rule | None) -> Rule | None:
        """Return the rule, or the one that heeds what the user asks."""
        if rule is None and self.marks.regions:
            return by_region
        return as_read if rule is None and self.marks.tags else rule

    def rewrite(self, joint: Joint, rule: Rule, run: Run = Run.NEEDED) -> ChangedPair:
        view = graph_of(joint, self.marks, self.costs)
        saved = view.chosen(rule(view.graph))
        behind = [op for op in joint.function.ops if joint.behind(op)]
        runs = {} if run is Run.NEEDED else _together(joint, saved, behind, run)
        again = False
        if self.policy.parts is not None:
            runs = _by_part(joint, [view.chosen(part) for part in self.policy.parts(view.graph)], behind)
            again = bool(runs)
        made = joint.made
        dropped = any(v in made and v not in saved for op in behind for v in op.inputs)
        again = again or (dropped and bool(self.policy.named))
        return ChangedPair(recompute(joint, saved, runs=runs) if dropped or runs else joint, again)


def _together(joint: Joint, saved: AbstractSet[Value], behind: Sequence[Op], run: Run) -> dict[Op, list[Op]]:
    """Return what of a block runs again together, by the op with which its backward pass begins."""
    again = [
        op for op in joint.function.ops if op in joint.forward and any(v not in saved for v in op.outputs)
    ]
    if run is Run.EARLY:
        read = {v for op in behind for v in op.inputs}
        needed = [place for place, op in enumerate(again) if any(v in read - saved for v in op.outputs)]
        again = again[: max(needed, default=-1) + 1]
    first = next((op for op in behind if op.inputs), None)
    return {first: again} if first is not None and again else {}


def _by_part(joint: Joint, parts: Sequence[AbstractSet[Value]], behind: Sequence[Op]) -> dict[Op, list[Op]]:
    """Return what runs again together, the ops that make or read the values of a part, by the op before
    which it does: the first of backward that reads one.
    """
    runs: dict[Op, list[Op]] = {}
    for part in parts:
        first = next((op for op in behind if not part.isdisjoint(op.inputs)), None)
        if first is not None:
            again = [
                op
                for op in joint.function.ops
                if op in joint.forward and not part.isdisjoint((*op.inputs, *op.outputs))
            ]
            runs.setdefault(first, []).extend(again)
    return runs


def _made_once(function: Function) -> dict[Value, Tag]:
    ops = [op for op in function.ops if op.attributes.get(ONCE)]
    return dict.fromkeys([value for op in ops for value in op.outputs], Tag.MUST_SAVE)


def _some_device(function: Function) -> Device:
    for value in function.inputs:
        if isinstance(value.type, Tensor) and value.type.device is not None:
            return devices_of(value.type.device)[0]
    return Device(0, "any")
