"""Timings of a machine -> the figures of a cluster's file, each with its source and its residual."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from distsim.calibration.machine import MEMORY, Machine
from distsim.calibration.nccl_tests import read_nccl_tests
from distsim.calibration.regression import Regression, solve
from distsim.calibration.timings import CollectiveCall, KernelCall, LaunchCall, Readings, Timing
from distsim.calibration.timings_csv import read_timings_csv
from distsim.calibration.torch_trace import read_torch_trace
from distsim.errors import TimingsError
from distsim.hardware import load_cluster
from distsim.hardware.cluster_table import Raw
from distsim.hardware.cluster_text import cluster_text, complete_table
from distsim.ir.kernel_rates import KINDS_OF_WORK, WAYS_TO_LAUNCH
from distsim.simulation.explain.text import table as text_table

MAX_TIMINGS = 5000
_DIGITS = 4
_TOO_FAR = 0.5
"""Mean error beyond which timings of one kind do not have a figure in common."""
_MOST_OF_LINK = 1.5
"""Of the bandwidth of a level's link: beyond what switches that add up save, figures are of another link."""
_NOTHING = "no timings"
_LIKE = {"linear": "linear_float8", "memory": "embedding"}
"""Kinds of work, and those whose share is known as one of their speed: products of 8 bits, rows that are
picked."""
_OF_BYTES = ("memory", "embedding")
"""Kinds of work whose share is one of the DRAM bandwidth."""


def read_timings(paths: Sequence[Path]) -> Readings:
    """Return the timings of files: tables (.csv), traces of torch (.json, .json.gz), else nccl-tests' output.

    Raises :class:`TimingsError` that names the file, the place in it and what is wrong, and for more than
    :data:`MAX_TIMINGS` timings.
    """
    found = Readings([], [])
    for place, path in enumerate(paths):
        if path.resolve() in [other.resolve() for other in paths[:place]]:
            raise TimingsError(f"{path} is given twice, and each timing counts once; give it once")
        names = [suffix.lower() for suffix in path.suffixes]
        if names[-1:] == [".json"] or names[-2:] == [".json", ".gz"]:
            timings, notes = read_torch_trace(path)
        elif names[-1:] == [".csv"]:
            timings, notes = read_timings_csv(path), []
        else:
            timings, notes = read_nccl_tests(path), []
        found.timings.extend(timings)
        found.notes.extend(notes)
    if len(found.timings) > MAX_TIMINGS:
        raise TimingsError(f"{len(found.timings)} timings are more than {MAX_TIMINGS}; give fewer sizes")
    return found


@dataclass(frozen=True, slots=True)
class MeasuredFigure:
    """A figure of the file that was fitted, and how well its timings agree with what was fitted to them.

    Errors are |predicted / measured - 1|; ``base_error`` is the mean one with the figures of the base.
    """

    name: str
    value: float
    unit: str
    base: str
    points: int
    mean_error: float
    worst_error: float
    worst: str
    base_error: float


@dataclass
class Calibration:
    """A cluster's table with measured figures, those figures, and why others are as in the base."""

    base: str
    table: Raw
    figures: list[MeasuredFigure] = field(default_factory=list[MeasuredFigure])
    kept: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def text(self) -> str:
        """The cluster as a TOML file that :func:`distsim.hardware.load_cluster` reads."""
        return cluster_text(self.table)

    def __str__(self) -> str:
        rows = [
            [
                figure.name,
                f"{figure.value:g} {figure.unit}".removesuffix(" 1"),
                figure.base,
                str(figure.points),
                _percent(figure.mean_error),
                _percent(figure.worst_error),
                _percent(figure.base_error),
            ]
            for figure in self.figures
        ]
        header = ["figure", "measured", self.base, "points", "mean error", "worst", "before"]
        untimed = [name for name, why in self.kept.items() if why == _NOTHING]
        worst = {figure.worst: None for figure in self.figures if figure.worst_error > 0.25}
        return "\n".join(
            [
                *text_table(header, rows),
                *(f"far off: {each}" for each in worst),
                *(f"as in {self.base}: {name}: {why}" for name, why in self.kept.items() if why != _NOTHING),
                *([f"as in {self.base}, for want of timings: {', '.join(untimed)}"] if untimed else []),
            ]
        )


