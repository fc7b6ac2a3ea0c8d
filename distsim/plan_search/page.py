"""The plans of a search as what a page shows."""

from __future__ import annotations

from typing import Any

from distsim.plan_search.results import STATUSES, SearchResult, status_of
from distsim.plan_search.text import short
from distsim.report.difference import differences

MOST_PLANS = 5000
"""Plans of a page's table: those that fit first, the best of them first."""


def plans_part(result: SearchResult) -> dict[str, Any]:
    """Return a row for each plan, what the best differ in from the first of them, and what was left out."""
    trials = {trial.text: trial for trial in result.trials}
    every = [trials[row["plan"]] for row in result.rows()]
    first = {status: place for place, status in enumerate(STATUSES)}
    every.sort(key=lambda trial: (not trial.fits, first[status_of(trial)]))  # stable: the best stay first
    shown = every[:MOST_PLANS]
    best, *others = result.winners or (None,)
    return {
        "unit": result.step.unit,
        "objective": result.objective,
        "plans": len(every),
        "counts": dict(result.counts),
        "usable": min(device.usable for device in result.step.topology.devices),
        "columns": list(COLUMNS),
        "rows": [
            [
                short(trial.plan),
                _status(trial.fits, status_of(trial), trial.simulated),
                *([trial.seconds, trial.low or None, trial.high or None] if trial.simulated else [None] * 3),
                *([result.rate(trial), result.mfu_of(trial)] if trial.simulated else [None] * 2),
                trial.peak or None,
                trial.missing or None,
                trial.bound_by() or trial.refused or None,
            ]
            for trial in shown
        ],
        "pareto": [short(trial.plan) for trial in result.pareto],
        "differences": [
            {
                "plan": short(other.plan),
                "seconds": other.seconds - best.seconds,
                "parts": [
                    [own.part, own.first, own.second]
                    for own in differences((best.seconds, best.parts), (other.seconds, other.parts))
                ],
            }
            for other in others
            if best is not None
        ],
        "left_out": len(every) - len(shown),
    }


COLUMNS = ("plan", "status", "step", "low", "high", "rate", "mfu", "memory", "missing", "note")
"""What a row has: seconds, tokens (or samples) of a second and a device, a share, bytes, a text."""


def _status(fits: bool, status: str, simulated: bool) -> str:
    return status if not simulated else "fits" if fits else "nearly fits"
