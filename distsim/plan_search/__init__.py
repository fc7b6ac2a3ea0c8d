"""Which plan: the best of a space, and what would make one fit."""

from distsim.plan_search.remedies import PlanTrials, Remedies, Remedy, remedies
from distsim.plan_search.results import SearchResult
from distsim.plan_search.run import SearchRun, search
from distsim.plan_search.space import PlanSpace, parse_sets
from distsim.plan_search.text import describe
from distsim.plan_search.trial import PlanTrial

__all__ = [
    "PlanSpace",
    "PlanTrial",
    "PlanTrials",
    "Remedies",
    "Remedy",
    "SearchResult",
    "SearchRun",
    "describe",
    "parse_sets",
    "remedies",
    "search",
]
