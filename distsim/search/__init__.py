"""Which plan: what would make one fit."""

from distsim.search.remedies import Remedy, remedies

__all__ = ["Remedy", "remedies"]
