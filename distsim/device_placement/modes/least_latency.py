"""The modes that look for little graph latency.

Cost-aware joins pieces. Kernighan-Lin swaps ops between the parts of the size-based partition, after
B. W. Kernighan and S. Lin, "An efficient heuristic procedure for partitioning graphs" (1970), with the graph
latency as the cost.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from distsim.device_placement.pieces import (
    DraftPart,
    Placement,
    best_fit,
    levels_of,
    longest_way,
    parents_of,
    piece_of,
)
from distsim.device_placement.problem import PartitionDevice, Problem
from distsim.errors import PartitionError


class Evaluator:
    """Places pieces and finds their latency; equal questions about two pieces are answered once."""

    def __init__(self, problem: Problem, devices: Sequence[PartitionDevice], transfer_rate: float) -> None:
        if not transfer_rate > 0 or not math.isfinite(transfer_rate):
            raise PartitionError(
                f"the transfer rate is {transfer_rate}; this mode needs one above 0 bytes per second"
            )
        self.problem, self.devices, self.rate = problem, devices, transfer_rate
        self._delays: dict[tuple[DraftPart, DraftPart], float] = {}
        self._pieces: dict[frozenset[int], DraftPart] = {}

    def piece(self, items: frozenset[int]) -> DraftPart:
        """Return the piece of these items."""
        found = self._pieces.get(items)
        if found is None:
            found = self._pieces[items] = piece_of(self.problem, items)
        return found

    def delay(self, parent: DraftPart, child: DraftPart) -> float:
        """How long the transfer from one piece to another takes: all that one holds and the other reads."""
        found = self._delays.get((parent, child))
        if found is None:
            items = self.problem.items
            read = {i for op in child.items for i in items[op].inputs if i in parent.items}
            found = self._delays[parent, child] = sum([items[i].output_bytes for i in read]) / self.rate
        return found

    def place(self, pieces: Sequence[DraftPart]) -> tuple[Placement, bool]:
        """Return where :func:`best_fit` puts the pieces, and whether it found a place for each."""
        return best_fit(self.problem, pieces, self.devices)

    def latency(
        self, pieces: Sequence[DraftPart], parents: Sequence[Collection[int]], places: Placement
    ) -> float:
        """Return the critical path over the pieces; infinite when some wait in a circle."""

        def delay(parent: int, child: int) -> float:
            here = places[child]
            return 0.0 if here and places[parent] == here else self.delay(pieces[parent], pieces[child])

        return longest_way(parents, [piece.latency for piece in pieces], delay)


def cost_aware(
    problem: Problem, devices: Sequence[PartitionDevice], transfer_rate: float
) -> tuple[list[DraftPart], Placement, bool]:
    """Return the pieces, where they are, and whether each has a place.

    Every op begins as a piece of its own. In each round all pairs are tried that are at most one level
    apart or read one another, all pieces being placed anew with :func:`best_fit` each time, and the pair of
    least latency is joined unless that is more than the latency before (of equal ones, the last).
    """
    evaluator = Evaluator(problem, devices, transfer_rate)
    pieces = [evaluator.piece(frozenset(problem.close([op]))) for op in problem.ops]
    places: Placement = [[] for _ in pieces]
    found = False
    while len(pieces) > 1:
        parents = parents_of(problem, pieces)
        best = _best_pair(evaluator, pieces, parents, evaluator.latency(pieces, parents, places))
        if best is not None:
            pieces = _join(evaluator, pieces, *best)
        places, found = evaluator.place(pieces)
        if best is None:
            break
    else:
        places, found = evaluator.place(pieces)
    return pieces, places, found


def _best_pair(
    evaluator: Evaluator, pieces: Sequence[DraftPart], parents: Sequence[set[int]], cost: float
) -> tuple[int, int] | None:
    levels, best = levels_of(parents), None
    largest = max(device.memory for device in evaluator.devices)
    for first in range(len(pieces)):
        for second in range(first + 1, len(pieces)):
            adjacent = first in parents[second] or second in parents[first]
            if not adjacent and abs(levels[first] - levels[second]) > 1:
                continue
            joined = _join(evaluator, pieces, first, second)
            if joined[-1].own >= largest or joined[-1].latency > cost:
                continue  # it fits nowhere, or takes too long by itself
            places, found = evaluator.place(joined)
            if found:
                latency = evaluator.latency(joined, _join_parents(parents, first, second), places)
                if latency <= cost:
                    best, cost = (first, second), latency
    return best


def _join(evaluator: Evaluator, pieces: Sequence[DraftPart], first: int, second: int) -> list[DraftPart]:
    rest = [piece for k, piece in enumerate(pieces) if k not in (first, second)]
    return [*rest, evaluator.piece(pieces[first].items | pieces[second].items)]


def _join_parents(parents: Sequence[set[int]], first: int, second: int) -> list[set[int]]:
    """Return the parents of the pieces after joining two, first < second; the joined one is the last."""
    last = len(parents) - 2
    new = [k - (k > first) - (k > second) for k in range(len(parents))]
    new[first] = new[second] = last
    found = [{new[k] for k in above} for n, above in enumerate(parents) if n not in (first, second)]
    return [*found, {new[k] for k in parents[first] | parents[second]} - {last}]


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
    search = _LocalSearch(Evaluator(problem, devices, transfer_rate), list(pieces), places)
    for _ in range(PASSES):
        before = search.cost
        for op in problem.ops:
            if search.tried < trials:
                search.improve(op)
        if not search.cost < before:
            break
    search.place_anew()
    return search.pieces, search.places


class _LocalSearch:
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
        return self._problem.ops_in(self.pieces[piece].items)

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
