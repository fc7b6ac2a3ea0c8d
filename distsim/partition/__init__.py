"""Which op goes where: parts of a function on devices with memory."""

from distsim.partition.dag import DagNode
from distsim.partition.edit import add_op, move_op, remove_op
from distsim.partition.optimal import OptimalPartition, Timetable, optimal_partition, timetable
from distsim.partition.partitioner import MODES, partition
from distsim.partition.parts import Part, Partition, make_partition
from distsim.partition.problem import Item, PartitionDevice, Problem, problem_of

__all__ = [
    "MODES",
    "DagNode",
    "Item",
    "OptimalPartition",
    "Part",
    "Partition",
    "PartitionDevice",
    "Problem",
    "Timetable",
    "add_op",
    "make_partition",
    "move_op",
    "optimal_partition",
    "partition",
    "problem_of",
    "remove_op",
    "timetable",
]
