"""Sparse-nn partition: embedding regions apart, the dense parts replicated next to them."""

from __future__ import annotations

from collections.abc import Sequence

from distsim.errors import NoMappingError, OpTooLargeError, TooFewDevicesError, UnequalMemoriesError
from distsim.partition.pieces import Growing, Piece, Placement, best_fit, piece_of
from distsim.partition.problem import PartitionDevice, Problem
from distsim.partition.regions import join_regions
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
    regions = join_regions(problem, regions_of(problem, memory), memory)
    pieces = [piece_of(problem, region.items) for region in regions]
    embedding = [region.embedding for region in regions]
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


def regions_of(problem: Problem, memory: int) -> list[tuple[Growing, bool]]:
    """Return runs of ops of one kind that fit on a device, and whether they are embeddings."""
    found: list[tuple[Growing, bool]] = []
    current, kind = Growing(problem), False
    for op in problem.ops:
        item = problem.items[op]
        full = current.bytes + current.extra(op) > memory
        if current.items and (full or item.embedding != kind):
            found.append((current, kind))
            current = Growing(problem)
        kind = item.embedding
        if (need := current.bytes + current.extra(op)) > memory:
            raise OpTooLargeError(
                f"{item.name} needs {need} bytes with its inputs; a device has {memory}. "
                f"Give devices of at least {need} bytes"
            )
        current.add(op)
    return [*found, (current, kind)]
