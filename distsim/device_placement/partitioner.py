"""The one entry to graph partitioning: a problem, devices and a mode -> a verified partition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypedDict, Unpack

from distsim.cost.cost_model import CostModel
from distsim.device_placement.modes.coarsen import COARSE, coarse_cost_aware, coarse_kernighan_lin
from distsim.device_placement.modes.size_based import fitted, size_based
from distsim.device_placement.modes.sparse_nn import sparse_nn
from distsim.device_placement.optimal import OptimalPartition, optimal_partition
from distsim.device_placement.parts import Partition, make_partition
from distsim.device_placement.pieces import DraftPart, Placement, order_of, parents_of, piece_of
from distsim.device_placement.problem import (
    WHAT_BYTES_ARE,
    PartitionDevice,
    Problem,
    check_problem,
    problem_of,
)
from distsim.errors import (
    CyclicPartitionError,
    NotEnoughMemoryError,
    PartitionError,
)
from distsim.ir import Function

MODES = ("single", "size_based", "sparse_nn", "cost_aware", "kernighan_lin", "ahead_of_time", "optimal")
"""The ways to put ops on devices that :func:`partition` knows."""


class ModeOptions(TypedDict, total=False):
    """What concerns one mode, or two: see :func:`partition`."""

    assigned_devices: Mapping[int, Sequence[int]] | None
    coarse: int
    time_limit: float
    transfers: Sequence[float] | None


def partition(
    problem: Problem | Function,
    devices: Sequence[PartitionDevice],
    mode: str = "size_based",
    transfer_rate: float = 0.0,
    saturate_host: bool = False,
    assignment: Mapping[str, int] | Sequence[int] | None = None,
    cost_model: CostModel | None = None,
    **options: Unpack[ModeOptions],
) -> Partition:
    """Partition a problem, or a function costed by ``cost_model``, and return the verified result.

    Whatever the mode, a problem that fits on the device of most memory is one part there; except in optimal,
    and ahead_of_time, where ``assignment`` says the part of every op (by name, or in order) and
    ``assigned_devices`` the ids of the devices of every part (without it, parts are placed by best fit).
    ``saturate_host`` replicates the parts on idle devices.

    ========================  ===========================================================================
    ``single``                one part, or an error
    ``size_based``            fill one device after the other, in the order of the ops
    ``sparse_nn``             embedding regions apart, the dense parts replicated next to them
    ``cost_aware``            join pieces while that shortens the graph latency
    ``kernighan_lin``         size_based, then swap ops between parts while that shortens the graph latency
    ``ahead_of_time``         as given
    ``optimal``               :func:`optimal_partition`: the shortest run found in ``time_limit`` seconds
                              (10); sending an item takes what ``transfers`` say, if given
    ========================  ===========================================================================

    ``transfer_rate`` in bytes per second is needed by cost_aware and kernighan_lin, which look at all pairs
    of up to ``coarse`` ops (64, unless given) and group more into that many
    (:mod:`distsim.device_placement.modes.coarsen`).
    Raises a :class:`PartitionError`: its kind says which rule cannot be kept, its text the numbers.

    >>> from distsim.device_placement.problem import Item
    >>> chain = Problem((Item("a", (), 4, 10), Item("b", (0,), 4, 10), Item("c", (1,), 4, 10)))
    >>> found = partition(chain, [PartitionDevice(f"d{i}", 20, i) for i in range(2)])
    >>> [(part.ops, part.bytes, part.devices[0].name) for part in found.parts]
    [((0, 1), 20, 'd0'), ((2,), 14, 'd1')]
    """
    _check_options(mode, assignment, options)
    if isinstance(problem, Function):
        if cost_model is None:
            raise PartitionError(f"{problem.name} is a Function: give a cost_model for its latencies")
        problem = problem_of(problem, cost_model)
    check_problem(problem, devices)
    largest = max(range(len(devices)), key=lambda number: devices[number].memory)
    if mode == "optimal":
        return _optimal(problem, devices, transfer_rate, saturate_host, options)
    if assignment is not None:
        pieces, places = given_parts(problem, devices, assignment, options.get("assigned_devices"))
    elif problem.total_bytes <= devices[largest].memory:
        pieces, places = [piece_of(problem, range(len(problem.items)))], [[largest]]
    else:
        memory = devices[largest].memory if mode == "single" else sum(device.memory for device in devices)
        if problem.total_bytes > memory:
            place = f"{devices[largest].name} has" if mode == "single" else f"{len(devices)} devices have"
            raise NotEnoughMemoryError(
                f"the whole needs {problem.total_bytes} bytes, {place} {memory}: "
                f"{problem.total_bytes - memory} more ({WHAT_BYTES_ARE})"
            )
        pieces, places = _split(problem, devices, mode, transfer_rate, options.get("coarse", COARSE))
    if saturate_host:
        places = saturate(pieces, devices, places)
    groups = [piece.items for piece in pieces]
    return make_partition(problem, devices, groups, places, transfer_rate, mode)


def _optimal(
    problem: Problem,
    devices: Sequence[PartitionDevice],
    transfer_rate: float,
    saturate_host: bool,
    options: ModeOptions,
) -> OptimalPartition:
    """Return the optimal partition, with replicas on idle devices if they are wanted."""
    time_limit, transfers = options.get("time_limit", 10.0), options.get("transfers")
    found = optimal_partition(problem, devices, transfer_rate, time_limit, transfers=transfers)
    if not saturate_host:
        return found
    number = {device: place for place, device in enumerate(found.devices)}
    pieces = [piece_of(found.problem, part.items) for part in found.parts]
    places = saturate(pieces, found.devices, [[number[d] for d in part.devices] for part in found.parts])
    parts = [
        replace(part, devices=tuple(found.devices[place] for place in where))
        for part, where in zip(found.parts, places, strict=True)
    ]
    return replace(found, parts=tuple(parts))


def _check_options(
    mode: str, assignment: Mapping[str, int] | Sequence[int] | None, options: ModeOptions
) -> None:
    known = ModeOptions.__optional_keys__
    if unknown := sorted(set(options) - known):
        raise TypeError(f"partition has no option {unknown[0]!r}; it has {', '.join(sorted(known))}")
    if mode not in MODES:
        raise PartitionError(f"there is no mode {mode!r}; choose one of {', '.join(MODES)}")
    if (assignment is not None) != (mode == "ahead_of_time"):
        raise PartitionError(f"an assignment goes with ahead_of_time, and with no other mode; mode is {mode}")
    if options.get("assigned_devices") is not None and assignment is None:
        raise PartitionError("assigned_devices says where the parts of an assignment are; give one")


def _split(
    problem: Problem, devices: Sequence[PartitionDevice], mode: str, transfer_rate: float, coarse: int
) -> tuple[list[DraftPart], Placement]:
    if mode == "sparse_nn":
        return sparse_nn(problem, devices)
    if mode == "cost_aware":
        return coarse_cost_aware(problem, devices, transfer_rate, coarse)
    if mode == "kernighan_lin":
        return coarse_kernighan_lin(problem, devices, transfer_rate, coarse)
    return size_based(problem, devices)


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
        return pieces, fitted(problem, pieces, devices)
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
