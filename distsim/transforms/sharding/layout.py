"""Where a value is along one mesh axis, and what it costs to move it from one state to another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from distsim.cache import cached
from distsim.hardware.rank_axes import EXPERT
from distsim.ir.type import Tensor, UInt8, as_tensor
from distsim.ir.value import Value
from distsim.ops.parts import Groups, Parts, Shard
from distsim.transforms.sharding.variable_elimination import Table


class State(NamedTuple):
    """The placement of a value along one axis of ranks.

    Replicated (every rank holds the whole), sharded (``dim`` is divided; with ``pieces``, each piece
    of the dimension is divided, or each rank has some of its groups), or partial (the value is the sum over
    the ranks, not yet taken).
    """

    kind: str
    dim: int = -1
    pieces: Parts = None

    @property
    def sharded(self) -> bool:
        """Whether a dimension is divided."""
        return self.kind == "S"

    @property
    def by_groups(self) -> bool:
        """Whether each rank has some groups, as those that have experts have of rows."""
        return isinstance(self.pieces, Groups)

    def __str__(self) -> str:
        if not self.sharded:
            return self.kind
        if isinstance(self.pieces, Groups):
            return f"S{self.dim}:{len(self.pieces.sizes)} groups"
        return f"S{self.dim}" + (f"{list(self.pieces)}" if self.pieces else "")


REPLICATED = State("R")
PARTIAL = State("P")
FORBIDDEN = float("inf")


def sharded(dim: int, pieces: Parts = None) -> State:
    """Return the state in which ``dim`` is divided over the ranks."""
    return State("S", dim, pieces)


class DividedAxis(NamedTuple):
    """An axis of a mesh along which values are divided into ``parts``: as many as ranks, or, of the batch,
    ranks and microbatches.

    ``zigzag``: what is divided is in twice as many parts, of which rank r has the r-th and the r-th from the
    end, so that a causal mask leaves all ranks the same work (Brandon et al. 2023, striped attention, and the
    "2cp chunks" of TransformerEngine, ``context_parallel.py``). ``experts``: its ranks have different
    ones, so that with other such axes it divides rows of experts (:func:`divisions`). ``part_of``: it is cut
    out of this axis, with which it goes but for experts (:func:`joint_axes`).
    """

    name: str
    parts: int
    zigzag: bool = False
    experts: bool = False
    part_of: str = ""

    def pieces(self, state: State, size: int) -> Parts:
        """Return the pieces in which a dimension of ``size`` is divided, for ``MPIScatter`` and the like."""
        if isinstance(state.pieces, Groups):
            plain = state.pieces.is_even(self.parts) and not state.pieces.kind
            return None if plain else state.pieces
        if not self.zigzag:
            return state.pieces
        return tuple([half for n in state.pieces or (size,) for half in (n // 2, -(n // 2))])


class Placement(NamedTuple):
    """The states of a value along the axes of ranks, the batch (microbatches and dp) first.

    ``flat``: the axis over which a parameter, or its state, is divided as well, flat and padded, for it stays
    over microbatches; and the shape of what the others leave of it. None: it is not.
    """

    axes: tuple[DividedAxis, ...]
    states: tuple[State, ...]
    flat: tuple[str, tuple[int, ...]] | None = None

    @property
    def batch(self) -> State:
        """The state along the batch."""
        return self.states[0]

    def along(self, name: str) -> State:
        """Return the state along an axis; whole where there is no such axis."""
        return next((s for a, s in zip(self.axes, self.states, strict=True) if a.name == name), REPLICATED)

    def shards(self, local: tuple[int, ...]) -> tuple[Shard, ...]:
        """Return how a value is divided of which a rank's part has this shape, for ``MPIScatter`` and
        ``MPIGather``."""
        shape = list(local if self.flat is None else self.flat[1])
        found: list[Shard] = []
        for axis, state in reversed(divisions(self.axes, self.states)):
            pieces = axis.pieces(state, 0)
            even = shape[state.dim] * axis.parts
            shape[state.dim] = sum(pieces.sizes) if isinstance(pieces, Groups) else even
            found.insert(0, (state.dim, axis.name, axis.pieces(state, shape[state.dim])))
        return tuple(found) if self.flat is None else (*found, (None, *self.flat))

    def __str__(self) -> str:
        flat = [] if self.flat is None else [f"{self.flat[0]}:flat{list(self.flat[1])}"]
        return " ".join([*(f"{a.name}:{s}" for a, s in zip(self.axes, self.states, strict=True)), *flat])


def expert_axis(axes: Sequence[DividedAxis]) -> DividedAxis:
    """Return all axes together whose ranks have different experts."""
    return DividedAxis(EXPERT, math.prod([axis.parts for axis in axes if axis.experts]))


def joint_axes(
    axes: Sequence[DividedAxis], *ends: Sequence[State]
) -> list[tuple[DividedAxis, tuple[int, ...]]]:
    """Return the axes along which values are divided, and the places in ``axes`` that each has.

    Parts of one axis are that axis where a value is along all of them in one state, at both of its ends, say:
    what moves does so over all ranks at once. In zigzag too: of the two parts that a rank of the outer one
    has, those of the inner one have what they have of the axis.

    >>> axes = [DividedAxis("ep_tp", 2, experts=True, part_of="tp"), DividedAxis("etp", 4, part_of="tp")]
    >>> [(axis.name, axis.parts) for axis, _ in joint_axes(axes, [sharded(1), sharded(1)])]
    [('tp', 8)]
    >>> [(axis.name, axis.parts) for axis, _ in joint_axes(axes, [REPLICATED, sharded(1)])]
    [('ep_tp', 2), ('etp', 4)]
    """
    found: list[tuple[DividedAxis, tuple[int, ...]]] = []
    for place, axis in enumerate(axes):
        joint = place > 0 and axis.part_of and axis.part_of == axes[place - 1].part_of
        if joint and all(states[place] == states[place - 1] for states in ends):
            before, places = found[-1]
            whole = DividedAxis(axis.part_of, before.parts * axis.parts, axis.zigzag)
            found[-1] = whole, (*places, place)
        else:
            found.append((axis, (place,)))
    return found


def divisions(axes: Sequence[DividedAxis], states: Sequence[State]) -> list[tuple[DividedAxis, State]]:
    """Return along which axes a value is divided, and how: by experts it is along all at once that have some.

    >>> rows, axes = sharded(1, Groups((6, 2, 3, 6))), [DividedAxis(name, 2, False, True) for name in "ab"]
    >>> [(axis.name, axis.parts, str(state)) for axis, state in divisions(axes, [rows, rows])]
    [('ep', 4, 'S1:4 groups')]
    """
    found: list[tuple[DividedAxis, State]] = []
    together = False
    for axis, places in joint_axes(axes, states):
        state = states[places[0]]
        if axis.experts and isinstance(state.pieces, Groups):
            found += [] if together else [(expert_axis(axes), state)]
            together = True
        elif state.sharded:
            found.append((axis, state))
    return found


class Divisions:
    """How values are divided, each way made once: many parameters are divided alike."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, tuple[int, ...]], tuple[Shard, ...]] = {}

    def of(self, place: Placement, value: Value) -> tuple[Shard, ...]:
        """Return how a value is divided of which a rank has this part."""
        shape = as_tensor(value.type, value.name).shape
        found = self._known.get((id(place), shape))
        if found is None:
            found = self._known[id(place), shape] = place.shards(shape)
        return found


@cached("what the ranks must divide, by shape and state", 65536)
def divisor(shape: tuple[int, ...], state: State) -> int | None:
    """Return what the number of ranks must divide so that each holds an equal part; 0: any, None: none.

    >>> divisor((6, 8), sharded(1)), divisor((6, 8), REPLICATED), divisor((6, 0), sharded(1))
    (8, 0, None)
    """
    if not state.sharded:
        return 0
    if isinstance(state.pieces, Groups):
        sizes = state.pieces.sizes
        return len(sizes) if sum(sizes) == shape[state.dim] else None
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
    size = state.pieces.largest(ranks) if isinstance(state.pieces, Groups) else shape[state.dim] // ranks
    return (*shape[: state.dim], size, *shape[state.dim + 1 :])


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
    merged = isinstance(source.pieces, tuple) or isinstance(target.pieces, tuple)
    return source.dim != target.dim and not merged


# --- tables of what moves cost, over all states of an axis --------------------------------------------

Ids = tuple[int, ...]
"""Numbers of states, or of an op's options."""
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
