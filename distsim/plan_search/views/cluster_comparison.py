"""Searches on several clusters side by side: how long, how dear and how hungry a training is on each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any, NamedTuple

from distsim.extras import data_frame
from distsim.plan_search.results import SearchResult
from distsim.plan_search.training.columns import CostCell, cost_columns
from distsim.plan_search.training.estimate import OBJECTIVES, OF_TRAINING, TrainingEstimate
from distsim.simulation.explain.text import rate_text, seconds_text, table
from distsim.simulation.quantities import bytes_label


class ClusterTexts(NamedTuple):
    """A table of clusters: a header, a row for each, the best first, and notes."""

    header: list[str]
    rows: list[list[str]]
    notes: list[str]


@dataclass(frozen=True, eq=False)
class ClusterComparison(Mapping[str, SearchResult]):
    """What searches on clusters found, by their names, and what a training takes on each.

    ``objective``: one of :data:`OBJECTIVES`, by which clusters rank; ``refused`` says why others have no
    plan. ``str`` is a table.

    >>> import distsim
    >>> gpt = "gpt:layers=2,hidden=64,heads=4,seq=32,vocab=100"
    >>> sets = "tp=1,pp=1,remat=none,zero=1,microbatch_size=1"
    >>> found = distsim.search(gpt, "dgx-a100", sets, 16, gpus=[4, 8], tokens=1e9, price=2.0)
    >>> list(found)
    ['dgx-a100 (4 GPUs)', 'dgx-a100 (8 GPUs)']
    >>> [row["devices"] for row in found.rows()], found.best in found.values()
    ([4, 8], True)
    """

    results: Mapping[str, SearchResult]
    objective: str = "time"
    refused: Mapping[str, str] = field(default_factory=dict[str, str])

    def __getitem__(self, name: str) -> SearchResult:
        return self.results[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    @property
    def best(self) -> SearchResult:
        """What was found on the cluster that is best by the objective; raises as :attr:`ranked`."""
        return self.results[self.ranked[0][0]]

    @property
    def estimates(self) -> dict[str, TrainingEstimate | None]:
        """What the training takes on each cluster, in the order given; None where nothing fits."""
        return {
            name: result.estimate(result.best) if result.fitting else None
            for name, result in self.results.items()
        }

    @property
    def ranked(self) -> list[tuple[str, TrainingEstimate | None]]:
        """The same, the best by the objective first; raises :class:`PlanError` where that is not known."""
        return sorted(self.estimates.items(), key=self._rank)

    def _rank(self, item: tuple[str, TrainingEstimate | None]) -> float:
        name, estimate = item
        objective = OBJECTIVES[self.objective]
        objective.check(name, self.results[name].costs.rates)
        value = None if estimate is None else objective.cluster(estimate)
        return float("inf") if value is None else value

    def rows(self) -> list[dict[str, Any]]:
        """Return a record for each cluster: its best plan, and what a training takes by it; None if unknown.

        ``{unit}_per_s`` is of all devices; the figures of a training are those of :data:`OF_TRAINING`.
        """
        return [self._row(name, own) for name, own in self.estimates.items()]

    def _row(self, name: str, own: TrainingEstimate | None) -> dict[str, Any]:
        result = self.results[name]
        unit, devices = f"{result.step.unit}_per_s", len(result.step.topology.devices)
        row: dict[str, Any] = {"cluster": name, "devices": devices, "fits": own is not None}
        if own is None:
            return row | dict.fromkeys(("plan", "step_s", unit, "mfu", "peak_bytes", "goodput", *OF_TRAINING))
        best = own.trial
        row |= {"plan": best.text, "step_s": best.seconds, unit: result.tokens_per_second}
        row |= {"mfu": result.mfu, "peak_bytes": best.peak, "goodput": own.goodput.share}
        return row | own.of_training()

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as what JSON has: each search, and what a training takes by its best plan."""
        return {
            "searches": [
                {"cluster": name, **self.results[name].to_dict(), **(own.to_dict() if own else {})}
                for name, own in self.estimates.items()
            ],
            **({"refused": dict(self.refused)} if self.refused else {}),
        }

    def to_pandas(self) -> Any:
        """Return :meth:`rows` as a table; raises :class:`MissingExtraError` without pandas."""
        return data_frame(self.rows())

    def _repr_html_(self) -> str:
        """Return the table for a notebook, in letters of one width."""
        return f"<pre>{escape(str(self))}</pre>"

    def __repr__(self) -> str:
        return f"ClusterComparison({', '.join(f'{name}: {own}' for name, own in self.results.items())})"

    def __str__(self) -> str:
        found = self.table()
        return "\n".join([*table(found.header, found.rows, texts=1), *found.notes])

    def table(self) -> ClusterTexts:
        """Return what ``str`` shows, cell by cell; raises as :attr:`ranked`."""
        ordered = self.ranked
        known = [estimate for _, estimate in ordered if estimate is not None]
        columns = self._columns(known)
        rows = [
            [
                name,
                *([cell(own) for cell in columns.values()] if own else _nothing(len(columns))),
                own.trial.short if own else "",
            ]
            for name, own in ordered
        ]
        return ClusterTexts(["cluster", *columns, "best plan"], rows, [*self._notes(ordered)])

    def _columns(self, known: list[TrainingEstimate]) -> dict[str, CostCell]:
        """Return the columns, without those of which nothing is known on any cluster."""
        unit = next(iter(self.results.values())).step.unit
        return {
            "step": lambda own: seconds_text(own.trial.seconds),
            f"{unit}/s": lambda own: rate_text(own.step.tokens / own.trial.seconds),
            "MFU": lambda own: f"{own.step.mfu(own.trial.seconds, own.trial.plan):.1%}",
            "memory": lambda own: bytes_label(own.trial.peak),
            "goodput": lambda own: f"{own.goodput.share:.1%}",
            **cost_columns(known, unit),
        }

    def _notes(self, ordered: list[tuple[str, TrainingEstimate | None]]) -> Iterator[str]:
        """Say by what the figures are, and what they leave out; what holds of several clusters once."""
        known = {name: own for name, own in ordered if own is not None}
        for say in (_reliability_note, _price_note, _energy_note):
            names: dict[str, list[str]] = {}
            for name, own in known.items():
                names.setdefault(say(own), []).append(name)
            yield from (f"{', '.join(own)}: {note}" for note, own in names.items() if note)
        unpriced = [name for name, own in known.items() if own.rates.price is None]
        trains = any(own.training.tokens is not None for own in known.values())
        if unpriced and trains:
            yield f"{', '.join(unpriced)}: without dollars: no price is known; give --price, of a GPU-hour"
        unknown = [name for name, own in known.items() if own.rates.watts is None]
        if unknown and (trains or len(unknown) < len(known)):
            yield (
                f"{', '.join(unknown)}: without kWh: what a GPU draws is not known of each; give --set "
                "device.power=700W, or power in [device] and [[nodes]] of its file"
            )


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
    host, kinds = own.rates.host_watts, own.rates.kinds
    mean = f" (the mean of {kinds} kinds)" if kinds > 1 else ""
    return (
        f"energy at {own.rates.watts:g} W a GPU{mean} and {'unknown, so 0' if host is None else f'{host:g}'} "
        f"W of its host at all times, times a PUE of {own.training.pue:g}; without switches and storage"
    )


def _duration(seconds: float) -> str:
    """Return seconds as people say long ones."""
    for scale, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return seconds_text(seconds)


def _nothing(columns: int) -> list[str]:
    return ["nothing fits", *[""] * (columns - 1)]
