"""Where a value is along one mesh axis, and what it costs to move it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from distsim.cache import cached
from distsim.ir.type import Tensor
from distsim.ops.communication import Shard


@dataclass(frozen=True, slots=True)
class State:
    """The placement of a value along one axis of ranks.

    Replicated (every rank holds the whole), sharded (``dim`` is divided; with ``pieces``, each piece
    of the dimension is divided), or partial (the value is the sum over the ranks, not yet taken).
    """

    kind: str
    dim: int = -1
    pieces: tuple[int, ...] | None = None

    @property
    def sharded(self) -> bool:
        """Whether a dimension is divided."""
        return self.kind == "S"

    def __str__(self) -> str:
        if not self.sharded:
            return self.kind
        return f"S{self.dim}" + (f"{list(self.pieces)}" if self.pieces else "")


REPLICATED = State("R")
PARTIAL = State("P")
FORBIDDEN = float("inf")


def sharded(dim: int, pieces: tuple[int, ...] | None = None) -> State:
    """Return the state in which ``dim`` is divided over the ranks."""
    return State("S", dim, pieces)


@dataclass(frozen=True, slots=True)
class Placement:
    """The states of a value along the batch axis (microbatches and dp) and along the tp axis.

    ``flat``: the shape of what tp leaves of a parameter, or of its state, that is divided over dp as well:
    flat and padded, for it stays over microbatches. None: it is not.
    """

    batch: State = REPLICATED
    tp: State = REPLICATED
    flat: tuple[int, ...] | None = None

    def shards(self) -> tuple[Shard, ...]:
        """Return how it is divided, for ``MPIScatter`` and ``MPIGather``."""
        states = (("dp", self.batch), ("tp", self.tp))
        found: tuple[Shard, ...] = tuple([(s.dim, axis, s.pieces) for axis, s in states if s.sharded])
        return found if self.flat is None else (*found, (None, "dp", self.flat))

    def __str__(self) -> str:
        flat = "" if self.flat is None else f" dp:flat{list(self.flat)}"
        return f"dp:{self.batch} tp:{self.tp}{flat}"


@cached("what the ranks must divide, by shape and state", 65536)
def divisor(shape: tuple[int, ...], state: State) -> int | None:
    """Return what the number of ranks must divide so that each holds an equal part; 0: any, None: none.

    >>> divisor((6, 8), sharded(1)), divisor((6, 8), REPLICATED), divisor((6, 0), sharded(1))
    (8, 0, None)
    """
    if not state.sharded:
        return 0
    sizes = state.pieces or (shape[state.dim],)
    return math.gcd(*sizes) if sum(sizes) == shape[state.dim] and all(sizes) else None


def divisible(shape: tuple[int, ...], state: State, ranks: int) -> bool:
    """Return whether ``ranks`` ranks can hold equal parts of a tensor of that shape."""
    found = divisor(shape, state)
    return found is not None and found % ranks == 0


def local_shape(shape: tuple[int, ...], state: State, ranks: int) -> tuple[int, ...]:
    """Return the shape of the part of one rank."""
    if not state.sharded:
        return shape
    return (*shape[: state.dim], shape[state.dim] // ranks, *shape[state.dim + 1 :])


def moved_bytes(tensor: Tensor, source: State, target: State, ranks: int) -> float:
    """Return the bytes each rank sends to bring ``tensor`` (global type) from one state to another.

    Ring algorithms (Patarasuk and Yuan 2009): an all-reduce moves 2 (n-1)/n of the size, a
    reduce-scatter or an all-gather (n-1)/n, an all-to-all (n-1)/n of a rank's part. Taking the own
    part of what is replicated moves nothing, nor does making it partial (each rank keeps an equal
    share of its numbers). What is sharded does not become partial.
    """
    if source == target:
        return 0.0
    share = (ranks - 1) / ranks * tensor.nbytes
    if target.kind == "P":
        return 0.0 if source.kind == "R" else FORBIDDEN
    if source.kind == "P":
        return share if target.sharded else 2 * share
    if source.kind == "R":
        return 0.0
    if not target.sharded:
        return share
    return share / ranks if exchangeable(source, target) else share


def exchangeable(source: State, target: State) -> bool:
    """Return whether one all-to-all turns one sharded state into the other."""
    return source.dim != target.dim and not source.pieces and not target.pieces
