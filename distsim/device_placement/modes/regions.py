"""Joining the regions of a sparse-nn partition, the smallest with the largest that it fits with."""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Sequence
from operator import attrgetter

from distsim.device_placement.pieces import Growing, levels_of, parents_of
from distsim.device_placement.problem import Problem


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
    items, grown = problem.items, other.bytes
    for item in other.items:
        if item in region.items:  # an outside input that both hold
            grown -= items[item].total_bytes
        elif (count := region.outside.get(item, 0)) > 0:
            grown -= items[item].output_bytes * (count if problem.per_reader else 1)
    for item, count in other.outside.items():
        if item in region.items:
            grown -= items[item].output_bytes * (count if problem.per_reader else 1)
        elif item in region.outside and not problem.per_reader:
            grown -= items[item].output_bytes
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
