"""Plans of one division tried one after the other: built, their memory counted, simulated, unless bounds
prove that they are none of the best.
"""

from __future__ import annotations

import math
import warnings
from bisect import insort
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from distsim.cache import MemoryLimit
from distsim.compose import parallelize
from distsim.compose.compose import check_sizes
from distsim.compose.division import levels_written
from distsim.cost import CostModel, UncostedOperatorWarning
from distsim.errors import DistsimError, PlanError
from distsim.hardware.variation import in_use
from distsim.ir import Function, Topology
from distsim.ops import signature_of
from distsim.plan import Plan
from distsim.plan_search.bounds.layer_figures import LayerExtras, LayerWork, StageWork
from distsim.plan_search.bounds.layer_probe import LayerProbes, probe_of
from distsim.plan_search.bounds.layer_work import is_product, layer_work
from distsim.plan_search.bounds.pipeline_bounds import layers_counted
from distsim.plan_search.bounds.plan_bounds import PlanBounds, PlanKnowledge
from distsim.plan_search.bounds.plan_keys import PlanKeys, cuts_layers, runs_alone
from distsim.plan_search.space import ModelTraits
from distsim.plan_search.trial import LATER, SLOWER, TOO_LARGE, PlanTrial
from distsim.program.program import Program
from distsim.simulation import Simulation, Simulator
from distsim.simulation.memory.peak import fullest_device
from distsim.simulation.memory.program_memory import ProgramMemory, program_memory
from distsim.simulation.steady_state import full_program, step_memory
from distsim.transforms.kernels.policies import Kernels

NEARLY = 0.1
"""The share of the memory that may be missing for a plan to fit nearly."""

OBJECTIVES = ("time", "memory")
"""By what plans are ranked: the seconds of a step, or the bytes on the fullest device."""

RECOMPUTED, MOVED = 1.3, 0.02
"""How much longer a plan that recomputes all is taken to be while nothing is known of its layers; and the
part more for each rank of tp and cp but the first."""

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
    """What is known while plans are tried: the best objectives so far; the seconds of products, and of those
    in ``forward`` passes of layers, by key; and what is known of layers, of stages, of the bytes that layers
    save, and that are ``pending`` between halves, of the seconds of the ``sums`` of their gradients, and of
    their ``extras``, each by its own."""

    best: list[float] = field(default_factory=list[float])
    work: dict[Hashable, float] = field(default_factory=dict[Hashable, float])
    forward: dict[Hashable, float] = field(default_factory=dict[Hashable, float])
    layers: dict[Hashable, LayerWork] = field(default_factory=dict[Hashable, LayerWork])
    stages: dict[Hashable, tuple[StageWork, ...]] = field(
        default_factory=dict[Hashable, tuple[StageWork, ...]]
    )
    saved: dict[Hashable, int] = field(default_factory=dict[Hashable, int])
    pending: dict[Hashable, int] = field(default_factory=dict[Hashable, int])
    sums: dict[Hashable, float] = field(default_factory=dict[Hashable, float])
    extras: dict[Hashable, LayerExtras] = field(default_factory=dict[Hashable, LayerExtras])

    def worst(self, top: int) -> float:
        """Return the objective that one of the best plans has to reach."""
        return self.best[top - 1] if len(self.best) >= top else math.inf

    def copy(self) -> Standing:
        """Return one that may change apart."""
        seconds = dict(self.work), dict(self.forward)
        held = dict(self.saved), dict(self.pending)
        kept = dict(self.layers), dict(self.stages), *held, dict(self.sums)
        return Standing(list(self.best), *seconds, *kept, dict(self.extras))


