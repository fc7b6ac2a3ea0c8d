"""The command line: ``distsim simulate``, ``distsim show`` and ``distsim clusters``."""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from distsim.compose import parallelize
from distsim.cost import CostModel, UncostedOperatorWarning
from distsim.device_placement.partitioned import HOST_MODES, partition_model
from distsim.errors import DistsimError, PlanError
from distsim.hardware import describe, load_cluster, presets
from distsim.importer import load_model
from distsim.interpret import count_flops
from distsim.ir import Device, Function, Topology, pformat
from distsim.ir.type import dtype_named
from distsim.plan import Plan
from distsim.report import plot_timeline, summarize, write_trace
from distsim.report.output import check_format, check_target
from distsim.report.progress import Progress
from distsim.simulate import Disturbances, Simulation, Simulator
from distsim.streams import complain, say
from distsim.transforms import (
    add_loss,
    describe_blocks,
    differentiate,
    optimizer_named,
    outline,
    set_precision,
    steady_state_transform,
)
from distsim.transforms.autodiff.loss import LOSSES
from distsim.transforms.autodiff.optimizers import OPTIMIZERS
from distsim.transforms.sharding.roles import batch_inputs, brings_backward, roles

MOST_EVENTS = 2_000_000
"""Events in a trace of all devices, beyond which one device stands for those that do the same."""

BAD_INPUT, OUT_OF_MEMORY = 2, 3
"""Exit statuses."""

EPILOG = """exit status:
  0 when all is well, 2 for bad input or a file that cannot be written, with the reason, 3 when the step is
  simulated and reported but does not fit in the memory of the devices, 130 for Ctrl-C, 143 for SIGTERM

examples:
  distsim simulate gpt2 --cluster dgx-a100:2 --plan dp=2,tp=4,pp=2,microbatches=8 --batch 64 --bind seq=1024
  distsim simulate mlp:layers=16,width=8192 --cluster dgx-2 --plan dp=16 --batch 8192
  distsim show gpt:layers=2,hidden=64,heads=4,seq=16,vocab=100 --batch 8 --cluster dgx-a100 --plan tp=2,pp=2
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status (see ``EPILOG``). Why input is refused goes to stderr."""
    options = _parser().parse_args(arguments)
    return _attempt(lambda: options.run(options))


def _attempt(work: Callable[[], int]) -> int:
    """Return the exit status of some work: what it returns, or ``BAD_INPUT`` after saying why."""
    try:
        return work()
    except MemoryError:
        complain("distsim: not enough memory on this machine for a model of this size")
    except (DistsimError, OSError) as error:  # OSError: a full disk, a name that is too long, no permission
        complain(f"distsim: {error}")
    return BAD_INPUT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="distsim",
        description="How fast a model trains on a cluster, whether it fits, and what holds it back.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    simulate = commands.add_parser("simulate", help="simulate one training step", epilog=EPILOG)
    simulate.formatter_class = argparse.RawDescriptionHelpFormatter
    _model_options(simulate)
    simulate.add_argument(
        "--cluster", required=True, help="a preset such as dgx-a100 or dgx-h100:4, or a .toml"
    )
    simulate.add_argument("--plan", help="dp=2,tp=4,pp=2,microbatches=8,schedule=1f1b (default dp=1)")
    simulate.add_argument(
        "--partition",
        metavar="MODE",
        help=f"inference of one batch instead of a plan, its ops on all devices by {', '.join(HOST_MODES)}",
    )
    simulate.add_argument(
        "--device-memory", type=float, metavar="BYTES", help="with --partition: less memory than devices have"
    )
    simulate.add_argument(
        "--saturate-host", action="store_true", help="with --partition: replicas on devices that are idle"
    )
    simulate.add_argument(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="of the search of --partition optimal, and of compiling it in the first run (default 10)",
    )
    simulate.add_argument("--strict", action="store_true", help="refuse operators without a work rule")
    simulate.add_argument("--no-overlap", action="store_true", help="one stream per device: nothing overlaps")
    simulate.add_argument(
        "--explain", action="store_true", help="say what bounds the step, and what would gain"
    )
    simulate.add_argument(
        "--contention", action="store_true", help="transfers share links (event engine, device by device)"
    )
    simulate.add_argument(
        "--jitter", type=float, default=0.0, help="coefficient of variation of every op's time (event engine)"
    )
    simulate.add_argument("--seed", type=int, default=0, help="of the jitter")
    simulate.add_argument(
        "--trace", type=Path, metavar="JSON", help="write a trace for Perfetto, compressed as .json.gz"
    )
    simulate.add_argument("--plot", type=Path, metavar="PNG", help="draw the timeline")
    simulate.set_defaults(run=_simulate)
    show = commands.add_parser("show", help="print the function, also after a transform")
    _model_options(show)
    show.add_argument("--training", action="store_true", help="with loss, backward pass and optimizer")
    show.add_argument("--cluster", help="with --plan: the cluster to place it on")
    show.add_argument("--plan", help="print the parallel, scheduled step (implies --training)")
    show.add_argument(
        "--outline",
        action="store_true",
        help="make blocks of the model that repeat one function, and count them",
    )
    show.set_defaults(run=_show)
    clusters = commands.add_parser("clusters", help="list the presets, or the figures of one")
    clusters.add_argument("name", nargs="?")
    clusters.set_defaults(run=_clusters)
    return parser


