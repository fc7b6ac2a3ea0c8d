"""The command ``distsim simulate``: one training step, or inference partitioned over devices."""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distsim.commands.attempt import OUT_OF_MEMORY, attempt
from distsim.commands.options.cluster import add_settings, read_cluster
from distsim.commands.options.exports import add_export_options, check_exports, exports, ranks_of
from distsim.commands.options.json_output import PRINTED, add_json, check_json, teller, write_json
from distsim.commands.options.model import add_model_options, model_options
from distsim.commands.options.training_file import READERS, take_file, take_layout
from distsim.console.terminal import for_terminal, say
from distsim.cost import CostModel, UncostedOperatorWarning
from distsim.device_placement.partitioned import HOST_MODES, partition_model
from distsim.errors import PlanError
from distsim.hardware.units import BYTES, parse_quantity
from distsim.interpret import count_model_flops
from distsim.ir import Device, Function
from distsim.plan import Plan
from distsim.plan_search import PlanTrials, remedies
from distsim.plan_search.remedies import SEARCH_SECONDS, Change
from distsim.plan_search.space import ModelTraits
from distsim.report import plot_timeline, summarize, write_trace
from distsim.report.exports.folders import chosen_devices
from distsim.report.figures import DEVICE, StepFigures
from distsim.report.output import PAGE, TRACE, check_ending, check_format, check_target
from distsim.report.page import PageCase, write_page
from distsim.report.page.sources import NamedCluster
from distsim.report.progress import Progress
from distsim.schedule import Schedule, read_csv
from distsim.schedule.refusals import count as count_of
from distsim.simulation import Simulation
from distsim.simulation.explain.text import seconds_text
from distsim.simulation.quantities import bytes_label
from distsim.study.options import LAYOUT, TRAINING, EngineOptions, option_of, options_of
from distsim.study.simulate import SimulatedStep, refused_offload, simulated, simulator_of
from distsim.study.training_step import forward_pass

MOST_EVENTS = 2_000_000
"""Events in a trace of all devices, beyond which one device stands for those that do the same."""


