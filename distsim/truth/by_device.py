"""How far predicted steps are from measured ones, by device and source: the table that pages show."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from datetime import date

from distsim.hardware.presets import table_and_figures
from distsim.truth.accuracy import Accuracy, Comparison
from distsim.truth.machine import cluster_of
from distsim.truth.row import number
from distsim.truth.score import coverage, scores, source_of

COLUMNS = ("device", "source", "rows", "mean", "median", "bias", "worst", "inside", "intervals", "date")
"""Of each device and source: how many rows; their errors, predicted / measured - 1; how many of the rows that
have intervals lie within; and the day of the prediction."""


def errors_by_device(accuracy: Accuracy, day: date) -> str:
    """Return the table as the text of a file, CSV: :data:`COLUMNS`, a line for each device and source."""
    groups: dict[tuple[str, str], list[Comparison]] = {}
    for each in accuracy.comparisons:
        groups.setdefault((_device_of(each), source_of(each.row)), []).append(each)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for (device, source), own in sorted(groups.items()):
        writer.writerow([device, source, *_cells(own), day.isoformat()])
    return text.getvalue()


def _device_of(each: Comparison) -> str:
    """Return the model of the device that a row is predicted on."""
    cluster = cluster_of(each.row, number(each.row, "n_gpus", 1), [])
    return table_and_figures(cluster.name)[0].device.model


def _cells(own: Sequence[Comparison]) -> Iterator[str]:
    score = scores([("", each.outcome.seconds, each.measured) for each in own])[""]
    known = [each for each in own if each.has_interval]
    found = coverage([(e.outcome.low, e.outcome.seconds, e.outcome.high, e.measured) for e in known])
    yield str(len(own))
    yield from (f"{value:.4f}" for value in (score.mean, score.median, score.bias, score.worst))
    yield str(found.inside if found else 0)
    yield str(len(known))
