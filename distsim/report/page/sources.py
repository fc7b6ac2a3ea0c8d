"""What figures rest on: those of the cluster with their sources, and how far to trust a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distsim.hardware import figures
from distsim.simulation import Simulation
from distsim.simulation.explain.interval import BETWEEN, SPREADS


@dataclass(frozen=True)
class NamedCluster:
    """A cluster as :func:`distsim.hardware.load_cluster` takes it."""

    name: str
    settings: Sequence[str] = ()


def assumptions_part(cluster: NamedCluster) -> list[list[Any]]:
    """Return the figures of a cluster: name, value, unit and source of each."""
    return [
        [figure.name, figure.value, figure.unit, figure.source]
        for figure in figures(cluster.name, cluster.settings)
    ]


def accuracy_part(cluster: NamedCluster, simulation: Simulation) -> dict[str, Any] | None:
    """Return what the interval of a step is made of; None where none is known."""
    interval = simulation.interval()
    if interval is None:
        return None
    parts = simulation.breakdown("kind")
    total = sum(parts.values()) or 1.0
    source = next(
        (f.source for f in figures(cluster.name, cluster.settings) if f.name == "device.spread"), ""
    )
    return {
        "level": interval.level,
        "low": interval.low,
        "high": interval.high,
        "spread": max(device.rates.spread for device in simulation.timestamps),
        "source": source,
        "between": BETWEEN,
        "terms": [
            [kind, SPREADS[kind], seconds / total] for kind, seconds in parts.items() if kind in SPREADS
        ],
    }
