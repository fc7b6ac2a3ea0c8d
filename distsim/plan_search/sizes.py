"""Searches on several sizes of a cluster side by side: how long and how dear a training would be on each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distsim.plan_search.results import SearchResult
from distsim.plan_search.text import short
from distsim.simulation.explain.text import seconds_text, table

HOUR = 3600.0


@dataclass(frozen=True)
class Training:
    """What is to be trained: so many tokens (of a model without any, samples), at a price of a device-hour.

    ``price`` in dollars. Either may be left open. Nothing is lost to failures, checkpoints and restarts: a
    lower bound.
    """

    tokens: float | None = None
    price: float | None = None

    def hours(self, result: SearchResult) -> float | None:
        """Return the hours that the best plan takes; None where no plan fits, or it is not said how many."""
        if self.tokens is None or not result.fitting:
            return None
        return self.tokens / result.step.tokens * result.fastest.seconds / HOUR

    def cost(self, result: SearchResult) -> float | None:
        """Return the dollars that it costs, without a price the hours of all devices together."""
        hours = self.hours(result)
        if hours is None:
            return None
        return hours * len(result.step.topology.devices) * (1.0 if self.price is None else self.price)

    def to_dict(self, result: SearchResult) -> dict[str, Any]:
        """Return what is known as what JSON has."""
        hours, cost = self.hours(result), self.cost(result)
        name = "device_hours" if self.price is None else "dollars"
        return {} if hours is None else {"tokens": self.tokens, "hours": hours, name: cost}


def sizes_table(found: Mapping[str, SearchResult], training: Training, cheapest: bool) -> list[str]:
    """Return a row for each cluster; ``cheapest`` first, or in the order given."""
    ordered = list(found.items())
    if cheapest:
        ordered.sort(key=lambda item: training.cost(item[1]) or float("inf"))
    unit = next(iter(found.values())).step.unit
    dear = "GPU-hours" if training.price is None else "dollars"
    header = ["cluster", "step", f"{unit}/s", "MFU"]
    header += [] if training.tokens is None else [f"days for {training.tokens:.3g} {unit}", dear]
    rows = [[name, *_cells(result, training)] for name, result in ordered]
    plans = ["best plan", *(short(result.fastest.plan) if result.fitting else "" for _, result in ordered)]
    lines = table(header, rows)
    width = max(map(len, lines))
    return [f"{line.ljust(width)}  {plan}".rstrip() for line, plan in zip(lines, plans, strict=True)]


def _cells(result: SearchResult, training: Training) -> list[str]:
    count = 3 if training.tokens is None else 5
    if not result.fitting:
        return ["nothing fits", *[""] * (count - 1)]
    best = result.fastest
    rate = result.rate(best) * len(result.step.topology.devices)
    cells = [seconds_text(best.seconds), f"{rate:.5g}", f"{result.mfu_of(best):.1%}"]
    hours, cost = training.hours(result), training.cost(result)
    if hours is None or cost is None:
        return cells
    return [*cells, f"{hours / 24:.3g}", f"{cost:,.0f}"]
