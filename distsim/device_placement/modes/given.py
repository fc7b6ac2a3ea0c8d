"""Ahead-of-time partition: the parts are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distsim.device_placement.modes.size_based import unplaced
from distsim.device_placement.pieces import DraftPart, Placement, best_fit, order_of, parents_of, piece_of
from distsim.device_placement.problem import PartitionDevice, Problem
from distsim.errors import CyclicPartitionError, PartitionError


def given_parts(
    problem: Problem,
    devices: Sequence[PartitionDevice],
    assignment: Mapping[str, int] | Sequence[int],
    assigned_devices: Mapping[int, Sequence[int]] | None,
) -> tuple[list[DraftPart], Placement]:
    """Return the pieces in the order of their part numbers, and where they are.

    ``assignment`` is the part of each op, by name or in order; ``assigned_devices`` the ids of the devices
    of each part. Raises :class:`PartitionError` for an op without a part and for a part on unknown
    devices, and :class:`CyclicPartitionError` for parts that wait for each other.
    """
    parts = _parts(problem, assignment)
    groups: dict[int, list[int]] = {part: [] for part in sorted(set(parts.values()))}
    for op in problem.ops:
        groups[parts[op]].append(op)
    pieces = [piece_of(problem, problem.close(ops)) for ops in groups.values()]
    parents = parents_of(problem, pieces)
    if len(done := order_of(parents)) < len(pieces):
        numbers = list(groups)
        circle = [numbers[k] for k in range(len(pieces)) if k not in done]
        raise CyclicPartitionError(
            f"the given parts {circle} wait for each other in a circle; put ops that depend on each other "
            "both ways into one part"
        )
    if assigned_devices is None:
        places, found = best_fit(problem, pieces, devices)
        if not found:
            raise unplaced(problem, pieces, places, devices)
        return pieces, places
    known: dict[int, int] = {device.id: number for number, device in enumerate(devices)}
    places: Placement = []
    for part in groups:
        ids = assigned_devices.get(part, ())
        if not ids or any(i not in known for i in ids):
            raise PartitionError(
                f"part {part} is given the devices {list(ids)}; give it some of the ids {sorted(known)}"
            )
        places.append([known[i] for i in ids])
    return pieces, places


def _parts(problem: Problem, assignment: Mapping[str, int] | Sequence[int]) -> dict[int, int]:
    if isinstance(assignment, Mapping):
        missing = [problem.items[op].name for op in problem.ops if problem.items[op].name not in assignment]
        if missing:
            raise PartitionError(f"{len(missing)} ops have no part in the assignment: {missing[:5]}")
        return {op: assignment[problem.items[op].name] for op in problem.ops}
    if len(assignment) != len(problem.ops):
        raise PartitionError(
            f"{len(assignment)} parts are given for {len(problem.ops)} ops; give one for each"
        )
    return dict(zip(problem.ops, assignment, strict=True))
