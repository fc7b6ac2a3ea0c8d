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

Scope = tuple[int, ...]
"""Two variables or more, in order, whose choices together have a cost."""


def solve(problem: Problem, limit: int = 1_000_000) -> Solution:
    """Return a least-cost assignment; infinite ``cost`` means that there is none."""
    elimination = _Elimination(problem)
    elimination.run(limit)
    return elimination.solution()


class _Elimination:
    def __init__(self, problem: Problem) -> None:
        self.sizes = problem.sizes
        self.unary = list(problem.unary)
        self.factors: dict[Scope, Table] = {}
        self.touching: list[dict[Scope, None]] = [{} for _ in problem.sizes]
        self.removed: list[tuple[int, tuple[int, ...], Any]] = []
        free = [v for v, size in enumerate(problem.sizes) if size > 1]
        self.left: dict[int, None] = dict.fromkeys(free)
        self.cost, self.proven = 0.0, True
        for (first, second), table in problem.pairs.items():
            if 1 in table.shape:  # one side has no choice: not a tie between them
                self.add((second if table.shape[0] == 1 else first,), table.reshape(-1))
            else:
                self.add((first, second), table)
        self.cost += float(sum(self.unary[v][0] for v in range(len(self.sizes)) if v not in self.left))

    def add(self, scope: tuple[int, ...], table: Table) -> None:
        if not scope:
            self.cost += float(table)
        elif len(scope) == 1:
            self.unary[scope[0]] = self.unary[scope[0]] + table
        elif scope in self.factors:
            self.factors[scope] = self.factors[scope] + table
        else:
            self.factors[scope] = table
            for variable in scope:
                self.touching[variable][scope] = None

    def take(self, variable: int) -> list[tuple[Scope, Table]]:
        """Remove and return the factors that touch a variable."""
        found: list[tuple[Scope, Table]] = []
        for scope in tuple(self.touching[variable]):
            found.append((scope, self.factors.pop(scope)))
            for other in scope:
                del self.touching[other][scope]
        return found

    def neighbours(self, variable: int) -> tuple[int, ...]:
        found = {other for scope in self.touching[variable] for other in scope}
        found.discard(variable)
        return tuple(sorted(found))

    def weight(self, variable: int) -> int:
        return math.prod([self.sizes[other] for other in self.neighbours(variable)])

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
        around = self.neighbours(variable)
        axes = {v: i for i, v in enumerate(around)}
        total = self.unary[variable]  # the last axis is the variable's own
        for scope, table in self.take(variable):
            place = scope.index(variable)
            if place != len(scope) - 1:
                table = np.moveaxis(table, place, -1)
            shape = [1] * len(around) + [self.sizes[variable]]
            for other in scope:
                if other != variable:
                    shape[axes[other]] = self.sizes[other]
            total = total + table.reshape(shape)
        self.removed.append((variable, around, total.argmin(axis=-1)))
        del self.left[variable]
        self.add(around, total.min(axis=-1))
        return around

    def fix(self, variable: int) -> tuple[int, ...]:
        """Give a variable the choice that is cheapest if every neighbour chose for it alone."""
        around, factors = self.neighbours(variable), self.take(variable)
        costs = self.unary[variable]
        for scope, table in factors:
            costs = costs + table.min(axis=tuple(i for i, v in enumerate(scope) if v != variable))
        best = int(costs.argmin())
        self.removed.append((variable, (), np.asarray(best)))
        del self.left[variable]
        self.proven = False
        self.cost += float(self.unary[variable][best])
        for scope, table in factors:
            rest = tuple(v for v in scope if v != variable)
            self.add(rest, np.take(table, best, axis=scope.index(variable)))
        return around

    def solution(self) -> Solution:
        choices = [0] * len(self.sizes)
        for variable, scope, best in reversed(self.removed):
            choices[variable] = int(best[tuple(choices[v] for v in scope)])
        return Solution(tuple(choices), self.cost, self.proven)
