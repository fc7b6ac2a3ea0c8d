"""Kernighan-Lin partition: start from the size-based one and swap ops between parts while that pays.

After B. W. Kernighan and S. Lin, "An efficient heuristic procedure for partitioning graphs" (1970), with
the graph latency as the cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from distsim.device_placement.modes.evaluate import Evaluator
from distsim.device_placement.pieces import DraftPart, Placement, parents_of
from distsim.device_placement.problem import PartitionDevice, Problem

PASSES = 8
"""At most so many passes over the ops; each must have shortened the latency for the next to begin."""


def kernighan_lin(
    problem: Problem,
    devices: Sequence[PartitionDevice],
    transfer_rate: float,
    pieces: Sequence[DraftPart],
    places: Placement,
    trials: float = math.inf,
) -> tuple[list[DraftPart], Placement]:
    """Return pieces of no more latency than those given, and where they are.

    For each op in turn: of all swaps with an op of another piece, and moves to another piece, that which
    gives the least latency is done if that is less than before. Pieces are placed anew each time; what
    cannot be placed, or waits in a circle, is not done. Pieces that become empty are left out. Without any
    swap the pieces are still placed anew if that takes no longer than where they were. The search ends
    with the op at which it has tried ``trials`` swaps and moves.
    """
    search = _Search(Evaluator(problem, devices, transfer_rate), list(pieces), places)
    for _ in range(PASSES):
        before = search.cost
        for op in problem.ops:
            if search.tried < trials:
                search.improve(op)
        if not search.cost < before:
            break
    search.place_anew()
    return search.pieces, search.places


class _Search:
    """The pieces as they are, where they are, and their latency."""

    def __init__(self, evaluator: Evaluator, pieces: list[DraftPart], places: Placement) -> None:
        self._evaluator, self._problem = evaluator, evaluator.problem
        self.pieces, self.places, self.tried = pieces, places, 0
        self.cost = evaluator.latency(pieces, parents_of(self._problem, pieces), places)

    def improve(self, op: int) -> None:
        """Do the best swap or move of an op, if it shortens the latency."""
        home = next(k for k, piece in enumerate(self.pieces) if op in piece.items)
        best: tuple[list[DraftPart], Placement] | None = None
        for other in range(len(self.pieces)):
            partners = [] if other == home else [*self._ops(other), None]
            self.tried += len(partners)
            for partner in partners:
                pieces = self._swapped(op, home, partner, other)
                cost, places = self._cost(pieces)
                if cost < self.cost:
                    self.cost, best = cost, (pieces, places)
        if best is not None:
            self.pieces, self.places = best

    def place_anew(self) -> None:
        """Place the pieces as every swap does, unless that takes longer than where they are."""
        cost, places = self._cost(self.pieces)
        if cost <= self.cost and len(self.pieces) > 1:
            self.cost, self.places = cost, places

    def _ops(self, piece: int) -> list[int]:
        items = self._problem.items
        return [number for number in sorted(self.pieces[piece].items) if items[number].is_op]

    def _swapped(self, op: int, home: int, partner: int | None, other: int) -> list[DraftPart]:
        here, there = dict.fromkeys(self._ops(home)), dict.fromkeys(self._ops(other))
        del here[op]
        there[op] = None
        if partner is not None:
            del there[partner]
            here[partner] = None
        new = {home: here, other: there}
        made = {
            k: self._evaluator.piece(frozenset(self._problem.close(ops))) for k, ops in new.items() if ops
        }
        return [made.get(k, piece) for k, piece in enumerate(self.pieces) if k not in new or k in made]

    def _cost(self, pieces: list[DraftPart]) -> tuple[float, Placement]:
        places, found = self._evaluator.place(pieces)
        if not found:
            return math.inf, places
        return self._evaluator.latency(pieces, parents_of(self._problem, pieces), places), places
