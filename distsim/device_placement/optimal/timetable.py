"""When the ops of any partition run: a device does one at a time, in a given order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distsim.device_placement.optimal.optimum import OptimalPartition, transfer_times
from distsim.device_placement.optimal.replay import replay
from distsim.device_placement.parts import Partition
from distsim.errors import PartitionError


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
