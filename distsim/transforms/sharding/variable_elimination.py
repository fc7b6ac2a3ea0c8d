"""Least-cost assignment of discrete variables by eliminating them one at a time.

Exact dynamic programming over a graph of pairwise costs (bucket elimination, Dechter 1999). Where an
elimination table would pass a limit of entries, the variable with most neighbours is fixed at its
cheapest local choice instead. Then a lower bound is taken in the same order, in which each table chooses
such a variable for itself (mini-buckets, Dechter and Rish 2003): where no table would choose otherwise, the
assignment costs as much as the bound, which proves it. Else the choices of such variables are gone through,
the one of the least bound first (branch and bound, Marinescu and Dechter 2009), to an end.

In which order variables are eliminated depends only on how many choices they have and on which of them are
tied, not on what the choices cost, so problems of one shape (a model on 2, 4, 8 ranks) share one order.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from distsim.cache import cached

HUB = 32
"""A variable with more costs than this is weighed anew only when its turn comes."""

SMALL = 4096
"""The sums of tables of so many entries are kept until the choices are made, of larger ones the tables."""

LIMITS = (30_000, 1_000_000, 100_000)
"""The entries that a table may have, one after the other until an assignment is proven: larger tables are
mostly better, not always. Branches are tried with the last."""

BRANCHES, SEARCHED = 12, 1000
"""After how many sets of choices no more are opened, where an assignment is known and where none is."""

ROUNDING = 1e-14
"""Share of its cost by which an assignment may pass the bound that proves it: sums in another order."""

Scope = tuple[int, ...]
"""Variables, in order, whose choices together have a cost."""


class Read(NamedTuple):
    """A table that a step takes: where it is, the order of its axes (None: as it is), its new shape."""

    slot: int
    axes: tuple[int, ...] | None
    shape: tuple[int, ...]


class Eliminate(NamedTuple):
    """Put the least sum of the tables read over the choices of a variable, their first axis, into a slot."""

    variable: int
    around: Scope
    reads: tuple[Read, ...]
    slot: int
    entries: int
    """Of the sum of the tables."""


class Fix(NamedTuple):
    """Give a variable its cheapest local choice: per table, its slot, the variable's axis, the new slot."""

    variable: int
    tables: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class EliminationOrder:
    """The steps, and how many slots they need.

    Slots 0 to n-1 hold the costs of each variable, the next those of the scopes given, in their order. A step
    that makes a table adds it to what is in the slot; slot -1 is the total.
    """

    steps: tuple[Eliminate | Fix, ...]
    slots: int


@cached("orders of elimination, by sizes, scopes and limit", 256)
def order(sizes: tuple[int, ...], scopes: tuple[Scope, ...], limit: int) -> EliminationOrder:
    """Return the order for variables with ``sizes`` choices and costs of ``scopes`` of two or more.

    The variable whose elimination makes the smallest table goes first. Where even that would read one of more
    than ``limit`` entries, that with most neighbours is fixed instead. Those with one choice take no part.
    """
    return _OrderPlanner(sizes, scopes).run(limit)


