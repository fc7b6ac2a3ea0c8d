"""distsim: how fast a model trains on a cluster, whether it fits, and what holds it back."""

__version__ = "0.1.0"
__all__ = ["__version__"]