def _model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        help="an .onnx file, gpt2, or a builder with options: mlp:layers=16,width=8192, gpt:..., llama:...",
    )
    parser.add_argument("--batch", type=int, help="global batch: samples per step")
    parser.add_argument(
        "--bind",
        action="append",
        default=[],
        help="sizes of symbolic dimensions, seq=128,... (may be repeated)",
    )
    parser.add_argument(
        "--parameters",
        action="append",
        default=[],
        help="patterns of graph inputs that are weights: p_*,... (may be repeated)",
    )
    parser.add_argument(
        "--keep",
        action="append",
        metavar="NAME",
        help="an output to compute that the loss does not need (may be repeated)",
    )
    parser.add_argument("--loss", help=f"the loss to add: {', '.join(LOSSES)} (default auto)")
    parser.add_argument("--optimizer", help=f"{' or '.join(sorted(OPTIMIZERS))} (default adam)")
    parser.add_argument(
        "--dtype",
        default="float32",
        help="what float32 tensors become, e.g. bfloat16: parameters and optimizer state too, without a "
        "float32 copy of either",
    )


def _forward(options: argparse.Namespace) -> Function:
    patterns = tuple(p for text in options.parameters for p in text.split(",") if p)
    dtype = dtype_named(options.dtype)
    if not dtype.is_floating:
        raise PlanError(f"--dtype {options.dtype}: float32 tensors can become a floating-point type only")
    bindings = ",".join(filter(None, options.bind))
    function = load_model(options.model, options.batch, bindings, patterns)
    return set_precision(function, dtype)


def _read(options: argparse.Namespace, progress: Progress) -> Function:
    function = progress.run(f"reading {options.model}", lambda: _forward(options))
    if not getattr(options, "outline", False):
        return function
    outlined = progress.run("outlining", lambda: outline(function))
    for line in describe_blocks(outlined).splitlines():
        say(f"# {line}")
    return outlined


def _training(options: argparse.Namespace, progress: Progress) -> Function:
    optimizer = optimizer_named(options.optimizer or "adam")
    loss = options.loss or "auto"
    if loss not in LOSSES:
        raise PlanError(f"loss {loss!r} is not one of {', '.join(LOSSES)}")
    function = _read(options, progress)
    if brings_backward(function):
        if options.loss or options.optimizer or options.keep:
            raise PlanError(f"{function.name} brings its own backward pass: no --loss, --optimizer, --keep")
        return function
    keep = options.keep or ()
    return progress.run(
        "differentiating", lambda: differentiate(add_loss(function, loss, keep), optimizer, keep)
    )