class _OrderPlanner:
    def __init__(self, sizes: tuple[int, ...], scopes: tuple[Scope, ...]) -> None:
        self.sizes = sizes
        self.slot: dict[Scope, int] = {}
        self.touching: list[dict[Scope, None]] = [{} for _ in sizes]
        self.beside: list[set[int]] = [set() for _ in sizes]  # those in one of its scopes
        self.left = dict.fromkeys(v for v, size in enumerate(sizes) if size > 1)
        self.slots = len(sizes)
        for scope in scopes:
            self.slot_of(scope)

    def slot_of(self, scope: Scope) -> int:
        """Return where the costs of a scope are, a new place if there are none yet."""
        if len(scope) < 2:
            return scope[0] if scope else -1
        found = self.slot.get(scope)
        if found is None:
            found = self.slot[scope] = self.slots
            self.slots += 1
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

    def run(self, limit: int) -> EliminationOrder:
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
        return EliminationOrder(tuple(steps), self.slots)

    def eliminate(self, variable: int, around: Scope) -> Eliminate:
        place = {v: i for i, v in enumerate(around, 1)}
        reads: list[Read] = []
        for scope, slot in self.take(variable):
            own = scope.index(variable)  # its axis comes first
            axes = (own, *(i for i in range(len(scope)) if i != own)) if own else None
            shape = [self.sizes[variable]] + [1] * len(around)
            for other in scope:
                if other != variable:
                    shape[place[other]] = self.sizes[other]
            reads.append(Read(slot, axes, tuple(shape)))
        entries = math.prod([self.sizes[each] for each in (variable, *around)])
        return Eliminate(variable, around, tuple(reads), self.slot_of(around), entries)

    def fix(self, variable: int) -> Fix:
        tables: list[tuple[int, int, int]] = []
        for scope, slot in self.take(variable):
            rest = tuple(v for v in scope if v != variable)
            tables.append((slot, scope.index(variable), self.slot_of(rest)))
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
        table = np.array(costs, float)
        self.sizes.append(len(table))
        self.unary.append(table)
        return len(self.sizes) - 1

    def pair(self, first: int, second: int, costs: Table) -> None:
        """Add costs[i, j] for the choice i of ``first`` and j of ``second``: not to be changed afterwards."""
        if first == second:
            self.unary[first] += np.diagonal(costs)
            return
        key, table = ((first, second), costs) if first < second else ((second, first), costs.T)
        known = self.pairs.get(key)
        self.pairs[key] = table if known is None else known + table


@dataclass(frozen=True)
class Solution:
    """A choice per variable, its cost, and whether no cheaper one exists."""

    choices: tuple[int, ...]
    cost: float
    proven: bool


def solve(problem: EliminationProblem, limits: Sequence[int] = LIMITS, most: int = BRANCHES) -> Solution:
    """Return a least-cost assignment; infinite ``cost`` means that there is none, if it is ``proven``.

    The least that was found where ``most`` branches with tables of the last of the ``limits`` prove none.
    """
    tied = tuple([pair for pair, table in problem.pairs.items() if 1 not in table.shape])
    best = Solution((), math.inf, False)
    for number, limit in enumerate(limits, 1):
        plan = order(tuple(problem.sizes), tied, limit)
        best = _branched(problem, plan, best, most if number == len(limits) else 1)
        if best.proven:
            break
    return best


def _branched(problem: EliminationProblem, plan: EliminationOrder, best: Solution, most: int) -> Solution:
    """Return the ``best`` or one of ``most`` branches: sets of choices of variables that the order fixes."""
    begun = _Elimination(problem, plan).advanced()
    found = begun.solution()
    if begun.next is None:
        return replace(found, proven=True)
    best = min(found, best, key=lambda each: each.cost)
    queue, tried = [(begun.bound(), 1, begun, begun.next)], 1
    while queue and queue[0][0] < best.cost and not math.isclose(queue[0][0], best.cost, rel_tol=ROUNDING):
        if tried >= (most if most == 1 or math.isfinite(best.cost) else SEARCHED):
            return best
        _, _, opened, step = heapq.heappop(queue)
        for choice in np.flatnonzero(np.isfinite(problem.unary[step.variable])).tolist():
            tried += 1
            part = opened.copied().fixed(step, choice)
            bound = part.bound()
            if bound >= best.cost:
                continue
            best = min(best, part.solution(), key=lambda each: each.cost)
            if part.next is not None:
                heapq.heappush(queue, (bound, tried, part, part.next))
    return replace(best, proven=True)


