"""Least-cost assignment of discrete variables by eliminating them one at a time.

Exact dynamic programming over a graph of pairwise costs (bucket elimination, Dechter 1999): a chain
costs what the usual dynamic program costs, a general graph as much as its width asks for. Where an
elimination table would pass ``limit`` entries, the variable with most neighbours is fixed at its
cheapest local choice instead, and the result says that it is no longer proven.
"""

from __future__ import annotations

import heapq
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


Factor = tuple[tuple[int, ...], Table]


def solve(problem: Problem, limit: int = 300_000) -> Solution:
    """Return a least-cost assignment; infinite ``cost`` means that there is none."""
    count = len(problem.sizes)
    factors: dict[int, Factor] = {}
    touching: list[set[int]] = [set() for _ in range(count)]

    def add(scope: tuple[int, ...], table: Table) -> None:
        number = len(seen)
        seen.append(number)
        factors[number] = (scope, table)
        for variable in scope:
            touching[variable].add(number)

    seen: list[int] = []
    for variable, table in enumerate(problem.unary):
        add((variable,), table)
    for (first, second), table in problem.pairs.items():
        if table.shape[0] == 1 or table.shape[1] == 1:  # one side has no choice: not a tie between them
            add((second if table.shape[0] == 1 else first,), table.reshape(-1))
        else:
            add((first, second), table)

    def neighbours(variable: int) -> tuple[int, ...]:
        found = {v for number in touching[variable] for v in factors[number][0]}
        return tuple(sorted(found - {variable}))

    def weight(variable: int) -> int:
        total = 1
        for other in neighbours(variable):
            total *= problem.sizes[other]
        return total

    queue = [(weight(v), v) for v in range(count)]
    heapq.heapify(queue)
    removed: list[tuple[int, tuple[int, ...], Any]] = []
    done = [False] * count
    base, proven = 0.0, True
    while queue:
        stored, variable = heapq.heappop(queue)
        if done[variable]:
            continue
        current = weight(variable)
        if current != stored:
            heapq.heappush(queue, (current, variable))
            continue
        if current * problem.sizes[variable] > limit:
            heapq.heappush(queue, (current, variable))
            variable = max((v for v in range(count) if not done[v]), key=lambda v: (len(neighbours(v)), -v))
            best = _cheapest(problem.sizes[variable], variable, factors, touching)
            around = neighbours(variable)
            for number in tuple(touching[variable]):
                members, table = factors.pop(number)
                for other in members:
                    touching[other].discard(number)
                rest = tuple(v for v in members if v != variable)
                part = np.take(table, best, axis=members.index(variable))
                if rest:
                    add(rest, part)
                else:
                    base += float(part)
            removed.append((variable, (), np.asarray(best)))
            done[variable], proven = True, False
            for other in around:
                heapq.heappush(queue, (weight(other), other))
            continue
        scope = neighbours(variable)
        total = _combine(variable, scope, factors, touching, problem.sizes)
        for number in tuple(touching[variable]):
            for other in factors.pop(number)[0]:
                touching[other].discard(number)
        removed.append((variable, scope, total.argmin(axis=-1)))
        done[variable] = True
        reduced = total.min(axis=-1)
        if scope:
            add(scope, reduced)
            for other in scope:
                heapq.heappush(queue, (weight(other), other))
        else:
            base += float(reduced)
    choices = [0] * count
    for variable, scope, best in reversed(removed):
        choices[variable] = int(best[tuple(choices[v] for v in scope)])
    return Solution(tuple(choices), base, proven)


def _combine(
    variable: int,
    scope: tuple[int, ...],
    factors: dict[int, Factor],
    touching: list[set[int]],
    sizes: list[int],
) -> Table:
    """Return the sum of all costs that touch ``variable``, over (*scope, variable)."""
    axes = {v: i for i, v in enumerate((*scope, variable))}
    total = np.zeros([sizes[v] for v in (*scope, variable)])
    for number in sorted(touching[variable]):
        members, table = factors[number]
        order = sorted(range(len(members)), key=lambda i: axes[members[i]])
        shape = [1] * len(axes)
        for i in order:
            shape[axes[members[i]]] = table.shape[i]
        total += table.transpose(order).reshape(shape)
    return total


def _cheapest(size: int, variable: int, factors: dict[int, Factor], touching: list[set[int]]) -> int:
    """Return the choice that would be cheapest if every neighbour chose for it alone."""
    costs = np.zeros(size)
    for number in touching[variable]:
        members, table = factors[number]
        others = tuple(i for i, v in enumerate(members) if v != variable)
        costs += table.min(axis=others) if others else table
    return int(costs.argmin())
