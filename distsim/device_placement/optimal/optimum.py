"""The ``optimal`` mode: the partition whose simulated run is shortest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np

from distsim.device_placement.modes.coarsen import coarse_cost_aware
from distsim.device_placement.modes.size_based import size_based
from distsim.device_placement.optimal.jobs import Jobs, make_jobs
from distsim.device_placement.optimal.search import Search
from distsim.device_placement.optimal.states import Clock, Memory, no_limit
from distsim.device_placement.optimal.timetable import OptimalPartition, order_by_time, replay, transfer_times
from distsim.device_placement.parts import make_partition
from distsim.device_placement.pieces import DraftPart, Placement
from distsim.device_placement.problem import WHAT_BYTES_ARE, PartitionDevice, Problem, check_problem
from distsim.errors import (
    NoMappingError,
    NotEnoughMemoryError,
    OpTooLargeError,
    PartitionError,
)

MOST_OPS = 2000
"""Ops of a problem that is searched; the search keeps which op descends from which."""


def optimal_partition(
    problem: Problem,
    devices: Sequence[PartitionDevice],
    transfer_rate: float = 0.0,
    time_limit: float = 10.0,
    tolerance: float = 1e-4,
    transfers: Sequence[float] | None = None,
    progress: Callable[[float, float], None] | None = None,
) -> OptimalPartition:
    """Return the partition of least makespan, or the best that is found in ``time_limit`` seconds.

    The makespan is that of a run in which a device does one op at a time, without interruption, for the
    longer of its two latencies, an op starts when its device and its inputs are there, and what it makes
    reaches another device bytes / rate later, whatever else is sent (``transfers`` gives that time per
    item instead). Both which op is where and in which order are free; memory holds as in
    :meth:`Partition.verify`. Parts are the ops of a device between two arrivals, so they never wait for
    each other in a circle.

    A search over schedules with lower bounds (:mod:`distsim.device_placement.optimal.search`); it ends when
    bound and best are within ``tolerance`` of each other, relatively, as solvers of integer programs do: 0
    for equality. ``progress`` is called with both now and then. Problems of more than ``MOST_OPS`` ops get a
    list schedule and a plain bound. The first search on an installation also compiles its loops, in its time
    (:func:`compile_search` does it ahead): when that takes it all, the list schedule is returned. Raises
    :class:`NoMappingError` when the memory allows no placing, or when none is found.

    >>> from distsim.device_placement.problem import Item
    >>> ops = (Item("a", (), 4, 4, 1.0), Item("b", (0,), 4, 4, 3.0), Item("c", (0,), 4, 4, 3.0))
    >>> two = [PartitionDevice(f"d{i}", 100, i) for i in range(2)]
    >>> found = optimal_partition(Problem(ops), two, transfer_rate=8.0)
    >>> found.makespan, found.proven, [part.devices[0].name for part in found.parts]
    (4.5, True, ['d0', 'd1'])
    """
    if not tolerance >= 0 or not time_limit >= 0:
        raise PartitionError(f"tolerance={tolerance} and time_limit={time_limit} must not be negative")
    begin = perf_counter()
    _check(problem, devices)
    delays = transfer_times(problem, transfer_rate) if transfers is None else transfers
    jobs = _jobs(problem, delays)
    memory = _memory(problem, devices)
    clock = Clock(begin + time_limit, tolerance, _step(jobs))
    search = Search(jobs, len(devices), memory, clock, progress)
    if memory.limited:
        _offer_heuristics(problem, devices, delays, transfer_rate, search)
    if len(problem.ops) <= MOST_OPS:
        search.run()
    if search.end is None or search.machine is None:
        raise _no_mapping(problem, devices, search.impossible, time_limit)
    found = [0.0] * len(problem.items)
    where = [-1] * len(problem.items)
    for op, end, machine in zip(problem.ops, search.end.tolist(), search.machine.tolist(), strict=True):
        found[op], where[op] = end, machine
    sequence = order_by_time(problem, found)
    ends = replay(problem, where, sequence, delays)
    makespan = max(ends)
    lower = min(search.lower, makespan)
    groups, placed = _parts(problem, where)
    plain = make_partition(problem, devices, groups, placed, transfer_rate, "optimal")
    return OptimalPartition(
        problem=problem,
        devices=plain.devices,
        parts=plain.parts,
        transfer_rate=transfer_rate,
        mode="optimal",
        makespan=makespan,
        lower_bound=lower,
        proven=clock.close(lower, makespan),
        sequence=sequence,
        ends=ends,
    )


def _check(problem: Problem, devices: Sequence[PartitionDevice]) -> None:
    check_problem(problem, devices)
    whole = sum(device.memory for device in devices)
    if problem.total_bytes > whole:
        raise NotEnoughMemoryError(
            f"the whole needs {problem.total_bytes} bytes, {len(devices)} devices have {whole}: "
            f"{problem.total_bytes - whole} more ({WHAT_BYTES_ARE})"
        )
    items, most = problem.items, max(device.memory for device in devices)
    for op in problem.ops:
        sizes = [min(items[read].output_bytes, items[read].total_bytes) for read in items[op].inputs]
        need = items[op].total_bytes + sum(sizes)
        if need > most:
            raise OpTooLargeError(
                f"{items[op].name} needs {need} bytes with what it reads; the largest device has {most}: "
                f"{need - most} too few"
            )


def _offer_heuristics(
    problem: Problem,
    devices: Sequence[PartitionDevice],
    delays: Sequence[float],
    transfer_rate: float,
    search: Search,
) -> None:
    """Let the search begin from heuristic modes, which find what fits more often than a list schedule."""
    _offer(problem, devices, delays, search, lambda: size_based(problem, devices))
    if search.end is None:
        rate = transfer_rate if transfer_rate > 0 else 1.0  # any will do to find a placing
        _offer(problem, devices, delays, search, lambda: coarse_cost_aware(problem, devices, rate))


def _offer(
    problem: Problem,
    devices: Sequence[PartitionDevice],
    delays: Sequence[float],
    search: Search,
    mode: Callable[[], tuple[list[DraftPart], Placement]],
) -> None:
    """Let the search begin from what a mode finds, if anything."""
    try:
        pieces, places = mode()
    except PartitionError:
        return
    where = [-1] * len(problem.items)
    for piece, (place, *_) in zip(pieces, places, strict=True):
        for item in piece.items:
            where[item] = place
    groups = [[op for op in problem.ops if where[op] == place] for place in range(len(devices))]
    if all(problem.bytes_of(problem.close(g)) <= d.memory for g, d in zip(groups, devices, strict=True)):
        ends = replay(problem, where, problem.ops, delays)
        ops = list(problem.ops)
        search.offer(np.array(ends)[ops], np.array(where)[ops])


def _jobs(problem: Problem, delays: Sequence[float]) -> Jobs:
    number = {op: job for job, op in enumerate(problem.ops)}
    edges = [
        (number[read], number[op], delays[read])
        for op in problem.ops
        for read in problem.items[op].inputs
        if read in number
    ]
    seconds = [problem.items[op].latency for op in problem.ops]
    return make_jobs(seconds, edges, searched=len(seconds) <= MOST_OPS)


def _memory(problem: Problem, devices: Sequence[PartitionDevice]) -> Memory:
    """Return what a device holds: its ops, and what they read from outside or elsewhere once."""
    capacity = np.array([device.memory for device in devices], np.float64)
    if problem.total_bytes <= capacity.min():
        return no_limit(len(problem.ops), len(devices))
    number = {op: job for job, op in enumerate(problem.ops)}
    outside = [item for item in range(len(problem.items)) if item not in number]
    number |= {item: len(problem.ops) + place for place, item in enumerate(outside)}
    items, reads, brought, start = problem.items, list[int](), list[float](), [0]
    for op in problem.ops:
        for read in items[op].inputs:
            reads.append(number[read])
            brought.append(items[read].output_bytes if items[read].is_op else items[read].total_bytes)
        start.append(len(reads))
    own = np.array([items[op].total_bytes for op in problem.ops], np.float64)
    return Memory(
        True,
        capacity,
        own,
        np.array(start, np.int64),
        np.array(reads, np.int64),
        np.array(brought, np.float64),
        len(items),
        float(sum(items[item].total_bytes for item in outside)),
    )


def _step(jobs: Jobs) -> float:
    """Return a time of which all are multiples, if they are whole numbers; else 0."""
    times = [*jobs.seconds.tolist(), *jobs.delay_in.tolist()]
    whole = all(time.is_integer() and time < 2**40 for time in times)
    return float(math.gcd(*map(int, times))) if whole else 0.0


def _parts(problem: Problem, where: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ops of each part and its device: as few levels as the moves between devices need."""
    level = [0] * len(problem.items)
    parts: dict[tuple[int, int], list[int]] = {}
    for op in problem.ops:
        for read in problem.items[op].inputs:
            if problem.items[read].is_op:
                level[op] = max(level[op], level[read] + (where[read] != where[op]))
        parts.setdefault((level[op], where[op]), []).append(op)
    keys = sorted(parts)
    return [parts[key] for key in keys], [[device] for _, device in keys]


def _no_mapping(
    problem: Problem, devices: Sequence[PartitionDevice], impossible: bool, time_limit: float
) -> NoMappingError:
    sizes = ", ".join(str(device.memory) for device in devices)
    what = f"{len(problem.ops)} ops of {problem.total_bytes} bytes on devices of {sizes} bytes"
    if impossible:
        return NoMappingError(f"no placing of {what} fits; what is read on several devices counts on each")
    return NoMappingError(
        f"no placing of {what} was found in {time_limit:g} s; allow more time_limit or take size_based"
    )
