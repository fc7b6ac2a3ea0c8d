"""The partition of least simulated makespan, with a proof or a stated gap."""

from distsim.partition.optimal.optimum import OptimalPartition, optimal_partition
from distsim.partition.optimal.timetable import Timetable, timetable

__all__ = ["OptimalPartition", "Timetable", "optimal_partition", "timetable"]
