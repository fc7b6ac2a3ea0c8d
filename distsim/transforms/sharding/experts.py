"""Experts over ranks that divide the data: along which axes of these rows go to the ranks of their experts.

Ranks of experts are the same that divide the batch, sequences or, along tp, what is between the products.
One choice says which ops run by experts. Along each axis that has some of the ranks it holds for these ops,
in place of the one of the axis: rows are divided by their experts over all such ranks together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from distsim.errors import PlanError
from distsim.ir import Function, Op, Role, Value
from distsim.ir.type import as_tensor
from distsim.ops import signature_of
from distsim.ops.parts import Groups, Parts
from distsim.ops.places import shape_of
from distsim.ops.sharding_rule import Pieces, factors_of
from distsim.transforms.sharding.layout import PARTIAL, REPLICATED, State, sharded
from distsim.transforms.sharding.problem_graph import Node, Structure
from distsim.transforms.sharding.roles import Mark, Marks, marked, propagate, propagate_back
from distsim.transforms.sharding.strategies import (
    EXPERTS,
    Allowed,
    Decision,
    Options,
    Strategy,
    divided_share,
    rule_of,
)


def expert_options(
    function: Function,
    structure: Structure,
    known: Mapping[Value, Role],
    divided: Mapping[Value, int],
    batch: Marks,
) -> Options:
    """Return the choice over ranks of experts: these inputs are ``divided`` as the batch is, experts are too.

    ``batch`` are the dimensions that carry the batch. Rows of experts go back to the rank of their tokens
    before they are added up: all-to-alls, not sums over the ranks.
    """
    number = structure.number
    given = {number[v]: REPLICATED for v in function.inputs if known[v] in (Role.INPUT, Role.CONSTANT)}
    given |= {number[v]: sharded(dim) for v, dim in divided.items()}
    experts = _of_experts(function, structure)

    def allowed(node: Node) -> Allowed:
        rule = rule_of(node.signature)
        if rule is None or rule.experts:
            return lambda factor, pieces: 0
        of_expert, of_batch = marked(node.op, experts), marked(node.op, batch)

        def test(factor: str, part: Parts) -> int | None:
            if of_batch(factor, part):
                return 0
            kept = all(any(factor in factors_of(dim) for dim in dims) for dims in rule.outputs)
            kept = kept or factor in rule.finish or not isinstance(part, Groups)
            return 0 if kept and of_expert(factor, part) else None

        return test

    return Options(structure, allowed, given, decomposed=False, context=EXPERTS)


def _of_experts(function: Function, structure: Structure) -> Marks:
    """Return the dimensions that have a place or a group for each expert: of weights, and what follows."""
    seeds: Marks = {}
    for node in structure.nodes:
        rule = rule_of(node.signature)
        if rule is not None and (rule.experts or rule.rows):
            for value, dims in zip(node.op.inputs, rule.inputs, strict=True):
                own = frozenset[Mark]((place, None) for place, dim in enumerate(dims) if dim == rule.experts)
                seeds[value] = seeds.get(value, frozenset()) | own
            ends = (*node.op.inputs, *node.op.outputs), (*rule.inputs, *rule.outputs)
            for value, dims in zip(*ends, strict=True) if rule.rows else ():
                rows = [(place, dim) for place, dim in enumerate(dims) if isinstance(dim, Pieces)]
                own = frozenset[Mark]([(place, dim.sizes) for place, dim in rows if dim.factor == rule.rows])
                seeds[value] = seeds.get(value, frozenset()) | own
    return propagate(function, propagate_back(function, seeds))


def check_experts(structure: Structure, decision: Decision, ranks: int, most: int) -> None:
    """Raise where ranks of experts do not divide them, or there are none; ``most``: of all that could be."""
    found = False
    for node in structure.nodes:
        rule = rule_of(node.signature)
        if rule is None or not rule.experts:
            continue
        found = True
        sizes = zip(node.signature.inputs, rule.inputs, strict=True)
        count = next(t.shape[dims.index(rule.experts)] for t, dims in sizes if rule.experts in dims)
        if count % ranks or decision.strategies[node.op].factor != rule.experts:
            usable = ", ".join(str(n) for n in range(1, count + 1) if count % n == most % n == 0)
            raise PlanError(
                f"ep={ranks} does not divide the {count} experts of {node.op!r}; choose one of {usable}"
            )
    if not found:
        raise PlanError(f"ep={ranks}, but {structure.name} has no experts; use ep=1")


class ByExperts:
    """What is divided by experts, as one choice over their ranks says."""

    def __init__(self, structure: Structure, choice: Decision, batch: Marks) -> None:
        self.structure, self.choice = structure, choice
        self._batch = batch
        self.strategies: dict[Op, Strategy] = {}
        self.groups: dict[int, State] = {}
        for value, number in structure.number.items():
            if self._divided(value, choice.groups[number]):
                self.groups[number] = self._state(value, choice.groups[number])
        for node in structure.nodes:
            self._add(node)

    def along(self, own: Decision) -> Decision:
        """Return the decision along an axis that has ranks of experts: its ``own`` elsewhere."""
        strategies = {**own.strategies, **self.strategies}
        return replace(
            own,
            strategies=strategies,
            divided=divided_share(self.structure.nodes, strategies) if own.strategies else own.divided,
            groups=tuple([self.groups.get(number, state) for number, state in enumerate(own.groups)]),
            choices=(*own.choices, *self.choice.choices),
        )

    def beside(self, own: Decision, outer: Sequence[Decision]) -> Decision:
        """Return the decision along an axis without ranks of experts; ``outer``: of those with, further out.

        What it divides within what these do cannot stay so once rows are exchanged along them: it is whole.
        """

        def state(number: int, state: State) -> State:
            dims = [each.groups[number].dim for each in outer if each.groups and each.groups[number].sharded]
            within = number in self.groups and state.sharded and state.dim in dims
            return REPLICATED if within else state

        if not outer or not own.groups:
            return own
        return replace(own, groups=tuple([state(*each) for each in enumerate(own.groups)]))

    def _add(self, node: Node) -> None:
        """Keep the strategy of an op that is divided by experts, or adds up what such ops made in part."""
        strategy, op = self.choice.strategies[node.op], node.op
        ends = [
            *zip(op.inputs, strategy.inputs, strict=True),
            *zip(op.outputs, strategy.outputs, strict=True),
        ]
        read = zip(node.inputs, strategy.inputs, strict=True)
        summed = any(state is PARTIAL and self.groups.get(number) is PARTIAL for number, state in read)
        if not summed and not any(self._divided(value, state) for value, state in ends):
            return
        inputs, outputs = (
            tuple([self._state(value, state) for value, state in zip(values, states, strict=True)])
            for values, states in ((op.inputs, strategy.inputs), (op.outputs, strategy.outputs))
        )
        self.strategies |= dict.fromkeys(node.ops, strategy._replace(inputs=inputs, outputs=outputs))
        for number, state in zip(node.outputs, outputs, strict=True):
            if state is PARTIAL and self.choice.groups[number] is PARTIAL:
                self.groups[number] = PARTIAL

    def _divided(self, value: Value, state: State) -> bool:
        """Whether what a state divides is places of experts, or their rows; not the batch."""
        batch = [dim for dim, _ in self._batch.get(value, ())]
        return state.sharded and (isinstance(state.pieces, Groups) or state.dim not in batch)

    def _state(self, value: Value, state: State) -> State:
        """Return a state as all axes with experts have it together: by groups, places being of one each."""
        if not self._divided(value, state) or isinstance(state.pieces, Groups):
            return state
        return sharded(state.dim, Groups((1,) * as_tensor(value.type, value.name).shape[state.dim]))


def read_by_experts(function: Function, values: Sequence[Value]) -> bool:
    """Whether products of experts read one of these values, in the function that makes them."""
    readers = [op for op in function.ops if not op.is_call and not set(values).isdisjoint(op.inputs)]
    rules = [rule_of(signature_of(op)) for op in readers]
    return any(rule is not None and rule.experts for rule in rules)


class CountedRows(NamedTuple):
    """Rows of groups of these sizes, which ranks tell each other before they send them."""

    sizes: tuple[int, ...]


def counted_rows(function: Function) -> dict[Value, CountedRows]:
    """Return the rows that counted products read, also as they are before they are cast."""
    ends = [(op.inputs[0], op.outputs[0]) for op in function.ops if op.inputs and not op.is_call]
    makers = {made: read for read, made in ends if shape_of(read) == shape_of(made)}
    found: dict[Value, CountedRows] = {}
    for op in function.ops:
        if "counted" in op.attributes and op.inputs[0] not in found:
            value, rows = op.inputs[0], CountedRows(op.attributes["sizes"])
            found[value] = rows
            if value in makers:
                found[makers[value]] = rows
    return found
