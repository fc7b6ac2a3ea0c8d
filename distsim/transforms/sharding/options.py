"""The strategies that the ops of a function may have along one axis, for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from distsim.ops import Pieces
from distsim.ops.operator import factors_of, labels_of
from distsim.transforms.sharding.layout import PARTIAL, REPLICATED, State
from distsim.transforms.sharding.problem_graph import Node, Structure
from distsim.transforms.sharding.strategies import Allowed, Candidate, Strategy, candidates, rule_of

Ids = tuple[int, ...]
"""Numbers of states, or of an op's options."""
PiecesBySize = dict[int, tuple[tuple[int, ...], ...]]
"""By size of a dimension, the pieces that some op makes of it."""


@dataclass(frozen=True, slots=True)
class Option:
    """A strategy of an op, with the numbers of its states."""

    strategy: Strategy
    candidate: Candidate
    inputs: Ids
    outputs: Ids


class Options:
    """What every op may do, and the states of groups that are given; both also in numbers of states."""

    def __init__(
        self,
        structure: Structure,
        allowed: Callable[[Node], Allowed],
        given: Mapping[int, State],
        pieces: PiecesBySize,
    ) -> None:
        self._structure = structure
        self._numbers: dict[State, int] = {REPLICATED: 0, PARTIAL: 1}
        self.of: tuple[tuple[Option, ...], ...] = tuple(
            [
                tuple([self._option(c) for c in candidates(n.signature, _where_made(n, allowed(n)), pieces)])
                for n in structure.nodes
            ]
        )
        """The options of each op, in the order of the structure."""
        self.given: dict[int, int] = {group: self._number(state) for group, state in given.items()}
        self.states: tuple[State, ...] = tuple(self._numbers)

    def that_fit(self, ranks: int, parts: int) -> list[Ids]:
        """Return per op the options that there are on so many ranks, the batch in so many parts."""
        return [
            tuple([i for i, option in enumerate(options) if option.candidate.fits(ranks, parts)])
            for options in self.of
        ]

    def reachable(self, fitting: Sequence[Ids]) -> list[Ids]:
        """Return per group the states that something makes or asks for, through Calls as well."""
        wanted = [1] * len(self._structure.groups)  # sets of states as bits; all may be replicated
        made = list(wanted)
        for node, options, chosen in zip(self._structure.nodes, self.of, fitting, strict=True):
            for index in chosen:
                for number, state in zip(node.inputs, options[index].inputs, strict=True):
                    wanted[number] |= 1 << state
                for number, state in zip(node.outputs, options[index].outputs, strict=True):
                    made[number] |= 1 << state
        changed = True
        while changed:
            changed = False
            for tie in self._structure.ties:
                forth, back = made[tie.source] | made[tie.target], wanted[tie.source] | wanted[tie.target]
                if forth != made[tie.target] or back != wanted[tie.source]:
                    made[tie.target], wanted[tie.source] = forth, back
                    changed = True
        both = [m | w for m, w in zip(made, wanted, strict=True)]
        ids = {bits: tuple([i for i in range(len(self.states)) if bits >> i & 1]) for bits in set(both)}
        return [ids[bits] for bits in both]

    def _option(self, candidate: Candidate) -> Option:
        strategy = candidate.strategy
        inputs = tuple([self._number(state) for state in strategy.inputs])
        outputs = tuple([self._number(state) for state in strategy.outputs])
        return Option(strategy, candidate, inputs, outputs)

    def _number(self, state: State) -> int:
        return self._numbers.setdefault(state, len(self._numbers))


def pieces_of(structure: Structure) -> PiecesBySize:
    """Return, by size of a dimension, the pieces that some op makes of such a dimension."""
    found: dict[int, dict[tuple[int, ...], None]] = {}
    for node in structure.nodes:
        rule = rule_of(node.signature)
        for dim in (dim for dims in (*rule.inputs, *rule.outputs) for dim in dims) if rule else ():
            for label in labels_of(dim):
                if isinstance(label, Pieces):
                    found.setdefault(sum(label.sizes), {})[label.sizes] = None
    return {size: tuple(pieces) for size, pieces in found.items()}


def _where_made(node: Node, allowed: Allowed) -> Allowed:
    """Allow also the factors that no input has: the op makes the same on every rank, so may make less."""
    rule = rule_of(node.signature)
    if rule is None:
        return allowed
    inputs = {factor for dims in rule.inputs for dim in dims for factor in factors_of(dim)}
    outputs = {factor for dims in rule.outputs for dim in dims for factor in factors_of(dim)}
    own = outputs - inputs
    return lambda factor, pieces: 0 if factor in own else allowed(factor, pieces)
