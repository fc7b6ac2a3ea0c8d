"""Which op goes where: parts of a function on devices with memory."""

from distsim.partition.parts import Part, Partition, make_partition
from distsim.partition.problem import Item, PartitionDevice, Problem, problem_of

__all__ = ["Item", "Part", "Partition", "PartitionDevice", "Problem", "make_partition", "problem_of"]