_PLAN = (
    "dp=2,tp=4,pp=2,microbatches=8,schedule=1f1b (default dp=1), and stages=layers, chunks=2, remat=full, "
    "zero=1, sp=on, offload=3 (to the host, what the first 3 layers of each stage save)"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_step_options(parser)
    parser.add_argument(
        "--own-runs",
        type=float,
        nargs="+",
        default=[],
        metavar="RATIO",
        help="measured over predicted seconds of other steps on this cluster: they correct this one",
    )
    parser.add_argument(
        "--trace", type=Path, metavar="JSON", help="write a trace for Perfetto, compressed as .json.gz"
    )
    add_json(parser)
    add_export_options(parser)
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the timeline, a row for each rank")
    parser.add_argument("--streams", action="store_true", help="with --plot: a row for each stream of a rank")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page to look at, one file")


def add_step_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what is simulated, and how."""
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
        "--device-memory", metavar="SIZE", help="with --partition: less memory than devices have, as 10GiB"
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
        "--contention", action="store_true", help="transfers share links (event engine, device by device)"
    )
    parser.add_argument(
        "--jitter", type=float, default=0.0, help="coefficient of variation of every op's time (event engine)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the jitter")
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
    take_file(options)
    for path in filter(None, (options.trace, options.plot, options.html)):
        check_target(path)
    for path, kind in ((options.trace, TRACE), (options.html, PAGE)):
        if path:
            check_ending(path, *kind)
    check_json(options.json)
    check_exports(options)
    if options.own_runs and options.partition:
        raise PlanError(
            "--own-runs corrects a prediction, and with --partition no host takes time: leave one out"
        )
    if options.plot:
        check_format(options.plot, "a timeline")
    elif options.streams:
        raise PlanError("--streams is for the picture: add --plot FILE")
    progress = Progress(sys.stderr)
    return _tell(options, progress, simulated_step(options, progress, advise=True))


@dataclass(frozen=True, eq=False)
class StepReport:
    """What options ask for, simulated: ``function`` laid out in some ``way``; ``about`` it.

    ``notes`` are of the files that were given, ``advice`` says what would fit, ``parts`` are of a partition.
    """

    way: str
    function: Function
    simulation: Simulation
    about: str = ""
    notes: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    parts: Mapping[str, Any] | None = None

    @property
    def samples(self) -> int:
        """What one step processes."""
        return ModelTraits.of(self.function).batch

    def figures(self, name: str, by: str = DEVICE) -> StepFigures:
        """Return the figures of the step; ``by``: what its parts are."""
        sequence = ModelTraits.of(self.function).sequence
        counted = self.samples * (sequence or 1), "tokens" if sequence else "samples"
        return StepFigures.of(name, self.simulation, counted, count_model_flops(self.function), by)

    def all_notes(self) -> list[str]:
        """Return what is to be said of the plan, the program, its memory and its costs."""
        return [*self.notes, *self.simulation.notes, *self.advice]


def simulated_step(options: argparse.Namespace, progress: Progress, advise: bool = False) -> StepReport:
    """Return what :func:`add_step_options` ask for; ``advise``: its notes say what would make it fit."""
    if options.partition:
        return _simulate_partition(options, progress)
    for name in ("device_memory", "saturate_host", "time_limit"):
        given = getattr(options, name)
        if given is not None and given is not False:  # 0 is given too
            raise PlanError(f"{option_of(name)} goes with --partition")
    order = _table(options)
    topology = read_cluster(options)
    batch_given = options.batch is not None
    from_file = take_layout(options, len(topology.devices))
    engine = _engine(options, order)
    found = simulated(model_options(options), (options.cluster, topology), engine, progress)
    asks = advise and order is None and not found.simulation.fits
    file = None if batch_given else found.choices.file
    of_rank = file is not None and file.batch.total is None  # which another plan makes another batch
    beside = f" and --batch {ModelTraits.of(found.function).batch}" if of_rank else ""
    advice = _advice(found, progress, beside) if asks else []
    plan = found.choices.written(found.plan)
    way = plan if order is None else f"{plan} (schedule of {options.schedule_csv.name})"
    return StepReport(way, found.function, found.simulation, notes=tuple(from_file), advice=tuple(advice))


def _advice(step: SimulatedStep, progress: Progress, beside: str) -> list[str]:
    """Say what would make a plan fit, and what else has to be asked for with it."""
    topology, traits = step.simulation.cost_model.topology, ModelTraits.of(step.function)

    def changed(_: Plan, change: Change) -> Plan:
        plan = step.choices.changed(step.asked, change)
        if why := refused_offload(step.choices, plan, traits):
            raise PlanError(f"{step.choices.stack.name} refuses offload={plan.offload} {why}")
        return plan

    trials = PlanTrials(step.function, topology, step.build, step.simulate, changed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncostedOperatorWarning)
        found = progress.run(
            f"looking for plans that fit, for {SEARCH_SECONDS:g} s at most",
            lambda: remedies(step.plan, trials),
        )
    notes = [
        f"it would fit with {remedy}{beside}: "
        f"{seconds_text(remedy.seconds)}, at most {bytes_label(remedy.peak)}"
        for remedy in found.fit
    ]
    if found.untried:
        left = f"{count_of(found.untried, 'plan')} with a few changes not tried within {SEARCH_SECONDS:g} s"
        return [*(notes or [f"none of the {count_of(found.looked_at, 'plan')} tried fits"]), left]
    tried = f"{count_of(found.looked_at, 'plan')} with one to three changes of {', '.join(found.fields)}"
    return notes or [f"of {tried}, none fits; search looks at others too"]


def _tell(options: argparse.Namespace, progress: Progress, step: StepReport) -> int:
    """Print what was simulated of a model, run in some way, and write what is asked for."""
    simulation, notes = step.simulation, step.all_notes()
    if options.json:
        write_json(options.json, {**simulation.to_dict(), **_of_parts(options, step), "notes": notes})
    if options.json != PRINTED:
        say(for_terminal(f"{options.model} on {options.cluster}, {step.way}, batch {step.samples}\n"))
        if step.about:
            say(step.about)
        summary = summarize(simulation, step.samples, count_model_flops(step.function))
        say(for_terminal(summary))
        for note in notes:
            say(for_terminal(f"note: {note}"))
    return _write(options, step, progress) or (0 if simulation.fits else OUT_OF_MEMORY)


def _of_parts(options: argparse.Namespace, step: StepReport) -> dict[str, Any]:
    """Return what JSON has of a partition, whose simulation knows of no model, cluster or speed."""
    if step.parts is None:
        return {}
    named = {"model": options.model, "cluster": options.cluster, "plan": step.way, "samples": step.samples}
    figures, seconds = step.figures(options.cluster), step.simulation.step_period
    speed = {"samples_per_s": step.samples / seconds if seconds else None, "mfu": figures.mfu}
    return {**named, **speed, "partition": step.parts}


def _engine(options: argparse.Namespace, order: Schedule | None = None) -> EngineOptions:
    """Return how the command line wants it simulated."""
    return options_of(EngineOptions, {**vars(options), "overlap": not options.no_overlap, "schedule": order})


def _table(options: argparse.Namespace) -> Schedule | None:
    """Return the schedule that is given as a table, if there is one."""
    if options.schedule_csv is None:
        if options.copies is not None:
            raise PlanError("--copies goes with --schedule-csv, of which no table says it")
        return None
    return read_csv(options.schedule_csv, copies=1 if options.copies is None else options.copies)


def _simulate_partition(options: argparse.Namespace, progress: Progress) -> StepReport:
    """Inference of one batch, partitioned over the devices of the cluster."""
    asked = model_options(options)
    others = [name for name in ("schedule_csv", "copies", *READERS) if getattr(options, name) is not None]
    training = [*asked.given(LAYOUT), *others, *asked.given(TRAINING)]
    if training:
        raise PlanError(
            "--partition places the ops of a forward pass, "
            f"{option_of(training[0])} is for training: leave one out"
        )
    if options.time_limit is not None and options.partition != "optimal":
        raise PlanError("--time-limit is for --partition optimal; the other modes do not search")
    topology = read_cluster(options)
    cost_model = CostModel(topology, strict=options.strict)
    simulator = simulator_of(_engine(options), cost_model)
    function = forward_pass(asked, progress, inference=True)
    memory = math.inf if options.device_memory is None else _bytes(options.device_memory)
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
    about = found.describe(simulation)
    if options.device_memory is not None:
        about += f"limit         {bytes_label(memory)} a device, as --device-memory says\n"
    return StepReport(way, function, simulation, about, parts=found.to_dict())


def _bytes(text: str) -> float:
    """Return the bytes of a size: a number alone is of bytes."""
    number, unit = parse_quantity(
        text if text.strip()[-1:].isalpha() else f"{text} B", BYTES, "--device-memory"
    )
    return number * BYTES[unit]


def _write(options: argparse.Namespace, step: StepReport, progress: Progress) -> int:
    """Write the trace, plot and page that are asked for; one that cannot be written costs no other."""
    simulation, tell = step.simulation, teller(options.json)

    def trace() -> int:
        devices, what = _traced(simulation, ranks_of(options))
        progress.run(f"writing {options.trace}", lambda: write_trace(simulation, options.trace, devices))
        tell(f"trace: {options.trace} {what}(open it at ui.perfetto.dev)")
        return 0

    def plot() -> int:
        progress.run(
            f"drawing {options.plot}",
            lambda: plot_timeline(simulation, options.plot, streams=options.streams),
        )
        tell(f"timeline: {options.plot}")
        return 0

    def html() -> int:
        about = {"model": options.model, "cluster": options.cluster, "plan": step.way}
        case = PageCase(
            options.cluster,
            {**about, "batch": str(step.samples)},
            NamedCluster(options.cluster, options.set),
            (simulation, step.figures(options.cluster)),
            step.all_notes(),
        )
        title = f"{options.model} on {options.cluster}"
        progress.run(f"writing {options.html}", lambda: write_page(options.html, title, [case]))
        tell(f"page: {options.html}")
        return 0

    works = [work for work in (trace, plot, html) if getattr(options, work.__name__)]
    return max(map(attempt, [*works, *exports(options, simulation, progress)]), default=0)


def _traced(simulation: Simulation, ranks: list[int] | None) -> tuple[list[Device], str]:
    """The devices asked for, or all, or where that is too much to look at one for those that do the same."""
    if ranks is not None:
        return chosen_devices(simulation, ranks), f"with {count_of(len(ranks), 'rank')} "
    devices = list(simulation.timestamps)
    if len(devices) * len(simulation.timeline) / len(simulation.classes.members) <= MOST_EVENTS:
        return devices, ""
    chosen = [members[0] for members in simulation.classes.members]
    return chosen, f"with one of the devices that do the same, {len(chosen)} of {len(devices)} "
