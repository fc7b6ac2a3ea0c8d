"""Fit what kernels and hosts reach to published training steps, and write it into the presets.

``python experiments/calibrate.py calibrate.csv`` lays out each row once (:mod:`distsim.truth`), then looks
for the figures of :data:`FIGURES` with which simulated and measured seconds agree: least squares on the
logarithms, each figure held near its prior (Gauss-Newton on differences; of a source at most
:data:`MOST_ROWS` rows are used, evenly spread over its table, and count as :data:`ROWS_A_SOURCE`; outliers
count for less). It prints each figure with its prior and the interval that the data leave (90 %), the errors
by source, and those of each source when the fit has not seen it; writes both as CSV and a picture; and with
``--write`` puts the figures into ``distsim/hardware/presets``. No figure knows who published a row. Of the
rows of ``--judge CSV``, which nothing is fitted to, it prints the errors too, the rows of their source left
out of the fit.
"""

from __future__ import annotations

import argparse
import csv
import math
import multiprocessing
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import numpy.typing as npt
from calibrated_figures import FAMILIES, FIGURES, FittedFigures, rates_of, write_presets
from common import RESULTS, panels, save

from distsim.cost import CostModel
from distsim.cost.cost_model import Group
from distsim.errors import DistsimError
from distsim.ir import Device
from distsim.ops import Signature
from distsim.program.program import Program
from distsim.simulation import Simulator
from distsim.simulation.explain.interval import deviations
from distsim.transforms.kernels.policies import kernels_named
from distsim.truth import Row, case_of, read_rows
from distsim.truth.case import Case
from distsim.truth.prediction import program_of
from distsim.truth.score import measured, scores, source_of

Floats = npt.NDArray[np.float64]
MOST_ROWS, ROWS_A_SOURCE = 72, 12
SPREAD = 0.10
"""What a row is expected to differ by: about what sources differ by on the same machine."""
QUANTILE = 1.645
"""How many standard deviations 90 % intervals reach to either side."""
STEPS = 4
"""Steps of Gauss-Newton: derivatives are taken anew at every second one."""


class TrialCosts(CostModel):
    """The costs on devices with other figures."""

    def __init__(self, case: Case, values: Mapping[str, float]) -> None:
        super().__init__(case.topology(), kernels=kernels_named(case.kernels).way)
        self._values, self._family = values, FAMILIES[case.cluster.name.partition(":")[0]]
        self._devices: dict[Device, Device] = {}

    def seconds(self, signature: Signature, where: Group) -> float:
        """Seconds of a compute op on the devices as they are tried."""
        return super().seconds(signature, tuple([self._device(device) for device in where]))

    def launch_seconds(self, signature: Signature, device: Device) -> float:
        """Seconds of the host on the device as it is tried."""
        return super().launch_seconds(signature, self._device(device))

    def slowdown_seconds(self, signature: Signature, group: Group, device: Device) -> float:
        """Seconds that computation loses on the device as it is tried."""
        return super().slowdown_seconds(signature, group, self._device(device))

    def _device(self, device: Device) -> Device:
        found = self._devices.get(device)
        if found is None:
            rates = rates_of(self._values, self._family, device)
            found = self._devices[device] = replace(device, rates=rates)
        return found


# --- simulated rows ---------------------------------------------------------------------------------------

Laid = tuple[Case, Program]


def lay_out(row: Row) -> Laid | str:
    """Return a row laid out, or why it cannot be."""
    try:
        case = case_of(row)
        if case.cluster.name.partition(":")[0] not in FAMILIES:
            return f"no figures are fitted for {case.cluster}"
        return case, program_of(case, CostModel(case.topology(), kernels=kernels_named(case.kernels).way))
    except DistsimError as error:
        return str(error)


def serve(rows: Sequence[Row], end: Connection) -> None:
    """Lay rows out, tell what is assumed of them, then answer figures with seconds until there are none."""
    warnings.simplefilter("ignore")
    laid = [lay_out(row) for row in rows]
    end.send([each if isinstance(each, str) else "" for each in laid])
    end.send([assumed_variance(each) for each in laid if not isinstance(each, str)])
    while (values := end.recv()) is not None:
        end.send([seconds_of(each, values) for each in laid if not isinstance(each, str)])


def assumed_variance(laid: Laid) -> float:
    """Return the variance of the logarithm of a step that kinds of work add to which nothing is fitted."""
    case, program = laid
    costs = CostModel(case.topology(), kernels=kernels_named(case.kernels).way)
    parts = Simulator(costs).simulate(program).breakdown("kind")
    return sum([each**2 for each in deviations(parts, {}).values()])


