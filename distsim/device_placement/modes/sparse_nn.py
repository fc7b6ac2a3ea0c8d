"""Sparse-nn partition: embedding regions apart, the dense parts replicated next to them."""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Sequence
from operator import attrgetter

from distsim.device_placement.modes.size_based import fitted
from distsim.device_placement.pieces import (
    DraftPart,
    Growing,
    Placement,
    levels_of,
    parents_of,
    piece_of,
)
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
        return pieces, fitted(problem, pieces, devices)
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


class Region:
    """Ops of one kind, what they need, and their place among the regions.

    ``outside`` counts how many of its ops read each op of others; ``rank`` orders regions by when they
    became what they are.
    """

    __slots__ = ("above", "below", "bytes", "embedding", "items", "level", "outside", "rank")

    def __init__(self, problem: Problem, growing: Growing, embedding: bool, rank: int) -> None:
        self.items, self.bytes, self.embedding, self.rank = set(growing.items), growing.bytes, embedding, rank
        reads = [i for item in self.items for i in problem.items[item].inputs]
        self.outside = Counter([i for i in reads if i not in self.items])
        self.above: dict[Region, None] = {}
        self.below: dict[Region, None] = {}
        self.level = 0

    @property
    def size(self) -> tuple[int, int]:
        """Bytes, then rank: what regions are sorted by."""
        return self.bytes, self.rank


def join_regions(
    problem: Problem, growing: Sequence[tuple[Growing, bool]], memory: int, room: int
) -> list[Region]:
    """Return the regions, in order of rank, after joining first the dense and then the embedding ones.

    The smallest region of a kind is joined with the largest that is at most one level away and with which
    it fits, dense ones in ``memory`` and embeddings in ``room``; the kind is done when there is none. Each
    step costs what it changes: the sizes of the smaller region and the levels of those behind.
    """
    regions = [Region(problem, piece, kind, rank) for rank, (piece, kind) in enumerate(growing)]
    parents = parents_of(problem, [piece.piece() for piece, _ in growing])
    for region, above, level in zip(regions, parents, levels_of(parents), strict=True):
        region.level = level
        for parent in sorted(above):
            region.above[regions[parent]] = regions[parent].below[region] = None
    rank = len(regions)
    found: list[Region] = []
    for kind in (False, True):
        queue = sorted([region for region in regions if region.embedding == kind], key=attrgetter("size"))
        limit = room if kind else memory
        while (number := _partner(problem, queue, limit)) is not None:
            smallest, region = queue.pop(0), queue.pop(number - 1)
            _absorb(problem, region, smallest, rank)
            rank += 1
            insort(queue, region, key=attrgetter("size"))
        found += queue
    return sorted(found, key=attrgetter("rank"))


def _partner(problem: Problem, queue: Sequence[Region], memory: int) -> int | None:
    """Return the place in the queue of the largest region that the first can be joined with."""
    for number in range(len(queue) - 1, 0, -1):
        region = queue[number]
        close = abs(queue[0].level - region.level) <= 1
        if close and region.bytes + _growth(problem, region, queue[0]) <= memory:
            return number
    return None


def _growth(problem: Problem, region: Region, other: Region) -> int:
    """Bytes by which a region grows when another joins it."""
    items, times, grown = problem.items, problem.times, other.bytes
    for item in other.items:
        if item in region.items:  # an outside input that both hold
            grown -= items[item].total_bytes
        else:
            grown -= items[item].output_bytes * times(region.outside[item])
    for item, count in other.outside.items():
        if item in region.items:
            grown -= items[item].output_bytes * times(count)
        elif own := region.outside[item]:
            grown -= items[item].output_bytes * (times(own) + times(count) - times(own + count))
    return grown


def _absorb(problem: Problem, region: Region, other: Region, rank: int) -> None:
    region.bytes += _growth(problem, region, other)
    region.outside.update(other.outside)
    region.items |= other.items
    for item in [*other.items, *other.outside]:
        if item in region.items:
            region.outside.pop(item, None)
    region.rank = rank
    for near, back in (("above", "below"), ("below", "above")):
        mine, theirs = getattr(region, near), getattr(other, near)
        mine.update(theirs)
        for neighbour in theirs:
            links = getattr(neighbour, back)
            links.pop(other, None)
            links[region] = None
    for links in (region.above, region.below):
        links.pop(region, None)
        links.pop(other, None)
    _relevel(region)


def _relevel(region: Region) -> None:
    """Set the level of a region and of all behind it whose levels change."""
    queue = deque([region, *region.below])
    while queue:
        current = queue.popleft()
        level = 1 + max([parent.level for parent in current.above], default=-1)
        if level != current.level:
            current.level = level
            queue.extend(current.below)
