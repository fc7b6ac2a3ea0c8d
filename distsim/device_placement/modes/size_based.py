"""Size-based partition: fill one device after the other."""

from __future__ import annotations

from collections.abc import Sequence

from distsim.device_placement.pieces import DraftPart, Growing, Placement, best_fit, piece_of
from distsim.device_placement.problem import PartitionDevice, Problem
from distsim.errors import NoMappingError, OpTooLargeError


def size_based(problem: Problem, devices: Sequence[PartitionDevice]) -> tuple[list[DraftPart], Placement]:
    """Return pieces that fill the devices in the order of the ops, and where they are.

    A piece takes the first free device that holds its first op, and then ops as long as they fit. Once
    every device has a piece, the op that does not fit and all after it are pieces of their own, for which
    :func:`best_fit` finds devices with memory left. Raises :class:`OpTooLargeError` when no free device
    holds an op that begins a piece, and :class:`NoMappingError` when a piece is left without a device.
    """
    pieces: list[DraftPart] = []
    placed: Placement = []
    current, left, rest = Growing(problem), 0, False
    for op in problem.ops:
        extra = current.extra(op)
        if not rest and (extra > left or not placed):
            if current.items:
                pieces.append(current.piece())
                rest = len(pieces) == len(devices)
            if not rest:
                number = _free_device(problem, op, devices, placed)
                placed.append([number])
                current = Growing(problem)
                extra = current.extra(op)
                left = devices[number].memory
        if rest:
            pieces.append(piece_of(problem, problem.close([op])))
            placed.append([])
        else:
            left -= extra
            current.add(op)
    if not rest:
        pieces.append(current.piece())
    return pieces, fitted(problem, pieces, devices, placed)


def _free_device(problem: Problem, op: int, devices: Sequence[PartitionDevice], placed: Placement) -> int:
    need = Growing(problem).extra(op)
    taken = {number for where in placed for number in where}
    free = [number for number in range(len(devices)) if number not in taken]
    for number in free:
        if devices[number].memory >= need:
            return number
    most = max([devices[number].memory for number in free], default=0)
    raise OpTooLargeError(
        f"{problem.items[op].name} needs {need} bytes with its inputs; the largest of {len(free)} free "
        f"devices has {most}. Give a device of at least {need} bytes"
    )


def fitted(
    problem: Problem,
    pieces: Sequence[DraftPart],
    devices: Sequence[PartitionDevice],
    placed: Placement | None = None,
) -> Placement:
    """Return where :func:`best_fit` puts the pieces; raise :class:`NoMappingError` when one has no place.

    The error says which piece has no device and how much is free on each.
    """
    places, found = best_fit(problem, pieces, devices, placed)
    if found:
        return places
    free = {device.name: device.memory for device in devices}
    for piece, where in zip(pieces, places, strict=True):
        for number in where:
            free[devices[number].name] -= piece.bytes
    missing = [piece for piece, where in zip(pieces, places, strict=True) if not where]
    first = missing[0]
    name = problem.items[max(first.items)].name
    raise NoMappingError(
        f"{len(missing)} of {len(pieces)} parts have no device: that of {name} needs {first.bytes} bytes, "
        f"and the others leave {free}; give more memory, or another mode"
    )
