"""The command ``distsim schedule``: a pipeline schedule alone, printed, drawn and written."""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from pathlib import Path

from distsim.console.terminal import complain, say
from distsim.errors import ScheduleError
from distsim.report import describe_schedule, plot_schedule
from distsim.report.output import check_format, check_target, replacing
from distsim.report.progress import Progress
from distsim.schedule import FLUSH, SCHEDULES, Kind, Schedule, read_csv, schedule, write_csv
from distsim.schedule.catalogue import check_named
from distsim.simulation.action_times import TIMED, ActionTimes
from distsim.simulation.schedule_times import time_schedule

MOST_PAIRS = 200_000
"""Pairs of a stage and a microbatch in a schedule: more take over half a minute."""

_SIZES = ("stages", "chunks", "microbatches")
_OPTIONS = ("memory_limit", "weight_share", "update_every")
"""Options of some schedules only: of those that are searched for given times, and of weights' updates."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("name", nargs="?", help=", ".join(SCHEDULES))
    parser.add_argument(
        *("--pp", "--stages"),
        type=int,
        dest="stages",
        metavar="RANKS",
        help="pipeline ranks (pp): the stages of a model in which each rank has one",
    )
    parser.add_argument(
        "--chunks",
        type=int,
        help="parts of the model on each of them (default: what the schedule takes, or 1)",
    )
    parser.add_argument("--microbatches", type=int, help="of a step, those of both copies in dualpipe")
    times = ActionTimes()
    options = [(kind.name.lower(), kind.value, times.of_kind(kind), kind.phase) for kind in TIMED]
    about = "a message, from the end of an action to the start of one on another rank"
    for name, dest, default, what in (*options, ("send", "send", times.send, about)):
        both = "; a whole backward takes both" if dest == Kind.BACKWARD_WEIGHT.value else ""
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=float,
            default=default,
            dest=dest,
            metavar="TIME",
            help=f"time of {what}{both} (default {default:g})",
        )
    parser.add_argument(
        "--memory-limit",
        type=float,
        metavar="ACTIVATIONS",
        help="of a searched schedule: so many of a stage and a microbatch may a rank hold",
    )
    parser.add_argument(
        "--weight-share", type=float, metavar="SHARE", help="of a searched schedule: what W frees of one"
    )
    parser.add_argument(
        "--update-every",
        type=int,
        metavar="MICROBATCHES",
        help="of pipedream_2bw: so many are an update (default: the fewest from --stages that divide all)",
    )
    parser.add_argument(
        "--together",
        action="store_true",
        help="a pair of actions starts when both can and sends when both have ended (default: in turn)",
    )
    parser.add_argument(
        "--schedule-csv", type=Path, metavar="FILE", help="instead of a name: a table as torch writes it"
    )
    parser.add_argument(
        "--copies", type=int, help="with --schedule-csv: of the model in its stages (dualpipe: 2)"
    )
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw it")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write it as a table that torch reads")


def run(options: argparse.Namespace) -> int:
    """Print, draw and write the schedule that is asked for."""
    for path in filter(None, (options.csv, options.plot)):
        check_target(path)
    if options.plot:
        check_format(options.plot, "a schedule")
    times = ActionTimes({kind.value: getattr(options, kind.value) for kind in TIMED}, options.send)
    chosen = _chosen(options, times)
    if options.together and not chosen.pairs_actions:
        raise ScheduleError(
            f"--together is for pairs of actions that overlap, and {chosen.name} has none; leave it out"
        )
    progress = Progress(sys.stderr)
    found = progress.run("simulating", lambda: time_schedule(chosen, times, options.together))
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    say(describe_schedule(found, width))
    refused = _written(chosen, options.csv) if options.csv else None
    if options.plot:
        progress.run(f"drawing {options.plot}", lambda: plot_schedule(found, options.plot))
        say(f"schedule: {options.plot}")
    if refused is not None:
        raise refused
    return 0


def _written(chosen: Schedule, path: Path) -> ScheduleError | None:
    """Write a schedule as a table; return why it is none, for what else is asked for to be written first."""
    try:
        table = write_csv(chosen)
    except ScheduleError as error:
        return error
    with replacing(path) as file:
        file.write(table.encode("ascii"))
    say(f"table: {path}")
    if chosen.weights != FLUSH:
        complain(
            f"note: a table says no more than the order: read from {path}, {chosen.name} has one "
            "update, after the last backward"
        )
    return None


def _chosen(options: argparse.Namespace, times: ActionTimes) -> Schedule:
    """Return the schedule that is named, searched for the times if it is, or that is in the table."""
    if options.schedule_csv is None:
        return _named(options, times)
    given = [name for name in ("name", *_SIZES, *_OPTIONS) if getattr(options, name) is not None]
    if given:
        name = f"the name {options.name}" if given[0] == "name" else f"--{given[0].replace('_', '-')}"
        raise ScheduleError(f"--schedule-csv says what the schedule is: leave out {name}")
    copies = 1 if options.copies is None else options.copies
    table = read_csv(options.schedule_csv, copies=copies)
    _check_size(table.num_stages * table.num_microbatches)
    return table


def _named(options: argparse.Namespace, times: ActionTimes) -> Schedule:
    if options.name is None:
        raise ScheduleError(f"name a schedule, one of {', '.join(SCHEDULES)}, or give --schedule-csv FILE")
    check_named(options.name)
    missing = [f"--{name}" for name in ("stages", "microbatches") if getattr(options, name) is None]
    if missing:
        raise ScheduleError(f"{options.name}: say how many: {' and '.join(missing)}")
    if options.copies is not None:
        raise ScheduleError(f"{options.name}: --copies goes with --schedule-csv, of which no table says it")
    sizes = (options.stages, options.chunks or 1, options.microbatches)
    _check_size(math.prod([max(size, 0) for size in sizes]))
    asked = {name: getattr(options, name) for name in _OPTIONS if getattr(options, name) is not None}
    if options.name in SCHEDULES and "seconds" in SCHEDULES[options.name].options:
        whole = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
        asked["seconds"] = tuple(map(times.of_kind, whole))
        asked["send"] = times.send
    return schedule(options.name, options.stages, options.microbatches, options.chunks, **asked)


def _check_size(pairs: int) -> None:
    if pairs > MOST_PAIRS:
        raise ScheduleError(
            f"{pairs:,} pairs of a stage and a microbatch, over {MOST_PAIRS:,}; choose fewer microbatches"
        )
