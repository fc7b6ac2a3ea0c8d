"""One training step of a model under a plan on a cluster, simulated: what ``distsim simulate`` does."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Unpack

from distsim.compose import parallelize
from distsim.cost import CostModel, UncostedOperatorWarning
from distsim.errors import PlanError, TopologyError
from distsim.hardware import load_cluster
from distsim.hardware.cluster_table import Settings, settings_of
from distsim.hardware.variation import in_use
from distsim.interpret import count_model_flops
from distsim.ir import Function, Topology
from distsim.ir.kernel_rates import WAYS_TO_LAUNCH
from distsim.plan import Plan
from distsim.plan.fields import PlanFields
from distsim.plan_search.space import ModelTraits
from distsim.program.program import Program
from distsim.report.progress import Progress
from distsim.schedule import Schedule, read_csv
from distsim.simulation import Disturbances, Simulation, Simulator
from distsim.simulation.explain.interval import correction
from distsim.simulation.trained_step import PlannedStep, model_type
from distsim.study.arguments import argument, model_given, plan_given, taken
from distsim.study.choices import Choices
from distsim.study.layout import lay_out, plan_asked, settled
from distsim.study.options import (
    EngineOptions,
    Model,
    ModelOptions,
    SimulationKeywords,
    options_of,
)
from distsim.study.training_step import kept_training_step
from distsim.transforms.kernels.policies import Kernels


def simulate(
    model: Model,
    cluster: str | os.PathLike[str] | Topology,
    plan: str | PlanFields | Plan | None = None,
    batch: int | None = None,
    seq: int | None = None,
    set: Settings = (),
    **options: Unpack[SimulationKeywords],
) -> Simulation:
    """Return the simulation of one training step, as ``distsim simulate`` with the same options.

    ``model``: a name (:func:`distsim.importer.model_names`), a ``config.json`` of Hugging Face or an
    ``.onnx`` file by its path, the table that a ``config.json`` holds, a builder with its sizes
    (``mlp:layers=16,width=8192``), or a function built in Python: a forward pass, or one that brings its
    backward pass. ``cluster``: a preset, maybe with ``:nodes``, a ``.toml`` file, or a :class:`Topology`;
    ``set`` changes its figures (``{"device.memory": "40GiB"}``, or text as ``device.memory=40GiB``).
    ``plan`` (``dp=1``): a text or a mapping of fields, of which the stack says what they leave open, or a
    :class:`Plan`, which is as it is. ``batch`` samples a step of ``seq`` tokens each.
    ``options`` are those of :class:`SimulationKeywords`, as text or as what the text names:
    ``precision="mixed"``, ``stack="megatron"``, ``optimizer=Adam(lr=1e-4)``. With ``own_runs``, measured over
    predicted seconds of other steps on that cluster, it has a :attr:`Simulation.corrected_period` too.

    Raises a :class:`DistsimError` that says what cannot be read, or does not fit; a step that needs more
    memory than there is is no error: see :attr:`Simulation.fits`.

    >>> import distsim
    >>> gpt = "gpt:layers=2,hidden=64,heads=4,seq=32,vocab=100"
    >>> step = distsim.simulate(gpt, "dgx-a100", {"dp": 2, "tp": 2}, batch=8)
    >>> step.fits, step.known_step.tokens, len(step.timestamps)
    (True, 256, 4)
    """
    given = {**taken("simulate", options, SimulationKeywords), "model": model_given(model)}
    given |= {name: argument(name, own, int | None) for name, own in (("batch", batch), ("seq", seq))}
    given["plan"] = plan_given(plan)
    place = cluster_label(cluster), topology_of(cluster, set)
    engine = options_of(EngineOptions, given)
    return simulated(options_of(ModelOptions, given), place, engine, Progress()).simulation


def topology_of(cluster: str | os.PathLike[str] | Topology, settings: Settings = ()) -> Topology:
    """Return a cluster by its name or file with figures changed; a topology is as it is.

    Raises :class:`TopologyError` for what :func:`load_cluster` refuses, and for changes of a topology.
    """
    if not isinstance(cluster, Topology):
        return load_cluster(cluster, settings)
    if changes := settings_of(settings):
        raise TopologyError(f"{cluster} is made: change figures where it is, not by {changes[0]}")
    return cluster


def cluster_label(cluster: str | os.PathLike[str] | Topology) -> str:
    """Return what a cluster is called; raises :class:`OptionError` for what is none."""
    argument("cluster", cluster, str | os.PathLike[str] | Topology)
    return str(cluster) if isinstance(cluster, Topology) else os.fspath(cluster)


@dataclass(frozen=True, eq=False)
class SimulatedStep:
    """A simulated training step, and what made it: the joint function, the program of a plan, the choices.

    ``asked`` is the plan that was asked for, of which :attr:`choices` make ``plan``; ``build`` makes the
    program of another plan, and ``simulate`` its step.
    """

    simulation: Simulation
    function: Function
    asked: str | Plan
    plan: Plan
    choices: Choices
    build: Callable[[Plan], Program]
    simulate: Callable[[Program], Simulation]


@dataclass(frozen=True, eq=False)
class _Plans:
    """Builds and simulates plans of a function on the first devices of a topology.

    Each waits for the slowest of those that it uses, not of those that are idle.
    """

    function: Function
    topology: Topology
    engine: EngineOptions
    kernels: Kernels
    order: Schedule | None
    _simulators: dict[int, Simulator] = field(default_factory=dict[int, Simulator])

    def build(self, plan: Plan) -> Program:
        """Return the program of a plan."""
        costs = self._simulator(plan.devices).cost_model
        return parallelize(self.function, plan, costs.topology, costs, self.order, self.kernels)

    def simulate(self, program: Program) -> Simulation:
        """Return its simulated step."""
        return self._simulator(len(program.mesh)).simulate(program)

    def _simulator(self, devices: int) -> Simulator:
        if devices not in self._simulators:
            used = in_use(self.topology, devices)
            costs = CostModel(used, self.engine.strict, self.engine.rules, self.kernels.way)
            self._simulators[devices] = simulator_of(self.engine, costs)
        return self._simulators[devices]


def simulated(
    options: ModelOptions, cluster: tuple[str, Topology], engine: EngineOptions, progress: Progress
) -> SimulatedStep:
    """Simulate the training step that options ask for, on a cluster of a name.

    The simulation knows its step: samples, tokens, the model's FLOPs, the plan and what was assumed.
    """
    name, topology = cluster
    _check_own_runs(options, engine.own_runs)
    order = _table(engine.schedule)
    asked = plan_asked(options.plan, order)
    function, choices = kept_training_step(replace(options, plan=asked), progress)
    plans = _Plans(function, topology, engine, choices.kernels, order)

    def build(plan: Plan) -> Program:
        return progress.run(f"parallelizing: {choices.written(plan)}", lambda: plans.build(plan))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncostedOperatorWarning)  # they are notes
        plan, program, said = lay_out(asked, choices, build)
        simulation = progress.run("simulating", lambda: plans.simulate(program))
    traits = ModelTraits.of(function)
    notes = [f"assumed: {', '.join(choices.assumed)}"] if choices.assumed else []
    notes += said
    notes += choices.device_notes(topology)
    notes += _zero_alone(plan)
    if why := refused_offload(choices, plan, traits):
        notes.append(f"{choices.stack.name} refuses offload={plan.offload} {why}; simulated all the same")
    notes += _idle_devices(name, plan, topology, traits.batch)
    notes += _uneven_ranks(plan, program.schedule, simulation)
    simulation.step = PlannedStep(
        options.label,
        traits.batch,
        traits.sequence,
        count_model_flops(function),
        simulation.trains,
        model_type(function),
        name,
        choices.written(plan),
        tuple(notes),
    )
    simulation.own_runs = engine.own_runs
    asked = settled(asked, plan, choices)
    return SimulatedStep(simulation, function, asked, plan, choices, plans.build, plans.simulate)


def _check_own_runs(options: ModelOptions, ratios: Sequence[float]) -> None:
    """Check that ratios of other steps can be, and correct a prediction of this one."""
    correction(ratios)
    if ratios and (kernels := Choices.of(options).kernels.one_by_one).way not in WAYS_TO_LAUNCH:
        raise PlanError(
            f"--own-runs corrects a prediction, and with --kernels {kernels.name} no host takes time: leave "
            "one out"
        )


def _table(schedule: Schedule | str | os.PathLike[str] | None) -> Schedule | None:
    """Return the schedule that is given as a table, if there is one."""
    return schedule if schedule is None or isinstance(schedule, Schedule) else read_csv(Path(schedule))


def simulator_of(engine: EngineOptions, cost_model: CostModel) -> Simulator:
    """Return the max-plus engine, or the event engine for what is not linear."""
    if engine.seed and not engine.jitter:
        raise PlanError("--seed has no effect without --jitter")
    if not (engine.contention or engine.jitter):
        return Simulator(cost_model, engine.overlap)
    disturbances = Disturbances(engine.jitter, engine.seed) if engine.jitter else None
    return Simulator(
        *(cost_model, engine.overlap),
        engine="events",
        contention=engine.contention,
        disturbances=disturbances,
    )


def _idle_devices(cluster: str, plan: Plan, topology: Topology, samples: int) -> list[str]:
    """Say how many devices a plan leaves idle, and which dp would use the most of them, if any."""
    count, replica = len(topology.devices), plan.cp * plan.tp * plan.pp
    if plan.devices == count:
        return []
    divide = [dp for dp in range(1, count // replica + 1) if samples % (dp * plan.microbatches) == 0]
    most = max(divide, default=plan.dp)
    way = f"dp={most} would use {most * replica}"
    if most <= plan.dp:
        way = f"a batch of {samples} in {plan.microbatches} microbatches allows no larger dp, but tp or pp"
    degrees = "dp * cp * tp * pp" if plan.cp > 1 else "dp * tp * pp"
    idle = f"{count - plan.devices} of {count} devices of {cluster} are idle"
    return [f"{idle}, as the plan uses {degrees} = {plan.devices}; {way}"]


def _zero_alone(plan: Plan) -> list[str]:
    """Say so where there are no ranks over which ZeRO divides anything."""
    if not plan.zero or plan.dp * plan.cp > 1:
        return []
    return [f"zero={plan.zero} has no effect: it divides over the ranks of dp and cp, of which there is one"]


def refused_offload(choices: Choices, plan: Plan, traits: ModelTraits) -> str:
    """Return beside what the stack refuses to offload layers, "" where it does not refuse."""
    if not (plan.offload and choices.stack.offloads_alone):
        return ""
    if plan.pp > 1:
        return f"with pp={plan.pp}"
    if plan.remat != "none":
        return f"with remat={plan.remat}"
    return "of all layers" if plan.offload >= traits.every_layer else ""


UNEVEN = 1.1
"""How much more than the mean of the ranks the busiest may compute before it is noted."""


def _uneven_ranks(plan: Plan, order: Schedule, simulation: Simulation) -> list[str]:
    """Say how uneven the ranks' work is where stages are even, and ranks hold several."""
    if plan.stages != "even" or order.stages_a_rank == 1:
        return []
    groups = [(simulation.shares(members[0]).busy, len(members)) for members in simulation.classes.members]
    most = max(busy for busy, _ in groups)
    mean = sum(busy * size for busy, size in groups) / sum(size for _, size in groups)
    if not most > UNEVEN * mean:
        return []
    return [
        f"stages=even makes stages even, not the ranks that hold {order.stages_a_rank} of them: the busiest "
        f"computes {most / mean:.2f} times the mean; stages=auto, or counts as in 3-4-4-3, may do better"
    ]
