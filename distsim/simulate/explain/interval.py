"""How far to trust the seconds of a step: an interval around them.

The logarithm of measured over predicted seconds is taken to be normal with mean 0. Its standard deviation is
that of the device (``Device.rates.spread``: over published steps of sources that its figures were not fitted
to), and on top, independent of it, what a term of which less is known adds by the share that it has of the
critical path (:data:`SPREADS`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import NamedTuple

from distsim.errors import SimulationError

SPREADS: Mapping[str, float] = {
    **dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "shift"), 0.25),
    "send": 0.5,
    "linear_float8": 0.2,
    "grouped": 0.2,
}
"""Standard deviation of the logarithm of the seconds of a kind of work, where it is more than that of a step
as a whole: assumptions (collectives are fitted within a node, and guesses between nodes; few rows have 8 bits
or experts)."""


class Interval(NamedTuple):
    """Seconds between which a measured step lies with a probability of ``level``."""

    low: float
    high: float
    level: float

    def __str__(self) -> str:
        return f"{self.low:.4g} to {self.high:.4g} s, {self.level:.0%}"


def interval_of(
    seconds: float, spread: float, parts: Mapping[str, float], level: float = 0.9
) -> Interval | None:
    """Return the interval of a step on devices of a spread; None where that is not known.

    ``parts`` are the seconds of its critical path by kind of work. Raises :class:`SimulationError` for a
    level outside of (0, 1).
    """
    if not 0 < level < 1:
        raise SimulationError(f"level={level}: a probability between 0 and 1, as 0.9")
    if not spread or not seconds:
        return None
    total = sum(parts.values()) or 1.0
    variance = spread**2 + sum((SPREADS.get(kind, 0.0) * own / total) ** 2 for kind, own in parts.items())
    half = math.exp(NormalDist().inv_cdf((1 + level) / 2) * math.sqrt(variance))
    return Interval(seconds / half, seconds * half, level)
