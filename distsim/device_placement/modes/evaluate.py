"""What a set of pieces costs: the graph latency once they are placed."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from distsim.device_placement.pieces import DraftPart, Placement, best_fit, order_of, piece_of
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
        order = order_of(parents)
        if len(order) < len(pieces):
            return math.inf
        ends = [0.0] * len(pieces)
        for k in order:
            begin, here, piece = 0.0, places[k], pieces[k]
            for parent in parents[k]:
                end = ends[parent]
                if not here or places[parent] != here:
                    end += self.delay(pieces[parent], piece)
                if end > begin:
                    begin = end
            ends[k] = begin + piece.latency
        return max(ends)
