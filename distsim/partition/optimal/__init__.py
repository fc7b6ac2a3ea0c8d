"""The partition of least simulated makespan, with a proof or a stated gap."""

from distsim.partition.optimal.optimum import OptimalPartition, optimal_partition
from distsim.partition.optimal.search import compile_search
from distsim.partition.optimal.timetable import Timetable, timetable

__all__ = ["OptimalPartition", "Timetable", "compile_search", "optimal_partition", "timetable"]
