"""The cluster of a command: a preset or a file, with the figures that ``--set`` changes."""

from __future__ import annotations

import argparse

from distsim.hardware import load_cluster
from distsim.ir import Topology


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
