"""Least squares on the logarithms of seconds, for as many quantities as timings can tell apart.

Timings far off count for less, as of a first call that sets up: a residual r counts as 2 s^2 (sqrt(1 + (r /
s)^2) - 1), that is r^2 where it is small and 2 s r where it is large, with s of :data:`USUAL` (soft L1).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from distsim.calibration.timings import Timing

Floats = npt.NDArray[np.float64]
"""Seconds or logarithms, [timings]."""

LEAST_SHARE = 1 / 3
"""What part of a time must depend on a quantity for its timing to say something of it."""
FEWEST = 3
"""Timings that must say something of a quantity."""
USUAL = 0.15
"""What the logarithm of a timing may well differ by."""
_STEP, _MOST_STEPS = 1e-3, 60
_MOST_ALIKE = 30.0
"""Condition of the derivatives beyond which two quantities are not told apart."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """What is fitted: its name, its value in the base, and values from which the search starts.

    ``least`` is the part of a time that must depend on it, as :data:`LEAST_SHARE`.
    """

    name: str
    base: float
    starts: tuple[float, ...]
    least: float = LEAST_SHARE


@dataclass(frozen=True)
class Regression:
    """Timings, and what they are expected to take: ``predict(values of the quantities)`` gives seconds.

    ``base_seconds`` are what the base makes of them. The quantities come in the order of what matters most:
    where two are not told apart, the later one keeps its value. ``fewest``: timings needed.
    """

    quantities: tuple[Quantity, ...]
    timings: Sequence[Timing]
    predict: Callable[[Sequence[float]], Floats]
    base_seconds: Floats
    fewest: int = FEWEST

    @property
    def measured(self) -> Floats:
        """The seconds that were measured."""
        return np.array([timing.seconds for timing in self.timings])


@dataclass(frozen=True)
class FittedValues:
    """Values by name of what was fitted, and by name why others were not."""

    values: dict[str, float]
    kept: dict[str, str]


def solve(regression: Regression) -> FittedValues:
    """Return the values with which log(predicted / measured) is smallest, as the module's docstring says.

    A quantity on which too few timings depend (by ``Quantity.least`` of their time), and one that cannot be
    told from another, keeps its value in the base, and the others are fitted again.
    """
    quantities = regression.quantities
    active, kept = list(range(len(quantities))), dict[str, str]()
    values = [quantity.base for quantity in quantities]
    while active:
        values = _fitted(regression, active)
        slopes = _slopes(regression, values, active)
        least = [quantities[i].least for i in active]
        depend: list[int] = (np.abs(slopes) >= least).sum(axis=0).tolist()
        fewest = min(depend)
        if fewest < regression.fewest:
            dropped = active[depend.index(fewest)]
            kept[quantities[dropped].name] = (
                f"{fewest} of {len(regression.timings)} timings depend on it, of {regression.fewest} needed"
            )
        elif len(active) > 1 and np.linalg.cond(slopes) > _MOST_ALIKE:
            dropped = active[-1]
            kept[quantities[dropped].name] = (
                f"the timings do not tell it from {quantities[active[0]].name}: measure more sizes"
            )
        else:
            break
        active.remove(dropped)
    return FittedValues({quantities[i].name: values[i] for i in active}, kept)


def _fitted(regression: Regression, active: Sequence[int]) -> list[float]:
    """Return the values of all quantities, those that are active fitted (Levenberg and Marquardt)."""
    measured = np.log(regression.measured)

    def residuals(logs: Sequence[float]) -> Floats:
        return np.log(regression.predict(_values(regression, active, logs))) - measured

    def loss(logs: Sequence[float]) -> float:
        return float((np.sqrt(1 + np.square(residuals(logs) / USUAL)) - 1).sum())

    starts = itertools.product(*(map(math.log, regression.quantities[i].starts) for i in active))
    logs = list(min(starts, key=loss))
    least, damping = loss(logs), 1e-3
    for _ in range(_MOST_STEPS):
        slopes = _slopes(regression, _values(regression, active, logs), active)
        far = residuals(logs)
        weighted = slopes.T / np.sqrt(1 + np.square(far / USUAL))
        matrix = weighted @ slopes + damping * np.eye(len(active))
        step = -np.linalg.solve(matrix, weighted @ far)
        moved = [log + min(max(change, -1.0), 1.0) for log, change in zip(logs, step.tolist(), strict=True)]
        reached = loss(moved)
        if reached < least:
            logs, damping = moved, damping / 4
            if least - reached < 1e-12 * least:
                break
            least = reached
        else:
            damping *= 8
        if np.abs(step).max() < 1e-9:
            break
    return _values(regression, active, logs)


def _values(regression: Regression, active: Sequence[int], logs: Sequence[float]) -> list[float]:
    values = [quantity.base for quantity in regression.quantities]
    for i, log in zip(active, logs, strict=True):
        values[i] = math.exp(min(max(log, -80.0), 80.0))
    return values


def _slopes(regression: Regression, values: Sequence[float], active: Sequence[int]) -> Floats:
    """Return how the logarithms of seconds change with those of the active quantities."""
    columns: list[Floats] = []
    for i in active:
        around: list[Floats] = []
        for factor in (math.exp(_STEP), math.exp(-_STEP)):
            moved = list(values)
            moved[i] *= factor
            around.append(np.log(regression.predict(moved)))
        columns.append((around[0] - around[1]) / (2 * _STEP))
    return np.stack(columns, axis=1)
