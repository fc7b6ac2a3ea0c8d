"""Plans of one division tried one after the other: built, their memory counted, simulated, unless bounds
prove that they are none of the best.
"""

from __future__ import annotations

import math
import warnings
from bisect import insort
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from distsim.compose import parallelize
from distsim.cost import CostModel, UncostedOperatorWarning
from distsim.division import levels_written
from distsim.errors import DistsimError
from distsim.ir import Function, Topology
from distsim.ops import signature_of
from distsim.plan import Plan
from distsim.plan_search.bounds import PlanBounds, layers_key, work_key
from distsim.plan_search.layer_work import LayerWork, is_product, layer_work
from distsim.plan_search.space import ModelTraits
from distsim.plan_search.trial import SLOWER, TOO_LARGE, PlanTrial
from distsim.program.program import Program
from distsim.simulation import Simulation, Simulator
from distsim.simulation.memory.program_memory import program_memory
from distsim.simulation.steady_state import full_program
from distsim.transforms.kernels.policies import Kernels

NEARLY = 0.1
"""The share of the memory that may be missing for a plan to fit nearly."""

OBJECTIVES = ("time", "memory")
"""By what plans are ranked: the seconds of a step, or the bytes on the fullest device."""

ModelOf = Callable[[Plan], Function]
"""Returns the training step that a plan divides: the same object for plans that divide the same."""


@dataclass(frozen=True, eq=False)
class SearchProblem:
    """What is searched: a step on a topology, its kernels, by which objective, how many plans are wanted."""

    model: ModelOf
    topology: Topology
    kernels: Kernels
    objective: str = "time"
    top: int = 10


@dataclass
class Standing:
    """What is known while plans are tried: the best objectives so far, the seconds of products by key, and
    what is known of layers by theirs."""

    best: list[float] = field(default_factory=list[float])
    work: dict[Hashable, float] = field(default_factory=dict[Hashable, float])
    layers: dict[Hashable, LayerWork] = field(default_factory=dict[Hashable, LayerWork])

    def worst(self, top: int) -> float:
        """Return the objective that one of the best plans has to reach."""
        return self.best[top - 1] if len(self.best) >= top else math.inf

    def copy(self) -> Standing:
        """Return one that may change apart."""
        return Standing(list(self.best), dict(self.work), dict(self.layers))