class _Elimination:
    """Does what an order says with the costs of a problem, up to the next variable that it fixes.

    Branches, and the bound and the assignment of each, go on from there: all before is the same for them.
    """

    def __init__(self, problem: EliminationProblem, plan: EliminationOrder) -> None:
        self.steps, self.done, self.count = plan.steps, 0, len(problem.sizes)
        self.next: Fix | None = None  # None where all steps are done
        self.tables: list[Table | None] = [*problem.unary]
        self.removed: list[tuple[int, Scope, list[Table]]] = []
        self.cost: float = 0.0
        for (first, second), table in problem.pairs.items():
            if 1 in table.shape:  # one side has no choice: not a tie between them
                self.add(second if table.shape[0] == 1 else first, table.reshape(-1))
            else:
                self.tables.append(table)
        self.tables += [None] * (plan.slots - len(self.tables))
        self.cost += float(sum(self.of(v)[0] for v, size in enumerate(problem.sizes) if size == 1))

    def copied(self) -> _Elimination:
        """Return one that goes on by itself."""
        found = copy(self)
        found.tables, found.removed = [*self.tables], [*self.removed]
        return found

    def advanced(self) -> _Elimination:
        """Do the steps up to the next that fixes a variable."""
        self.next = None
        while self.next is None and self.done < len(self.steps):
            step = self.steps[self.done]
            self.done += 1
            if isinstance(step, Fix):
                self.next = step
            else:
                self.eliminate(step)
        return self

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
        parts = [self.of(step.variable).reshape(-1, *[1] * len(step.around))]
        for read in step.reads:
            table = self.of(read.slot)
            if read.axes is not None:
                table = table.transpose(read.axes)
            parts.append(table.reshape(read.shape))
            self.tables[read.slot] = None
        # Which choice is best is asked in the end, for the choices of the neighbours that were made.
        total = _sum(parts)
        least = np.minimum.reduce(total, axis=0)
        parts = parts if step.entries > SMALL else [total]
        self.removed.append((step.variable, step.around, parts))
        self.add(step.slot, least)

    def least(self, step: Fix) -> list[Table]:
        """Return per table what each choice of a variable costs at least in it."""
        tables = [(self.of(slot), axis) for slot, axis, _ in step.tables]
        return [table.min(axis=tuple(i for i in range(table.ndim) if i != axis)) for table, axis in tables]

    def fixed(self, step: Fix, choice: int | None = None) -> _Elimination:
        """Give a variable a choice, else that which is cheapest if every neighbour chose for it alone."""
        own = self.of(step.variable)
        if choice is None:
            choice = int((own + sum(self.least(step))).argmin())
        self.removed.append((step.variable, (), [np.not_equal(np.arange(len(own)), choice).astype(float)]))
        self.cost += float(own[choice])
        for slot, axis, target in step.tables:
            self.add(target, np.take(self.of(slot), choice, axis=axis))
            self.tables[slot] = None
        return self.advanced()

    def relaxed(self, step: Fix) -> _Elimination:
        """Let each table choose for itself, when what a choice costs at least was made the same in all.

        What is added to one table is taken off others: the sum of an assignment stays.
        """
        least = self.least(step)
        costs = self.of(step.variable) + sum(least)
        if not least:
            self.cost += float(costs.min())
        for (slot, axis, target), own in zip(step.tables, least, strict=True):
            table = self.of(slot)
            shape = [-1 if i == axis else 1 for i in range(table.ndim)]
            # What cannot be in one table cannot be in any: infinite less infinite is no number.
            added = np.subtract(costs / len(least), own, out=np.zeros_like(costs), where=np.isfinite(own))
            self.add(target, (table + added.reshape(shape)).min(axis=axis))
            self.tables[slot] = None
        return self.advanced()

    def bound(self) -> float:
        """Return what an assignment costs at least, given the choices that were made."""
        left = self.copied()
        while left.next is not None:
            left.relaxed(left.next)
        return left.cost

    def solution(self) -> Solution:
        """Return an assignment, given the choices that were made."""
        left = self.copied()
        while left.next is not None:
            left.fixed(left.next)
        choices = [0] * self.count
        for variable, scope, parts in reversed(left.removed):
            at = [choices[v] for v in scope]
            first, *others = parts
            costs = first[(slice(None), *_places(at, first))]
            for part in others:
                costs = costs + part[(slice(None), *_places(at, part))]
            choices[variable] = int(costs.argmin())
        return Solution(tuple(choices), left.cost, False)


def _sum(parts: Sequence[Table]) -> Table:
    total = parts[0]
    for part in parts[1:]:
        total = np.add(total, part, order="C")
    return total


def _places(choices: Sequence[int], table: Table) -> Sequence[int]:
    """Return where choices are in a table, but for its first axis; one that does not matter has one place."""
    if 1 not in table.shape:
        return choices
    return [0 if size == 1 else place for place, size in zip(choices, table.shape[1:], strict=True)]
