"""The partition of least simulated makespan, with a proof or a stated gap."""

from distsim.partition.optimal.optimum import OptimalPartition, optimal_partition

__all__ = ["OptimalPartition", "optimal_partition"]
