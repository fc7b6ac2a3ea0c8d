"""How far predictions are from what was measured: errors by group, beside a baseline that knows no layout."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from distsim.interpret import count_model_flops
from distsim.truth.case import Case
from distsim.truth.row import MissingFeatureError, Row, decimal

BASELINE_MFU = 0.4
"""Model utilisation of the baseline: every step takes the model's FLOPs at this share of the peak."""


@dataclass(frozen=True)
class Score:
    """Errors of some predictions: predicted / measured - 1."""

    errors: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean of what they are without a sign."""
        return statistics.fmean(map(abs, self.errors))

    @property
    def median(self) -> float:
        """The median of what they are without a sign."""
        return statistics.median(map(abs, self.errors))

    @property
    def bias(self) -> float:
        """Their mean, with signs."""
        return statistics.fmean(self.errors)

    @property
    def worst(self) -> float:
        """The largest, with its sign."""
        return max(self.errors, key=abs)

    def __str__(self) -> str:
        return (
            f"{self.mean:.1%} mean, {self.median:.1%} median, {self.bias:+.1%} bias, {self.worst:+.1%} worst"
        )


def scores(pairs: Iterable[tuple[str, float, float]]) -> dict[str, Score]:
    """Return the score of each group of (group, predicted, measured), in the order in which they come.

    >>> scores([("a", 1.1, 1.0), ("a", 0.8, 1.0)])["a"].bias.__format__("+.2f")
    '-0.05'
    """
    found: dict[str, list[float]] = {}
    for group, predicted, measured in pairs:
        found.setdefault(group, []).append(predicted / measured - 1)
    return {group: Score(tuple(errors)) for group, errors in found.items()}


def baseline_seconds(case: Case) -> float:
    """Return what the step takes at ``BASELINE_MFU`` of the peak of the devices of its plan."""
    peak = case.topology().devices[0].peak(case.precision.compute.name)
    return count_model_flops(case.joint()) / (BASELINE_MFU * peak * case.plan.devices)


def measured(row: Row, column: str) -> float | None:
    """Return a figure that was measured, None where there is none that can be read."""
    try:
        return decimal(row, column)
    except MissingFeatureError:
        return None


def by_count(texts: Sequence[str]) -> list[tuple[str, int]]:
    """Return texts with how often they occur, the most frequent first.

    >>> by_count(["a", "b", "b"])
    [('b', 2), ('a', 1)]
    """
    counts: dict[str, int] = {}
    for text in texts:
        counts[text] = counts.get(text, 0) + 1
    return sorted(counts.items(), key=lambda item: -item[1])


def source_of(row: Row) -> str:
    """Return who published a row, for the table of errors: no prediction reads it."""
    return row.get("source", "") or "no source"