def calibrate(
    timings: Sequence[Timing], base: str, settings: Sequence[str] = (), *, name: str, date: str
) -> Calibration:
    """Return the cluster that ``base`` is, with the figures that timings give; ``settings`` change the base.

    Fitted, by least squares on the logarithm of seconds, are: the share of the DRAM bandwidth of ``memory``
    and the time of a kernel beside its bytes; the share of the peak of products, batched products, and
    attention forward and backward, each by the shape rules of :mod:`distsim.cost.efficiency`; the time of a
    launch; bandwidth and latency of each level that collectives cross, what they take to begin where several
    sizes of groups, or all-reduces and others, were timed, and what segments take where many sizes of
    messages were. What timings do not support stays.

    Raises :class:`TimingsError` for timings that ``base`` cannot have, and for a base of several kinds of
    nodes; ``TopologyError`` for one that cannot be read.
    """
    table = complete_table(base, settings)
    if "nodes" in table or "slow" in table:
        raise TimingsError(f"{base} has [[nodes]] or [[slow]]: calibrate one kind of node, then add them")
    if not timings:
        raise TimingsError("there are no timings to fit to")
    # Kernels are timed on one device, not on the slowest of a node.
    topology = load_cluster(base, (*settings, "device.variation=0"))
    machine = Machine(topology.devices[0], topology.levels, int(table["devices_per_node"]))
    table |= {"name": name, "description": f"{table.get('description') or base}; measured where it says so"}
    fitting = _Fitting(machine, Calibration(base, table), date)
    fitting.kernels([timing for timing in timings if isinstance(timing.call, KernelCall)])
    fitting.launches([timing for timing in timings if isinstance(timing.call, LaunchCall)])
    fitting.levels([timing for timing in timings if isinstance(timing.call, CollectiveCall)])
    return fitting.made


@dataclass(frozen=True)
class _Quality:
    """How far a regression is from its timings, and what the file says of that."""

    points: int
    mean_error: float
    worst_error: float
    worst: str
    base_error: float
    source: str


