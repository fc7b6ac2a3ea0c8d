"""The command ``distsim show``: a model's function, also after a transform."""

from __future__ import annotations

import argparse
import sys
import warnings

from distsim.commands.options.cluster import add_settings, read_cluster
from distsim.commands.options.model import add_model_options, model_options
from distsim.commands.options.training_file import take_file, take_layout
from distsim.compose import parallelize
from distsim.console.terminal import is_coloured, say
from distsim.cost import UncostedOperatorWarning
from distsim.errors import PlanError
from distsim.ir import Function, pformat
from distsim.report.progress import Progress
from distsim.study.layout import lay_out, plan_asked
from distsim.study.options import LAYOUT, TRAINING, option_of, says
from distsim.study.training_step import forward_pass, training_step
from distsim.transforms import steady_state_transform


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_model_options(parser)
    parser.add_argument("--training", action="store_true", help="with loss, backward pass and optimizer")
    parser.add_argument("--cluster", help="with --plan: the cluster to place it on")
    add_settings(parser)
    parser.add_argument("--plan", help="print the parallel, scheduled step (implies --training)")
    parser.add_argument(
        "--outline",
        action="store_true",
        help="make blocks of the model that repeat one function, and count them",
    )


def run(options: argparse.Namespace) -> int:
    """Print what is asked for."""
    progress = Progress(sys.stderr)
    config = take_file(options)
    if config is not None and options.cluster:
        for line in take_layout(options, len(read_cluster(options).devices)):
            say(f"# {line}")
    _check_effect(options)
    if not options.plan and not options.training:
        _print_function(forward_pass(model_options(options), progress))
        return 0
    function, choices = training_step(model_options(options), progress)
    if options.plan:
        if not options.cluster:
            raise PlanError("--plan needs --cluster: the devices to place the plan on")
        topology = read_cluster(options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UncostedOperatorWarning)  # what is shown has no times
            _, program, notes = lay_out(
                plan_asked(options.plan),
                choices,
                lambda plan: parallelize(function, plan, topology, kernels=choices.kernels),
            )
        for note in notes:
            say(f"# {note}")
        function = steady_state_transform(program.to_function())[0]
    _print_function(function)
    return 0


def _check_effect(options: argparse.Namespace) -> None:
    """Raise :class:`PlanError` for an option that says nothing of what is shown."""
    if options.cuda_graphs is not None:
        raise PlanError(
            "--cuda-graphs has no effect on what is shown, which has no launches: use simulate or explain"
        )
    if options.plan:
        return
    asked = model_options(options)
    laid_out = [*(name for name in ("cluster", "set") if says(getattr(options, name))), *asked.given(LAYOUT)]
    unused = [*laid_out, *([] if options.training else asked.given(TRAINING))]
    if unused:
        way = "--plan" if unused[0] in laid_out else "--plan or --training"
        raise PlanError(f"{option_of(unused[0])} has no effect on what is shown: add {way}")


def _print_function(function: Function) -> None:
    say(pformat(function, colour=is_coloured()))
