"""How far to trust the seconds of a step: an interval around them.

The logarithm of measured over predicted seconds is taken to be normal with mean 0. Its variance is the sum
of that of steps on the device whatever they consist of (``Device.rates.spread``: by how much steps differ
from what steps of other sources say of them), of how well the figures of each kind of work are known
(``Device.rates.uncertainties``: what these rows leave open), and of what is assumed of kinds that nothing was
fitted to (:data:`SPREADS`). What a kind adds is by its share of the critical path: by so much a step takes
longer whose work of that kind does.

A part of the variance is between machines (:data:`BETWEEN`): steps on one of them are all slower than
predicted, or all faster. Measured steps of one's own say by how much, the more of them the surer: the median
of their logarithms counts b / (b + w / n) (James and Stein 1961), b being the variance between machines and w
that on one of them, so that a single one misleads little. w is what they show where that is more; and where
they are far from what was predicted (:func:`clash`), the interval reaches as far.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from statistics import NormalDist, median
from typing import NamedTuple

from distsim.errors import SimulationError, shortened

SPREADS: Mapping[str, float] = {
    **dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "shift"), 0.25),
    "send": 0.5,
    "linear_float8": 0.2,
    "grouped": 0.2,
}
"""Standard deviation of the logarithm of the seconds of a kind of work of which the device's figures do not
say it: assumptions (collectives are fitted within a node, and guesses between nodes; few rows have 8 bits or
experts)."""


BETWEEN_SOURCES, WITHIN_SOURCE = 0.075, 0.085
"""Standard deviations of the logarithm in an analytic study of the published rows."""

BETWEEN = BETWEEN_SOURCES**2 / (BETWEEN_SOURCES**2 + WITHIN_SOURCE**2)
"""The share of the variance that is between machines."""

TO_DEVIATION = 1.4826
"""By what the median distance from the median is multiplied to be a normal variable's standard deviation."""

FAR = 3.0
"""By how many standard deviations own steps may differ: one of 370 machines does by more."""


class Interval(NamedTuple):
    """Seconds between which a measured step lies with a probability of ``level``."""

    low: float
    high: float
    level: float

    def __str__(self) -> str:
        return f"{self.low:.4g} to {self.high:.4g} s, {self.level:.0%}"


MOST_RATIO = 100.0
"""How far a measured step may be from a predicted one: more is another step, or another unit."""


def correction(ratios: Sequence[float]) -> float:
    """Return by what to multiply predicted seconds, given measured over predicted ones of the same machine.

    Raises :class:`SimulationError` for a ratio that cannot be one.

    >>> round(correction([1.2]), 3), round(correction([1.2] * 5), 3), correction([])
    (1.083, 1.156, 1.0)
    """
    for ratio in ratios:
        if not isinstance(ratio, Real) or not 1 / MOST_RATIO <= ratio <= MOST_RATIO:
            raise SimulationError(
                f"{shortened(ratio)} is no ratio of measured to predicted seconds; those of the same step "
                "are about 1"
            )
    return math.exp(_OwnRuns(ratios).taken) if ratios else 1.0


def clash(ratios: Sequence[float]) -> bool:
    """Return whether measured steps of one machine are further from predicted ones than machines differ: what
    ran is something else, perhaps, than what was predicted (:data:`FAR`).

    >>> clash([1.05, 1.1]), clash([3.0, 3.0]), clash([0.7, 1.3])
    (False, True, False)
    """
    return bool(ratios) and _OwnRuns(ratios).beyond > 0


class _OwnRuns:
    """What measured steps of one machine say: the logarithm that is ``taken``, the variance of it that is
    ``left``, that of steps ``within`` the machine, and what is ``beyond`` both."""

    def __init__(self, ratios: Sequence[float]) -> None:
        logs = [math.log(ratio) for ratio in ratios]
        middle = median(logs)
        shown = TO_DEVIATION * median([abs(log - middle) for log in logs])
        self.within = max(WITHIN_SOURCE, shown) ** 2
        of_median = self.within / len(logs)
        weight = BETWEEN_SOURCES**2 / (BETWEEN_SOURCES**2 + of_median)
        self.taken, self.left = weight * middle, BETWEEN_SOURCES**2 * (1 - weight)
        apart = ((1 - weight) * FAR) ** 2 * (BETWEEN_SOURCES**2 + of_median)
        self.beyond = max(0.0, (middle - self.taken) ** 2 - apart)

    def variance(self, usual: float) -> float:
        """Return the variance of a step that has ``usual`` without these."""
        known = (self.left + self.within) / (BETWEEN_SOURCES**2 + WITHIN_SOURCE**2)
        return usual * known + self.beyond


def deviations(parts: Mapping[str, float], uncertainties: Mapping[str, float]) -> dict[str, float]:
    """Return by how much a step deviates because kinds of work do, each by its share: of the logarithm.

    >>> deviations({"linear": 3.0, "host": 1.0}, {"linear": 0.04})
    {'linear': 0.03}
    """
    total = sum(parts.values()) or 1.0
    each = {kind: math.hypot(SPREADS.get(kind, 0.0), uncertainties.get(kind, 0.0)) for kind in parts}
    return {kind: each[kind] * part / total for kind, part in parts.items() if each[kind] and part}


def interval_of(
    seconds: float,
    spread: float,
    parts: Mapping[str, float],
    level: float = 0.9,
    own: Sequence[float] = (),
    uncertainties: Mapping[str, float] | None = None,
) -> Interval | None:
    """Return the interval of a step on devices of a spread; None where that is not known.

    ``parts`` are the seconds of its critical path by kind of work, ``own`` measured over predicted seconds of
    other steps on the same machine: the interval is around ``seconds * correction(own)`` then, and narrower
    where they agree.
    ``uncertainties`` are those of the devices (``Device.rates.uncertainties``).
    Raises :class:`SimulationError` for a level outside of (0, 1), and for a ratio that cannot be one.
    """
    if not 0 < level < 1:
        raise SimulationError(f"level={level}: a probability between 0 and 1, as 0.9")
    seconds *= correction(own)
    if not spread or not seconds:
        return None
    variance = spread**2 + sum(each**2 for each in deviations(parts, uncertainties or {}).values())
    variance = _OwnRuns(own).variance(variance) if own else variance
    half = math.exp(NormalDist().inv_cdf((1 + level) / 2) * math.sqrt(variance))
    return Interval(seconds / half, seconds * half, level)
