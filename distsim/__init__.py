"""distsim: how fast a model trains on a cluster, whether it fits, and what holds it back."""

from distsim import ops

__version__ = "0.1.0"
__all__ = ["__version__", "ops"]
