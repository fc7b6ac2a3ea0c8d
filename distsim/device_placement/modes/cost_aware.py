"""Cost-aware partition: join the two pieces whose union shortens the graph latency most, again and again."""

from __future__ import annotations

from collections.abc import Sequence

from distsim.device_placement.modes.evaluate import Evaluator
from distsim.device_placement.pieces import DraftPart, Placement, levels_of, parents_of
from distsim.device_placement.problem import PartitionDevice, Problem


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
