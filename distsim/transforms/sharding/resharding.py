"""What it costs to bring values from one state to another, as tables over all states of an axis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from distsim.ir import Tensor
from distsim.ir.type import UInt8
from distsim.transforms.sharding.layout import PARTIAL, REPLICATED, State, moved_bytes
from distsim.transforms.sharding.options import Ids
from distsim.transforms.sharding.variable_elimination import Table

TOUCH_WEIGHT = 1e-6
"""Cost of a byte that a kernel touches on its own device: breaks ties between equal communication."""
START_BYTES = 1048576.0
"""A collective costs its start besides its bytes: some 10 us, in which 100 GB/s move 1 MiB."""
AVOIDED = 1e6
"""Times dearer, over the batch, is what microbatches cannot do: bring a divided value together, divide
one that is made once, or take a sum inside a callee. It is chosen where nothing else is possible."""

_BYTE = Tensor(UInt8(), (1,))


class Moves:
    """The costs of all moves between ``states`` over ``ranks`` ranks, in bytes sent."""

    def __init__(self, states: Sequence[State], ranks: int, over_time: bool) -> None:
        ranks = max(ranks, 2)
        sent = np.array([[moved_bytes(_BYTE, s, t, ranks) for t in states] for s in states])
        own_part = np.array([[s is REPLICATED and t is not s for t in states] for s in states])
        self._start = np.where((sent > 0) & ~own_part, START_BYTES, 0.0)
        sent = np.where(own_part, TOUCH_WEIGHT * 2, sent)  # a copy on the device
        self._per_byte = (sent, sent)
        if over_time:
            self._per_byte = tuple(
                sent + AVOIDED * np.array([[_avoided(s, t, top) for t in states] for s in states])
                for top in (False, True)
            )
        self._all: dict[tuple[int, bool], Table] = {}
        self._places: dict[tuple[Ids, Ids], npt.NDArray[np.intp]] = {}

    def table(self, nbytes: int, top: bool, sources: Ids, targets: Ids) -> Table:
        """Return the costs for a value of ``nbytes``; ``top``: it is one of the whole function."""
        every = self._all.get((nbytes, top))
        if every is None:
            # Of nothing nothing is sent; what cannot be stays infinite.
            size = max(nbytes, 1e-300)
            every = self._per_byte[top] * size + (self._start if nbytes else 0.0)
            self._all[nbytes, top] = every
        places = self._places.get((sources, targets))
        if places is None:
            rows, columns = np.array(sources, np.intp), np.array(targets, np.intp)
            places = self._places[sources, targets] = rows[:, None] * len(every) + columns[None, :]
        return every.take(places)


def _avoided(source: State, target: State, top: bool) -> float:
    dear = source.sharded or target.sharded or (source is PARTIAL and not top)
    return 1.0 if dear and source != target else 0.0
