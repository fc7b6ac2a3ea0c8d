"""0/1 knapsacks: which values to save so that the least time goes into recomputing the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

STEPS = 10_000
"""Sizes are rounded to this share of the budget's range."""


def rounded_knapsack(sizes: Sequence[float], seconds: Sequence[float], room: float) -> tuple[int, ...]:
    """Return the items to keep, most seconds within ``room``, with sizes rounded to 1/10,000.

    The dynamic program over rounded sizes that PyTorch runs, in its single precision and with its choice
    among equals. What rounds to nothing is free, so many small items may exceed the room together: check.

    >>> rounded_knapsack([0.5, 0.4, 0.3], [2.0, 3.0, 2.0], 0.7)
    (1, 2)
    """
    sizes_in_steps = [round(size * STEPS) for size in sizes]
    capacity = round(room * STEPS)
    best: npt.NDArray[np.float32] = np.zeros(capacity + 1, dtype=np.float32)
    taken: npt.NDArray[np.bool_] = np.zeros((len(sizes), capacity + 1), dtype=np.bool_)
    for i, (size, gain) in enumerate(zip(sizes_in_steps, np.array(seconds, dtype=np.float32), strict=True)):
        with_item = best.copy()
        if size == 0:
            with_item += gain
        elif size <= capacity:
            np.maximum(best[size:], best[:-size] + gain, out=with_item[size:])
        taken[i] = with_item != best
        best = with_item
    kept: list[int] = []
    for i in reversed(range(len(sizes))):
        if taken[i, capacity]:
            kept.append(i)
            capacity -= sizes_in_steps[i]
    return tuple(reversed(kept))


def exact_knapsack(sizes: Sequence[int], seconds: Sequence[float], room: int) -> tuple[int, ...]:
    """Return the items to keep: never more than ``room`` bytes, most seconds (HiGHS, gap 0).

    >>> exact_knapsack([5, 4, 3], [2.0, 3.0, 2.0], 7)
    (1, 2)
    """
    optimize: Any = import_module("scipy.optimize")  # slow to import, and without type hints
    fits = [i for i, size in enumerate(sizes) if size <= room]
    free = [i for i in fits if sizes[i] == 0]
    fits = [i for i in fits if sizes[i] > 0]
    if not fits or room < 0:
        return tuple(free)
    unit = math.gcd(*(sizes[i] for i in fits))
    weights = np.array([sizes[i] // unit for i in fits], dtype=np.float64)
    gains = np.array([seconds[i] for i in fits], dtype=np.float64)
    limit = room // unit
    while True:
        # Whole numbers come back as nearly whole ones: the exact sum decides.
        result: Any = optimize.milp(
            c=-gains / max(gains.max(), 1e-300),
            constraints=optimize.LinearConstraint(weights[None, :], ub=limit),
            integrality=np.ones(len(fits)),
            bounds=optimize.Bounds(0, 1),
            options={"mip_rel_gap": 0.0},
        )
        kept = [i for i, value in zip(fits, result.x, strict=True) if value > 0.5]
        excess = sum(sizes[i] for i in kept) - room
        if excess <= 0:
            return tuple(sorted(free + kept))
        limit -= max(1, excess // unit)
