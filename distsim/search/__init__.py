"""Which plan: what would make one fit."""

from distsim.search.remedies import PlanTrials, Remedies, Remedy, remedies

__all__ = ["PlanTrials", "Remedies", "Remedy", "remedies"]
