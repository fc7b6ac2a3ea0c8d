"""Least-cost assignment of discrete variables by eliminating them one at a time.

Exact dynamic programming over a graph of pairwise costs (bucket elimination, Dechter 1999): a chain
costs what the usual dynamic program costs, a general graph as much as its width asks for. Where an
elimination table would pass ``limit`` entries, the variable with most neighbours is fixed at its
cheapest local choice instead, and the result says that it is no longer proven.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from distsim.transforms.sharding.elimination_order import Eliminate, Fix, order

Table = npt.NDArray[np.float64]


@dataclass
class EliminationProblem:
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


def solve(problem: EliminationProblem, limit: int = 1_000_000) -> Solution:
    """Return a least-cost assignment; infinite ``cost`` means that there is none."""
    tied = [pair for pair, table in problem.pairs.items() if 1 not in table.shape]
    plan = order(tuple(problem.sizes), tuple(tied), limit)
    run = _Run(problem, plan.slots)
    for step in plan.steps:
        if isinstance(step, Eliminate):
            run.eliminate(step)
        else:
            run.fix(step)
    return run.solution()


class _Run:
    """Does what an order says with the costs of a problem."""

    def __init__(self, problem: EliminationProblem, slots: int) -> None:
        self.tables: list[Table | None] = [*problem.unary]
        self.removed: list[tuple[int, tuple[int, ...], Any]] = []
        self.count = len(problem.sizes)
        self.cost, self.proven = 0.0, True
        for (first, second), table in problem.pairs.items():
            if 1 in table.shape:  # one side has no choice: not a tie between them
                self.add(second if table.shape[0] == 1 else first, table.reshape(-1))
            else:
                self.tables.append(table)
        self.tables += [None] * (slots - len(self.tables))
        self.cost += float(sum(self.of(v)[0] for v, size in enumerate(problem.sizes) if size == 1))

    def of(self, slot: int) -> Table:
        found = self.tables[slot]
        if found is None:
            raise IndexError(f"slot {slot} is empty")
        return found

    def add(self, slot: int, table: Table) -> None:
        if slot < 0:
            self.cost += float(table)
        else:
            known = self.tables[slot]
            self.tables[slot] = table if known is None else known + table

    def eliminate(self, step: Eliminate) -> None:
        """Replace a variable by the cost of its best choice, per choice of its neighbours."""
        total = self.of(step.variable)
        for read in step.reads:
            table = self.of(read.slot)
            if read.axes is not None:
                table = table.transpose(read.axes)
            total = total + table.reshape(read.shape)
            self.tables[read.slot] = None
        self.removed.append((step.variable, step.around, total.argmin(axis=-1)))
        self.add(step.slot, total.min(axis=-1))

    def fix(self, step: Fix) -> None:
        """Give a variable the choice that is cheapest if every neighbour chose for it alone."""
        own = costs = self.of(step.variable)
        for slot, axis, _ in step.tables:
            table = self.of(slot)
            costs = costs + table.min(axis=tuple(i for i in range(table.ndim) if i != axis))
        best = int(costs.argmin())
        self.removed.append((step.variable, (), np.asarray(best)))
        self.proven = False
        self.cost += float(own[best])
        for slot, axis, target in step.tables:
            self.add(target, np.take(self.of(slot), best, axis=axis))
            self.tables[slot] = None

    def solution(self) -> Solution:
        choices = [0] * self.count
        for variable, scope, best in reversed(self.removed):
            choices[variable] = int(best[tuple([choices[v] for v in scope])])
        return Solution(tuple(choices), self.cost, self.proven)
