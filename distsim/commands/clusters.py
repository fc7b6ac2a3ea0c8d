"""The command ``distsim clusters``: the presets, or the figures of one."""

from __future__ import annotations

import argparse

from distsim.hardware import describe, presets
from distsim.streams import say


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("name", nargs="?")


def run(options: argparse.Namespace) -> int:
    """Print the presets."""
    say(describe(options.name) if options.name else "\n".join(presets()))
    return 0
