"""The command ``distsim explain``: what holds a step back."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from distsim.commands.attempt import OUT_OF_MEMORY
from distsim.commands.options.training_file import take_file
from distsim.commands.simulate import add_step_options, simulated_step
from distsim.console.terminal import for_terminal, say
from distsim.report import plot_explanation
from distsim.report.output import check_format, check_target
from distsim.report.progress import Progress
from distsim.report.summary import memory_lines


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_step_options(parser)
    parser.add_argument(
        "--plot", type=Path, metavar="PNG", help="draw the critical path over the stages, and the what-ifs"
    )


def run(options: argparse.Namespace) -> int:
    """Simulate what is asked for, and say what bounds it and what would gain how much."""
    if options.plot:
        check_target(options.plot)
        check_format(options.plot, "an explanation")
    take_file(options)
    progress = Progress(sys.stderr)
    step = simulated_step(options, progress)
    found = progress.run("explaining", step.simulation.explain)
    say(f"{options.model} on {options.cluster}, {step.way}, batch {step.samples}\n")
    say(for_terminal(str(found)))
    say(for_terminal(memory_lines(step.simulation)[0]))
    for note in step.all_notes():
        say(f"note: {note}")
    if options.plot:
        progress.run(f"drawing {options.plot}", lambda: plot_explanation(found, options.plot))
        say(f"explanation: {options.plot}")
    return 0 if step.simulation.fits else OUT_OF_MEMORY