def seconds_of(laid: Laid, values: Mapping[str, float]) -> float:
    """Return the seconds of a step with these figures."""
    case, program = laid
    return Simulator(TrialCosts(case, values)).simulate(program).step_period


class Rows:
    """Rows, laid out over processes: those that can be, what was measured, and what figures predict."""

    def __init__(self, rows: Sequence[Row], workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        order = sorted(rows, key=lambda row: [row.get(column, "") for column in ("model", "batch")])
        size = -(-len(order) // workers)
        parts = [order[first : first + size] for first in range(0, len(order), size)]
        self._ends: list[Connection] = []
        for part in parts:
            here, there = context.Pipe()
            context.Process(target=serve, args=(part, there), daemon=True).start()
            self._ends.append(here)
        missing = [why for end in self._ends for why in end.recv()]
        self.left_out = [(row["id"], why) for row, why in zip(order, missing, strict=True) if why]
        self.rows = [row for row, why in zip(order, missing, strict=True) if not why]
        self.assumed = np.array([each for end in self._ends for each in end.recv()])
        self.measured = np.array([measured(row, "iter_time_s") or math.nan for row in self.rows])

    def predict(self, logs: Floats) -> Floats:
        """Return the seconds of each row for the logarithms of all figures over their priors."""
        values = figures_of(logs)
        for end in self._ends:
            end.send(values)
        return np.array([seconds for end in self._ends for seconds in end.recv()])


def figures_of(logs: Floats) -> dict[str, float]:
    """Return the figures whose logarithms over the priors these are."""
    return {name: each.prior * math.exp(log) for (name, each), log in zip(FIGURES.items(), logs, strict=True)}


# --- the fit ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """The solution, the residuals there (logarithms of predicted over measured) and their derivatives."""

    logs: Floats
    residuals: Floats
    slopes: Floats
    weights: Floats

    def solve(self, chosen: npt.NDArray[np.bool_]) -> tuple[Floats, Floats]:
        """Return the change of the solution for some rows only, and the covariance of the solution."""
        weights = self.weights[chosen, None] / np.sqrt(
            1 + (self.residuals[chosen, None] * self.weights[chosen, None] / 2) ** 2
        )
        spreads = np.array([each.spread for each in FIGURES.values()])
        matrix = np.vstack([self.slopes[chosen] * weights, np.diag(1 / spreads)])
        right = np.concatenate([self.residuals[chosen] * weights[:, 0], self.logs / spreads])
        covariance = np.linalg.inv(matrix.T @ matrix)
        return -covariance @ (matrix.T @ right), covariance


def fit(rows: Rows, say: Callable[[str], None]) -> Fit:
    """Return the figures that fit best."""
    weights = np.sqrt(row_weights(rows)) / SPREAD
    logs, every = np.zeros(len(FIGURES)), np.ones(len(rows.rows), np.bool_)
    slopes = np.zeros((len(rows.rows), len(logs)))
    for step in range(STEPS + 1):
        residuals = np.log(rows.predict(logs) / rows.measured)
        say(f"step {step}: mean error {np.abs(np.expm1(residuals)).mean():.1%}")
        if step % 2 == 0:
            slopes = slopes_of(rows, logs, residuals)
        if step < STEPS:
            logs = logs + Fit(logs, residuals, slopes, weights).solve(every)[0]
    return Fit(logs, residuals, slopes, weights)


def slope(rows: Rows, logs: Floats, place: int, residuals: Floats, width: float = -0.05) -> Floats:
    """Return the derivative of the residuals by one figure: towards less, as no share is over 1."""
    moved = logs.copy()
    moved[place] += width
    return (np.log(rows.predict(moved) / rows.measured) - residuals) / width


@dataclass(frozen=True)
class Unseen:
    """What rows of other sources predict of rows: seconds, and the variance of their logarithm.

    ``variances`` are from what those rows leave open of the figures, and from what is assumed.
    """

    seconds: Floats
    variances: Floats

    def text(self, measured: Floats, spread: float) -> str:
        """Return how many rows lie within their intervals, and how wide these are."""
        reach = QUANTILE * np.sqrt(self.variances + spread**2)
        inside = (np.abs(np.log(measured / self.seconds)) <= reach).mean()
        half = np.median(np.expm1(reach))
        return (
            f"{inside:.0%} of {len(reach)} rows lie in their 90 % intervals, half width {half:.1%} (median)"
        )


def unseen_of(rows: Rows, found: Fit, judged: Rows, residuals: Floats, slopes: Floats) -> Unseen:
    """Return what is predicted of each judged row by rows of other sources, to first order.

    ``residuals`` and ``slopes`` are those of the judged rows at the solution.
    """
    fitted = np.array([source_of(row) for row in rows.rows])
    sources = np.array([source_of(row) for row in judged.rows])
    seconds, variances = np.empty(len(sources)), np.empty(len(sources))
    for source in dict.fromkeys(sources.tolist()):
        own = sources == source
        change, covariance = found.solve(fitted != source)
        seconds[own] = np.exp(residuals[own] + slopes[own] @ change) * judged.measured[own]
        variances[own] = np.einsum("ij,jk,ik->i", slopes[own], covariance, slopes[own]) + judged.assumed[own]
    return Unseen(seconds, variances)


def said_of(unseen: Unseen, rows: Rows, known: Floats, slopes: Floats) -> Unseen:
    """Return the same seconds with the variances that the presets say, whatever was left out."""
    variances = np.einsum("ij,jk,ik->i", slopes, known, slopes) + rows.assumed
    return Unseen(unseen.seconds, variances)


def widened(rows: Rows, found: Fit, covariance: Floats) -> Floats:
    """Return the covariance of the figures with what sources disagree by where that is more.

    A figure that one source sets, as what its host takes for a launch, is as sure as that source has rows,
    and no surer of other machines than what is left without it: the jackknife (Efron and Stein 1981) over
    sources says how far it moves.
    """
    sources = np.array([source_of(row) for row in rows.rows])
    names = dict.fromkeys(sources.tolist())
    moved = np.array([found.solve(sources != name)[0] for name in names])
    spread = (len(names) - 1) / len(names) * ((moved - moved.mean(axis=0)) ** 2).sum(axis=0)
    scale = np.sqrt(np.maximum(spread / np.diag(covariance), 1.0))
    return covariance * np.outer(scale, scale)


def spread_of(rows: Rows, found: Fit, covariance: Floats) -> float:
    """Return by how much rows differ from what is fitted to them: the standard deviation of the logarithm.

    Sources count as in the fit, less as many rows as there are figures that these set in place of the priors.
    """
    weights = row_weights(rows)
    priors = np.array([each.spread for each in FIGURES.values()])
    set_by_rows = (1 - np.diag(covariance) / priors**2).sum()
    return math.sqrt((weights * found.residuals**2).sum() / (weights.sum() - set_by_rows))


def row_weights(rows: Rows) -> Floats:
    """Return how much each row counts: those of a source together as :data:`ROWS_A_SOURCE` at most."""
    counts = Counter(source_of(row) for row in rows.rows)
    return np.array([1 / max(1.0, counts[source_of(row)] / ROWS_A_SOURCE) for row in rows.rows])


def slopes_of(rows: Rows, logs: Floats, residuals: Floats) -> Floats:
    """Return the derivatives of the residuals by all figures."""
    return np.stack([slope(rows, logs, place, residuals) for place in range(len(logs))], axis=1)


# --- results ----------------------------------------------------------------------------------------------


def main() -> int:
    """Fit, print, write; the exit status is 2 if the table cannot be read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tables", type=Path, nargs="+", metavar="CSV")
    parser.add_argument(
        "--judge", type=Path, nargs="+", default=[], metavar="CSV", help="what is not fitted to"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for what is written")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--write", action="store_true", help="put the figures into the presets")
    given = parser.parse_args()
    try:
        table = thinned([row for row in read_rows(given.tables) if measured(row, "iter_time_s")])
        judge = [row for row in read_rows(given.judge) if measured(row, "iter_time_s")] if given.judge else []
    except DistsimError as error:
        print(error, file=sys.stderr)
        return 2
    rows = Rows(table, max(given.workers, 1))
    print(f"{len(rows.rows)} of {len(table)} rows are laid out", file=sys.stderr)
    found = fit(rows, lambda text: print(text, file=sys.stderr))
    values, (_, covariance) = figures_of(found.logs), found.solve(np.ones(len(rows.rows), np.bool_))
    widths = np.exp(QUANTILE * np.sqrt(np.diag(covariance)))
    figures = [
        {
            "figure": name,
            "value": f"{value:.4g}",
            "low": f"{value / width:.4g}",
            "high": f"{value * width:.4g}",
        }
        | {"prior": f"{FIGURES[name].prior:g}", "about": FIGURES[name].source}
        for (name, value), width in zip(values.items(), widths, strict=True)
    ]
    for each in figures:
        print(
            f"{each['figure']:12} {each['value']:>10}  ({each['low']} to {each['high']})  "
            f"prior {each['prior']}: {each['about']}"
        )
    fitted = np.exp(found.residuals) * rows.measured
    unseen = unseen_of(rows, found, rows, found.residuals, found.slopes)
    spread, known = spread_of(rows, found, covariance), widened(rows, found, covariance)
    for name, deviation in zip(values, np.sqrt(np.diag(known)), strict=True):
        print(f"{name:12} deviates by {deviation:.3f}, sources included")
    print_errors(rows, fitted, "fitted")
    print_errors(rows, unseen.seconds, "with the source left out")
    print(f"spread {spread:.4f} beside what the figures leave open: {unseen.text(rows.measured, spread)}")
    said = said_of(unseen, rows, known, found.slopes)
    print(f"by what the presets say: {said.text(rows.measured, spread)}")
    if judge:
        judged = Rows(judge, max(given.workers, 1))
        print(f"\n{len(judged.rows)} of {len(judge)} judged rows are laid out")
        for row_id, why in judged.left_out:
            print(f"left out: {row_id}: {why}")
        residuals = np.log(judged.predict(found.logs) / judged.measured)
        slopes = slopes_of(judged, found.logs, residuals)
        others = unseen_of(rows, found, judged, residuals, slopes)
        print_errors(
            judged, others.seconds, f"of {', '.join(map(str, given.judge))}, with the source left out"
        )
        print(others.text(judged.measured, spread))
        print(
            f"by what the presets say: {said_of(others, judged, known, slopes).text(judged.measured, spread)}"
        )
    given.out.mkdir(parents=True, exist_ok=True)
    write_table(given.out / "calibration.csv", figures)
    pairs = zip(rows.rows, rows.measured.tolist(), fitted.tolist(), unseen.seconds.tolist(), strict=True)
    columns = ("measured", "fitted", "left_out")
    write_table(
        given.out / "calibration_rows.csv",
        [
            {"id": row["id"]} | dict(zip(columns, [f"{n:.6g}" for n in each], strict=True))
            for row, *each in pairs
        ],
    )
    draw(rows, fitted, given.out / "calibration.png")
    for row_id, why in rows.left_out:
        print(f"left out: {row_id}: {why}")
    if given.write:
        write_presets(FittedFigures(values, known, spread, ", ".join(path.name for path in given.tables)))
    return 0


def thinned(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with at most :data:`MOST_ROWS` of a source, evenly spread."""
    of_source: dict[str, list[Row]] = {}
    for row in rows:
        of_source.setdefault(source_of(row), []).append(row)
    kept = [own[:: -(-len(own) // MOST_ROWS)] for own in of_source.values()]
    return [row for own in kept for row in own]


def print_errors(rows: Rows, predicted: Floats, how: str) -> None:
    """Print the errors by source."""
    pairs = list(zip(map(source_of, rows.rows), predicted.tolist(), rows.measured.tolist(), strict=True))
    print(f"\n{how}:")
    for source, score in scores(pairs).items():
        print(f"  {source:56.56} {len(score.errors):4}  {score}")
    (score,) = scores([("", *rest) for _, *rest in pairs]).values()
    print(f"  {'all':56} {len(score.errors):4}  {score}")


def write_table(path: Path, lines: Sequence[Mapping[str, str]]) -> None:
    """Write records of the same fields as CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    print(f"table: {path}")


def draw(rows: Rows, predicted: Floats, path: Path) -> None:
    """Draw fitted over measured seconds, by source."""
    figure, (axis,) = panels(1, 7.5, 5)
    sources = [source_of(row) for row in rows.rows]
    for place, source in enumerate(dict.fromkeys(sources)):
        chosen = [i for i, each in enumerate(sources) if each == source]
        axis.scatter(
            rows.measured[chosen],
            (predicted / rows.measured)[chosen],
            s=16,
            alpha=0.7,
            label=source[:40],
            color=f"C{place % 10}",
        )
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set(xscale="log", xlabel="measured seconds of a step", ylabel="fitted / measured")
    axis.legend(fontsize=6)
    save(figure, path)


if __name__ == "__main__":
    sys.exit(main())
