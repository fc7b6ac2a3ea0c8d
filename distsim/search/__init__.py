"""Which plan: the best of a space, and what would make one fit."""

from distsim.search.remedies import PlanTrials, Remedies, Remedy, remedies
from distsim.search.results import SearchResult
from distsim.search.run import SearchRun, search
from distsim.search.space import PlanSpace, parse_sets
from distsim.search.text import describe
from distsim.search.trial import PlanTrial
from distsim.search.workers import RemoteWorkers, dask_workers

__all__ = [
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
