"""The best plans of a model on a cluster: what ``distsim search`` does on each cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from distsim.ir import Topology
from distsim.plan import Plan
from distsim.plan_search.evaluation import SearchProblem
from distsim.plan_search.results import SearchResult
from distsim.plan_search.run import SearchRun, Stand
from distsim.plan_search.space import PlanSpace, parse_sets
from distsim.plan_search.workers import RemoteWorkers
from distsim.study.choices import Choices
from distsim.study.options import Model, ModelOptions, SearchKeywords, check_keywords, options_of
from distsim.study.plans import ModelOfPlans
from distsim.study.simulate import cluster_label, topology_of


def search(
    model: Model,
    cluster: str | os.PathLike[str] | Topology,
    plan: str = "",
    batch: int | None = None,
    seq: int | None = None,
    objective: str = "time",
    top: int = 10,
    workers: int = 1,
    **options: Unpack[SearchKeywords],
) -> SearchResult:
    """Return the best plans of a model on all devices of a cluster, as ``distsim search`` finds them.

    ``model``, ``cluster``, ``batch`` and ``seq`` are as in :func:`distsim.simulate`. ``plan`` are sets of
    values for fields of a plan, ``"tp=1|2|4,remat=*"``, and what is left open has the sensible ones
    (``distsim search --help``). ``objective``: ``time`` of a step or ``memory`` of the fullest device;
    ``top``: how many of the best are wanted; ``workers``: processes. ``options`` are those of
    :class:`SearchKeywords`. Raises as :func:`distsim.simulate`, and :class:`PlanError` where there is no such
    plan.

    >>> import distsim
    >>> gpt = "gpt:layers=2,hidden=64,heads=4,seq=32,vocab=100"
    >>> found = distsim.search(gpt, "dgx-a100", "dp=8|4,pp=1,zero=0,remat=none,sp=off,microbatch_size=1", 16)
    >>> len(found.trials), found.best.plan.devices
    (2, 8)
    """
    check_keywords("search", options, SearchKeywords)
    given: Mapping[str, Any] = options
    asked = options_of(ModelOptions, {**given, "model": model, "batch": batch, "seq": seq})
    journal = given.get("journal")
    study = PlanStudy.of(asked, plan, given.get("max_tp"))
    way = SearchWay(
        *(objective, top, workers), None if journal is None else Path(journal), given.get("resume", False)
    )
    return study.run(cluster_label(cluster), topology_of(cluster), way)


@dataclass(frozen=True)
class SearchWay:
    """How plans are searched: by which objective, how many are wanted, processes or another pool, a
    journal, who watches, and who is told what is damaged."""

    objective: str = "time"
    top: int = 10
    workers: int | RemoteWorkers = 1
    journal: Path | None = None
    resume: bool = False
    watch: Callable[[Stand], None] | None = None
    notice: Callable[[str], None] | None = None


@dataclass(frozen=True)
class PlanStudy:
    """A model whose plans are searched, on one cluster or on several: sets of values for fields of a plan."""

    model: ModelOfPlans
    sets: Mapping[str, tuple[str, ...]]
    max_tp: int | None = None

    @staticmethod
    def of(options: ModelOptions, sets: str, max_tp: int | None = None, aloud: bool = False) -> PlanStudy:
        """Return that of options and the text of sets; what the stack recomputes is tried too."""
        choices, parsed = Choices.of(options), parse_sets(sets)
        if "remat" not in parsed and choices.stack.remat not in ("none", "full"):
            parsed["remat"] = (choices.stack.remat, "none", "full")
        return PlanStudy(ModelOfPlans(options, choices, aloud), parsed, max_tp)

    @property
    def choices(self) -> Choices:
        """How the model is trained."""
        return self.model.choices

    def space(self, topology: Topology) -> PlanSpace:
        """Return the plans on all devices of a topology."""
        return PlanSpace.of(self.model(Plan()), topology, self.sets, self.max_tp, self._complete)

    def run(self, name: str, topology: Topology, way: SearchWay) -> SearchResult:
        """Return the best plans on a cluster of that name."""
        return SearchRun(
            self.problem(topology, way.objective, way.top),
            self.space(topology).plans,
            way.workers,
            way.journal,
            way.resume,
            f"{self.model.options.label} on {name}",
            way.watch,
            way.notice,
        ).run()

    def problem(self, topology: Topology, objective: str, top: int) -> SearchProblem:
        """Return what is searched on a topology."""
        return SearchProblem(self.model, topology, self.choices.kernels, objective, top)

    def _complete(self, plan: Plan) -> Plan:
        return self.choices.spread(plan, self.sets)
