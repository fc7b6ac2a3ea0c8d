"""Which op goes where, and what is kept: parts of a function on devices with memory, stages, saved values."""

from distsim.partition.dag import DagNode
from distsim.partition.edit import add_op, move_op, remove_op
from distsim.partition.partitioner import MODES, partition
from distsim.partition.parts import Part, Partition, make_partition
from distsim.partition.problem import Item, PartitionDevice, Problem, problem_of

__all__ = [
    "MODES",
    "DagNode",
    "Item",
    "Part",
    "Partition",
    "PartitionDevice",
    "Problem",
    "add_op",
    "make_partition",
    "move_op",
    "partition",
    "problem_of",
    "remove_op",
]
