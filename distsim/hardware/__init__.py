"""Device and cluster presets, and what collectives cost on a topology."""

from distsim.hardware.cluster_text import cluster_toml
from distsim.hardware.collectives import (
    COLLECTIVES,
    FluidCollective,
    collective_algorithms,
    collective_time,
    collective_transfer,
)
from distsim.hardware.presets import describe, figures, load_cluster, presets
from distsim.hardware.routes import Channel, channels, port

__all__ = [
    "COLLECTIVES",
    "Channel",
    "FluidCollective",
    "channels",
    "cluster_toml",
    "collective_algorithms",
    "collective_time",
    "collective_transfer",
    "describe",
    "figures",
    "load_cluster",
    "port",
    "presets",
]
