"""What figures rest on: those of the cluster with their sources, and how far to trust a step."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from distsim.hardware import figures
from distsim.hardware.presets import table_and_figures
from distsim.simulation import Simulation
from distsim.simulation.explain.interval import BETWEEN, deviations


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


def accuracy_part(cluster: NamedCluster, simulation: Simulation) -> dict[str, Any]:
    """Return how far to trust a step: its interval, None where none is known, and published steps."""
    return {"interval": _interval(cluster, simulation), "published": published_part(cluster)}


def published_part(cluster: NamedCluster) -> dict[str, Any]:
    """Return how far predictions of published steps were from what was measured on the devices of a cluster.

    A row a source: its name, how many steps, and the mean, median, bias and worst of predicted / measured
    - 1; of all steps of these devices how many, and how many of those with an interval lay within; the same
    of all devices. Written by ``distsim validate --errors``; several kinds of nodes have the first one's.
    """
    device = table_and_figures(cluster.name, cluster.settings)[0].device.model
    every = list(csv.DictReader(io.StringIO(_table())))
    own = [row for row in every if row["device"] == device]
    return {
        "device": device,
        "rows": [[row["source"], *(float(row[name]) for name in ERRORS)] for row in own],
        "own": _together(own),
        "all": _together(every),
        "date": max((row["date"] for row in every), default=""),
    }


ERRORS = ("rows", "mean", "median", "bias", "worst")
"""What is known of a source: how many steps, and errors."""


def _table() -> str:
    return files("distsim.report.page").joinpath("assets", "errors.csv").read_text(encoding="utf-8")


def _together(rows: Sequence[Mapping[str, str]]) -> dict[str, float]:
    """Return steps, their mean error and bias, those that have intervals, and those within theirs."""
    count = sum(int(row["rows"]) for row in rows)
    found = {name: float(sum(int(row[name]) for row in rows)) for name in ("rows", "intervals", "inside")}
    for name in ("mean", "bias"):
        found[name] = sum(int(row["rows"]) * float(row[name]) for row in rows) / max(count, 1)
    return found


def _interval(cluster: NamedCluster, simulation: Simulation) -> dict[str, Any] | None:
    """Return what the interval of a step is made of; None where none is known."""
    interval = simulation.interval()
    if interval is None:
        return None
    parts = simulation.breakdown("kind")
    total = sum(parts.values()) or 1.0
    shares = {kind: seconds / total for kind, seconds in parts.items()}
    rates = max([device.rates for device in simulation.timestamps], key=lambda each: each.spread)
    source = next(
        (f.source for f in figures(cluster.name, cluster.settings) if f.name == "device.spread"), ""
    )
    return {
        "level": interval.level,
        "low": interval.low,
        "high": interval.high,
        "spread": rates.spread,
        "source": source,
        "between": BETWEEN,
        "terms": [
            [kind, deviation / shares[kind], shares[kind]]
            for kind, deviation in deviations(parts, dict(rates.uncertainties)).items()
        ],
    }
