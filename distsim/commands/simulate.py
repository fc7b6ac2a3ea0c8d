"""The command ``distsim simulate``: one training step, or inference partitioned over devices."""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from distsim.commands.attempt import OUT_OF_MEMORY, attempt
from distsim.commands.cluster import add_settings, read_cluster
from distsim.commands.layout import lay_out
from distsim.commands.model import add_model_options, plan_text, read_model, training_step
from distsim.compose import parallelize
from distsim.cost import CostModel, UncostedOperatorWarning
from distsim.device_placement.partitioned import HOST_MODES, partition_model
from distsim.errors import PlanError
from distsim.interpret import count_model_flops
from distsim.ir import Device, Function, Topology
from distsim.ir.kernel_rates import ATTENTION_KERNELS
from distsim.plan import Plan
from distsim.plan_search import PlanTrials, remedies
from distsim.plan_search.remedies import SEARCH_SECONDS
from distsim.program.program import Program
from distsim.report import plot_timeline, summarize, write_trace
from distsim.report.output import check_format, check_target
from distsim.report.progress import Progress
from distsim.schedule import TABLE, Schedule, read_csv
from distsim.schedule.refusals import count as count_of
from distsim.simulation import Disturbances, Simulation, Simulator
from distsim.simulation.explain.interval import correction
from distsim.simulation.explain.text import seconds_text
from distsim.simulation.quantities import bytes_label
from distsim.streams import say
from distsim.transforms.sharding.roles import batch_inputs, roles

MOST_EVENTS = 2_000_000
"""Events in a trace of all devices, beyond which one device stands for those that do the same."""