def _simulate(options: argparse.Namespace) -> int:
    for path in filter(None, (options.trace, options.plot)):
        check_target(path)
    if options.plot:
        check_format(options.plot, "a timeline")
    progress = Progress(sys.stderr)
    if options.partition:
        return _simulate_partition(options, progress)
    for name in ("device_memory", "saturate_host", "time_limit"):
        given = getattr(options, name)
        if given is not None and given is not False:  # 0 is given too
            raise PlanError(f"--{name.replace('_', '-')} goes with --partition")
    plan = Plan.parse("dp=1" if options.plan is None else options.plan)
    topology = load_cluster(options.cluster)
    cost_model = CostModel(topology, strict=options.strict)
    simulator = _simulator(options, cost_model)
    function = _training(options, progress)
    program = progress.run(f"parallelizing: {plan}", lambda: parallelize(function, plan, topology))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncostedOperatorWarning)  # they are notes below
        simulation = progress.run("simulating", lambda: simulator.simulate(program))
    notes = _idle_devices(options, plan, topology, _samples(function))
    return _tell(options, progress, (str(plan), function), cost_model, simulation, notes=notes)


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
    say(summarize(simulation, samples, count_flops(function)))
    if options.explain:
        say(progress.run("explaining", simulation.explain))
    uncosted = ", ".join(cost_model.uncosted)
    last = [f"costed by their bytes for want of a work rule: {uncosted}"] if uncosted else []
    for note in (*notes, *simulation.notes, *last):
        say(f"note: {note}")
    return _write(options, simulation, progress) or (0 if simulation.fits else OUT_OF_MEMORY)


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


def _simulate_partition(options: argparse.Namespace, progress: Progress) -> int:
    """Inference of one batch, partitioned over the devices of the cluster."""
    fields = ("plan", "loss", "optimizer", "keep")
    training = [name for name in fields if getattr(options, name) is not None]
    if training:
        raise PlanError(
            f"--partition places the ops of a forward pass, --{training[0]} is for training: leave one out"
        )
    if options.time_limit is not None and options.partition != "optimal":
        raise PlanError("--time-limit is for --partition optimal; the other modes do not search")
    topology = load_cluster(options.cluster)
    cost_model = CostModel(topology, strict=options.strict)
    simulator = _simulator(options, cost_model)
    function = _read(options, progress)
    memory = math.inf if options.device_memory is None else options.device_memory
    limit = 10.0 if options.time_limit is None else options.time_limit
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncostedOperatorWarning)  # they are notes below
        found = progress.run(
            f"partitioning: {options.partition}",
            lambda: partition_model(
                function, topology, options.partition, memory, options.saturate_host, limit
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
        progress.run(f"drawing {options.plot}", lambda: plot_timeline(simulation, options.plot))
        say(f"timeline: {options.plot}")
        return 0

    return max([_attempt(work) for work in (trace, plot) if getattr(options, work.__name__)], default=0)


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


def _show(options: argparse.Namespace) -> int:
    progress = Progress(sys.stderr)
    if not options.plan and (options.cluster or not options.training):
        given = [n for n in ("cluster", "loss", "optimizer", "keep") if getattr(options, n)]
        if given:
            raise PlanError(f"--{given[0]} has no effect on what is shown: add --plan or --training")
    if not options.plan and not options.training:
        _print_function(_read(options, progress))
        return 0
    function = _training(options, progress)
    if options.plan:
        if not options.cluster:
            raise PlanError("--plan needs --cluster: the devices to place the plan on")
        program = parallelize(function, Plan.parse(options.plan), load_cluster(options.cluster))
        function = steady_state_transform(program.to_function())[0]
    _print_function(function)
    return 0


def _print_function(function: Function) -> None:
    say(pformat(function, colour=sys.stdout.isatty()))


def _clusters(options: argparse.Namespace) -> int:
    say(describe(options.name) if options.name else "\n".join(presets()))
    return 0
