"""Searches on several clusters side by side: how long, how dear and how hungry a training is on each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from distsim.plan_search.results import SearchResult
from distsim.plan_search.text import short
from distsim.plan_search.training.estimate import DeviceRates, Objective, Training, TrainingEstimate
from distsim.simulation.explain.text import rate_text, seconds_text, table
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
            f"{unit}/s": lambda own: rate_text(own.result.rate(own.result.best) * own.devices),
            "MFU": lambda own: f"{own.result.mfu_of(own.result.best):.1%}",
            "memory": lambda own: bytes_label(own.result.best.peak),
            "goodput": lambda own: f"{own.goodput.share:.1%}",
        }
        if tokens is not None:
            columns[f"days for {_amount(tokens)} {unit}"] = lambda own: _figure(own.hours, 1 / 24)
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
        """Say by what the figures are, and what they leave out; what holds of several clusters once."""
        known = {name: own for name, own in ordered if own is not None}
        for say in (_reliability_note, _price_note, _energy_note):
            names: dict[str, list[str]] = {}
            for name, own in known.items():
                names.setdefault(say(own), []).append(name)
            yield from (f"{', '.join(own)}: {note}" for note, own in names.items() if note)
        unpriced = [name for name, own in known.items() if own.rates.price is None]
        if unpriced and self.training.tokens is not None:
            yield f"{', '.join(unpriced)}: without dollars: no price is known; give --price, of a GPU-hour"


def _reliability_note(own: TrainingEstimate) -> str:
    lost = own.goodput
    if lost.share == 1:
        return ""
    return (
        f"a failure every {_duration(lost.between)}; checkpoints of {bytes_label(lost.checkpoint)} in "
        f"{_duration(lost.write)}, every {_duration(lost.interval)} of work (Daly; Young: "
        f"{_duration(lost.young)})"
    )


def _price_note(own: TrainingEstimate) -> str:
    price = own.rates.price
    return "" if price is None else f"{price:g} $ a GPU-hour, {own.rates.price_source}"


def _energy_note(own: TrainingEstimate) -> str:
    if own.rates.watts is None:
        return ""
    host = own.rates.host_watts
    return (
        f"energy at {own.rates.watts:g} W a GPU and {'unknown, so 0' if host is None else f'{host:g}'} W of "
        f"its host at all times, times a PUE of {own.training.pue:g}; without switches and storage"
    )


def _amount(number: float) -> str:
    """Return a large number as people write it.

    >>> _amount(3e11), _amount(1.5e12), _amount(2e15), _amount(500.0)
    ('300 billion', '1.5 trillion', '2e+15', '500')
    """
    for scale, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if scale <= number < 1e15:
            return f"{number / scale:.4g} {name}"
    return f"{number:g}"


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
