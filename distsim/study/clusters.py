"""The clusters of a search: those that are named or made, or so many GPUs of each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distsim.errors import OptionError, PlanError, TopologyError
from distsim.hardware.presets import Figure, figures_by_kind, table_and_figures
from distsim.ir import Topology
from distsim.plan_search.training.estimate import DeviceRates
from distsim.schedule.refusals import count as count_of
from distsim.study.simulate import cluster_label, topology_of

Cluster = str | os.PathLike[str] | Topology
"""A cluster: a preset, maybe with ``:nodes``, the path of a ``.toml`` file, or a topology."""


@dataclass(frozen=True, eq=False)
class SizedCluster:
    """A cluster as people call it, what :func:`load_cluster` takes (or a topology), and its place among those
    asked for."""

    shown: str
    cluster: str | Topology
    settings: tuple[str, ...]
    place: int

    @property
    def topology(self) -> Topology:
        """Its devices and links."""
        return topology_of(self.cluster, self.settings)

    @property
    def figures(self) -> tuple[Figure, ...]:
        """Its figures; without prices and power where kinds of nodes differ, which have their own; none of a
        topology, which says no source."""
        if isinstance(self.cluster, Topology):
            return ()
        table, found = table_and_figures(self.cluster, self.settings)
        if not any(kind.base or kind.device for kind in table.nodes):
            return found
        rates = ("device.price", "device.power", "device.power_limit", "device.host_power")
        return tuple(figure for figure in found if figure.name not in rates)

    def rates(self, price: float | None) -> DeviceRates:
        """Return what a device costs and draws, in the mean where kinds of nodes differ; a price that is
        given goes before their own."""
        kinds = () if isinstance(self.cluster, Topology) else figures_by_kind(self.cluster, self.settings)
        if not kinds:
            return DeviceRates.of(self.figures, price)
        return DeviceRates.mean([(count, DeviceRates.of(figures, price)) for count, figures in kinds])


def sized_clusters(
    clusters: Sequence[Cluster], gpus: int | str | Sequence[int] | None, settings: Sequence[str]
) -> list[SizedCluster]:
    """Return the clusters that are named, or each with so many GPUs instead: numbers, or a text of them
    between commas.

    Raises :class:`PlanError` for what is no such number, or no size of one of the clusters, and
    :class:`OptionError` for a text of several clusters, which are a list.
    """
    for cluster in clusters:
        if isinstance(cluster, str) and "," in cluster and not Path(cluster).exists():
            raise OptionError(f"cluster {cluster!r:.80}: several are a list, {cluster.split(',')}")
    if gpus is None:
        return [
            SizedCluster(
                cluster_label(each),
                each if isinstance(each, Topology) else os.fspath(each),
                tuple(settings),
                place,
            )
            for place, each in enumerate(clusters)
        ]
    counts = _counts(gpus)
    return [_of_size(each, count, settings, place) for place, each in enumerate(clusters) for count in counts]


def _counts(gpus: int | str | Sequence[int]) -> list[int]:
    """Return numbers of GPUs, each once."""
    parts = gpus.split(",") if isinstance(gpus, str) else [gpus] if isinstance(gpus, int) else gpus
    texts = list(dict.fromkeys(str(part).strip() for part in parts))
    if not texts or not all(text.isascii() and text.isdigit() and 0 < int(text) < 2**20 for text in texts):
        raise PlanError(f"--gpus {gpus!r:.60} is not numbers of GPUs between commas, as 8,16,32")
    return [int(text) for text in texts]


def _of_size(cluster: Cluster, count: int, settings: Sequence[str], place: int) -> SizedCluster:
    """Return so many GPUs of a cluster, whose own count does not matter."""
    if isinstance(cluster, Topology):
        raise TopologyError(f"{cluster} is made: --gpus {count} needs a preset or a file")
    name = os.fspath(cluster)
    base, colon, nodes = name.rpartition(":")
    whole = base if colon and nodes.isdigit() else name
    table, _ = table_and_figures(whole, settings)
    node = table.devices_per_node
    if table.nodes:
        return _first_nodes(name, count, (node, sum(kind.count for kind in table.nodes)), settings, place)
    if count > node and count % node:
        raise PlanError(
            f"--gpus {count}: a node of {whole} has {node}; take a multiple, or fewer than {node}"
        )
    sizes = [f"devices_per_node={count}"] if count < node else []
    sized = whole if count <= node else f"{whole}:{count // node}"
    return SizedCluster(f"{sized} ({count_of(count, 'GPU')})", sized, (*settings, *sizes), place)


def _first_nodes(
    name: str, count: int, size: tuple[int, int], settings: Sequence[str], place: int
) -> SizedCluster:
    """Return so many GPUs of a file that lists nodes, the first, whole; ``size``: GPUs of a node, nodes."""
    node, nodes = size
    if count % node or count > node * nodes:
        raise PlanError(
            f"--gpus {count}: the [[nodes]] of {name} are {nodes} of {node} GPUs, of which the first are "
            f"taken, whole; give a multiple of {node} up to {node * nodes}"
        )
    taken = () if count == node * nodes else (f"nodes={count // node}",)
    return SizedCluster(f"{name} ({count_of(count, 'GPU')})", name, (*settings, *taken), place)
