"""What a training takes as columns of a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from distsim.plan_search.training.estimate import TrainingEstimate

_OF_PLANS = 2
"""Columns of plans of one cluster, the first: others differ by the same factor as these."""

_INTERVAL = "90 %"
"""The column of the days between which a training takes: plans have that of their step."""

CostCell = Callable[[TrainingEstimate], str]


def cost_columns(known: Sequence[TrainingEstimate], unit: str) -> dict[str, CostCell]:
    """Return the columns, without those of which nothing is known of any estimate.

    ``unit``: what is counted of a step, tokens or samples.
    """
    columns: dict[str, CostCell] = {}
    tokens = known[0].training.tokens if known else None
    if tokens is not None:
        columns[f"days for {_amount(tokens)} {unit}"] = lambda own: _figure(own.hours, 1 / 24)
        if any(own.hours_interval for own in known):
            columns[_INTERVAL] = _days
    if any(own.rates.price is not None for own in known):
        if tokens is not None:
            columns["dollars"] = lambda own: _rounded(own.of_all(own.token_dollars))
        columns[f"{unit}/$"] = lambda own: _figure(None if not (d := own.token_dollars) else 1 / d)
    elif tokens is not None:
        columns["GPU-hours"] = lambda own: _rounded(own.of_all(own.token_seconds), own.devices / 3600)
    if any(own.kilowatts is not None for own in known):
        columns["kWh/step"] = lambda own: _figure(own.step_kwh)
        if tokens is not None:
            columns["kWh"] = lambda own: _rounded(own.of_all(own.token_kwh))
    return columns


def plan_cost_columns(known: Sequence[TrainingEstimate], unit: str) -> dict[str, CostCell]:
    """Return those of plans of one cluster: time and dollars, or the first of what is known."""
    columns = {name: cell for name, cell in cost_columns(known, unit).items() if name != _INTERVAL}
    return dict(list(columns.items())[:_OF_PLANS])


def _days(own: TrainingEstimate) -> str:
    low, high = own.hours_interval or (None, None)
    return "-" if low is None else f"{_figure(low, 1 / 24)} to {_figure(high, 1 / 24)}"


def _amount(number: float) -> str:
    """Return a large number as people write it.

    >>> _amount(3e11), _amount(1.5e12), _amount(2e15), _amount(500.0)
    ('300 billion', '1.5 trillion', '2e+15', '500')
    """
    for scale, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if scale <= number < 1e15:
            return f"{number / scale:.4g} {name}"
    return f"{number:g}"


def _figure(value: float | None, factor: float = 1.0) -> str:
    return "-" if value is None else f"{value * factor:.3g}"


def _rounded(value: float | None, factor: float = 1.0) -> str:
    return "-" if value is None else f"{value * factor:,.0f}"