class PlanEvaluator:
    """Tries plans of a problem; what is derived for one is there for the next."""

    def __init__(self, problem: SearchProblem) -> None:
        self.problem = problem
        self.costs = CostModel(problem.topology, kernels=problem.kernels.way)
        self.simulator = Simulator(self.costs)
        self._bounds: dict[Function, PlanBounds] = {}
        self._batch: dict[Function, int] = {}
        self._levels: dict[tuple[Function, int], int] = {}
        kinds = {self.costs.spec(device): device for device in reversed(problem.topology.devices)}
        self._kinds = tuple(kinds.values())

    def bounds(self, plan: Plan) -> PlanBounds:
        """Return the bounds of what a plan divides."""
        function = self.problem.model(plan)
        if function not in self._bounds:
            self._bounds[function] = PlanBounds(function, self.problem.topology)
        return self._bounds[function]

    def batch(self, plan: Plan) -> int:
        """Return the samples of a step of what a plan divides."""
        function = self.problem.model(plan)
        if function not in self._batch:
            self._batch[function] = ModelTraits.of(function).batch
        return self._batch[function]

    def key(self, plan: Plan) -> Hashable:
        """Return what the seconds of the products of a plan depend on."""
        return work_key(plan, self.batch(plan))

    def layers_key(self, plan: Plan) -> Hashable:
        """Return what the layers of a plan depend on; None where that is not known before it is built."""
        function = self.problem.model(plan)
        count = plan.num_stages
        if plan.stages != "even" and count > 1:
            return None
        if (function, count) not in self._levels:
            costs = self.costs.on(self.problem.topology.devices[0])
            self._levels[function, count] = levels_written(function, count, costs)
        return layers_key(plan, self.batch(plan), self._levels[function, count])

    def bound(self, plan: Plan, standing: Standing) -> float:
        """Return the least that the objective of a plan can be."""
        if self.problem.objective == "memory":
            return self.least_bytes(plan, standing)
        bounds = self.bounds(plan)
        known = [None, standing.work.get(self.key(plan)), self._layer_seconds(plan, standing)]
        # A part of 1e-9 is for sums that are rounded, and for times that lie on a grid.
        return max(bounds.step_seconds(plan, seconds) for seconds in known) * (1 - 1e-9)

    def _layer_seconds(self, plan: Plan, standing: Standing) -> float | None:
        """Return for what a microbatch takes devices at least, if plans of the same layers were built.

        One that recomputes all of its layers runs their forward passes once more.
        """
        layers = standing.layers.get(self.layers_key(plan))
        if layers is None and plan.remat == "full":
            saving = standing.layers.get(self.layers_key(replace(plan, remat="none")))
            return None if saving is None else saving.seconds + saving.forward
        return None if layers is None else layers.seconds

    def least_bytes(self, plan: Plan, standing: Standing) -> float:
        """Return the least that the fullest device can hold."""
        layers = standing.layers.get(self.layers_key(plan))
        return self.bounds(plan).device_bytes(plan, 0 if layers is None else layers.saved)

    def discarded(self, plan: Plan, standing: Standing) -> str:
        """Return why a plan cannot be one of the best: ``SLOWER``, ``TOO_LARGE``, or "" if it can."""
        usable = max(device.usable for device in self.problem.topology.devices)
        if self.least_bytes(plan, standing) > usable:
            return TOO_LARGE
        return SLOWER if self.bound(plan, standing) > standing.worst(self.problem.top) else ""

    def trials(
        self, plans: Iterator[Plan] | tuple[Plan, ...], standing: Standing, known: Mapping[str, PlanTrial]
    ) -> Iterator[PlanTrial]:
        """Yield what becomes of each plan; ``standing`` grows with it. What is known is not tried again."""
        for plan in plans:
            reason = self.discarded(plan, standing)
            if reason:
                yield PlanTrial(str(plan), discarded=reason)
                continue
            limit = standing.worst(self.problem.top)
            trial = known.get(str(plan)) or self.trial(plan, limit)
            self.learn(trial, standing)
            yield trial

    def learn(self, trial: PlanTrial, standing: Standing) -> None:
        """Add to a standing what a trial says."""
        if trial.work:
            standing.work[self.key(trial.plan)] = trial.work
        if trial.layers is not None and (key := self.layers_key(trial.plan)) is not None:
            known = standing.layers.get(key, trial.layers)
            standing.layers[key] = known.least(trial.layers)
        if trial.fits:
            insort(standing.best, self.objective(trial))

    def objective(self, trial: PlanTrial) -> float:
        """Return by what a plan is ranked: less is better."""
        return trial.seconds if self.problem.objective == "time" else trial.peak

    def trial(self, plan: Plan, limit: float = math.inf) -> PlanTrial:
        """Build a plan and count its memory; simulate it if it fits, or nearly.

        What its step consists of is said of one whose objective is at most ``limit``.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UncostedOperatorWarning)
            try:
                return self._trial(plan, limit)
            except DistsimError as error:
                return PlanTrial(str(plan), refused=str(error))

    def program(self, plan: Plan) -> Program:
        """Return the scheduled step of a plan."""
        problem = self.problem
        function = problem.model(plan)
        return parallelize(function, plan, problem.topology, self.costs, None, problem.kernels)

    def simulate(self, plan: Plan) -> Simulation:
        """Return the simulated step of a plan. Raises :class:`PlanError` for one that does not suit."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UncostedOperatorWarning)
            return self.simulator.simulate(self.program(plan))

    def _trial(self, plan: Plan, limit: float) -> PlanTrial:
        program = self.program(plan)
        memory = program_memory(full_program(program))
        usable = min(device.usable for device in program.mesh.devices)
        layers = layer_work(program, self.costs)
        found = PlanTrial(
            str(plan), peak=max(memory.peaks), usable=usable, missing=memory.missing, layers=layers
        )
        if memory.missing > NEARLY * usable:
            return found
        simulation = self.simulator.simulate(program)
        found = replace(found, seconds=simulation.step_period, work=self._work(plan, simulation))
        if not found.fits or self.objective(found) > limit:
            return found
        interval = simulation.interval()
        low, high = (interval.low, interval.high) if interval else (0.0, 0.0)
        return replace(found, low=low, high=high, parts=dict(simulation.breakdown("kind")))

    def _work(self, plan: Plan, simulation: Simulation) -> float:
        """Return the seconds of the products of a microbatch, summed over the stages.

        Each as the fastest devices run it, on which another plan may put what is on slower ones here. A mean
        over the ranks of a stage. Other work depends on where stages begin and on how gradients and
        parameters are spread: masks are made anew on each stage, sums and casts are of what a rank holds.
        """
        members = simulation.classes.members
        total = 0.0
        for op, rank_class, times in simulation.timeline.op_counts:
            if is_product(op):
                signature = signature_of(op)
                least = min(self.costs.seconds(signature, (device,)) for device in self._kinds)
                total += least * times * len(members[rank_class])
        return total / (plan.dp * plan.tp * plan.cp * plan.microbatches)
