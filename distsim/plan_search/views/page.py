"""The plans of a search, and the clusters of several, as what a page shows."""

from __future__ import annotations

from typing import Any

from distsim.plan_search.columns import page_cells, page_row, plan_columns
from distsim.plan_search.results import SearchResult
from distsim.plan_search.trial import STATUSES
from distsim.plan_search.views.cluster_comparison import ClusterComparison

MOST_PLANS = 5000
"""Plans of a page's table: those that fit first, the best of them first."""


def plans_part(result: SearchResult) -> dict[str, Any]:
    """Return a row for each plan, in what the other best ones, and the plan that they are searched against,
    differ from the first, and what was left out."""
    trials = {trial.text: trial for trial in result.trials}
    every = [trials[row["plan"]] for row in result.rows()]
    first = {status: place for place, status in enumerate(STATUSES)}
    every.sort(key=lambda trial: (not trial.fits, first[trial.status]))  # stable: the best stay first
    shown, columns = every[:MOST_PLANS], plan_columns(result.step)
    return {
        "unit": result.step.unit,
        "objective": result.objective,
        "plans": len(every),
        "counts": dict(result.counts),
        "usable": min(device.usable for device in result.step.topology.devices),
        "columns": [column.name for column in columns if column.name],
        "shown": page_cells(columns),
        "rows": [page_row(columns, trial) for trial in shown],
        "pareto": [trial.short for trial in result.pareto],
        "differences": _differences(result),
        "left_out": len(every) - len(shown),
    }


def clusters_part(comparison: ClusterComparison) -> dict[str, Any]:
    """Return the clusters side by side, the best first, with what a training takes on each, and notes."""
    return {"objective": comparison.objective, **comparison.table()._asdict()}


def _differences(result: SearchResult) -> list[dict[str, Any]]:
    """Return in what plans differ from the best: the own one first, then the other best ones."""
    best, *others = result.winners or (None,)
    if best is None:
        return []
    compared = [(f"{place}. {other.short}", other) for place, other in enumerate(others, 2)]
    if result.own is not None and result.own.text != best.text:
        compared.insert(0, (f"yours: {result.own.short}", result.own))
    if not compared:
        return []
    found = result.compare(best, *(other for _, other in compared))
    return [
        {
            "plan": name,
            "seconds": found.steps[number].seconds - found.steps[0].seconds,
            "parts": [[own.part, own.first, own.second] for own in found.differences(number)],
        }
        for number, (name, _) in enumerate(compared, 1)
    ]
