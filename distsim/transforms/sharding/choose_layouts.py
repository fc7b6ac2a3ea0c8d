"""Choosing how every op and value is placed along one axis of ranks, all at once.

One variable per op (its strategy) and one per group of values (the state in which they are handed on: a
partial sum is taken once, for all readers). A function that is called many times has its variables once,
so all of its calls are placed alike. The objective is time, counted in bytes sent: what the collectives
move, and the matrix flops of a rank at the machine's balance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from distsim.cache import Cache
from distsim.cost.efficiency import element_type
from distsim.errors import PlanError
from distsim.ops import ShardingRule
from distsim.transforms.sharding.layout import (
    AVOIDED,
    FORBIDDEN,
    PARTIAL,
    REPLICATED,
    START_BYTES,
    TOUCH_WEIGHT,
    Ids,
    Moves,
    divisible,
    moved_bytes,
)
from distsim.transforms.sharding.problem_graph import Node, Structure, overwritten
from distsim.transforms.sharding.strategies import (
    Axis,
    Decision,
    Option,
    Options,
    divided_share,
    rule_of,
    size_of,
)
from distsim.transforms.sharding.variable_elimination import EliminationProblem, Table, solve

LINK_SHARE = 1 / 7
"""What a link moves of what device memory moves: A100, 300e9 of 2.0e12 byte/s (NVIDIA A100 datasheet).
The placement is chosen before the links are known, and for all axes alike."""
UNDIVIDED = 16.0
"""Who asks for ranks wants the work divided, and the weights with it: matrix flops that are not count this
many times, so that a product stays whole only where dividing it sends far more than it saves."""
DIVIDED_SHARE = 0.67
"""A placement that divides less than this of the matrix flops all the same (small models: the backward
pass alone is two thirds) is given up for one that divides all it can, as the batch always is."""
INSISTENT = 1e7
"""How many times undivided flops count then."""
BATCH_TOUCH_WEIGHT = 1e3
"""The cost of a byte touched, over the batch and a sequence, of which every op is divided if it can be."""
WHOLE = 0
"""The number of the state REPLICATED."""
READER_WEIGHT = 1e-9
"""Breaks ties: a collective that one reader asks for is run where the value is made, so early."""


def decide(structure: Structure, axis: Axis) -> Decision:
    """Return the least-cost placement of every op and value."""
    chooser = _Chooser(structure, axis)
    if not (axis.over_time or axis.all_ops):
        found = chooser.decide(UNDIVIDED)
        if found.divided >= DIVIDED_SHARE:
            return found
    return chooser.decide(INSISTENT)


class _MoveCosts(NamedTuple):
    """What costs the same whatever the batch is divided into: of all moves, of the moves of a group by
    whether they are in the whole function and from which states to which, and of the options of an op; the
    states of all groups by the divisor and the options there are; and how much dearer moves are that take
    the sum of what is pinned."""

    all: Moves
    moves: dict[tuple[int, bool, Ids, Ids], Table]
    ops: dict[tuple[int, Ids, float, float], list[float]]
    domains: dict[tuple[int, tuple[Ids, ...]], list[Ids]]
    taken: dict[tuple[Ids, Ids], Table]


_COSTS = Cache[Options, _MoveCosts](
    "costs of layouts, by options, ranks and whether over time and of all ops", 16
)


class _Chooser:
    def __init__(self, structure: Structure, axis: Axis) -> None:
        self.structure, self.axis = structure, axis
        ways = (axis.ranks, axis.over_time, axis.all_ops)
        states = axis.options.states
        self.kept = _COSTS.get(
            axis.options, ways, lambda: _MoveCosts(Moves(states, *ways[:2]), {}, {}, {}, {})
        )
        self.divisor = axis.divisor or axis.ranks
        self.options = axis.options.that_fit(self.divisor, axis.parts)
        asked = self.divisor, tuple(self.options)
        found = self.kept.domains.get(asked)
        if found is None:
            found = self.kept.domains[asked] = self._domains()
        self.domains = found
        self.problem, self.values, self.ops = EliminationProblem(), list[int](), list[int]()
        self._pose()

    def _domains(self) -> list[Ids]:
        """A value may be in any state that its producer makes or that a reader asks for.

        One number that may be a sum over tp ranks, as of the squares of gradients, is one until it is read:
        what it is the sum of, all gradients of a step, would be chosen together otherwise.
        """
        options, groups = self.axis.options, self.structure.groups
        found: list[Ids] = []
        sums = set[int]() if self.axis.over_time else self._sums()
        for number, states in enumerate(options.reachable(self.options)):
            given = options.given.get(number)
            if given is not None:
                found.append((given,))
                continue
            shape, is_input = groups[number].type.shape, groups[number].role is not None
            kept = [
                state
                for state in states
                if divisible(shape, options.states[state], self.divisor)
                and not (is_input and options.states[state] is PARTIAL)
            ]
            if number in sums:
                kept = [state for state in kept if options.states[state] is PARTIAL]
            if number in options.spread and any(options.states[state].sharded for state in kept):
                kept = [state for state in kept if options.states[state] is not REPLICATED]
            found.append(tuple(kept))
        return found

    def _sums(self) -> set[int]:
        """Return the groups of single numbers within the function that an op may make as partial sums.

        They are sums over what some op divides: a number that all ranks have, as the gradient of the loss,
        is none.
        """
        groups, states = self.structure.groups, self.axis.options.states
        of_sums: dict[int, list[int]] = {}  # by group what is made of it by a linear op, or through Calls
        sums = set[int]()
        for node, every, chosen in zip(self.structure.nodes, self.axis.options.of, self.options, strict=True):
            for option in [every[index] for index in chosen]:
                partial = [
                    p for p, s in zip(node.outputs, option.outputs, strict=True) if states[s] is PARTIAL
                ]
                made = [place for place in partial if groups[place].type.size == 1]
                if option.strategy.factor is not None:
                    sums.update(made)
                for place, state in zip(node.inputs, option.inputs, strict=True):
                    if states[state] is PARTIAL:
                        of_sums.setdefault(place, []).extend(made)
        for tie in self.structure.ties:
            if groups[tie.source].type.size == 1:
                of_sums.setdefault(tie.source, []).append(tie.target)
        todo = list(sums)
        while todo:
            fresh = set(of_sums.get(todo.pop(), ())) - sums
            sums |= fresh
            todo += fresh
        made = {place for node in self.structure.nodes for place in node.outputs}
        return {place for place in sums & made if not groups[place].returned}

    def decide(self, insistence: float) -> Decision:
        """Return the least-cost placement when undivided flops count ``insistence`` times."""
        for number, variable in enumerate(self.ops):
            self.problem.unary[variable] = np.array(self._cost(number, insistence))
        solution = solve(self.problem)
        if not np.isfinite(solution.cost):
            agrees = "agrees" if solution.proven else "was found that agrees"
            raise PlanError(
                f"{self.structure.name}: no way to run it on {self.axis.ranks} ranks {agrees} with the "
                "placements that are given"
            )
        picked = [chosen[solution.choices[v]] for chosen, v in zip(self.options, self.ops, strict=True)]
        states = [domain[solution.choices[v]] for domain, v in zip(self.domains, self.values, strict=True)]
        return self._result(picked, states, solution.cost, solution.proven)

    def _pose(self) -> None:
        """Put the problem, but for what ops cost: all else is the same however undivided flops count."""
        self.values += [self.problem.variable(self._held(number)) for number in range(len(self.domains))]
        whole = {n: self._gathered(n) for n in self._read_by_several()}
        for number in range(len(self.options)):
            self.ops.append(self._add_op(number, whole))
        for tie in self.structure.ties:
            ends = self.domains[tie.source], self.domains[tie.target]
            table = self._moves(tie.target, tie.top, *ends) * (tie.times * self._repeats(tie.source, tie.top))
            table = self._untaken(tie.source, table, *ends)
            table = _unmoved(table, *ends) if tie.in_place else table
            self.problem.pair(self.values[tie.source], self.values[tie.target], table)

    def _held(self, number: int) -> list[float]:
        """What a value costs where it lies: to keep an input, and to send the value along other axes."""
        group, states = self.structure.groups[number], self.axis.options.states
        whole = TOUCH_WEIGHT * group.type.nbytes * group.count if group.role is not None else 0.0
        whole += self.axis.beside.get(number, 0.0)
        costs = [whole / self.axis.ranks if states[s].sharded else whole for s in self.domains[number]]
        if group.returned:  # what is returned is not a sum that is yet to be taken
            costs = [
                FORBIDDEN if states[s] is PARTIAL else cost
                for s, cost in zip(self.domains[number], costs, strict=True)
            ]
        return costs

    def _read_by_several(self) -> list[int]:
        """Return the groups, of those handed on divided, of which several products are made."""
        readers = Counter([place for node in self.structure.nodes if node.flops for place in node.inputs])
        return sorted([number for number in self.axis.options.spread if readers[number] > 1])

    def _gathered(self, number: int) -> int:
        """Return the variable that says whether what is handed on divided is brought together.

        That is done once for all readers: choices 0 and 1 are no and yes.
        """
        group, domain = self.structure.groups[number], self.domains[number]
        found = self.problem.variable([0.0, 0.0])
        table = self._moves(number, False, domain, (WHOLE,)) * (group.times * self._repeats(number, False))
        both = np.concatenate([np.zeros_like(table), table], axis=1)
        self.problem.pair(self.values[number], found, both)
        return found

    def _add_op(self, number: int, whole: Mapping[int, int]) -> int:
        problem, values = self.problem, self.values
        node, chosen = self.structure.nodes[number], self.options[number]
        options = [self.axis.options.of[number][c] for c in chosen]
        variable = problem.variable([0.0] * len(chosen))  # what it costs is put there by decide
        for index, place in enumerate(node.outputs):
            raw = tuple([option.outputs[index] for option in options])
            table = self._moves(place, node.top, raw, self.domains[place])
            table = self._untaken(
                place, table * (node.times * self._repeats(place, node.top)), raw, self.domains[place]
            )
            problem.pair(variable, values[place], table)
        taken = overwritten(node.op)
        for index, place in enumerate(node.inputs):
            asked = tuple([option.inputs[index] for option in options])
            table = self._moves(place, node.top, self.domains[place], asked)
            table = table * (node.times * self._repeats(place, node.top) * (1 + READER_WEIGHT))
            table = self._untaken(place, table, self.domains[place], asked)
            if index in taken:
                table = _unmoved(table, self.domains[place], asked)
            elif place in whole:
                read = np.array(asked) == WHOLE
                table = np.where(read, 0.0, table)
                problem.pair(whole[place], variable, np.where([read, np.zeros_like(read)], FORBIDDEN, 0.0))
            problem.pair(values[place], variable, table)
        return variable

    def _cost(self, number: int, insistence: float) -> list[float]:
        """Return what an op costs by option, which no batch changes."""
        node, chosen = self.structure.nodes[number], self.options[number]
        balance = self._flops_per_byte(node) if node.flops else 0.0
        key = number, chosen, insistence, balance
        found = self.kept.ops.get(key)
        if found is None:
            options = [self.axis.options.of[number][c] for c in chosen]
            found = self.kept.ops[key] = self._done(node, options, insistence, balance)
        return found

    def _done(
        self, node: Node, options: Sequence[Option], insistence: float, flops_per_byte: float
    ) -> list[float]:
        """Return what an op costs, wherever its operands are, by option."""
        flops = node.flops / flops_per_byte if node.flops else 0.0
        every = self.axis.over_time or self.axis.all_ops
        touched = (BATCH_TOUCH_WEIGHT if every else TOUCH_WEIGHT) * node.touched
        rule = rule_of(node.signature)
        return [
            node.times
            * (
                (flops + touched) / self.axis.ranks
                if option.strategy.factor is not None
                else insistence * flops + touched
            )
            + node.times * sum([sent + START_BYTES for sent in self._reduced(node, rule, option)])
            for option in options
        ]

    def _reduced(self, node: Node, rule: ShardingRule | None, option: Option) -> list[float]:
        """Return the bytes sent by each all-reduce within an op."""
        decomposition = rule.decompositions.get(option.strategy.factor or "") if rule else None
        if decomposition is None or decomposition.reduced is None:
            return []
        share = 2 * (self.axis.ranks - 1) / self.axis.ranks
        return [share * nbytes for nbytes in decomposition.reduced(node.signature.inputs)]

    def _moves(self, number: int, top: bool, sources: Ids, targets: Ids) -> Table:
        """Return what it costs to move a value once, which no batch changes."""
        key = number, top, sources, targets
        found = self.kept.moves.get(key)
        if found is None:
            found = self.kept.moves[key] = self._moved(*key)
        return found

    def _moved(self, number: int, top: bool, sources: Ids, targets: Ids) -> Table:
        nbytes = self.structure.groups[number].type.nbytes
        table = self.kept.all.table(nbytes, top, sources, targets)
        if number in self.structure.weights:
            # All passes use a weight as it lies: to bring it elsewhere for one of them is fewer bytes where
            # tokens are many and key heads few, but nobody does.
            table = table + AVOIDED * nbytes * np.not_equal.outer(np.array(sources), np.array(targets))
        if number not in self.axis.options.spread:
            return table
        # What is handed on divided is reduce-scattered once, not summed on all ranks by who reads it.
        states = self.axis.options.states
        summed = [[states[s] is PARTIAL and states[t] is REPLICATED for t in targets] for s in sources]
        table = np.where(np.array(summed), FORBIDDEN, table)
        if self.axis.all_ops:
            return table
        # Over tp it is gathered for products, not exchanged for a part of what they sum over: Megatron's
        # ranks gather, and scatter, beside a product (Korthikanti et al. 2022), whose bytes are not all.
        exchanged = [[s != t and states[s].sharded and states[t].sharded for t in targets] for s in sources]
        return table * np.where(np.array(exchanged), AVOIDED, 1.0)

    def _untaken(self, number: int, table: Table, sources: Ids, targets: Ids) -> Table:
        """Make it dear to take the sum of what is pinned; that is done where nothing else is possible."""
        if number not in self.structure.pinned:
            return table
        dearer = self.kept.taken.get((sources, targets))
        if dearer is None:
            states = self.axis.options.states
            partial = [[states[s] is PARTIAL and states[t] is not PARTIAL for t in targets] for s in sources]
            dearer = self.kept.taken[sources, targets] = np.where(np.array(partial), AVOIDED, 1.0)
        return table * dearer

    def _flops_per_byte(self, node: Node) -> float:
        """Return the flops that take as long as sending one byte."""
        device = self.axis.device
        return device.peak(element_type(node.signature)) / (LINK_SHARE * device.dram_bandwidth)

    def _repeats(self, number: int, top: bool) -> float:
        return 1.0 if self.axis.repeats is None else self.axis.repeats[number][top]

    def _result(self, picked: list[int], states: list[int], cost: float, proven: bool) -> Decision:
        nodes, options = self.structure.nodes, self.axis.options
        chosen = [every[c] for every, c in zip(options.of, picked, strict=True)]
        sent = self._sent(chosen, states)
        reduced = [
            node.times * sum(self._reduced(node, rule_of(node.signature), each))
            for node, each in zip(nodes, chosen, strict=True)
        ]
        strategies = {
            op: option.strategy for node, option in zip(nodes, chosen, strict=True) for op in node.ops
        }
        return Decision(
            strategies,
            tuple([options.states[state] for state in states]),
            self.structure.number,
            sum(sent.values()) + sum(reduced),
            proven,
            divided_share(nodes, strategies),
            cost,
            (*picked, *states),
            self._undivided(chosen),
            sent,
            options.own,
        )

    def _undivided(self, chosen: Sequence[Option]) -> tuple[int, ...]:
        """Return the sizes of vocabularies that stay whole."""
        found: dict[int, None] = {}
        for node, option in zip(self.structure.nodes, chosen, strict=True):
            factor = self.axis.options.divided.get(node.op)
            rule = rule_of(node.signature)
            if factor is not None and rule is not None and option.strategy.factor != factor:
                found[size_of(node.signature, rule, factor)] = None
        return tuple(found)

    def _sent(self, chosen: Sequence[Option], states: Sequence[int]) -> dict[int, float]:
        """Return the bytes sent per rank of each group; a state that several readers ask for is made once."""
        moves: dict[tuple[int, int, int], bool] = {}  # and whether in the whole function
        found, names = dict[int, float](), self.axis.options.states
        for node, option in zip(self.structure.nodes, chosen, strict=True):
            moves |= {(v, s, states[v]): node.top for v, s in zip(node.outputs, option.outputs, strict=True)}
            moves |= {(v, states[v], s): node.top for v, s in zip(node.inputs, option.inputs, strict=True)}
        moves |= {(t.outer, states[t.source], states[t.target]): t.top for t in self.structure.ties}
        for (number, source, target), top in moves.items():
            if source != target:
                group = self.structure.groups[number]
                times = group.times * group.count * self._repeats(number, top)
                sent = times * moved_bytes(group.type, names[source], names[target], self.axis.ranks)
                found[number] = found.get(number, 0.0) + sent
        return found


def _unmoved(table: Table, sources: Ids, targets: Ids) -> Table:
    """Forbid all moves: what an op overwrites, a parameter, is updated where and as it lies."""
    same = np.equal.outer(np.array(sources), np.array(targets))
    return np.where(same, table, FORBIDDEN)
