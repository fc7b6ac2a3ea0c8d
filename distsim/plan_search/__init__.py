"""Which plan: the best of a space, and what would make one fit."""

from distsim.plan_search.remedies import PlanTrials, Remedies, Remedy, remedies
from distsim.plan_search.results import SearchResult
from distsim.plan_search.run import SearchRun, search
from distsim.plan_search.space import PlanSpace, parse_sets
from distsim.plan_search.trial import PlanTrial
from distsim.plan_search.views.cluster_comparison import ClusterComparison
from distsim.plan_search.views.text import describe
from distsim.plan_search.workers import RemoteWorkers, dask_workers

__all__ = [
    "ClusterComparison",
    "PlanSpace",
    "PlanTrial",
    "PlanTrials",
    "Remedies",
    "Remedy",
    "RemoteWorkers",
    "SearchResult",
    "SearchRun",
    "dask_workers",
    "describe",
    "parse_sets",
    "remedies",
    "search",
]
