"""How far to trust the seconds of a step: an interval around them.

The logarithm of measured over predicted seconds is taken to be normal with mean 0. Its variance is the sum
of that of steps on the device whatever they consist of (``Device.rates.spread``: by how much rows differ from
what is fitted to them), of how well the figures of each kind of work are known
(``Device.rates.uncertainties``: what these rows leave open), and of what is assumed of kinds that nothing was
fitted to (:data:`SPREADS`). What a kind adds is by its share of the critical path: by so much a step takes
longer whose work of that kind does.

A part of the variance is between machines (:data:`BETWEEN`): steps on one of them are all slower than
predicted, or all faster. Measured steps of one's own say by how much, the more of them the surer: the median
of their logarithms counts n / (n + within / between) (James and Stein 1961), so that a single one misleads
little.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist, median
from typing import NamedTuple

from distsim.errors import SimulationError

SPREADS: Mapping[str, float] = {
    **dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "shift"), 0.25),
    "send": 0.5,
    "linear_float8": 0.2,
    "grouped": 0.2,
}
"""Standard deviation of the logarithm of the seconds of a kind of work of which the device's figures do not
say it: assumptions (collectives are fitted within a node, and guesses between nodes; few rows have 8 bits or
experts)."""


BETWEEN = 0.44
"""The share of the variance that is between machines, of 0.075 between sources and 0.085 within one: standard
deviations of the logarithm in an analytic study of the published rows."""


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
    (1.084, 1.156, 1.0)
    """
    for ratio in ratios:
        if not 1 / MOST_RATIO <= ratio <= MOST_RATIO:
            raise SimulationError(
                f"{ratio:g} is no ratio of measured to predicted seconds; those of the same step are about 1"
            )
    return math.exp(_weight(len(ratios)) * median(map(math.log, ratios))) if ratios else 1.0


def _weight(count: int) -> float:
    """Return how much of what so many steps say of their machine counts."""
    return BETWEEN / (BETWEEN + (1 - BETWEEN) / count) if count else 0.0


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
    other steps on the same machine: the interval is around ``seconds * correction(own)`` then, and narrower.
    ``uncertainties`` are those of the devices (``Device.rates.uncertainties``).
    Raises :class:`SimulationError` for a level outside of (0, 1), and for a ratio that cannot be one.
    """
    if not 0 < level < 1:
        raise SimulationError(f"level={level}: a probability between 0 and 1, as 0.9")
    seconds *= correction(own)
    if not spread or not seconds:
        return None
    variance = spread**2 + sum(each**2 for each in deviations(parts, uncertainties or {}).values())
    variance *= 1 - BETWEEN * _weight(len(own))
    half = math.exp(NormalDist().inv_cdf((1 + level) / 2) * math.sqrt(variance))
    return Interval(seconds / half, seconds * half, level)
