"""Which op goes where: parts of a function on devices with memory."""

from distsim.device_placement.optimal import OptimalPartition, Timetable, optimal_partition, timetable
from distsim.device_placement.partitioned import Placed, partition_devices, place, transfer_seconds
from distsim.device_placement.partitioner import MODES, partition
from distsim.device_placement.parts import (
    DagNode,
    Part,
    Partition,
    add_op,
    make_partition,
    move_op,
    remove_op,
)
from distsim.device_placement.problem import Item, PartitionDevice, Problem, problem_of

__all__ = [
    "MODES",
    "DagNode",
    "Item",
    "OptimalPartition",
    "Part",
    "Partition",
    "PartitionDevice",
    "Placed",
    "Problem",
    "Timetable",
    "add_op",
    "make_partition",
    "move_op",
    "optimal_partition",
    "partition",
    "partition_devices",
    "place",
    "problem_of",
    "remove_op",
    "timetable",
    "transfer_seconds",
]
