"""The command ``distsim clusters``: the presets, or the figures of one; and the cluster of other commands."""

from __future__ import annotations

import argparse

from distsim.errors import TopologyError
from distsim.hardware import describe, load_cluster, presets
from distsim.ir import Topology
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


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the option that changes figures of the cluster."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="another figure for the cluster, with its unit: device.memory=40GiB, infiniband.bandwidth="
        "100Gbit/s, devices_per_node=4 (may be repeated; `distsim clusters NAME` lists them)",
    )


def read_cluster(options: argparse.Namespace) -> Topology:
    """Return the cluster of a command line."""
    return load_cluster(options.cluster, options.set)
