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
from distsim.errors import DistsimError
from distsim.ir import Device, Function, Op, Topology
from distsim.ops import operator, signature_of, work
from distsim.plan import Plan
from distsim.plan_search.bounds import PlanBounds, work_key
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
    """What is known while plans are tried: the best objectives so far, and the seconds of work by key."""

    best: list[float] = field(default_factory=list[float])
    work: dict[Hashable, float] = field(default_factory=dict[Hashable, float])

    def worst(self, top: int) -> float:
        """Return the objective that one of the best plans has to reach."""
        return self.best[top - 1] if len(self.best) >= top else math.inf

    def copy(self) -> Standing:
        """Return one that may change apart."""
        return Standing(list(self.best), dict(self.work))


class PlanEvaluator:
    """Tries plans of a problem; what is derived for one is there for the next."""

    def __init__(self, problem: SearchProblem) -> None:
        self.problem = problem
        self.costs = CostModel(problem.topology, kernels=problem.kernels.way)
        self.simulator = Simulator(self.costs)
        self._bounds: dict[Function, PlanBounds] = {}
        self._batch: dict[Function, int] = {}

    def bounds(self, plan: Plan) -> PlanBounds:
        """Return the bounds of what a plan divides."""
        function = self.problem.model(plan)
        if function not in self._bounds:
            self._bounds[function] = PlanBounds(function, self.problem.topology)
        return self._bounds[function]

    def key(self, plan: Plan) -> Hashable:
        """Return what the seconds of work of a plan depend on."""
        function = self.problem.model(plan)
        if function not in self._batch:
            self._batch[function] = ModelTraits.of(function).batch
        return work_key(plan, self._batch[function])

    def bound(self, plan: Plan, standing: Standing) -> float:
        """Return the least that the objective of a plan can be."""
        bounds = self.bounds(plan)
        if self.problem.objective == "memory":
            return bounds.device_bytes(plan)
        # A part of 1e-9 is for sums that are rounded, and for times that lie on a grid.
        known = bounds.step_seconds(plan, standing.work.get(self.key(plan)))
        return max(bounds.step_seconds(plan), known) * (1 - 1e-9)

    def discarded(self, plan: Plan, standing: Standing) -> str:
        """Return why a plan cannot be one of the best: ``SLOWER``, ``TOO_LARGE``, or "" if it can."""
        usable = max(device.usable for device in self.problem.topology.devices)
        if self.bounds(plan).device_bytes(plan) > usable:
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
            if trial.work:
                standing.work[self.key(plan)] = trial.work
            if trial.fits:
                insort(standing.best, self.objective(trial))
            yield trial

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

    def _trial(self, plan: Plan, limit: float) -> PlanTrial:
        program = self.program(plan)
        memory = program_memory(full_program(program))
        usable = min(device.usable for device in program.mesh.devices)
        found = PlanTrial(str(plan), peak=max(memory.peaks), usable=usable, missing=memory.missing)
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

        A mean over the ranks of a stage. Other work depends on where stages begin and on how gradients and
        parameters are spread: masks are made anew on each stage, sums and casts are of what a rank holds.
        """
        members = simulation.classes.members
        total = 0.0
        for op, rank_class, times in simulation.timeline.op_counts:
            if _is_product(op):
                devices: tuple[Device, ...] = tuple(members[rank_class])
                total += self.costs.seconds(signature_of(op), devices[:1]) * times * len(devices)
        return total / (plan.dp * plan.tp * plan.cp * plan.microbatches)


def _is_product(op: Op) -> bool:
    meaning = operator(op.op_type)
    if meaning.communication is not None or not meaning.computes:
        return False
    demand = work(signature_of(op))
    return demand is not None and demand.matrix
