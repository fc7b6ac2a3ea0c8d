"""Saturating the host: replicas of all parts on devices that are idle."""

from __future__ import annotations

from collections.abc import Sequence

from distsim.device_placement.pieces import DraftPart, Placement
from distsim.device_placement.problem import PartitionDevice


def saturate(pieces: Sequence[DraftPart], devices: Sequence[PartitionDevice], places: Placement) -> Placement:
    """Return where the pieces and their replicas are.

    In a round, every device in use gets a replica on the smallest idle device that holds what it holds;
    rounds go on while each device in use finds one. A round in which one does not leaves nothing behind.
    """
    need = [0] * len(devices)
    for piece, where in zip(pieces, places, strict=True):
        for number in where:
            need[number] += piece.bytes
    used = [number for number in range(len(devices)) if any(number in where for where in places)]
    idle = [number for number in range(len(devices)) if number not in used]
    replicas: list[tuple[int, int]] = []
    while len(idle) >= len(used):
        left, found = list(idle), list[tuple[int, int]]()
        for number in used:
            able = [d for d in left if devices[d].memory >= need[number]]
            if not able:
                return _with(places, replicas)
            new = min(able, key=lambda d: devices[d].memory)
            left.remove(new)
            found.append((new, number))
        idle = left
        replicas += found
    return _with(places, replicas)


def _with(places: Placement, replicas: Sequence[tuple[int, int]]) -> Placement:
    return [[*where, *[new for new, old in replicas if old in where]] for where in places]
