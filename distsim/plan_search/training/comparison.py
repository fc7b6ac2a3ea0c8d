"""Searches on several clusters side by side: how long, how dear and how hungry a training is on each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from distsim.plan_search.results import SearchResult
from distsim.plan_search.text import short
from distsim.plan_search.training.estimate import DeviceRates, Objective, Training, TrainingEstimate
from distsim.simulation.explain.text import seconds_text, table
from distsim.simulation.quantities import bytes_label

_Cell = Callable[[TrainingEstimate], str]


@dataclass(frozen=True, eq=False)
class ClusterComparison:
    """What searches on clusters found, and what a training takes on each, by name; ``str`` is a table."""

    results: Mapping[str, SearchResult]
    rates: Mapping[str, DeviceRates]
    training: Training
    objective: Objective

    @property
    def estimates(self) -> dict[str, TrainingEstimate | None]:
        """What the training takes on each cluster, in the order given; None where nothing fits."""
        return {name: self.training.on(result, self.rates[name]) for name, result in self.results.items()}

    @property
    def ranked(self) -> list[tuple[str, TrainingEstimate | None]]:
        """The same, the best by the objective first; raises :class:`PlanError` where that is not known."""
        return sorted(self.estimates.items(), key=self._rank)

    def _rank(self, item: tuple[str, TrainingEstimate | None]) -> float:
        name, estimate = item
        self.objective.check(name, self.rates[name])
        value = None if estimate is None else self.objective.cluster(estimate)
        return float("inf") if value is None else value

    def __str__(self) -> str:
        ordered = self.ranked
        known = [estimate for _, estimate in ordered if estimate is not None]
        columns = self._columns(known)
        rows = [
            [name, *([cell(own) for cell in columns.values()] if own else _nothing(len(columns)))]
            for name, own in ordered
        ]
        lines = table(["cluster", *columns], rows)
        plans = ["best plan", *(short(own.result.best.plan) if own else "" for _, own in ordered)]
        width = max(map(len, lines))
        shown = [f"{line.ljust(width)}  {plan}".rstrip() for line, plan in zip(lines, plans, strict=True)]
        return "\n".join([*shown, *self._notes(ordered)])

    def _columns(self, known: list[TrainingEstimate]) -> dict[str, _Cell]:
        """Return the columns, without those of which nothing is known on any cluster."""
        unit = next(iter(self.results.values())).step.unit
        tokens = self.training.tokens
        columns: dict[str, _Cell] = {
            "step": lambda own: seconds_text(own.result.best.seconds),
            f"{unit}/s": lambda own: f"{own.result.rate(own.result.best) * own.devices:.5g}",
            "MFU": lambda own: f"{own.result.mfu_of(own.result.best):.1%}",
            "memory": lambda own: bytes_label(own.result.best.peak),
            "goodput": lambda own: f"{own.goodput.share:.1%}",
        }
        if tokens is not None:
            columns[f"days for {tokens:.3g} {unit}"] = lambda own: _figure(own.hours, 1 / 24)
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

    def _notes(self, ordered: list[tuple[str, TrainingEstimate | None]]) -> Iterator[str]:
        """Say by what the figures are, and what they leave out."""
        for name, own in ordered:
            if own is not None and own.goodput.share < 1:
                lost = own.goodput
                yield (
                    f"{name}: a failure every {_duration(lost.between)}; checkpoints of "
                    f"{bytes_label(lost.checkpoint)} in {_duration(lost.write)}, every "
                    f"{_duration(lost.interval)} of work (Daly; Young: {_duration(lost.young)})"
                )
        for name, own in ordered:
            if own is not None and own.rates.price is not None:
                yield f"{name}: {own.rates.price:g} $ a GPU-hour, {own.rates.price_source}"
        for name, own in ordered:
            if own is not None and own.rates.watts is not None:
                host = own.rates.host_watts
                yield (
                    f"{name}: energy at {own.rates.watts:g} W a GPU and "
                    f"{'unknown, so 0' if host is None else f'{host:g}'} W of its host at all times, times a "
                    f"PUE of {self.training.pue:g}; without switches and storage"
                )


def _duration(seconds: float) -> str:
    """Return seconds as people say long ones."""
    for scale, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return seconds_text(seconds)


def _nothing(columns: int) -> list[str]:
    return ["nothing fits", *[""] * (columns - 1)]


def _figure(value: float | None, factor: float = 1.0) -> str:
    return "-" if value is None else f"{value * factor:.3g}"


def _rounded(value: float | None, factor: float = 1.0) -> str:
    return "-" if value is None else f"{value * factor:,.0f}"
