"""Searching a space of plans: those whose bounds are best are tried first, those that cannot win are not.

They are tried in rounds: the most promising of all that are left, of which those that share a division are a
unit, which one process tries in order. Of a plan of whose layers nothing is known a short step is built
first; where its bound turns out to be above those of the round, it is put off. Each round starts from what
those before found: so what is tried, and what comes out, is the same whatever the number of processes, and
after being resumed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from distsim.errors import DistsimError, PlanError
from distsim.hardware.variation import in_use
from distsim.interpret import count_model_flops
from distsim.ir import Function, Topology
from distsim.plan import Plan, parse_schedule
from distsim.plan_search.bounds.plan_bounds import PlanBounds
from distsim.plan_search.evaluation import OBJECTIVES, ModelOf, PlanEvaluator, SearchProblem, Standing
from distsim.plan_search.journal import JournalWriter, TrialJournal, digest_of, figures_of
from distsim.plan_search.ordering import PlanQueue
from distsim.plan_search.results import SearchResult
from distsim.plan_search.space import ModelTraits, PlanSpace, parse_sets
from distsim.plan_search.training.estimate import TrainingCosts
from distsim.plan_search.trial import LATER, TOO_LARGE, PlanTrial
from distsim.plan_search.workers import PlanUnit, RemoteWorkers, check_started, processes_for, workers_for
from distsim.schedule.catalogue import registered
from distsim.schedule.refusals import count
from distsim.simulation.trained_step import PeakRate, SearchedStep, model_type
from distsim.suggestions import choices_for
from distsim.transforms.kernels.policies import KERNELS, Kernels

PROBED, NEAR = 24, 3
"""Of how many plans that may be too large by a little it is found out at the end what their layers do, and
how many of them are tried."""

ROUND = 24, 48
"""Plans of a round, the fewest and the most; between them, a quarter of those that were built before it."""


@dataclass(frozen=True)
class Stand:
    """How far a search is: plans done of ``plans``, those that were tried, and the seconds it took.

    How long the rest takes is said once a round was tried: the first plans are the slowest, of which others
    take over what is derived, and none is discarded before them. As many of the rest may be discarded as so
    far, or none: it is said how long both take.

    >>> print(Stand(30, 90, 24, 10.0))
    30 of 90 plans, 24 tried, 3.0 plans/s, 20 to 25 s left
    >>> print(Stand(980, 990, 49, 49.0))  # discarding took no time: what is left may be the slow ones
    980 of 990 plans, 49 tried, 20.0 plans/s, 0 to 10 s left
    """

    done: int
    plans: int
    tried: int
    seconds: float

    def __str__(self) -> str:
        rate = self.done / self.seconds if self.seconds else 0.0
        known = rate and self.tried >= ROUND[0] and self.done < self.plans
        left = ""
        if known:
            rest = self.plans - self.done
            left = f", {rest / rate:.0f} to {rest * self.seconds / self.tried:.0f} s left"
        return f"{self.done} of {self.plans} plans, {self.tried} tried, {rate:.1f} plans/s{left}"


def search(
    model: Function | ModelOf,
    topology: Topology,
    plans: str | Iterable[Plan] = "",
    kernels: Kernels = KERNELS["eager"],
    objective: str = "time",
    top: int = 10,
    workers: int | RemoteWorkers = 1,
    against: Plan | None = None,
) -> SearchResult:
    """Return the best plans of a training step on all devices of a topology.

    ``plans`` are sets of values for fields of a plan, as ``"tp=1|2|4,remat=*"``, what is left open being
    sensible (:mod:`distsim.plan_search.space`), or the plans themselves; those of each number of devices are
    searched apart, as they wait for the slowest of as many. ``objective`` is one of ``OBJECTIVES``; ``top``
    how many of the best are wanted: what is proven to be worse is not tried. For a function that depends on
    the plan, give what returns it, the same one for plans that divide the same. ``workers``: how many
    processes, or those behind an executor, as ``dask_workers("tcp://host:8786")``.
    ``against``: a plan of one's own, with which the best are compared.

    >>> from distsim.hardware import load_cluster
    >>> from distsim.models import mlp
    >>> from distsim.transforms import SGD, differentiate
    >>> step = differentiate(mlp(layers=4, width=64, batch=16), SGD())
    >>> found = search(step, load_cluster("dgx-a100"), "dp=8|4,pp=1,remat=none", top=2)
    >>> found.best.text
    'dp=8,tp=1,pp=1,microbatches=1,schedule=1f1b'
    """
    of = FixedModel(model) if isinstance(model, Function) else model
    if isinstance(plans, str):
        plans = PlanSpace.of(of(Plan()), topology, parse_sets(plans)).plans
    asked = tuple(plans)
    found: list[SearchResult] = []
    for devices in sorted({plan.devices for plan in asked}, reverse=True) or (1,):
        problem = SearchProblem(of, in_use(topology, devices), kernels, objective, top)
        own = tuple([plan for plan in asked if plan.devices == devices])
        found.append(SearchRun(problem, own, workers, against=None if found else against).run())
    trials = {trial.text: trial for each in found for trial in each.trials}
    return replace(found[0], trials=[trials[str(plan)] for plan in asked])


@dataclass(frozen=True)
class FixedModel:
    """A training step that does not depend on the plan."""

    function: Function

    def __call__(self, plan: Plan) -> Function:
        """Return it."""
        return self.function


@dataclass(frozen=True, eq=False)
class SearchRun:
    """A search: a problem, the plans, who tries them, and a journal, if there is one, to go on with.

    ``workers``: how many processes, None for as many as there is work for, or those of an executor.
    ``subject`` is what people call it; ``watch`` is told how far it is, ``notice`` with what it goes on.
    ``against``: a plan, in the space or not, with which the best are compared; ``costs``: what a training
    takes; ``asked`` the options of the search by name, which its journal has. Raises :class:`PlanError` for
    no plans, an unknown objective, fewer than one plan that is wanted, and for a plan to compare with that
    does not suit the model or the cluster.
    """

    problem: SearchProblem
    plans: tuple[Plan, ...]
    workers: int | RemoteWorkers | None = 1
    journal: Path | None = None
    resume: bool = False
    subject: str = "a training step"
    watch: Callable[[Stand], None] | None = None
    notice: Callable[[str], None] | None = None
    against: Plan | None = None
    costs: TrainingCosts = field(default_factory=TrainingCosts)
    asked: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        if self.problem.objective not in OBJECTIVES:
            asked = self.problem.objective
            raise PlanError(f"objective {asked!r:.40} is not one of {choices_for(asked, OBJECTIVES)}")
        if not self.plans or self.problem.top < 1:
            raise PlanError(
                f"{len(self.plans)} plans of which {self.problem.top} are wanted: at least one each"
            )

    def run(self) -> SearchResult:
        """Return what was found."""
        asked = processes_for(len(self.plans)) if self.workers is None else self.workers
        check_started(asked)
        known = self._known()
        evaluator = PlanEvaluator(self.problem)
        own = self._own(evaluator)
        found = {
            str(plan): PlanTrial(str(plan), refused=why)
            for plan in self.plans
            if (why := self._unsuited(plan))
        }
        standing, counts = Standing(), _Counts(time.monotonic())
        named = registered({parse_schedule(plan.schedule)[0] for plan in self.plans})
        workers = workers_for(self.problem, asked, self.journal, evaluator, named)
        try:
            queue = PlanQueue(_left(self.plans, evaluator, standing, found), evaluator, standing)
            while queue:
                size = min(max(ROUND[0], counts.built // 4), ROUND[1])
                units, until = queue.round(size, standing, found)
                made = [_unit(plans, known, until, division) for division, plans in units.items()]
                tried: dict[str, PlanTrial] = {}
                for _, trials in workers.run(made, standing):
                    tried.update({trial.text: trial for trial in trials})
                    found.update({trial.text: trial for trial in trials if trial.discarded != LATER})
                    counts.add(trials)
                    if self.watch is not None:
                        self.watch(counts.stand(len(found), len(self.plans)))
                chosen = [plan for plans in units.values() for plan in plans]
                for plan in chosen:
                    evaluator.learn(tried[str(plan)], standing)
                queue.put_back([plan for plan in chosen if str(plan) not in found], standing)
        finally:
            workers.close()
        found |= self._near(known, found, evaluator, standing)
        best = sorted([t for t in found.values() if t.fits], key=evaluator.objective)[: self.problem.top]
        for trial in best:
            if not trial.parts:  # it was tried in a search of which fewer plans were wanted
                found[trial.text] = evaluator.trial(trial.plan)
        return SearchResult(
            [_stripped(found[str(plan)], best) for plan in self.plans],
            self.problem,
            _step(self.problem, self.plans[0]),
            own,
            self.costs,
        )

    def _own(self, evaluator: PlanEvaluator) -> PlanTrial | None:
        """Return what becomes of the plan that the best are compared with."""
        if self.against is None:
            return None
        using = evaluator.using(self.against)
        own = using.trial(self.against)
        if own.refused:
            raise PlanError(f"--against {self.against}: {own.refused}")
        # One that is far too large is not simulated to be ranked.
        return own if own.seconds else replace(own, seconds=using.simulate(self.against).step_period)

    def _near(
        self,
        known: Mapping[str, PlanTrial],
        found: Mapping[str, PlanTrial],
        evaluator: PlanEvaluator,
        standing: Standing,
    ) -> dict[str, PlanTrial]:
        """Return what becomes of plans that are too large, may nearly fit, and be fastest if they did."""
        if self.problem.objective != "time":
            return {}
        large = [plan for plan in self.plans if found[str(plan)].discarded == TOO_LARGE]
        for plan in evaluator.nearest(large, standing)[:PROBED]:
            evaluator.probed(plan, standing)
        near = evaluator.nearest(large, standing)[:NEAR]
        tried = {str(plan): known.get(str(plan)) or evaluator.trial(plan) for plan in near}
        if self.journal is not None:
            writer = JournalWriter(self.journal)
            for text in tried.keys() - known.keys():
                writer.append(tried[text])
            writer.close()
        return tried

    def _unsuited(self, plan: Plan) -> str:
        """Return why there is no such model as a plan divides, if there is none."""
        try:
            self.problem.model(plan)
        except DistsimError as error:
            return str(error)
        return ""

    def _known(self) -> Mapping[str, PlanTrial]:
        """Return what the journal has, and begin it where there is none."""
        if self.journal is None:
            return {}
        problem = self.problem
        digest = digest_of(problem.model(Plan()), problem.topology, problem.kernels)
        asked = {**self.asked, "kernels": problem.kernels.name, **figures_of(problem.topology)}
        journal = TrialJournal(self.journal, self.subject, digest, asked)
        if self.resume:
            content = journal.read()
            if self.notice is not None:
                damaged = f", {count(content.damaged, 'damaged line')} left out" if content.damaged else ""
                self.notice(f"{count(len(content.trials), 'plan')} known from {self.journal}{damaged}")
            return content.trials
        journal.begin()
        return {}


def _stripped(trial: PlanTrial, best: Sequence[PlanTrial]) -> PlanTrial:
    """Return a trial without what is known of the best alone: others may have been so for a while."""
    texts = {each.text for each in best}
    return trial if trial.text in texts else replace(trial, low=0.0, high=0.0, parts={})


def _step(problem: SearchProblem, plan: Plan) -> SearchedStep:
    function = problem.model(plan)
    traits = ModelTraits.of(function)
    devices = problem.topology.devices
    dtype = model_type(function)
    peak = PeakRate.of(dtype, devices).total / len(devices)
    counted = ModelFlops(problem.model)
    parameters, state, _ = PlanBounds(function, problem.topology, problem.kernels).held
    step = SearchedStep(function.name, traits.batch, traits.sequence, counted(plan), flops_of=counted)
    return replace(step, dtype=dtype, peak=peak, state_bytes=parameters + state, topology=problem.topology)


@dataclass(frozen=True, eq=False)
class ModelFlops:
    """Counts the FLOPs of the model of a step as a plan divides it, once for plans that divide the same."""

    model: ModelOf
    _counted: dict[Function, float] = field(default_factory=dict[Function, float])

    def __call__(self, plan: Plan) -> float:
        """Return them."""
        function = self.model(plan)
        if function not in self._counted:
            self._counted[function] = count_model_flops(function)
        return self._counted[function]


def _unit(
    plans: Sequence[Plan], known: Mapping[str, PlanTrial], until: float, division: Hashable
) -> PlanUnit:
    own = {text: known[text] for text in map(str, plans) if text in known}
    return PlanUnit(tuple(plans), own, until, division)


@dataclass
class _Counts:
    """How many plans were tried since a ``start``, and of these built."""

    start: float
    tried: int = 0
    built: int = 0

    def add(self, trials: Iterable[PlanTrial]) -> None:
        """Count what became of plans."""
        for trial in trials:
            self.tried += not trial.discarded
            self.built += trial.peak > 0

    def stand(self, done: int, plans: int) -> Stand:
        """Return how far a search is that is done with some of its plans."""
        return Stand(done, plans, self.tried, time.monotonic() - self.start)


def _left(
    plans: Sequence[Plan], evaluator: PlanEvaluator, standing: Standing, found: dict[str, PlanTrial]
) -> list[Plan]:
    """Return the plans that are left to try; those that are discarded by now are done."""
    left: list[Plan] = []
    for plan in plans:
        text = str(plan)
        if text in found:
            continue
        reason = evaluator.discarded(plan, standing)
        if reason:
            found[text] = PlanTrial(text, discarded=reason)
        else:
            left.append(plan)
    return left


def progress_lines(write: Callable[[str], None], seconds: float = 2.0) -> Callable[[Stand], None]:
    """Return what tells people how far a search is, every so many seconds and at its end."""
    last = [time.monotonic()]

    def watch(stand: Stand) -> None:
        now = time.monotonic()
        if now - last[0] >= seconds or stand.done == stand.plans:
            last[0] = now
            write(f"searching: {stand}")

    return watch
