"""The partition of least simulated makespan, with a proof or a stated gap."""

from distsim.device_placement.optimal.optimum import OptimalPartition, optimal_partition
from distsim.device_placement.optimal.search import compile_search
from distsim.device_placement.optimal.timetable import Timetable, timetable

__all__ = ["OptimalPartition", "Timetable", "compile_search", "optimal_partition", "timetable"]
