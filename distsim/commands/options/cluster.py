"""The cluster of a command: a preset or a file, with the figures that ``--set`` changes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from distsim.errors import PlanError
from distsim.hardware import load_cluster
from distsim.hardware.presets import Figure, table_and_figures
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


@dataclass(frozen=True)
class SizedCluster:
    """A cluster as people call it, what :func:`load_cluster` takes, and its place among those asked for."""

    shown: str
    name: str
    settings: tuple[str, ...]
    place: int

    @property
    def topology(self) -> Topology:
        """Its devices and links."""
        return load_cluster(self.name, self.settings)

    @property
    def figures(self) -> tuple[Figure, ...]:
        """Its figures; without prices and power where kinds of nodes differ, which have their own."""
        table, found = table_and_figures(self.name, self.settings)
        if not any(kind.base or kind.device for kind in table.nodes):
            return found
        rates = ("device.price", "device.power", "device.power_limit", "device.host_power")
        return tuple(figure for figure in found if figure.name not in rates)


def sized_clusters(names: Sequence[str], gpus: str | None, settings: Sequence[str]) -> list[SizedCluster]:
    """Return the clusters that are named, or each with so many GPUs (numbers between commas) instead.

    Raises :class:`PlanError` for what is no such number, or no size of one of the clusters.
    """
    if gpus is None:
        return [SizedCluster(name, name, tuple(settings), place) for place, name in enumerate(names)]
    counts: list[int] = []
    for text in dict.fromkeys(part.strip() for part in gpus.split(",")):
        if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**20):
            raise PlanError(f"--gpus {gpus!r:.60} is not numbers of GPUs between commas, as 8,16,32")
        counts.append(int(text))
    return [_of_size(name, count, settings, place) for place, name in enumerate(names) for count in counts]


def _of_size(name: str, count: int, settings: Sequence[str], place: int) -> SizedCluster:
    """Return so many GPUs of a cluster, whose own count does not matter."""
    base, colon, nodes = name.rpartition(":")
    whole = base if colon and nodes.isdigit() else name
    node = len(load_cluster(whole, settings).devices)
    if count > node and count % node:
        raise PlanError(
            f"--gpus {count}: a node of {whole} has {node}; take a multiple, or fewer than {node}"
        )
    sizes = [f"devices_per_node={count}"] if count < node else []
    sized = whole if count <= node else f"{whole}:{count // node}"
    return SizedCluster(f"{sized} ({count} GPUs)", sized, (*settings, *sizes), place)
