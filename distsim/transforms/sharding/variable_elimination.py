"""Least-cost assignment of discrete variables by eliminating them one at a time.

Exact dynamic programming over a graph of pairwise costs (bucket elimination, Dechter 1999): a chain
costs what the usual dynamic program costs, a general graph as much as its width asks for. Where an
elimination table would pass ``limit`` entries, the variable with most neighbours is fixed at its
cheapest local choice instead, and the result says that it is no longer proven.

In which order variables are eliminated depends only on how many choices they have and on which of them are
tied, not on what the choices cost, so problems of one shape (a model on 2, 4, 8 ranks) share one order.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from distsim.cache import cached
from distsim.compile import compiled, inner

HUB = 32
"""A variable with more costs than this is weighed anew only when its turn comes."""

Scope = tuple[int, ...]
"""Variables, in order, whose choices together have a cost."""


class Read(NamedTuple):
    """A table that a step takes: in which slot, and how far apart in it are the choices of the variable that
    is eliminated, then those of each around it; 0 for one that it does not have."""

    slot: int
    strides: tuple[int, ...]


class Eliminate(NamedTuple):
    """Put the least sum of the tables read over the choices of a variable into a slot."""

    variable: int
    around: Scope
    reads: tuple[Read, ...]
    slot: int


class Take(NamedTuple):
    """A table of a slot, [before, choices of the variable, after], of which one choice goes into another."""

    slot: int
    before: int
    after: int
    target: int


class Fix(NamedTuple):
    """Give a variable its cheapest local choice."""

    variable: int
    tables: tuple[Take, ...]


Ints = npt.NDArray[np.int64]


class EliminationSteps(NamedTuple):
    """The steps as arrays, for the compiled loop; places are those among the costs of all slots.

    ``begin`` and ``choices`` are of each variable: its first cost, how many there are. Of each step:
    ``variable``, whether it is ``fixed``, the first cost of its ``target`` (-1: the total), the first of its
    ``around`` and of its ``reads``. ``sizes`` are the choices of those around, ``offset`` the first costs of
    what is read; ``how`` are their strides, or of a fixed one (before, after, target), from ``at`` on.
    """

    begin: Ints
    choices: Ints
    variable: Ints
    fixed: Ints
    target: Ints
    around: Ints
    reads: Ints
    around_variable: Ints
    offset: Ints
    at: Ints
    how: Ints


@dataclass(frozen=True, slots=True)
class EliminationOrder:
    """The steps, and how many costs all slots have.

    Slots 0 to n-1 hold the costs of each of n variables, those after them the costs of the scopes given, in
    their order. A step that makes a table adds it to what is in the slot; slot -1 is the total.
    """

    steps: EliminationSteps
    costs: int


@cached("orders of elimination, by sizes, scopes and limit", 256)
def order(sizes: tuple[int, ...], scopes: tuple[Scope, ...], limit: int) -> EliminationOrder:
    """Return the order for variables with ``sizes`` choices and costs of ``scopes`` of two or more.

    The variable whose elimination makes the smallest table goes first. Where even that would read a table
    of more than ``limit`` entries, the variable with most neighbours is fixed instead. Variables with one
    choice take no part.
    """
    planner = _OrderPlanner(sizes, scopes)
    steps = planner.run(limit)
    return EliminationOrder(_arrays(sizes, steps, planner.held), sum(planner.held))


def _arrays(sizes: Sequence[int], steps: Sequence[Eliminate | Fix], held: Sequence[int]) -> EliminationSteps:
    """Return the steps as arrays; ``held``: how many costs each slot has."""
    first = [0, *np.cumsum(held).tolist()]
    first[-1] = -1  # that of slot -1
    target, around, variables, offset = list[int](), [0], list[int](), list[int]()
    reads, at, how = [0], list[int](), list[int]()
    for step in steps:
        fixed = isinstance(step, Fix)
        for one in step.tables if fixed else step.reads:
            offset.append(first[one.slot])
            at.append(len(how))
            how += [one.before, one.after, first[one.target]] if isinstance(one, Take) else one.strides
        target.append(-1 if fixed else first[step.slot])
        variables += () if fixed else step.around
        around.append(len(variables))
        reads.append(len(offset))
    columns = [
        first[: len(sizes)],
        sizes,
        [step.variable for step in steps],
        [isinstance(step, Fix) for step in steps],
        target,
        around,
        reads,
        variables,
        offset,
        at,
        how,
    ]
    return EliminationSteps(*[np.array(column, np.int64) for column in columns])


class _OrderPlanner:
    def __init__(self, sizes: tuple[int, ...], scopes: tuple[Scope, ...]) -> None:
        self.sizes = sizes
        self.slot: dict[Scope, int] = {}
        self.touching: list[dict[Scope, None]] = [{} for _ in sizes]
        self.beside: list[set[int]] = [set() for _ in sizes]  # those in one of its scopes
        self.left = dict.fromkeys(v for v, size in enumerate(sizes) if size > 1)
        self.held = [*sizes]  # how many costs each slot has
        for scope in scopes:
            self.slot_of(scope)

    def slot_of(self, scope: Scope) -> int:
        """Return where the costs of a scope are, a new place if there are none yet."""
        if len(scope) < 2:
            return scope[0] if scope else -1
        found = self.slot.get(scope)
        if found is None:
            found = self.slot[scope] = len(self.held)
            self.held.append(math.prod([self.sizes[variable] for variable in scope]))
            for variable in scope:
                self.touching[variable][scope] = None
                self.beside[variable].update(scope)
                self.beside[variable].discard(variable)
        return found

    def take(self, variable: int) -> list[tuple[Scope, int]]:
        """Remove and return the scopes with a variable, and where their costs are."""
        found: list[tuple[Scope, int]] = []
        for scope in tuple(self.touching[variable]):
            found.append((scope, self.slot.pop(scope)))
            for other in scope:
                del self.touching[other][scope]
        for other in self.beside[variable]:  # what a scope with it ties is tied by the one in its place
            self.beside[other].discard(variable)
        return found

    def neighbours(self, variable: int) -> Scope:
        return tuple(sorted(self.beside[variable]))

    def weight(self, variable: int) -> int:
        return math.prod([self.sizes[other] for other in self.beside[variable]])

    def run(self, limit: int) -> list[Eliminate | Fix]:
        steps: list[Eliminate | Fix] = []
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
                variable = max(self.left, key=lambda v: (len(self.beside[v]), -v))
                around = self.neighbours(variable)
                steps.append(self.fix(variable))
            else:
                around = self.neighbours(variable)
                steps.append(self.eliminate(variable, around))
            del self.left[variable]
            for other in around:  # a hub with many neighbours waits for its turn instead
                if len(self.touching[other]) <= HUB:
                    heapq.heappush(queue, (self.weight(other), other))
        return steps

    def eliminate(self, variable: int, around: Scope) -> Eliminate:
        reads: list[Read] = []
        for scope, slot in self.take(variable):
            stride = {v: math.prod([self.sizes[w] for w in scope[i + 1 :]]) for i, v in enumerate(scope)}
            reads.append(Read(slot, tuple([stride.get(v, 0) for v in (variable, *around)])))
        return Eliminate(variable, around, tuple(reads), self.slot_of(around))

    def fix(self, variable: int) -> Fix:
        tables: list[Take] = []
        for scope, slot in self.take(variable):
            own = scope.index(variable)
            before, after = (
                math.prod([self.sizes[v] for v in each]) for each in (scope[:own], scope[own + 1 :])
            )
            tables.append(Take(slot, before, after, self.slot_of(tuple(v for v in scope if v != variable))))
        return Fix(variable, tuple(tables))


# --- the problem, and doing what the order says ------------------------------------------------------

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
    alone = [*problem.unary]
    for (first, second), table in problem.pairs.items():
        if 1 in table.shape:  # one side has no choice: not a tie between them
            own = second if table.shape[0] == 1 else first
            alone[own] = alone[own] + table.reshape(-1)
    given = np.concatenate([np.zeros(0), *alone, *[problem.pairs[pair].reshape(-1) for pair in tied]])
    costs, choices = np.zeros(plan.costs), np.zeros(len(problem.sizes), np.int64)
    costs[: len(given)] = given
    fixed = float(sum(alone[v][0] for v, size in enumerate(problem.sizes) if size == 1))
    cost = _run(plan.steps, costs, choices, fixed)
    return Solution(tuple(choices.tolist()), cost, not plan.steps.fixed.any())


@compiled
def _run(steps: EliminationSteps, costs: Table, choices: Ints, total: float) -> float:
    """Do the steps with the costs of all slots; enter what is chosen, return its cost added to ``total``."""
    for step in range(len(steps.variable)):
        if steps.fixed[step]:
            total = _fix(steps, step, costs, choices, total)
        else:
            total = _eliminate(steps, step, costs, total)
    for step in range(len(steps.variable) - 1, -1, -1):
        # Which choice is best is asked in the end, for the choices of the neighbours that were made.
        if not steps.fixed[step]:
            around = steps.around_variable[steps.around[step] : steps.around[step + 1]]
            choices[steps.variable[step]] = _best(steps, step, costs, choices[around])[0]
    return total


@inner
def _best(steps: EliminationSteps, step: int, costs: Table, around: Ints) -> tuple[int, float]:
    """Return the best choice of the variable of a step, given those around it, and its cost."""
    variable, best, least = steps.variable[step], 0, np.inf
    for choice in range(steps.choices[variable]):
        cost = float(costs[steps.begin[variable] + choice])
        for read in range(steps.reads[step], steps.reads[step + 1]):
            stride = steps.at[read]
            place = steps.offset[read] + choice * steps.how[stride]
            for other in range(len(around)):
                place += around[other] * steps.how[stride + 1 + other]
            cost += float(costs[place])
        if cost < least:
            best, least = choice, cost
    return best, least


@inner
def _eliminate(steps: EliminationSteps, step: int, costs: Table, total: float) -> float:
    """Replace a variable by the cost of its best choice, per choice of its neighbours."""
    begin, end, target = steps.around[step], steps.around[step + 1], steps.target[step]
    around, cell = np.zeros(end - begin, np.int64), 0
    while True:
        least = _best(steps, step, costs, around)[1]
        if target < 0:
            return total + least
        costs[target + cell] += least
        cell += 1
        other = end - begin - 1
        while other >= 0 and around[other] + 1 == steps.choices[steps.around_variable[begin + other]]:
            around[other] = 0
            other -= 1
        if other < 0:
            return total
        around[other] += 1


@inner
def _fix(steps: EliminationSteps, step: int, costs: Table, choices: Ints, total: float) -> float:
    """Give a variable the choice that is cheapest if every neighbour chose for it alone."""
    variable = steps.variable[step]
    begin, count = steps.begin[variable], steps.choices[variable]
    local = costs[begin : begin + count].copy()
    for read in range(steps.reads[step], steps.reads[step + 1]):
        before, after = steps.how[steps.at[read]], steps.how[steps.at[read] + 1]
        for choice in range(count):
            least = np.inf
            for i in range(before):
                first = steps.offset[read] + (i * count + choice) * after
                least = min(least, costs[first : first + after].min())
            local[choice] += least
    best = int(local.argmin())
    choices[variable] = best
    total += float(costs[begin + best])
    for read in range(steps.reads[step], steps.reads[step + 1]):
        before, after, target = steps.how[steps.at[read] : steps.at[read] + 3]
        for i in range(before):
            first = steps.offset[read] + (i * count + best) * after
            if target < 0:
                total += float(costs[first])
            else:
                costs[target + i * after : target + (i + 1) * after] += costs[first : first + after]
    return total
