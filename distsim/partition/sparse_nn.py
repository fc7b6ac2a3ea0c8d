"""Sparse-nn partition: embedding regions apart, the dense parts replicated next to them."""

from __future__ import annotations

from collections.abc import Sequence

from distsim.errors import NoMappingError, OpTooLargeError, TooFewDevicesError, UnequalMemoriesError
from distsim.partition.pieces import Growing, Piece, Placement, best_fit, levels_of, parents_of, piece_of
from distsim.partition.problem import PartitionDevice, Problem
from distsim.partition.size_based import unplaced


def sparse_nn(problem: Problem, devices: Sequence[PartitionDevice]) -> tuple[list[Piece], Placement]:
    """Return pieces that are all embeddings or all dense, and where they are.

    Regions of ops of one kind are cut where a device is full, then the smallest piece of each kind is
    joined with the largest at most one level away as long as that fits. Each embedding piece has a device
    of its own, and all dense pieces are on every one of these; without embeddings, :func:`best_fit`
    places the dense ones. Raises :class:`UnequalMemoriesError` for devices of different memory,
    :class:`OpTooLargeError`, :class:`TooFewDevicesError` when there are more embedding pieces than
    devices, and :class:`NoMappingError` when the dense pieces do not fit beside one.
    """
    memory = devices[0].memory
    if any(device.memory != memory for device in devices):
        given = {device.name: device.memory for device in devices}
        raise UnequalMemoriesError(f"sparse_nn wants devices of equal memory, not {given}")
    joining = _Joining(problem, memory)
    joining.join(False)
    joining.join(True)
    pieces, embedding = joining.pieces, joining.embedding
    # In the order in which pieces became what they are, which is also theirs among all pieces.
    sparse = [k for k in range(len(pieces)) if embedding[k]]
    if not sparse:
        places, found = best_fit(problem, pieces, devices)
        if not found:
            raise unplaced(problem, pieces, places, devices)
        return pieces, places
    if len(sparse) > len(devices):
        need = sum(pieces[k].bytes for k in sparse)
        raise TooFewDevicesError(
            f"{len(sparse)} embedding parts of {need} bytes need {len(sparse)} devices of {memory} bytes, "
            f"{len(devices)} given"
        )
    dense = sum(piece.bytes for k, piece in enumerate(pieces) if not embedding[k])
    for k in sparse:
        if dense + pieces[k].bytes > memory:
            raise NoMappingError(
                f"embedding part {k} needs {pieces[k].bytes} bytes and the dense parts beside it {dense}: "
                f"{dense + pieces[k].bytes - memory} more than the {memory} of a device"
            )
    rank = {k: number for number, k in enumerate(sparse)}
    return pieces, [[rank[k]] if embedding[k] else list(range(len(sparse))) for k in range(len(pieces))]


class _Joining:
    """The pieces, of which kind they are, and which read which; joined pieces go to the end."""

    def __init__(self, problem: Problem, memory: int) -> None:
        self._problem, self._memory = problem, memory
        self.pieces: list[Piece] = []
        self.embedding: list[bool] = []
        self._regions()
        self._parents = parents_of(problem, self.pieces)

    def _regions(self) -> None:
        current, kind = Growing(self._problem), False
        for op in self._problem.ops:
            item = self._problem.items[op]
            full = current.bytes + current.extra(op) > self._memory
            if current.items and (full or item.embedding != kind):
                self._keep(current, kind)
                current = Growing(self._problem)
            kind = item.embedding
            if (need := current.bytes + current.extra(op)) > self._memory:
                raise OpTooLargeError(
                    f"{item.name} needs {need} bytes with its inputs; a device has {self._memory}. "
                    f"Give devices of at least {need} bytes"
                )
            current.add(op)
        self._keep(current, kind)

    def _keep(self, current: Growing, kind: bool) -> None:
        self.pieces.append(current.piece())
        self.embedding.append(kind)

    def join(self, kind: bool) -> None:
        """Join pieces of a kind until the smallest fits nowhere."""
        while (pair := self._pair(kind)) is not None:
            joined, first, second = pair
            keep = [k for k in range(len(self.pieces)) if k not in (first, second)]
            new = {k: number for number, k in enumerate(keep)} | {first: len(keep), second: len(keep)}
            both = self._parents[first] | self._parents[second]
            above = [*[self._parents[k] for k in keep], both - {first, second}]
            self._parents = [{new[k] for k in parents} for parents in above]
            self.pieces = [*[self.pieces[k] for k in keep], joined]
            self.embedding = [*[self.embedding[k] for k in keep], kind]

    def _pair(self, kind: bool) -> tuple[Piece, int, int] | None:
        mine = [k for k in range(len(self.pieces)) if self.embedding[k] == kind]
        mine.sort(key=lambda k: self.pieces[k].bytes)
        if len(mine) < 2:
            return None
        levels = levels_of(self._parents)
        smallest = mine[0]
        for other in reversed(mine[1:]):
            if abs(levels[smallest] - levels[other]) <= 1:
                joined = piece_of(self._problem, self.pieces[other].items | self.pieces[smallest].items)
                if joined.bytes <= self._memory:
                    return joined, other, smallest
        return None
