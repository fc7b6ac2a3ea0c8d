"""In which order variables are eliminated, and which tables each step reads and makes.

That depends only on how many choices the variables have and on which of them are tied, not on what
the choices cost, so that problems of one shape (a model on 2, 4, 8 ranks) share one order.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from distsim.cache import cached

HUB = 32
"""A variable with more costs than this is weighed anew only when its turn comes."""

Scope = tuple[int, ...]
"""Variables, in order, whose choices together have a cost."""


@dataclass(frozen=True, slots=True)
class Read:
    """A table that a step takes: where it is, the order of its axes (None: as it is), its new shape."""

    slot: int
    axes: tuple[int, ...] | None
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Eliminate:
    """Put the least sum of the tables read over the choices of a variable into a slot."""

    variable: int
    around: Scope
    reads: tuple[Read, ...]
    slot: int


@dataclass(frozen=True, slots=True)
class Fix:
    """Give a variable its cheapest local choice: per table, its slot, the variable's axis, the new slot."""

    variable: int
    tables: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class EliminationOrder:
    """The steps, and how many slots they need.

    Slots 0 to n-1 hold the costs of each of n variables, those after them the costs of the scopes given, in
    their order. A step that makes a table adds it to what is in the slot; slot -1 is the total.
    """

    steps: tuple[Eliminate | Fix, ...]
    slots: int


@cached("orders of elimination, by sizes, scopes and limit", 256)
def order(sizes: tuple[int, ...], scopes: tuple[Scope, ...], limit: int) -> EliminationOrder:
    """Return the order for variables with ``sizes`` choices and costs of ``scopes`` of two or more.

    The variable whose elimination makes the smallest table goes first. Where even that would read a table
    of more than ``limit`` entries, the variable with most neighbours is fixed instead. Variables with one
    choice take no part.
    """
    return _OrderPlanner(sizes, scopes).run(limit)


class _OrderPlanner:
    def __init__(self, sizes: tuple[int, ...], scopes: tuple[Scope, ...]) -> None:
        self.sizes = sizes
        self.slot: dict[Scope, int] = {}
        self.touching: list[dict[Scope, None]] = [{} for _ in sizes]
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
        return found

    def take(self, variable: int) -> list[tuple[Scope, int]]:
        """Remove and return the scopes with a variable, and where their costs are."""
        found: list[tuple[Scope, int]] = []
        for scope in tuple(self.touching[variable]):
            found.append((scope, self.slot.pop(scope)))
            for other in scope:
                del self.touching[other][scope]
        return found

    def neighbours(self, variable: int) -> Scope:
        found = {other for scope in self.touching[variable] for other in scope}
        found.discard(variable)
        return tuple(sorted(found))

    def weight(self, variable: int) -> int:
        return math.prod([self.sizes[other] for other in self.neighbours(variable)])

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
                variable = max(self.left, key=lambda v: (len(self.neighbours(v)), -v))
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
        place = {v: i for i, v in enumerate(around)}
        reads: list[Read] = []
        for scope, slot in self.take(variable):
            own = scope.index(variable)  # its axis comes last
            last = own == len(scope) - 1
            axes = None if last else (*(i for i in range(len(scope)) if i != own), own)
            shape = [1] * len(around) + [self.sizes[variable]]
            for other in scope:
                if other != variable:
                    shape[place[other]] = self.sizes[other]
            reads.append(Read(slot, axes, tuple(shape)))
        return Eliminate(variable, around, tuple(reads), self.slot_of(around))

    def fix(self, variable: int) -> Fix:
        tables: list[tuple[int, int, int]] = []
        for scope, slot in self.take(variable):
            rest = tuple(v for v in scope if v != variable)
            tables.append((slot, scope.index(variable), self.slot_of(rest)))
        return Fix(variable, tuple(tables))