class PlanEvaluator:
    """Tries plans of a problem; what is derived for one is there for the next, up to a limit of memory."""

    def __init__(self, problem: SearchProblem, limit: MemoryLimit | None = None) -> None:
        self.problem = problem
        self.costs = CostModel(problem.topology, kernels=problem.kernels.way)
        self.simulator = Simulator(self.costs)
        self._bounds: dict[Function, PlanBounds] = {}
        self._probes: dict[Function, LayerProbes] = {}
        self._batch: dict[Function, int] = {}
        self._levels: dict[tuple[Function, int], int] = {}
        self._keys: dict[Plan, PlanKeys] = {}
        self._told: dict[Plan, tuple[PlanKnowledge, tuple[float, float]]] = {}
        self._built: set[Function] = set()
        self._limit = limit or MemoryLimit()
        self.usable = max(device.usable for device in problem.topology.devices)
        links = problem.topology.kinds_of_links or (0,) * len(problem.topology.devices)
        about = reversed([*zip(problem.topology.devices, links, strict=True)])
        kinds = {(self.costs.spec(device), own): device for device, own in about}
        self._kinds = tuple(kinds.values())

    def using(self, plan: Plan) -> PlanEvaluator:
        """Return this one, or for a plan that leaves devices idle one that waits for those in use alone."""
        topology = in_use(self.problem.topology, plan.devices)
        if topology is self.problem.topology:
            return self
        return PlanEvaluator(replace(self.problem, topology=topology), self._limit)

    def bounds(self, plan: Plan) -> PlanBounds:
        """Return the bounds of what a plan divides."""
        function = self.problem.model(plan)
        if function not in self._bounds:
            self._bounds[function] = PlanBounds(function, self.problem.topology, self.problem.kernels)
        return self._bounds[function]

    def batch(self, plan: Plan) -> int:
        """Return the samples of a step of what a plan divides."""
        function = self.problem.model(plan)
        if function not in self._batch:
            self._batch[function] = ModelTraits.of(function).batch
        return self._batch[function]

    def keys(self, plan: Plan) -> PlanKeys:
        """Return what the bounds of a plan depend on."""
        found = self._keys.get(plan)
        if found is None:
            levels = self._levels_written(plan)
            found = self._keys[plan] = PlanKeys.of(plan, self.batch(plan), levels, self.problem.kernels)
        return found

    def _levels_written(self, plan: Plan) -> int | None:
        """Return of how many levels calls are written out; None: not known before it is built."""
        function, count = self.problem.model(plan), plan.num_stages
        if count == 1 or layers_counted(plan, self.bounds(plan).layers):
            return 0
        if plan.stages != "even":
            return None
        if (function, count) not in self._levels:
            costs = self.costs.on(self.problem.topology.devices[0])
            self._levels[function, count] = levels_written(function, count, costs)
        return self._levels[function, count]

    def known(self, plan: Plan, standing: Standing) -> PlanKnowledge:
        """Return what a standing says of a plan.

        One that recomputes has all products of one that saves all, and so has one whose backward passes are
        in two halves, and all else that their layers compute. One that recomputes all of its layers computes
        their forward passes once more, beside which collectives of backward may run.
        """
        keys = self.keys(plan)
        layers = standing.layers.get(keys.layers)
        if layers is None and keys.layers_undivided in standing.layers:
            layers = standing.layers[keys.layers_undivided].in_halves(runs_alone(plan))
        saves, busy = standing.work.get(keys.saves, 0.0), 0.0
        if layers is None and plan.remat == "full":
            saving = standing.layers.get(keys.layers_saving)
            busy = 0.0 if saving is None else saving.computing + saving.forward
            saves += standing.forward.get(keys.saves, 0.0) if saves and keys.whole else 0.0
        # Of a layer that is written out the last products need not run again.
        alike = standing.work.get(keys.work, 0.0) if keys.whole or plan.remat == "none" else 0.0
        products = max(alike, standing.work.get(keys.own_work, 0.0), saves)
        saved = standing.saved.get(keys.saved, 0)
        stages = standing.stages.get(keys.stages, ())
        sums = standing.sums.get(keys.sums, 0.0)
        halves = keys.layers_undivided and cuts_layers(plan)
        pending = standing.pending.get(keys.saved, 0) if halves else 0
        extras = standing.extras.get(keys.extras, LayerExtras())
        return PlanKnowledge(products, busy, layers, saved, stages, keys.whole, sums, pending, extras)

    def bound(self, plan: Plan, standing: Standing) -> float:
        """Return the least that the objective of a plan can be."""
        if self.problem.objective == "memory":
            return self.least_bytes(plan, standing)
        # A part of 1e-8 is for sums that are rounded, and for times that lie on a grid: 3e-9 was seen.
        return self._figures(plan, standing)[0] * (1 - 1e-8)

    def expected(self, plan: Plan, standing: Standing, rise: float = 1.0) -> float:
        """Return as what a plan is put in order: its bound, and twice that where memory is nearly full.

        While nothing is known of its layers, with what recomputing and collectives may cost, and at least
        ``rise`` times that.
        """
        bound = self.bound(plan, standing)
        if self.problem.objective == "memory":
            return bound
        if not self.knows_layers(plan, standing):
            recomputed = RECOMPUTED if plan.remat.startswith("full") else 1.0
            bound *= max(rise, recomputed) * (1.0 + MOVED * (plan.tp * plan.cp - 1))
        return bound * (2.0 if self.least_bytes(plan, standing) > 0.9 * self.usable else 1.0)

    def least_bytes(self, plan: Plan, standing: Standing) -> float:
        """Return the least that the fullest device can hold."""
        return self._figures(plan, standing)[1]

    def _figures(self, plan: Plan, standing: Standing) -> tuple[float, float]:
        """Return the seconds and the bytes that a plan takes at least, found once for what is known of it."""
        known = self.known(plan, standing)
        found = self._told.get(plan)
        if found is None or found[0] != known:
            bounds = self.bounds(plan)
            figures = bounds.step_seconds(plan, known), bounds.device_bytes(plan, known)
            found = self._told[plan] = known, figures
        return found[1]

    def discarded(self, plan: Plan, standing: Standing) -> str:
        """Return why a plan cannot be one of the best: ``SLOWER``, ``TOO_LARGE``, or "" if it can."""
        if self.least_bytes(plan, standing) > self.usable:
            return TOO_LARGE
        return SLOWER if self.bound(plan, standing) > standing.worst(self.problem.top) else ""

    def nearest(self, plans: Iterable[Plan], standing: Standing) -> list[Plan]:
        """Return the plans that may fit but for :data:`NEARLY`, and be of the best then, the best first."""
        most, worst = (1 + NEARLY) * self.usable, standing.worst(self.problem.top)
        bounds = [
            (bound, place, plan)
            for place, plan in enumerate(plans)
            if self.least_bytes(plan, standing) <= most and (bound := self.bound(plan, standing)) <= worst
        ]
        return [plan for _, _, plan in sorted(bounds)]

    def settled(self, plan: Plan, standing: Standing) -> PlanTrial | None:
        """Return what becomes of a plan that need not be tried: it is discarded, or refused for its sizes."""
        reason = self.discarded(plan, standing)
        if reason:
            return PlanTrial(str(plan), discarded=reason)
        try:
            check_sizes(plan, self.bounds(plan).layers)
        except PlanError as error:
            return PlanTrial(str(plan), refused=str(error))
        return None

    def trials(
        self,
        plans: Iterable[Plan],
        standing: Standing,
        known: Mapping[str, PlanTrial],
        until: float = math.inf,
    ) -> Iterator[PlanTrial]:
        """Yield what becomes of each plan; ``standing`` grows with it. What is known is not tried again, and
        what is expected to be above ``until`` not now."""
        for plan in plans:
            probed, reason = None, self.discarded(plan, standing)
            if not reason:
                probed = self.probed(plan, standing)
                reason = "" if probed is None else self.discarded(plan, standing)
            if not reason and self.expected(plan, standing) > until:
                reason = LATER
            if reason:
                yield PlanTrial(str(plan), discarded=reason, layers=probed)
                continue
            limit = standing.worst(self.problem.top)
            trial = known.get(str(plan)) or self.trial(plan, limit)
            trial = trial if probed is None or trial.layers is not None else replace(trial, layers=probed)
            self.learn(trial, standing)
            yield trial

    def knows_layers(self, plan: Plan, standing: Standing) -> bool:
        """Whether a standing says what the layers of a plan do, be it in whole backward passes."""
        keys = self.keys(plan)
        return keys.layers in standing.layers or keys.layers_undivided in standing.layers

    def probed(self, plan: Plan, standing: Standing) -> LayerWork | None:
        """Return what a step of few layers tells of those of a plan, or of its products where layers are cut;
        it is entered in a standing. None where that is known, or cannot be told so."""
        keys, function, probe = self.keys(plan), self.problem.model(plan), probe_of(plan)
        if probe is None or len(self._kinds) > 1 or self.problem.model(probe) is not function:
            return None
        told, asked = self.keys(probe), keys.layers_undivided or keys.layers
        known = self.knows_layers(plan, standing) and keys.extras in standing.extras
        layers = told.layers == asked and not known
        if not layers and not (told.work == keys.work and keys.work not in standing.work):
            return None
        if function not in self._probes:
            self._probes[function] = LayerProbes(self.bounds(plan), self.costs)
        found = self._probes[function].work(probe)
        if found is not None:
            self._learn_layers(probe, found, standing)
        return found

    def learn(self, trial: PlanTrial, standing: Standing) -> None:
        """Add to a standing what a trial says."""
        if trial.work:
            key = self.keys(trial.plan).own_work
            standing.work[key] = min(trial.work, standing.work.get(key, trial.work))
        if trial.layers is not None:
            # What a probe tells is of no stages.
            probe = None if trial.layers.stages else probe_of(trial.plan)
            self._learn_layers(probe or trial.plan, trial.layers, standing)
        if trial.fits:
            insort(standing.best, self.objective(trial))

    def _learn_layers(self, plan: Plan, made: LayerWork, standing: Standing) -> None:
        """Add to a standing what is known of the layers of a plan."""
        keys = self.keys(plan)
        if keys.layers is None:
            return
        standing.layers[keys.layers] = standing.layers.get(keys.layers, made).least(made)
        if made.stages:
            standing.stages.setdefault(keys.stages, made.stages)
        else:
            for key in (keys.work, keys.own_work):
                standing.work[key] = min(made.work, standing.work.get(key, made.work))
        known = standing.extras.get(keys.extras, made.extras)
        standing.extras[keys.extras] = known.least(made.extras)
        if made.sums and plan.microbatches > 2:
            standing.sums[keys.sums] = min(made.sums, standing.sums.get(keys.sums, made.sums))
        if made.layers:
            if made.saved:  # else some layer has nothing to itself, as its first one has
                standing.saved[keys.saved] = min(made.saved, standing.saved.get(keys.saved, made.saved))
            if made.pending:
                pending = standing.pending.get(keys.saved, made.pending)
                standing.pending[keys.saved] = min(made.pending, pending)
            least = standing.forward.get(keys.work, made.products)
            standing.forward[keys.work] = min(made.products, least)

    def objective(self, trial: PlanTrial) -> float:
        """Return by what a plan is ranked: less is better."""
        return trial.seconds if self.problem.objective == "time" else trial.peak

    def trial(self, plan: Plan, limit: float = math.inf) -> PlanTrial:
        """Build a plan and count its memory; simulate it if it fits, or nearly.

        What its step consists of is said of one whose objective is at most ``limit``.
        """
        if self._limit.exceeded():
            shorts = [probes.short for probes in self._probes.values() if probes.short is not None]
            self._limit.forget([*self._built, *shorts])
            self._built.clear()
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
        self._built.add(function)
        return parallelize(function, plan, problem.topology, self.costs, None, problem.kernels)

    def simulate(self, plan: Plan) -> Simulation:
        """Return the simulated step of a plan. Raises :class:`PlanError` for one that does not suit."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UncostedOperatorWarning)
            return self.simulator.simulate(self.program(plan))

    def _trial(self, plan: Plan, limit: float) -> PlanTrial:
        program = self.program(plan)
        memory = program_memory(full_program(program))
        # On devices of several kinds others may have faster ones.
        layers = layer_work(program, self.costs) if len(self._kinds) == 1 else None
        found = self._sized(PlanTrial(str(plan), layers=layers), memory)
        if found.missing > NEARLY * found.usable:
            return found
        simulation = self.simulator.simulate(program)
        found = self._sized(found, step_memory(memory, simulation))
        found = replace(found, seconds=simulation.step_period, work=self._work(plan, simulation))
        if not found.fits or self.objective(found) > limit:
            return found
        interval = simulation.interval()
        low, high = (interval.low, interval.high) if interval else (0.0, 0.0)
        return replace(found, low=low, high=high, parts=dict(simulation.breakdown("kind")))

    def _sized(self, trial: PlanTrial, memory: ProgramMemory) -> PlanTrial:
        """Return a trial with what its plan needs of memory."""
        peaks = memory.peak_of_devices() if len(self._kinds) > 1 else {}
        fullest = fullest_device(peaks) or memory.program.mesh.devices[0]
        peak = peaks.get(fullest, max(memory.peaks))
        return replace(trial, peak=peak, usable=fullest.usable, missing=float(memory.missing))

    def _work(self, plan: Plan, simulation: Simulation) -> float:
        """Return the seconds of the products of a microbatch, summed over the stages.

        Each as the fastest devices run it, on which another plan may put what is on slower ones here. A mean
        over the ranks of a stage. Other work depends on where stages begin and on how gradients and
        parameters are spread: masks are made anew on each stage, sums and casts are of what a rank holds.
        """
        members = simulation.classes.members
        total = 0.0
        for op, rank_class, times, _ in simulation.timeline.op_runs:
            if is_product(op):
                signature = signature_of(op)
                least = min(self.costs.seconds(signature, (device,)) for device in self._kinds)
                total += least * times * len(members[rank_class])
        return total / (plan.dp * plan.tp * plan.cp * plan.microbatches)
