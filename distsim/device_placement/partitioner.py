"""The one entry to graph partitioning: a problem, devices and a mode -> a verified partition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypedDict, Unpack

from distsim.cost.cost_model import CostModel
from distsim.device_placement.modes.coarsen import COARSE, coarse_cost_aware, coarse_kernighan_lin
from distsim.device_placement.modes.given import given_parts
from distsim.device_placement.modes.replicate import saturate
from distsim.device_placement.modes.size_based import size_based
from distsim.device_placement.modes.sparse_nn import sparse_nn
from distsim.device_placement.optimal import OptimalPartition, optimal_partition
from distsim.device_placement.parts import Partition, make_partition
from distsim.device_placement.pieces import DraftPart, Placement, piece_of
from distsim.device_placement.problem import PartitionDevice, Problem, check_devices, problem_of
from distsim.errors import NoDevicesError, NoOpsError, NotEnoughMemoryError, PartitionError
from distsim.ir import Function

MODES = ("single", "size_based", "sparse_nn", "cost_aware", "kernighan_lin", "ahead_of_time", "optimal")


class ModeOptions(TypedDict, total=False):
    """What concerns one mode, or two: see :func:`partition`."""

    assigned_devices: Mapping[int, Sequence[int]] | None
    coarse: int
    time_limit: float


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
    ``optimal``               :func:`optimal_partition`: the shortest run found in ``time_limit`` seconds (10)
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
    assigned_devices, time_limit = options.get("assigned_devices"), options.get("time_limit", 10.0)
    if isinstance(problem, Function):
        if cost_model is None:
            raise PartitionError(f"{problem.name} is a Function: give a cost_model for its latencies")
        problem = problem_of(problem, cost_model)
    _check(problem, devices)
    largest = max(range(len(devices)), key=lambda number: devices[number].memory)
    if mode == "optimal":
        return _optimal(problem, devices, transfer_rate, time_limit, saturate_host)
    if assignment is not None:
        pieces, places = given_parts(problem, devices, assignment, assigned_devices)
    elif problem.total_bytes <= devices[largest].memory:
        pieces, places = [piece_of(problem, range(len(problem.items)))], [[largest]]
    else:
        memory = devices[largest].memory if mode == "single" else sum(device.memory for device in devices)
        if problem.total_bytes > memory:
            place = f"{devices[largest].name} has" if mode == "single" else f"{len(devices)} devices have"
            raise NotEnoughMemoryError(
                f"the whole needs {problem.total_bytes} bytes, {place} {memory}: "
                f"{problem.total_bytes - memory} more"
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
    time_limit: float,
    saturate_host: bool,
) -> OptimalPartition:
    """Return the optimal partition, with replicas on idle devices if they are wanted."""
    found = optimal_partition(problem, devices, transfer_rate, time_limit)
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


def _check(problem: Problem, devices: Sequence[PartitionDevice]) -> None:
    if not devices:
        raise NoDevicesError(
            f"no devices are given for {len(problem.ops)} ops of {problem.total_bytes} bytes"
        )
    check_devices(devices)
    if not problem.ops:
        raise NoOpsError(
            f"there are 0 ops among {len(problem.items)} items, so there is nothing to partition"
        )


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
