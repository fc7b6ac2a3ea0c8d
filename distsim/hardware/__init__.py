"""Device and cluster presets, and what collectives cost on a topology."""

from distsim.hardware.collectives import COLLECTIVES, collective_algorithms, collective_time
from distsim.hardware.presets import describe, figures, load_cluster, presets

__all__ = [
    "COLLECTIVES",
    "collective_algorithms",
    "collective_time",
    "describe",
    "figures",
    "load_cluster",
    "presets",
]
