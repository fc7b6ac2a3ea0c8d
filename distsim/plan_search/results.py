"""What a search found: the best plans, the Pareto front of time and memory, what nearly fits, and why."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from distsim.errors import SimulationError, wrong_type
from distsim.extras import data_frame
from distsim.plan import Plan
from distsim.plan_search.columns import plan_columns, record_of
from distsim.plan_search.evaluation import PlanEvaluator, SearchProblem, Standing
from distsim.plan_search.training.columns import plan_cost_columns
from distsim.plan_search.training.estimate import OF_TRAINING, TrainingCosts, TrainingEstimate
from distsim.plan_search.trial import STATUSES, PlanTrial
from distsim.report.difference import StepComparison, parts_title
from distsim.report.figures import DEVICE, StepFigures
from distsim.schedule.refusals import count
from distsim.simulation import Simulation
from distsim.simulation.explain.text import html_table
from distsim.simulation.trained_step import SearchedStep

_MOST_BUILT = 3
"""Plans that are built to find one that misses little: some are refused then."""


@dataclass(frozen=True, eq=False, repr=False)
class SearchResult:
    """What became of every plan of a space, in its order; :func:`distsim.plan_search.describe` prints it.

    ``own`` is the plan that the best are searched against, if there is one; ``costs`` what is to be trained,
    of which rows have hours, dollars and kWh where that was asked for.

    >>> import distsim
    >>> sets = "dp=8|4,tp=1|2,pp=1,zero=0,remat=none,microbatches=1"
    >>> found = distsim.search("mlp:layers=4,width=64", "dgx-a100", sets, batch=16, kernels="ops")
    >>> found
    SearchResult(2 plans, 2 simulated, best dp=8,tp=1,pp=1,microbatches=1,schedule=1f1b)
    >>> [row["plan"] for row in found.rows()][:1] == [found.best.text]
    True
    """

    trials: Sequence[PlanTrial]
    problem: SearchProblem
    step: SearchedStep
    own: PlanTrial | None = None
    costs: TrainingCosts = field(default_factory=TrainingCosts)
    _figures: dict[str, StepFigures] = field(default_factory=dict[str, StepFigures], init=False)

    @property
    def objective(self) -> str:
        """By what plans are ranked."""
        return self.problem.objective

    @property
    def wanted(self) -> int:
        """How many of the best were asked for; the bounds keep the rest out."""
        return self.problem.top

    @property
    def best(self) -> PlanTrial:
        """The best plan. Raises :class:`SimulationError` if none fits."""
        if not self.fitting:
            raise SimulationError(
                f"none of {len(self.trials)} plans fits in memory; see .nearly, and use more devices, more "
                "recomputation, or a smaller batch"
            )
        return self.fitting[0]

    @cached_property
    def fitting(self) -> tuple[PlanTrial, ...]:
        """The plans that fit, the best first; the first ``wanted`` of them are the best of all plans."""
        value = _by_time if self.objective == "time" else _by_memory
        return tuple(sorted([trial for trial in self.trials if trial.fits], key=value))

    @property
    def fastest(self) -> PlanTrial:
        """The fastest of the plans that fit and were simulated; raises as :attr:`best`."""
        return min([self.best, *self.fitting], key=_by_time)

    def top(self, count: int) -> tuple[PlanTrial, ...]:
        """Return the ``count`` best plans, or as many as fit.

        Raises :class:`SimulationError` for more than were asked for, as bounds left plans out that are next.
        """
        if count > self.wanted and len(self.fitting) > self.wanted:
            raise SimulationError(
                f"the best {self.wanted} were searched for, not {count}: search with top={count}"
            )
        return self.fitting[:count]

    @property
    def winners(self) -> tuple[PlanTrial, ...]:
        """The best plans, as many as were wanted."""
        return self.top(self.wanted)

    @cached_property
    def pareto(self) -> tuple[PlanTrial, ...]:
        """The plans that fit of which none is faster with as little memory, the fastest first.

        Of the plans that were simulated: one that is proven to be slower than the best is not among them,
        even if it took less memory.
        """
        front: list[PlanTrial] = []
        for trial in sorted([trial for trial in self.trials if trial.fits], key=_by_time):
            if not front or trial.peak < front[-1].peak:
                front.append(trial)
        return tuple(front)

    @cached_property
    def nearly(self) -> tuple[PlanTrial, ...]:
        """The plans that do not fit for want of a tenth of the memory at most, the fastest first."""
        return tuple(sorted([t for t in self.trials if t.simulated and t.missing], key=_by_time))

    @cached_property
    def nearest(self) -> PlanTrial | None:
        """Of plans of which none fits, the one that misses least by what is known, built if it was not yet.

        None where all are refused, or one fits.
        """
        known = [trial for trial in self.trials if not (trial.refused or self.fitting)]
        least = {trial: trial.peak or self._evaluator.least_bytes(trial.plan, Standing()) for trial in known}
        for trial in sorted(known, key=lambda each: least[each])[:_MOST_BUILT]:
            built = trial if trial.peak else self._evaluator.trial(trial.plan)
            if built.missing:
                return replace(built, text=trial.text, always=trial.always)
        return None

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """How many plans were simulated, counted only, refused, and discarded by each proof."""
        found = Counter(trial.status for trial in self.trials)
        return {name: found[name] for name in STATUSES}

    @cached_property
    def refusals(self) -> Mapping[str, tuple[int, str]]:
        """Why plans were refused, the most frequent reason first: how many, and one of them in full."""
        reasons: dict[str, list[str]] = {}
        for trial in self.trials:
            if trial.refused:
                reasons.setdefault(_without_numbers(trial.refused), []).append(trial.refused)
        ordered = sorted(reasons.items(), key=lambda item: -len(item[1]))
        return {reason: (len(texts), texts[0]) for reason, texts in ordered}

    def mfu_of(self, trial: PlanTrial) -> float:
        """Return the share of the peak of all devices that the model's own FLOPs reach in a step."""
        return self.step.mfu(trial.seconds, trial.plan)

    @property
    def mfu(self) -> float:
        """That of the best plan; raises as :attr:`best`."""
        return self.mfu_of(self.best)

    @property
    def tokens_per_second(self) -> float:
        """Tokens, or samples where there are none, per second on all devices by the best plan; raises so."""
        return self.step.tokens / self.best.seconds

    def rate(self, trial: PlanTrial) -> float:
        """Return the tokens, or samples, of a second and a device."""
        return self.step.rate(trial.seconds)

    def estimate(self, trial: PlanTrial) -> TrainingEstimate:
        """Return what the whole training takes by a plan that was simulated."""
        return self.costs.by(self.step, trial)

    @cached_property
    def simulation(self) -> Simulation:
        """The simulated step of the best plan, as :func:`distsim.simulate` has it; raises as :attr:`best`."""
        return self.simulate(self.best.plan)

    def simulate(self, plan: Plan) -> Simulation:
        """Return the simulated step of a plan, of the space or not.

        Raises :class:`PlanError` for one that does not suit the model or the cluster.
        """
        if not isinstance(plan, Plan):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise wrong_type("plan", plan, "a Plan, as of a trial, or distsim.Plan.parse('dp=2,tp=4')")
        made = self._evaluator.using(plan).simulate(plan)
        made.step = self.step.by(plan)
        return made

    @cached_property
    def _evaluator(self) -> PlanEvaluator:
        return PlanEvaluator(self.problem)

    def compare(self, *trials: PlanTrial) -> StepComparison:
        """Return plans side by side, simulated, and what makes each differ from the first.

        As :func:`distsim.compare` has it: of the time of the mean device. Raises :class:`SimulationError` for
        fewer than two plans.
        """
        return StepComparison(tuple(map(self._figures_of, trials)), parts_title(DEVICE))

    def _figures_of(self, trial: PlanTrial) -> StepFigures:
        if trial.text not in self._figures:
            best = bool(self.fitting) and trial.text == self.best.text
            simulation = self.simulation if best else self.simulate(trial.plan)
            counted = self.step.tokens, self.step.unit
            flops = self.step.flops_by(trial.plan)
            self._figures[trial.text] = StepFigures.of(trial.text, simulation, counted, flops)
        return self._figures[trial.text]

    def rows(self) -> list[dict[str, Any]]:
        """Return a record for each plan: those that fit first, the best of them first, then the others."""
        places = {trial.text: place for place, trial in enumerate(self.fitting)}
        ordered = sorted(self.trials, key=lambda trial: places.get(trial.text, len(places)))
        return [self._row(trial) for trial in ordered]

    def _row(self, trial: PlanTrial) -> dict[str, Any]:
        own = self.estimate(trial).of_training() if trial.simulated and self.costs.shown else {}
        costs = {name: own.get(name) for name in OF_TRAINING} if self.costs.shown else {}
        return record_of(self.step, trial) | costs

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as what JSON has."""
        return {
            "step": self.step.name,
            "samples": self.step.samples,
            "sequence": self.step.sequence,
            "devices": len(self.step.topology.devices),
            "objective": self.objective,
            "plans": len(self.trials),
            "counts": dict(self.counts),
            "refusals": [{"plans": count, "for_example": text} for count, text in self.refusals.values()],
            "pareto": [trial.text for trial in self.pareto],
            "nearly": [trial.text for trial in self.nearly],
            **({} if self.own is None else {"against": self._against(self.own)}),
            "rows": self.rows(),
        }

    def _against(self, own: PlanTrial) -> dict[str, Any]:
        """Return what became of the own plan, and in what it differs from the best."""
        alone = not self.fitting or own.text == self.best.text
        row = self._row(own)
        if alone:
            return row | {"differences": []}
        compared = self.compare(self.best, own)  # simulated, though the search needed no figures of it
        known = compared.steps[1].to_dict()
        row |= {name: known[name] for name in row.keys() & known.keys() if row[name] is None}
        return row | {"differences": compared.to_dict()["differences"]}

    def to_pandas(self) -> Any:
        """Return :meth:`rows` as a table; raises :class:`MissingExtraError` without pandas."""
        return data_frame(self.rows())

    def _repr_html_(self) -> str:
        """Show the best plans as a table."""
        if not self.fitting:
            return html_table(("",), [(repr(self),)])
        estimates = [self.estimate(trial) for trial in self.winners]
        own = plan_cost_columns(estimates, self.step.unit) if self.costs.shown else {}
        columns = [column for column in plan_columns(self.step) if column.html]
        cells = [
            [*[column.text(trial) for column in columns], *[cell(estimate) for cell in own.values()]]
            for trial, estimate in zip(self.winners, estimates, strict=True)
        ]
        return html_table([*[column.html for column in columns], *own], cells)

    def __repr__(self) -> str:
        best = f"best {self.best.text}" if self.fitting else "none fits"
        plans = count(len(self.trials), "plan")
        return f"SearchResult({plans}, {self.counts['simulated']} simulated, {best})"


def _by_time(trial: PlanTrial) -> tuple[float, float, str]:
    return trial.seconds, trial.peak, trial.text


def _by_memory(trial: PlanTrial) -> tuple[float, float, str]:
    return trial.peak, trial.seconds, trial.text


def _without_numbers(text: str) -> str:
    """Return a reason without the plan and the numbers in it, so that the same one is the same text."""
    return re.sub(r"[0-9.]+", "N", re.sub(r"\w+=[\w.:+-]+", "", text))
