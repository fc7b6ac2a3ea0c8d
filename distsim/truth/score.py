"""How far predictions are from what was measured: errors, intervals, memory, choices; and a baseline."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from random import Random

from distsim.interpret import count_model_flops
from distsim.simulation.explain.interval import correction
from distsim.truth.case import Case
from distsim.truth.row import MissingFeatureError, Row, decimal, plain

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


@dataclass(frozen=True)
class Coverage:
    """How many of some measured steps lie in their intervals, and half the width of these, the median."""

    inside: int
    rows: int
    half_width: float

    @property
    def share(self) -> float:
        """The share of the steps that lie in their intervals."""
        return self.inside / self.rows

    def __str__(self) -> str:
        return (
            f"{self.share:.1%} of {self.rows} rows lie within; the median half width is {self.half_width:.1%}"
        )


def coverage(intervals: Sequence[tuple[float, float, float, float]]) -> Coverage | None:
    """Return the coverage of (low, predicted, high, measured), None of none; widths are over the predicted.

    >>> coverage([(0.5, 1.0, 1.5, 0.5), (1.5, 2.0, 2.5, 3.0)])
    Coverage(inside=1, rows=2, half_width=0.375)
    """
    if not intervals:
        return None
    inside = sum(low <= measured <= high for low, _, high, measured in intervals)
    widths = [(high - low) / 2 / predicted for low, predicted, high, _ in intervals]
    return Coverage(inside, len(intervals), statistics.median(widths))


@dataclass(frozen=True)
class Detection:
    """How often it was said that memory does not suffice: rightly, in all, and how often it did not."""

    right: int
    said: int
    happened: int

    @property
    def precision(self) -> float | None:
        """Of what was said not to fit, the share that did not; None if it was never said."""
        return self.right / self.said if self.said else None

    @property
    def recall(self) -> float | None:
        """Of what did not fit, the share of which it was said; None if all fitted."""
        return self.right / self.happened if self.happened else None


def detection(pairs: Sequence[tuple[bool, bool]]) -> Detection:
    """Return how well (said, happened) agree.

    >>> detection([(True, True), (True, False), (False, False)]).precision
    0.5
    """
    return Detection(
        sum(said and happened for said, happened in pairs),
        sum(said for said, _ in pairs),
        sum(happened for _, happened in pairs),
    )


def regret(choices: Sequence[tuple[float, float]]) -> float:
    """Return by what share the choice that is predicted to be fastest is slower than the fastest one.

    ``choices`` are (predicted, measured); of several predicted alike any may be taken: it is their mean.

    >>> regret([(1.0, 3.0), (1.1, 2.0), (1.0, 2.0)])
    0.25
    """
    least = min(predicted for predicted, _ in choices)
    taken = [measured for predicted, measured in choices if predicted == least]
    return max(statistics.fmean(taken) / min(measured for _, measured in choices) - 1, 0.0)


MOST_CHOICES = 100_000
"""As many of which are listed: those of 5 of 41 steps are 749,398."""


def after_own_runs(ratios: Sequence[float], count: int, most: int = 60) -> list[float]:
    """Return errors of predictions that are corrected by so many measured steps of the same machine.

    ``ratios`` are measured over predicted seconds of steps of one machine. Each choice of ``count`` of them
    corrects the others; of many choices the first ``most``, in an order of their own, are taken, and of more
    than :data:`MOST_CHOICES` so many are drawn.

    >>> [round(error, 3) for error in after_own_runs([1.2, 1.2, 1.2], 2)]
    [-0.069, -0.069, -0.069]
    """
    places, draws = range(len(ratios)), Random(0)
    if math.comb(len(ratios), count) > MOST_CHOICES:
        choices = [tuple(draws.sample(places, count)) for _ in range(most)]
    else:
        choices = list(combinations(places, count))
        draws.shuffle(choices)
    return [
        correction([ratios[place] for place in chosen]) / ratios[other] - 1
        for chosen in choices[:most]
        for other in places
        if other not in chosen
    ]


def mfu_seconds(case: Case) -> float:
    """Return what the step takes at ``BASELINE_MFU`` of the peak of the devices of its plan."""
    peak = case.topology().devices[0].peak(case.precision.compute.name)
    return count_model_flops(case.joint()) / (BASELINE_MFU * peak * case.plan.devices)


def measured(row: Row, column: str) -> float | None:
    """Return a figure that was measured, None where there is none that can be read."""
    try:
        return decimal(row, column)
    except MissingFeatureError:
        return None


def ran_out(row: Row) -> bool | None:
    """Return whether memory did not suffice for a row, by its outcome; None where it says nothing of it.

    >>> ran_out({"outcome": "OOM"}), ran_out({"outcome": "ok"}), ran_out({"iter_time_s": "2"}), ran_out({})
    (True, False, False, None)
    """
    if re.match(r"oom|(cuda )?out[ -]of[ -]memory", plain(row, "outcome")):
        return True
    return False if plain(row, "outcome") == "ok" or measured(row, "iter_time_s") else None


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