class _Fitting:
    """Fits one group of timings after the other, and puts what comes out into the table."""

    def __init__(self, machine: Machine, made: Calibration, date: str) -> None:
        self.machine = machine
        self.made = made
        self.date = date
        self.device: Raw = made.table["device"]

    # --- groups of timings ------------------------------------------------------------------------------

    def kernels(self, timings: Sequence[Timing]) -> None:
        """Fit the shares of kernels: those of memory first, as they bound small products too."""
        by_kind: dict[str, list[Timing]] = {}
        for timing in timings:
            if isinstance(timing.call, KernelCall):
                by_kind.setdefault(timing.call.kind, []).append(timing)
        fitted: dict[str, float] = {}
        found: dict[str, tuple[float, _Quality]] = {}
        for kind in ("memory", *(kind for kind in KINDS_OF_WORK if kind != "memory")):
            own, figure = by_kind.get(kind), f"device.kernels.{kind}"
            if own is None:
                if kind not in ("embedding", "grouped"):  # no timing says which rows are picked
                    self.made.kept[figure] = _NOTHING
                continue
            values, quality = self._solved(self.machine.kernel_regression(kind, own, fitted))
            share = values.pop(figure, None)
            if share is not None and share > 1:
                what = "DRAM bandwidth" if figure == MEMORY else "peak"
                self.made.kept[figure] = f"{share:.3g} of the {what} is more than there is: give another base"
                continue
            fitted |= values
            if share is not None:
                fitted |= {figure: share}
                found[kind] = share, quality
            for name, seconds in values.items():
                self._put(self.device, name, seconds * 1e6, "us", quality)
        self._put_shares(found)

    def launches(self, timings: Sequence[Timing]) -> None:
        """Fit the time of a launch, by the way in which kernels are run.

        It is one host that runs them in all ways: what else the base knows of its time changes in proportion.
        """
        rates, factor = self.machine.device.rates, 1.0
        for mode in WAYS_TO_LAUNCH:
            own = [t for t in timings if isinstance(t.call, LaunchCall) and t.call.mode == mode]
            if not own:
                continue
            values, quality = self._solved(self.machine.launch_regression(mode, own))
            for name, seconds in values.items():
                factor = seconds / rates.launch(mode) if factor == 1.0 and rates.launch(mode) else factor
                self._put(self.device.setdefault("launches", {}), name, seconds * 1e6, "us", quality)
        timed = {t.call.mode for t in timings if isinstance(t.call, LaunchCall)}
        given: Raw = self.device.get("launches", {})
        for name in [name for name in (*WAYS_TO_LAUNCH, "tensor") if name not in timed]:
            self.made.kept[f"device.launches.{name}"] = _NOTHING
            if factor != 1.0 and name in given:
                self._scale(given[name], factor, "as launches that were measured")
                self.made.kept[f"device.launches.{name}"] = f"no timings; times {factor:.4g}, as others"

    def levels(self, timings: Sequence[Timing]) -> None:
        """Fit the levels from the smallest on, each by the collectives over groups that it joins."""
        by_level: dict[int, list[Timing]] = {}
        for timing in timings:
            if isinstance(timing.call, CollectiveCall):
                try:
                    by_level.setdefault(self.machine.level_of(timing.call), []).append(timing)
                except TimingsError as error:
                    raise TimingsError(f"{timing.file}, {timing.place}: {error}") from error
        for number, level in enumerate(self.machine.levels):
            if number not in by_level:
                self.made.kept[f"levels.{level.name}"] = _NOTHING
                continue
            regression = self.machine.level_regression(number, by_level[number])
            values, quality = self._solved(regression)
            raw: Raw = self.made.table["levels"][number]
            achieved = values.get(f"levels.{level.name}.bandwidth", level.link.achieved)
            latency = values.get(f"levels.{level.name}.latency", level.link.latency)
            told = f"levels.{level.name}.start" in [quantity.name for quantity in regression.quantities]
            start = values.get(f"levels.{level.name}.start", level.start) if told else None
            segment = values.get(f"levels.{level.name}.segment_time", level.segment_time)
            if achieved > _MOST_OF_LINK * level.link.bandwidth:
                self.made.kept |= dict.fromkeys(
                    values,
                    f"{achieved / 1e9:.4g} GB/s are {achieved / level.link.bandwidth:.3g} times the "
                    f"{level.link.bandwidth / 1e9:.4g} GB/s of the link: give another base, or look whether "
                    "times and sizes are in the units that they should be",
                )
                continue
            if values:
                self.machine = self.machine.with_link(number, achieved, latency, start, segment)
            for name, value in values.items():
                if not name.endswith("bandwidth"):
                    self._put(raw, name, value * 1e6, "us", quality)
                    if name.endswith("latency") and "start" in raw and level.link.latency and not told:
                        self._scale(
                            raw["start"], value / level.link.latency, "as the latency that was measured"
                        )
                    continue
                bandwidth = level.link.bandwidth
                if achieved > bandwidth:  # switches that add up what passes them send less than a ring does
                    bandwidth = achieved
                    self._put(raw, name, achieved / 1e9, "GB/s", quality)
                self._put(raw, f"levels.{level.name}.efficiency", achieved / bandwidth, "1", quality)

    # --- one group --------------------------------------------------------------------------------------

    def _solved(self, regression: Regression) -> tuple[dict[str, float], _Quality]:
        """Return the values of what timings support, rounded as they are written, and how good they are."""
        solution = solve(regression)
        self.made.kept |= solution.kept
        values = {name: _rounded(value) for name, value in solution.values.items()}
        predicted = regression.predict([values.get(q.name, q.base) for q in regression.quantities])
        errors = np.abs(predicted / regression.measured - 1)
        place = int(np.argmax(errors))
        worst, count, mean = regression.timings[place], len(regression.timings), float(errors.mean())
        if values and mean > _TOO_FAR:
            why = f"its {count} timings contradict each other: mean error {_percent(mean)}"
            self.made.kept |= dict.fromkeys(values, why)
            values = {}
        files = list(dict.fromkeys(timing.file for timing in regression.timings))
        said = ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
        return values, _Quality(
            count,
            mean,
            float(errors[place]),
            f"{worst.file}, {worst.place}: {worst.call}: measured {worst.seconds:.4g} s, "
            f"predicted {predicted[place]:.4g} s",
            float(np.abs(regression.base_seconds / regression.measured - 1).mean()),
            f"measured: {said}, {count} point{'s' * (count > 1)}, mean error {_percent(mean)}, {self.date}",
        )

    def _put_shares(self, found: Mapping[str, tuple[float, _Quality]]) -> None:
        """Put shares of the peaks into the table: as those of what is reached at best, which may be more.

        What was measured was so under the machine's limit of power, and with its own kernel of attention: the
        table has neither a limit then nor other kernels.
        """
        for best, kinds in (
            ("bytes_efficiency", [kind for kind in found if kind in _OF_BYTES]),
            ("flops_efficiency", [kind for kind in found if kind not in _OF_BYTES]),
        ):
            if not kinds:
                continue
            before = reached = getattr(self.machine.device, best)
            most = max(kinds, key=lambda kind: found[kind][0])
            known = {kind: figure["value"] for kind, figure in self.device.get("kernels", {}).items()}
            limited = best == "flops_efficiency" and self.device.pop("power_limit", None) is not None
            if found[most][0] > before or limited:
                reached = max(found[most][0], before)
                self._put(self.device, f"device.{best}", reached, "1", found[most][1])
                self._rescale(before / reached, best == "bytes_efficiency", found)
            for kind in kinds:
                share, quality = found[kind]
                name = f"device.kernels.{kind}"
                self._put(self.device.setdefault("kernels", {}), name, share / reached, "1", quality)
                like = _LIKE.get(kind, "")
                if kind in known and like in known and like not in found:
                    why = f"as {kind}, of whose speed it is a share, was measured"
                    self._scale(self.device["kernels"][like], share / (known[kind] * before), why)

        if "attention" in found or "attention_grad" in found:
            self.device.pop("attention", None)

    def _rescale(self, factor: float, of_bytes: bool, found: Mapping[str, object]) -> None:
        """Keep what kernels that were not measured reach, where what is reached at best has changed."""
        for kind, figure in self.device.get("kernels", {}).items():
            if kind not in found and (kind in _OF_BYTES) == of_bytes:
                self._scale(figure, factor, "as more is reached at best")

    @staticmethod
    def _scale(figure: Raw, factor: float, why: str) -> None:
        """Multiply a figure of the table, and say so."""
        figure["value"] = _rounded(figure["value"] * factor)
        figure["source"] += f"; times {factor:.4g}, {why}"

    def _put(self, table: Raw, name: str, value: float, unit: str, quality: _Quality) -> None:
        """Put a figure into a table of the file, by the last part of its name."""
        last, value = name.rpartition(".")[2], _rounded(value)
        before: Raw | None = table.get(last)
        base = "-" if before is None else f"{before['value']:g} {before['unit']}".removesuffix(" 1")
        table[last] = {"value": value, "unit": unit, "source": quality.source}
        self.made.figures.append(
            MeasuredFigure(
                name,
                value,
                unit,
                base,
                quality.points,
                quality.mean_error,
                quality.worst_error,
                quality.worst,
                quality.base_error,
            )
        )


def _rounded(value: float) -> float:
    """Return a number of so many digits as are written."""
    return float(f"{value:.{_DIGITS}g}")


def _percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")
