"""The command ``distsim clusters``: the presets, or the figures of one."""

from __future__ import annotations

import argparse

from distsim.commands.cluster import add_settings
from distsim.errors import TopologyError
from distsim.hardware import describe, presets
from distsim.streams import say


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("name", nargs="?", help="a preset, maybe with :count, or a .toml file")
    add_settings(parser)


def run(options: argparse.Namespace) -> int:
    """Print the presets."""
    if options.set and not options.name:
        raise TopologyError("--set changes figures of a cluster: name one")
    say(describe(options.name, options.set) if options.name else "\n".join(presets()))
    return 0
