"""The best plans of a model on a cluster, or on several: what ``distsim search`` does.

The training step of a model for each of many plans, which share one as far as they divide the same.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Unpack, overload

from distsim.errors import PlanError, SimulationError
from distsim.hardware.cluster_table import settings_of
from distsim.ir import Function, Topology, pformat
from distsim.plan import Plan
from distsim.plan.fields import PlanSets
from distsim.plan_search.absent_values import undivided
from distsim.plan_search.evaluation import SearchProblem
from distsim.plan_search.journal import check_new
from distsim.plan_search.results import SearchResult
from distsim.plan_search.run import SearchRun, progress_lines
from distsim.plan_search.space import PlanSpace, parse_sets
from distsim.plan_search.training.estimate import OBJECTIVES, TrainingCosts
from distsim.plan_search.views.cluster_comparison import ClusterComparison
from distsim.plan_search.workers import RemoteWorkers, check_started, dask_workers
from distsim.report.progress import Progress
from distsim.schedule.refusals import count
from distsim.study.arguments import model_given, plan_given, sets_given, taken
from distsim.study.choices import Choices
from distsim.study.clusters import Cluster, SizedCluster, sized_clusters
from distsim.study.options import Model, ModelOptions, options_of, says
from distsim.study.search_options import SearchKeywords, SearchOptions, SearchPlaces
from distsim.study.training_step import training_step

Clusters = list[str] | list[Topology] | list[Cluster] | tuple[Cluster, ...]
"""Several clusters."""


@overload
def search(
    model: Model,
    cluster: Cluster,
    plan: str | PlanSets | None = None,
    batch: int | None = None,
    seq: int | None = None,
    objective: str = "time",
    top: int = 10,
    gpus: int | None = None,
    **options: Unpack[SearchKeywords],
) -> SearchResult: ...


@overload
def search(
    model: Model,
    cluster: Cluster | Clusters,
    plan: str | PlanSets | None = None,
    batch: int | None = None,
    seq: int | None = None,
    objective: str = "time",
    top: int = 10,
    *,
    gpus: str | Sequence[int],
    **options: Unpack[SearchKeywords],
) -> ClusterComparison: ...


@overload
def search(
    model: Model,
    cluster: Clusters,
    plan: str | PlanSets | None = None,
    batch: int | None = None,
    seq: int | None = None,
    objective: str = "time",
    top: int = 10,
    gpus: int | None = None,
    **options: Unpack[SearchKeywords],
) -> ClusterComparison: ...


def search(
    model: Model,
    cluster: Cluster | Clusters,
    plan: str | PlanSets | None = None,
    batch: int | None = None,
    seq: int | None = None,
    objective: str = "time",
    top: int = 10,
    gpus: int | str | Sequence[int] | None = None,
    **options: Unpack[SearchKeywords],
) -> SearchResult | ClusterComparison:
    """Return the best plans of a model on all devices of a cluster, as ``distsim search`` finds them.

    ``model``, ``cluster``, ``batch`` and ``seq`` are as in :func:`distsim.simulate`. ``plan`` are sets of
    values for fields of a plan, ``"tp=1|2|4,remat=*"`` or ``{"tp": [1, 2, 4], "remat": "*"}``, and what is
    left open has the sensible ones (``distsim search --help``). ``objective``: ``time`` of a step or
    ``memory`` of the fullest device, and of clusters also ``cost``, ``tokens-per-dollar`` and ``energy``;
    ``top``: how many of the best are wanted.

    A list of clusters, or of ``gpus`` of them (``[8, 16]`` or ``"8,16"``), gives a
    :class:`ClusterComparison`: what was found on each by its name, and which is best. With ``tokens``
    (``price``, ``failures``, ...) the plans have hours, dollars and kWh of the training. ``against`` a plan
    of one's own the best are compared; ``workers`` are processes, ``dask`` the address of a scheduler;
    ``journal`` a new file, of several clusters one each, with which ``resume=True`` goes on. ``options`` are
    those of :class:`SearchKeywords`, by the names that the command has for them.

    Raises as :func:`distsim.simulate`, and :class:`PlanError` where there is no such plan. Of several
    clusters those without one are left out, with a warning.

    >>> import distsim
    >>> gpt = "gpt:layers=2,hidden=64,heads=4,seq=32,vocab=100"
    >>> found = distsim.search(gpt, "dgx-a100", "dp=8|4,pp=1,zero=0,remat=none,sp=off,microbatch_size=1", 16)
    >>> len(found.trials), found.best.plan.devices
    (2, 8)
    """
    several = isinstance(cluster, list | tuple)
    clusters: Sequence[Cluster] = cluster if several else (cluster,)
    given = taken("search", options, SearchKeywords)
    by_place = {"batch": batch, "seq": seq, "objective": objective, "top": top, "gpus": gpus}
    given |= taken("search", by_place, SearchPlaces)
    given |= {"clusters": clusters, "model": model_given(model), "plan": sets_given(plan)}
    given |= {
        "against": plan_given(given.get("against"), "against"),
        "set": settings_of(given.get("set", ())),
    }
    asked = options_of(ModelOptions, {**given, "plan": None})
    searches = ClusterSearches.of(asked, options_of(SearchOptions, given))
    found, refused = dict[str, SearchResult](), dict[str, str]()
    for own, result in searches.run():
        if isinstance(result, SearchResult):
            found[own.shown] = result
        else:
            refused[own.shown] = str(result)
            warnings.warn(f"{asked.label} on {own.shown}: {result}", stacklevel=2)
    if several or not (gpus is None or isinstance(gpus, int)):
        return ClusterComparison(found, objective, refused)
    return next(iter(found.values()))


@dataclass(frozen=True, eq=False)
class ClusterSearches:
    """The plans of a model that are searched on clusters, one after the other."""

    study: PlanStudy
    options: SearchOptions
    clusters: Sequence[SizedCluster]
    costs: Mapping[str, TrainingCosts]
    say: Callable[[str], None] | None = None

    @staticmethod
    def of(
        model: ModelOptions, options: SearchOptions, say: Callable[[str], None] | None = None
    ) -> ClusterSearches:
        """Return those that options ask for; ``say`` is told how far they are.

        Raises :class:`PlanError` for an objective that a cluster does not know, and for ``against`` with
        several clusters.
        """
        clusters = sized_clusters(options.clusters, options.gpus, options.set)
        if options.against is not None and len(clusters) > 1:
            raise PlanError(
                f"--against {options.against}: a plan is of one cluster, and {len(clusters)} are searched"
            )
        study = PlanStudy.of(model, options.plan, options.max_tp, aloud=say is not None)
        costs: dict[str, TrainingCosts] = {}
        for each in clusters:
            rates = each.rates(options.prices[each.place])
            OBJECTIVES[options.objective].check(each.shown, rates)
            costs[each.shown] = TrainingCosts(options.training, rates, options.asks_costs)
        return ClusterSearches(study, options, clusters, costs, say)

    def run(self) -> Iterator[tuple[SizedCluster, SearchResult | PlanError]]:
        """Yield what is found on each cluster; of several, why one has no plan.

        Raises :class:`PlanError` where none has any, and before the first what its journal raises.
        """
        any_has, alone = False, len(self.clusters) == 1
        if self.options.dask is None:
            check_started(self.options.workers or 1)
        self._check_journals()
        with self._workers() as workers:
            for cluster in self.clusters:
                try:
                    result = self._search(cluster, workers, alone)
                except PlanError as error:  # other clusters may have plans
                    if alone:
                        raise
                    yield cluster, error
                    continue
                any_has = True
                yield cluster, result
        if not any_has:
            raise PlanError(f"none of {', '.join(each.shown for each in self.clusters)} has a plan")

    @property
    def journals(self) -> list[Path]:
        """The journals of the clusters, if there are any."""
        alone = len(self.clusters) == 1
        return [path for each in self.clusters if (path := _journal(self.options.journal, each, alone))]

    def _check_journals(self) -> None:
        """Check that journals are new, or, to go on with them, that there is one."""
        if not self.options.resume:
            for path in self.journals:
                check_new(path)
        elif not any(path.exists() for path in self.journals):
            raise SimulationError(
                f"{', '.join(map(str, self.journals))}: there is no journal to resume; leave --resume out"
            )

    @contextmanager
    def _workers(self) -> Generator[int | RemoteWorkers | None]:
        """Give who tries the plans."""
        if self.options.dask is None:
            yield self.options.workers
            return
        remote = dask_workers(self.options.dask)
        try:
            yield remote
        finally:
            remote.close()

    def _search(
        self, cluster: SizedCluster, workers: int | RemoteWorkers | None, alone: bool
    ) -> SearchResult:
        options, say, topology = self.options, self.say, cluster.topology
        space = self.study.space(topology)
        plans = space.plans
        if say is not None:
            say(f"{count(len(plans), 'plan')} on {cluster.shown}")
            if left_out := undivided(space, space.traits.every_layer * space.stages_divide):
                say(left_out)
        against = None if options.against is None else self.study.choices.plan(options.against)
        journal = _journal(options.journal, cluster, alone)
        begun = journal is not None and journal.exists()  # a search may have stopped before this cluster
        found = SearchRun(
            self.study.problem(topology, OBJECTIVES[options.objective].plan, options.top),
            plans,
            workers,
            journal,
            options.resume and begun,
            _subject(self.study.model.options, cluster),
            None if say is None else progress_lines(say),
            say,
            against,
            self.costs[cluster.shown],
            _asked(self.study.model.options, cluster),
        ).run()
        written = self.study.choices.written
        step = replace(
            found.step, label=self.study.model.options.label, cluster=cluster.shown, written=written
        )
        always = self.study.choices.always_written
        trials = [replace(each, text=written(each.plan), always=always) for each in found.trials]
        own = found.own and replace(found.own, text=written(found.own.plan), always=always)
        return replace(found, trials=trials, own=own, step=step)


def _subject(options: ModelOptions, cluster: SizedCluster) -> str:
    """Return what a journal calls a search: what people asked for by name or number."""
    names = ("batch", "seq", "stack", "precision", "attention", "kernels", "cuda_graphs", "optimizer")
    asked = {name: getattr(options, name) for name in names}
    said = [f"{name}={value}" for name, value in asked.items() if isinstance(value, str | int)]
    return ", ".join([f"{options.label} on {cluster.shown}", *said])


def _asked(options: ModelOptions, cluster: SizedCluster) -> dict[str, str]:
    """Return the options that say what is searched, by name, as text; of objects the names that they have."""
    asked = {own.name: getattr(options, own.name) for own in fields(options) if own.name != "plan"}
    asked |= {"model": options.label, "cluster": cluster.shown, "set": ", ".join(cluster.settings) or None}
    texts = {
        name: value if isinstance(value, str) else getattr(value, "name", None) or str(value)
        for name, value in asked.items()
        if says(value) and name != "from_file"
    }
    return texts


def _journal(path: str | os.PathLike[str] | None, cluster: SizedCluster, alone: bool) -> Path | None:
    """Return the journal of a cluster: each of several has its own."""
    if path is None:
        return None
    own = Path(path)
    name = re.sub(r"\W+", "-", cluster.shown).strip("-")
    return own if alone else own.with_name(f"{own.stem}-{name}{own.suffix}")


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
        if max_tp is not None and "tp" in parsed:
            given = "|".join(parsed["tp"])
            raise PlanError(f"max_tp={max_tp} and tp={given} of the plan both say which tp to try; give one")
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

    def problem(self, topology: Topology, objective: str, top: int) -> SearchProblem:
        """Return what is searched on a topology."""
        return SearchProblem(self.model, topology, self.choices.kernels, objective, top)

    def _complete(self, plan: Plan) -> Plan:
        return self.choices.spread(plan, self.sets)


@dataclass(eq=False)
class ModelOfPlans:
    """Returns the training step that options ask for, for a plan.

    It depends on the plan where a stack pads the vocabulary for tensor-parallel ranks, and where sequences
    are routed to experts part by part. ``aloud``: reading it is said on standard error, the first time.
    """

    options: ModelOptions
    choices: Choices
    aloud: bool = False
    _made: dict[tuple[int, int], Function] = field(default_factory=dict[tuple[int, int], Function])
    _by_text: dict[str, Function] = field(default_factory=dict[str, Function])

    def __call__(self, plan: Plan) -> Function:
        """Return the step: the same object for plans that divide the same."""
        parts = plan.sequence_parts
        return self._step(plan, parts if parts > 1 and self._routes_by_part else 1)

    @cached_property
    def _routes_by_part(self) -> bool:
        """Whether the step depends on how sequences are divided."""
        divided = Plan(cp=2)
        return self._step(Plan(), 1) is not self._step(divided, divided.sequence_parts)

    def _step(self, plan: Plan, parts: int) -> Function:
        key = self.choices.stack.vocabulary_multiple * plan.tp, parts
        if key not in self._made:
            made, _ = training_step(
                self.options, Progress(sys.stderr if self.aloud and not self._made else None), plan
            )
            self._made[key] = self._by_text.setdefault(pformat(made), made)
        return self._made[key]
