"""The command ``distsim clusters``: the presets, or the figures of one."""

from __future__ import annotations

import argparse

from distsim.commands.options.cluster import add_settings
from distsim.console.terminal import for_terminal, say
from distsim.errors import TopologyError
from distsim.hardware import cluster_toml, describe, load_cluster, presets


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("name", nargs="?", help="a preset, maybe with :count, or a .toml file")
    add_settings(parser)
    parser.add_argument(
        "--toml", action="store_true", help="print the file of the cluster, to copy and to change"
    )


def run(options: argparse.Namespace) -> int:
    """Print the presets, or the figures or the file of one."""
    if options.set and not options.name:
        raise TopologyError("--set changes figures of a cluster: name one")
    if options.toml and not options.name:
        raise TopologyError("--toml prints the file of a cluster: name one")
    if options.name:
        load_cluster(options.name, options.set)  # refuses what a plan would be refused for
    if options.toml:
        say(cluster_toml(options.name, options.set))
    else:
        say(for_terminal(describe(options.name, options.set) if options.name else _list()))
    return 0


def _list() -> str:
    """Return the presets by name, each with what it is."""
    width = max(map(len, presets()))
    about = {name: describe(name).partition("\n")[0].partition(": ")[2] for name in presets()}
    return "\n".join(f"{name:{width}}  {text}" for name, text in about.items())
