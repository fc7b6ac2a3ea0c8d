"""When the ops of a partition run: a device does one at a time, in a given order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from distsim.device_placement.parts import Partition
from distsim.device_placement.problem import Problem
from distsim.errors import PartitionError


def transfer_times(problem: Problem, rate: float) -> list[float]:
    """Return the time that each item takes to another device: its bytes over the rate."""
    if rate > 0:
        return [item.output_bytes / rate for item in problem.items]
    moving = [
        number for number in problem.ops if problem.readers[number] and problem.items[number].output_bytes
    ]
    if moving:
        item = problem.items[moving[0]]
        raise PartitionError(
            f"transfer_rate={rate}: {item.name} hands on {item.output_bytes} bytes; give a rate above 0 "
            "bytes per second"
        )
    return [0.0] * len(problem.items)


def order_by_time(problem: Problem, ends: Sequence[float]) -> tuple[int, ...]:
    """Return the ops in an order in which they can be issued so that they end at these times.

    It is that of the middles of their runs: rounding, which may let two runs on a device overlap, does not
    change it, and one that takes no time stays before what the device goes on with.
    """
    items = problem.items
    middle = [end - item.latency / 2 for item, end in zip(items, ends, strict=True)]
    missing = [sum(items[read].is_op for read in item.inputs) for item in items]
    ready = [(middle[op], op) for op in problem.ops if not missing[op]]
    heapify(ready)
    found: list[int] = []
    while ready:
        op = heappop(ready)[1]
        found.append(op)
        for reader in problem.readers[op]:
            missing[reader] -= 1
            if not missing[reader]:
                heappush(ready, (middle[reader], reader))
    return tuple(found)


def replay(
    problem: Problem, where: Sequence[int], sequence: Sequence[int], transfers: Sequence[float]
) -> tuple[float, ...]:
    """Return when each item ends (outside inputs: 0) if the ops are issued in ``sequence``.

    ``where`` is the device of each item that is an op. An op starts when its device has done the one before
    and what it reads is there: ``transfers[i]`` after the end of item i if that is on another device.
    """
    free = [0.0] * (max((where[op] for op in problem.ops), default=0) + 1)
    ends = [0.0] * len(problem.items)
    for op in sequence:
        begin = free[where[op]]
        for read in problem.items[op].inputs:
            if problem.items[read].is_op:
                begin = max(begin, ends[read] + (transfers[read] if where[read] != where[op] else 0.0))
        ends[op] = free[where[op]] = begin + problem.items[op].latency
    return tuple(ends)


@dataclass(frozen=True)
class OptimalPartition(Partition):
    """A partition with its schedule. Times in the unit of the latencies (seconds, for a Function).

    ``sequence`` is the order in which ops are issued, a device runs its own in it; ``makespan`` is when the
    last op ends, ``ends`` when each item does (outside inputs: 0). No schedule on
    these devices takes less than ``lower_bound``; ``proven``: to the tolerance that was asked for, this one
    takes no more.
    """

    makespan: float = 0.0
    lower_bound: float = 0.0
    proven: bool = False
    sequence: tuple[int, ...] = ()
    ends: tuple[float, ...] = ()

    @property
    def gap(self) -> float:
        """By which share of the makespan a schedule may still be shorter."""
        return 1.0 - self.lower_bound / self.makespan if self.makespan > 0 else 0.0


@dataclass(frozen=True)
class Timetable:
    """``sequence`` is the order in which ops are issued; ``ends[i]`` when item i ends (outside inputs: 0)."""

    sequence: tuple[int, ...]
    ends: tuple[float, ...]
    transfers: tuple[float, ...]

    @property
    def makespan(self) -> float:
        """When the last op ends."""
        return max(self.ends, default=0.0)


def timetable(partition: Partition, transfers: Sequence[float] | None = None) -> Timetable:
    """Return when the ops of a partition run, each part on the first of its devices.

    The rules are those of :func:`optimal_partition`. Each device runs its ops in the order of the problem;
    those of an :class:`OptimalPartition` in the order that was found. ``transfers`` gives the time per item
    instead of its bytes over the partition's rate.

    >>> from distsim.device_placement import Item, PartitionDevice, Problem, make_partition
    >>> chain = Problem((Item("a", (), 8, 8, 1.0), Item("b", (0,), 8, 8, 1.0)))
    >>> two = [PartitionDevice(f"d{i}", 100, i) for i in range(2)]
    >>> timetable(make_partition(chain, two, [[0], [1]], [[0], [1]], transfer_rate=4.0)).makespan
    4.0
    """
    problem = partition.problem
    if transfers is None:
        transfers = transfer_times(problem, partition.transfer_rate)
    if len(transfers) != len(problem.items):
        raise PartitionError(f"{len(transfers)} transfer times are given for {len(problem.items)} items")
    sequence = partition.sequence if isinstance(partition, OptimalPartition) else problem.ops
    number = {device: place for place, device in enumerate(partition.devices)}
    where = [number[partition.parts[part].devices[0]] if part >= 0 else -1 for part in partition.part_of]
    ends = replay(problem, where, sequence, transfers)
    return Timetable(sequence, ends, tuple(transfers))
