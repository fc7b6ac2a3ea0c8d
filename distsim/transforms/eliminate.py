"""Least-cost assignment of discrete variables by eliminating them one at a time.

Exact dynamic programming over a graph of pairwise costs (bucket elimination, Dechter 1999): a chain
costs what the usual dynamic program costs, a general graph as much as its width asks for. Where an
elimination table would pass ``limit`` entries, the variable with most neighbours is fixed at its
cheapest local choice instead, and the result says that it is no longer proven.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.float64]


@dataclass
class Problem:
    """Variables with finite domains, unary and pairwise costs, all to be minimised in sum."""

    sizes: list[int] = field(default_factory=list[int])
    unary: list[Table] = field(default_factory=list[Table])
    pairs: dict[tuple[int, int], Table] = field(default_factory=dict[tuple[int, int], Table])

    def variable(self, costs: npt.ArrayLike) -> int:
        """Add a variable with a cost per choice and return its number."""
        table = np.asarray(costs, float)
        self.sizes.append(len(table))
        self.unary.append(table.copy())
        return len(self.sizes) - 1

    def pair(self, first: int, second: int, costs: Table) -> None:
        """Add costs[i, j] for the choice i of ``first`` and j of ``second``."""
        if first == second:
            self.unary[first] += np.diagonal(costs)
            return
        key, table = ((first, second), costs) if first < second else ((second, first), costs.T)
        known = self.pairs.get(key)
        self.pairs[key] = table.copy() if known is None else known + table


@dataclass(frozen=True)
class Solution:
    """A choice per variable, its cost, and whether no cheaper one exists."""

    choices: tuple[int, ...]
    cost: float
    proven: bool


HUB = 32
"""A variable with more costs than this is weighed anew only when its turn comes."""

Factor = tuple[tuple[int, ...], Table]
"""(variables, cost of each combination of their choices)."""


def solve(problem: Problem, limit: int = 300_000) -> Solution:
    """Return a least-cost assignment; infinite ``cost`` means that there is none."""
    elimination = _Elimination(problem)
    elimination.run(limit)
    return elimination.solution()


class _Elimination:
    def __init__(self, problem: Problem) -> None:
        self.sizes = problem.sizes
        self.factors: dict[int, Factor] = {}
        self.touching: list[set[int]] = [set() for _ in problem.sizes]
        self.numbers = 0
        self.removed: list[tuple[int, tuple[int, ...], Any]] = []
        self.left: dict[int, None] = dict.fromkeys(range(len(problem.sizes)))
        self.cost, self.proven = 0.0, True
        for variable, table in enumerate(problem.unary):
            self.add((variable,), table)
        for (first, second), table in problem.pairs.items():
            if 1 in table.shape:  # one side has no choice: not a tie between them
                self.add((second if table.shape[0] == 1 else first,), table.reshape(-1))
            else:
                self.add((first, second), table)

    def add(self, scope: tuple[int, ...], table: Table) -> None:
        if not scope:
            self.cost += float(table)
            return
        self.factors[self.numbers] = (scope, table)
        for variable in scope:
            self.touching[variable].add(self.numbers)
        self.numbers += 1

    def take(self, variable: int) -> list[Factor]:
        """Remove and return the factors that touch a variable."""
        found: list[Factor] = []
        for number in sorted(self.touching[variable]):
            factor = self.factors.pop(number)
            found.append(factor)
            for other in factor[0]:
                self.touching[other].discard(number)
        return found

    def neighbours(self, variable: int) -> tuple[int, ...]:
        found = {v for number in self.touching[variable] for v in self.factors[number][0]}
        return tuple(sorted(found - {variable}))

    def weight(self, variable: int) -> int:
        return math.prod(self.sizes[other] for other in self.neighbours(variable))

    def run(self, limit: int) -> None:
        queue = [(self.weight(v), v) for v in self.left]
        heapq.heapify(queue)
        while queue:
            stored, variable = heapq.heappop(queue)
            if variable not in self.left:
                continue
            current = self.weight(variable)
            if current != stored:
                heapq.heappush(queue, (current, variable))
                continue
            if current * self.sizes[variable] > limit:
                heapq.heappush(queue, (current, variable))
                around = self.fix(max(self.left, key=lambda v: (len(self.neighbours(v)), -v)))
            else:
                around = self.eliminate(variable)
            for other in around:  # a hub with many neighbours waits for its turn instead
                if len(self.touching[other]) <= HUB:
                    heapq.heappush(queue, (self.weight(other), other))

    def eliminate(self, variable: int) -> tuple[int, ...]:
        """Replace a variable by the cost of its best choice, per choice of its neighbours."""
        scope = self.neighbours(variable)
        axes = {v: i for i, v in enumerate((*scope, variable))}
        total = np.zeros([self.sizes[v] for v in (*scope, variable)])
        for members, table in self.take(variable):
            order = sorted(range(len(members)), key=lambda i: axes[members[i]])
            shape = [1] * len(axes)
            for i in order:
                shape[axes[members[i]]] = table.shape[i]
            total += table.transpose(order).reshape(shape)
        self.removed.append((variable, scope, total.argmin(axis=-1)))
        del self.left[variable]
        self.add(scope, total.min(axis=-1))
        return scope

    def fix(self, variable: int) -> tuple[int, ...]:
        """Give a variable the choice that is cheapest if every neighbour chose for it alone."""
        around, factors = self.neighbours(variable), self.take(variable)
        costs = np.zeros(self.sizes[variable])
        for members, table in factors:
            others = tuple(i for i, v in enumerate(members) if v != variable)
            costs += table.min(axis=others) if others else table
        best = int(costs.argmin())
        self.removed.append((variable, (), np.asarray(best)))
        del self.left[variable]
        self.proven = False
        for members, table in factors:
            rest = tuple(v for v in members if v != variable)
            self.add(rest, np.take(table, best, axis=members.index(variable)))
        return around

    def solution(self) -> Solution:
        choices = [0] * len(self.sizes)
        for variable, scope, best in reversed(self.removed):
            choices[variable] = int(best[tuple(choices[v] for v in scope)])
        return Solution(tuple(choices), self.cost, self.proven)
