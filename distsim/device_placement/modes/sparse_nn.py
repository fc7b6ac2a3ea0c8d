"""Sparse-nn partition: embedding regions apart, the dense parts replicated next to them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from distsim.device_placement.modes.regions import join_regions
from distsim.device_placement.modes.size_based import unplaced
from distsim.device_placement.pieces import DraftPart, Growing, Placement, best_fit, piece_of
from distsim.device_placement.problem import PartitionDevice, Problem
from distsim.errors import NoMappingError, OpTooLargeError, TooFewDevicesError, UnequalMemoriesError


def sparse_nn(problem: Problem, devices: Sequence[PartitionDevice]) -> tuple[list[DraftPart], Placement]:
    """Return pieces that are all embeddings or all dense, and where they are.

    Regions of ops of one kind are cut where a device is full, then the smallest piece of each kind is
    joined with the largest at most one level away as long as that fits. Each embedding piece has a device
    of its own, and all dense pieces are on every one of these, so embeddings are cut where these just fit
    beside them (torch.fx fills the device, and then finds that they do not); without embeddings,
    :func:`best_fit` places the dense ones. Raises :class:`UnequalMemoriesError` for devices of different
    memory, :class:`OpTooLargeError`, :class:`TooFewDevicesError` when there are more embedding pieces than
    devices, and :class:`NoMappingError` when the dense pieces do not fit beside a single embedding.
    """
    memory = devices[0].memory
    if any(device.memory != memory for device in devices):
        given = {device.name: device.memory for device in devices}
        raise UnequalMemoriesError(f"sparse_nn wants devices of equal memory, not {given}")
    room = memory
    while True:
        regions = join_regions(problem, regions_of(problem, memory, room), memory, room)
        sparse = [region for region in regions if region.embedding]
        if len(sparse) > len(devices):
            need = sum(region.bytes for region in sparse)
            beside = f", {memory - room} of them for the dense parts" if room < memory else ""
            raise TooFewDevicesError(
                f"{len(sparse)} embedding parts of {need} bytes need {len(sparse)} devices of {memory} "
                f"bytes{beside}, {len(devices)} given"
            )
        dense = sum(region.bytes for region in regions if not region.embedding)
        most = max(sparse, key=attrgetter("bytes"), default=None)
        if most is None or dense + most.bytes <= memory:
            break
        if memory - dense >= room:
            raise NoMappingError(
                f"embedding part {regions.index(most)} needs {most.bytes} bytes and the dense parts beside "
                f"it {dense}: {dense + most.bytes - memory} more than the {memory} of a device"
            )
        room = memory - dense
    pieces = [piece_of(problem, region.items) for region in regions]
    if not sparse:
        places, found = best_fit(problem, pieces, devices)
        if not found:
            raise unplaced(problem, pieces, places, devices)
        return pieces, places
    rank = {region: number for number, region in enumerate(sparse)}
    return pieces, [[rank[each]] if each.embedding else list(range(len(sparse))) for each in regions]


def regions_of(problem: Problem, memory: int, room: int) -> list[tuple[Growing, bool]]:
    """Return runs of ops of one kind, and whether they are embeddings.

    Dense runs fit on a device, in ``memory``, and embeddings in the ``room`` that is left on it, unless a
    single one does not.
    """
    found: list[tuple[Growing, bool]] = []
    current, kind = Growing(problem), False
    for op in problem.ops:
        item = problem.items[op]
        full = current.bytes + current.extra(op) > (room if kind else memory)
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
