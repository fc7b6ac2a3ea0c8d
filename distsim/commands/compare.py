"""The command ``distsim compare``: steps side by side, and what makes the difference."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from distsim.commands.attempt import OUT_OF_MEMORY
from distsim.commands.options.cluster import add_settings
from distsim.commands.options.json_output import PRINTED, add_json, check_json, write_json
from distsim.commands.options.model import add_model_options
from distsim.commands.options.training_file import take_file
from distsim.commands.simulate import simulated_step
from distsim.console.terminal import for_terminal, say
from distsim.errors import DistsimError, PlanError
from distsim.report.difference import StepComparison, parts_title
from distsim.report.figures import DEVICE, StepFigures
from distsim.report.progress import Progress
from distsim.study.compare import WAYS

_STEP = {
    **{"partition": None, "device_memory": None, "saturate_host": False, "time_limit": None},
    **{"no_overlap": False, "contention": False, "jitter": 0.0, "seed": 0},
    **{"schedule_csv": None, "copies": None, "strict": False},
}
"""How a step is simulated where nothing else is asked for: see ``distsim simulate``."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_model_options(parser)
    parser.add_argument(
        "--cluster",
        action="append",
        required=True,
        help="a preset such as dgx-a100 or dgx-h100:4, or a .toml (repeated: each plan on each cluster)",
    )
    add_settings(parser)
    parser.add_argument(
        "--plan", action="append", metavar="PLAN", help="as `distsim simulate` has it (may be repeated)"
    )
    parser.add_argument(
        "--by",
        choices=WAYS,
        default=DEVICE,
        help="what the difference is made of: the time of the mean device (default: compute by kind, exposed "
        "communication by axis, bubble), or the critical path by kind of work, operator, module, axis, phase",
    )
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Simulate each, print them side by side and how each other differs from the first."""
    pairs = list(_pairs(options))
    if len(pairs) < 2:
        given: list[str] = options.plan or []
        same = f"--plan {given[0]} is given {len(given)} times; " if len(given) > 1 else ""
        raise PlanError(
            f"{same}a comparison is of two or more: give other values of --plan, or of --cluster, as well"
        )
    take_file(options)
    check_json(options.json)
    steps, notes = list[StepFigures](), dict[str, list[str]]()
    for name, cluster, plan in pairs:
        try:
            figures, said = _simulated(options, name, cluster, plan)
        except DistsimError as error:
            raise PlanError(f"{name}: {error}") from error
        steps.append(figures)
        for note in said:
            notes.setdefault(note, []).append(name)
    found = StepComparison(tuple(steps), parts_title(options.by))
    if options.json != PRINTED:
        say(f"{options.model}\n")
        say(for_terminal(str(found)))
        for note, names in notes.items():
            say(f"note: {note}" if len(names) == len(pairs) else f"note on {'; '.join(names)}: {note}")
    if options.json:
        said = [{"note": note, "steps": names} for note, names in notes.items()]
        write_json(options.json, {"model": options.model, "by": options.by, **found.to_dict(), "notes": said})
    return 0 if any(step.fits for step in steps) else OUT_OF_MEMORY


def _pairs(options: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    """Yield what is compared: a name, which says what they do not share, the cluster and the plan."""
    clusters, plans = _distinct(options.cluster), _distinct(options.plan or ["dp=1"])
    for cluster in clusters:
        for plan in plans:
            name = f"{plan} on {cluster}" if len(plans) > 1 else cluster
            yield plan if len(clusters) == 1 else name, cluster, plan


def _distinct(given: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(given))


def _simulated(
    options: argparse.Namespace, name: str, cluster: str, plan: str
) -> tuple[StepFigures, list[str]]:
    own = argparse.Namespace(**{**vars(options), **_STEP, "cluster": cluster, "plan": plan})
    step = simulated_step(own, Progress(sys.stderr))
    return step.figures(name, options.by), step.all_notes()