_PLAN = (
    "dp=2,tp=4,pp=2,microbatches=8,schedule=1f1b (default dp=1), and stages=layers, chunks=2, remat=full, "
    "zero=1, sp=on, offload=3 (to the host, what the first 3 layers of each stage save)"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_model_options(parser)
    parser.add_argument(
        "--cluster", required=True, help="a preset such as dgx-a100 or dgx-h100:4, or a .toml"
    )
    add_settings(parser)
    parser.add_argument("--plan", help=_PLAN)
    parser.add_argument(
        "--partition",
        metavar="MODE",
        help=f"inference of one batch instead of a plan, its ops on all devices by {', '.join(HOST_MODES)}",
    )
    parser.add_argument(
        "--device-memory", type=float, metavar="BYTES", help="with --partition: less memory than devices have"
    )
    parser.add_argument(
        "--saturate-host", action="store_true", help="with --partition: replicas on devices that are idle"
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="of the search of --partition optimal, and of compiling it in the first run (default 10)",
    )
    parser.add_argument("--strict", action="store_true", help="refuse operators without a work rule")
    parser.add_argument("--no-overlap", action="store_true", help="one stream per device: nothing overlaps")
    parser.add_argument(
        "--explain", action="store_true", help="say what bounds the step, and what would gain"
    )
    parser.add_argument(
        "--contention", action="store_true", help="transfers share links (event engine, device by device)"
    )
    parser.add_argument(
        "--jitter", type=float, default=0.0, help="coefficient of variation of every op's time (event engine)"
    )
    parser.add_argument(
        "--own-runs",
        type=float,
        nargs="+",
        default=[],
        metavar="RATIO",
        help="measured over predicted seconds of other steps on this cluster: they correct this one",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the jitter")
    parser.add_argument(
        "--trace", type=Path, metavar="JSON", help="write a trace for Perfetto, compressed as .json.gz"
    )
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the timeline, a row for each rank")
    parser.add_argument("--streams", action="store_true", help="with --plot: a row for each stream of a rank")
    parser.add_argument(
        "--schedule-csv",
        type=Path,
        metavar="FILE",
        help="with --plan: the pipeline's schedule, a table as torch writes it",
    )
    parser.add_argument(
        "--copies", type=int, help="with --schedule-csv: of the model in its stages (dualpipe: 2)"
    )


def run(options: argparse.Namespace) -> int:
    """Simulate what is asked for, and report it."""
    for path in filter(None, (options.trace, options.plot)):
        check_target(path)
    correction(options.own_runs)  # refused before anything is simulated
    if options.own_runs and (options.kernels == "ops" or options.partition):
        way = "--partition" if options.partition else "--kernels ops"
        raise PlanError(f"--own-runs corrects a prediction, and with {way} no host takes time: leave one out")
    if options.plot:
        check_format(options.plot, "a timeline")
    elif options.streams:
        raise PlanError("--streams is for the picture: add --plot FILE")
    progress = Progress(sys.stderr)
    if options.partition:
        return _simulate_partition(options, progress)
    for name in ("device_memory", "saturate_host", "time_limit"):
        given = getattr(options, name)
        if given is not None and given is not False:  # 0 is given too
            raise PlanError(f"--{name.replace('_', '-')} goes with --partition")
    order = _table(options)
    topology = read_cluster(options)
    function, choices = training_step(options, progress)
    cost_model = CostModel(topology, strict=options.strict, kernels=choices.kernels.way)
    simulator = _simulator(options, cost_model)

    def build(plan: Plan) -> Program:
        return progress.run(
            f"parallelizing: {plan}",
            lambda: parallelize(function, plan, topology, cost_model, order, choices.kernels),
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncostedOperatorWarning)  # they are notes below
        plan, program, said = lay_out(_plan(options, order), options.stack, choices, build)
        simulation = progress.run("simulating", lambda: simulator.simulate(program))
    notes = [f"assumed: {', '.join(choices.assumed)}"] if choices.assumed else []
    notes += said
    notes += _unknown_kernel(choices.attention, topology)
    notes += _idle_devices(options, plan, topology, _samples(function))
    notes += _uneven_ranks(plan, program.schedule, simulation)
    if order is None and not simulation.fits:

        def build_quietly(other: Plan) -> Program:
            return parallelize(function, other, topology, cost_model, None, choices.kernels)

        notes += _advice(plan, PlanTrials(function, topology, build_quietly, simulator.simulate), progress)
    way = str(plan) if order is None else f"{plan} (schedule of {options.schedule_csv.name})"
    return _tell(options, progress, (way, function), cost_model, simulation, notes=notes)


def _advice(plan: Plan, trials: PlanTrials, progress: Progress) -> list[str]:
    """Say what would make a plan fit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncostedOperatorWarning)
        found = progress.run(
            f"looking for plans that fit, for {SEARCH_SECONDS:g} s at most", lambda: remedies(plan, trials)
        )
    notes = [
        f"it would fit with {remedy}: {seconds_text(remedy.step_time)}, at most {bytes_label(remedy.peak)}"
        for remedy in found.fit
    ]
    if found.untried:
        left = (
            f"{count_of(found.untried, 'plan')} with one or two changes not tried within {SEARCH_SECONDS:g} s"
        )
        return [*(notes or ["no plan was found that fits"]), left]
    return notes or ["no plan with one or two changes fits"]


def _tell(
    options: argparse.Namespace,
    progress: Progress,
    model: tuple[str, Function],
    cost_model: CostModel,
    simulation: Simulation,
    about: str = "",
    notes: Sequence[str] = (),
) -> int:
    """Print what was simulated of a model, run in some way, and write what is asked for."""
    way, function = model
    samples = _samples(function)
    say(f"{options.model} on {options.cluster}, {way}, batch {samples}\n")
    if about:
        say(about)
    say(summarize(simulation, samples, count_model_flops(function), options.own_runs))
    if options.explain:
        say(progress.run("explaining", simulation.explain))
    uncosted = ", ".join(cost_model.uncosted)
    last = [f"costed by their bytes for want of a work rule: {uncosted}"] if uncosted else []
    for note in (*notes, *simulation.notes, *last):
        say(f"note: {note}")
    return _write(options, simulation, progress) or (0 if simulation.fits else OUT_OF_MEMORY)


def _plan(options: argparse.Namespace, order: Schedule | None) -> str:
    """Return the text of the plan; a table says how many stages a rank has, where the plan does not."""
    text = plan_text(options)
    return text if order is None or "chunks=" in text else f"{text},chunks={order.stages_a_rank}"


def _table(options: argparse.Namespace) -> Schedule | None:
    """Return the schedule that is given as a table, if there is one."""
    if options.schedule_csv is None:
        if options.copies is not None:
            raise PlanError("--copies goes with --schedule-csv, of which no table says it")
        return None
    if "schedule=" in (options.plan or "").replace(f"schedule={TABLE}", ""):
        raise PlanError("--schedule-csv says what the schedule is: leave schedule= out of --plan")
    return read_csv(options.schedule_csv, copies=1 if options.copies is None else options.copies)


def _idle_devices(options: argparse.Namespace, plan: Plan, topology: Topology, samples: int) -> list[str]:
    """Say how many devices a plan leaves idle, and which dp would use the most of them, if any."""
    count, replica = len(topology.devices), plan.tp * plan.pp
    if plan.devices == count:
        return []
    divide = [dp for dp in range(1, count // replica + 1) if samples % (dp * plan.microbatches) == 0]
    most = max(divide, default=plan.dp)
    way = f"dp={most} would use {most * replica}"
    if most <= plan.dp:
        way = f"a batch of {samples} in {plan.microbatches} microbatches allows no larger dp, but tp or pp"
    idle = f"{count - plan.devices} of {count} devices of {options.cluster} are idle"
    return [f"{idle}, as the plan uses dp * tp * pp = {plan.devices}; {way}"]


def _unknown_kernel(attention: str | None, topology: Topology) -> list[str]:
    """Say where devices have no figure for the kernel of attention that is asked for."""
    rates = topology.devices[0].rates
    if attention not in ATTENTION_KERNELS or rates.attention(attention) is not None:
        return []
    return [
        f"attention {attention}: the cluster has no figure for it ([device.attention] of its file), so it "
        "takes as long as the usual kernel"
    ]


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


def _simulate_partition(options: argparse.Namespace, progress: Progress) -> int:
    """Inference of one batch, partitioned over the devices of the cluster."""
    fields = ("plan", "schedule_csv", "copies", "loss", "optimizer", "keep", "clip", "kernels", "stack")
    training = [name for name in fields if getattr(options, name) is not None]
    if training:
        raise PlanError(
            "--partition places the ops of a forward pass, "
            f"--{training[0].replace('_', '-')} is for training: leave one out"
        )
    if options.time_limit is not None and options.partition != "optimal":
        raise PlanError("--time-limit is for --partition optimal; the other modes do not search")
    topology = read_cluster(options)
    cost_model = CostModel(topology, strict=options.strict)
    simulator = _simulator(options, cost_model)
    function = read_model(options, progress)
    memory = math.inf if options.device_memory is None else options.device_memory
    limit = 10.0 if options.time_limit is None else options.time_limit
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncostedOperatorWarning)  # they are notes below
        found = progress.run(
            f"partitioning: {options.partition}",
            lambda: partition_model(
                function, topology, options.partition, memory, options.saturate_host, limit, cost_model
            ),
        )
        run = found.placed.function
        simulation = progress.run("simulating", lambda: simulator.interpret(run, run.inputs))
    way = f"{options.partition}, inference"
    return _tell(options, progress, (way, function), cost_model, simulation, found.describe(simulation))


def _simulator(options: argparse.Namespace, cost_model: CostModel) -> Simulator:
    """The max-plus engine, or the event engine for what is not linear."""
    overlap = not options.no_overlap
    if options.seed and not options.jitter:
        raise PlanError("--seed has no effect without --jitter")
    if not (options.contention or options.jitter):
        return Simulator(cost_model, overlap)
    disturbances = Disturbances(options.jitter, options.seed) if options.jitter else None
    return Simulator(
        cost_model, overlap, engine="events", contention=options.contention, disturbances=disturbances
    )


def _write(options: argparse.Namespace, simulation: Simulation, progress: Progress) -> int:
    """Write the trace and the plot that are asked for; one that cannot be written does not cost the other."""

    def trace() -> int:
        devices, what = _traced(simulation)
        progress.run(f"writing {options.trace}", lambda: write_trace(simulation, options.trace, devices))
        say(f"trace: {options.trace} {what}(open it at ui.perfetto.dev)")
        return 0

    def plot() -> int:
        progress.run(
            f"drawing {options.plot}",
            lambda: plot_timeline(simulation, options.plot, streams=options.streams),
        )
        say(f"timeline: {options.plot}")
        return 0

    return max([attempt(work) for work in (trace, plot) if getattr(options, work.__name__)], default=0)


def _traced(simulation: Simulation) -> tuple[list[Device], str]:
    """All devices, or where that is too much to look at one for those that do the same."""
    devices = list(simulation.timestamps)
    if len(devices) * len(simulation.timeline) / len(simulation.classes.members) <= MOST_EVENTS:
        return devices, ""
    chosen = [members[0] for members in simulation.classes.members]
    return chosen, f"with one of the devices that do the same, {len(chosen)} of {len(devices)} "


def _samples(function: Function) -> int:
    data = batch_inputs(function, roles(function))
    if not data:
        raise PlanError(f"{function.name} has no data input, so no batch to count samples by")
    return getattr(data[0].type, "shape", (0,))[0]
