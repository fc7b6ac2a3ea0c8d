"""The grid on which durations lie, so that sums of them are exact and engines agree to the bit."""

from __future__ import annotations

from distsim.cost.demand import usable

GRID = 2.0**-40
"""Seconds (0.9 ps) of which every duration is a multiple: sums up to 8,192 s are exact in a float64."""
_COARSE = 2.0**13
"""Seconds from which every float64 is such a multiple."""


def on_grid(seconds: float) -> float:
    """Return seconds as a multiple of :data:`GRID`."""
    return seconds if seconds >= _COARSE else round(seconds / GRID) * GRID


def task_seconds(op: object, seconds: float) -> float:
    """Return the seconds of a task, on the grid; raises as :func:`usable` for what is no time."""
    return on_grid(usable(op, seconds))
