"""Fit what kernels and hosts reach to published training steps, and write it into the presets.

``python experiments/calibrate.py calibrate.csv`` lays out each row once (:mod:`distsim.truth`), then looks
for the figures of :data:`FIGURES` with which simulated and measured seconds agree: least squares on the
logarithms, each figure held near its prior (Gauss-Newton on differences; of a source at most
:data:`MOST_ROWS` rows are used, evenly spread over its table, and count as :data:`ROWS_A_SOURCE`; outliers
count for less). It prints each figure with its prior and the interval that the data leave (90 %), the errors
by source, and those of each source when the fit has not seen it; writes both as CSV and a picture; and with
``--write`` puts the figures into ``distsim/hardware/presets``. ``--begin`` an earlier ``calibration.csv``
finds them in fewer steps. No figure knows who published a row. Of the
rows of ``--judge CSV``, which nothing is fitted to, it prints the errors too, the rows of their source left
out of the fit.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from calibrated_figures import FIGURES, FittedFigures, write_presets
from calibrated_rows import Floats, Rows, figures_of, row_weights
from common import RESULTS, panels, save

from distsim.errors import DistsimError
from distsim.truth import Row, read_rows
from distsim.truth.score import measured, scores, source_of

MOST_ROWS = 72
"""Of a source, of those that a table has."""
SPREAD = 0.10
"""What a row is expected to differ by: about what sources differ by on the same machine."""
ONE_CLUSTER = dict.fromkeys(
    (
        "nanotron Ultra-Scale sweep",
        "nanotron TP scaling (scripts/scaling_benchmarks.py comments)",
        "nanotron bench_cluster logs",
    ),
    "nanotron Ultra-Scale best configs",
)
"""Sources of the same publisher and software, and of the same cluster or one that they do not name: they are
left out together."""
LEVEL = 0.9
"""How many measured steps an interval is to hold."""
QUANTILE = 1.645
"""How many standard deviations such intervals reach to either side."""
STEPS = 8
"""Steps of Gauss-Newton at most: derivatives are taken anew at every second one."""
STILL = 0.05
"""By how much of its standard deviation a figure may change in the last step; else it is said."""


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


def fit(rows: Rows, say: Callable[[str], None], begin: Mapping[str, float]) -> Fit:
    """Return the figures that fit best; ``begin`` are those where the search begins, if not priors."""
    weights = np.sqrt(row_weights(rows)) / SPREAD
    logs = np.array([math.log(begin.get(name, each.prior) / each.prior) for name, each in FIGURES.items()])
    every = np.ones(len(rows.rows), np.bool_)
    slopes, residuals = np.zeros((len(rows.rows), len(logs))), np.zeros(len(rows.rows))
    before = np.zeros(len(logs))
    most_logs = np.array([math.log(each.most / each.prior) for each in FIGURES.values()])
    logs = np.minimum(logs, most_logs)
    for step in range(STEPS + 1):
        residuals = np.log(rows.predict(logs) / rows.measured)
        say(f"step {step}: mean error {np.abs(np.expm1(residuals)).mean():.1%}")
        if step % 2 == 0:
            slopes = slopes_of(rows, logs, residuals)
        change, covariance = Fit(logs, residuals, slopes, weights).solve(every)
        change = np.minimum(change, most_logs - logs)
        moves = np.abs(change) / np.sqrt(np.diag(covariance))
        most = int(np.argmax(moves))
        say(f"  {[*FIGURES][most]} would move most: {change[most]:+.2%}, {moves[most]:.2f} of its deviation")
        if step % 2 == 0 and moves[most] < STILL:
            break
        if step == STEPS:
            say(f"the fit moves still after {STEPS} steps")
        else:
            before = np.where(change * before < 0, change / 2, change)  # what went to and fro goes half way
            logs = logs + before
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
    fitted = np.array([cluster_of(row) for row in rows.rows])
    sources = np.array([cluster_of(row) for row in judged.rows])
    seconds, variances = np.empty(len(sources)), np.empty(len(sources))
    for source in dict.fromkeys(sources.tolist()):
        own = sources == source
        change, covariance = found.solve(fitted != source)
        seconds[own] = np.exp(residuals[own] + slopes[own] @ change) * judged.measured[own]
        variances[own] = variances_of(judged, slopes, covariance)[own]
    return Unseen(seconds, variances)


def cluster_of(row: Row) -> str:
    """Return whose row it is, the same for sources of :data:`ONE_CLUSTER`."""
    return ONE_CLUSTER.get(source_of(row), source_of(row))


def variances_of(rows: Rows, slopes: Floats, covariance: Floats) -> Floats:
    """Return the variance of the logarithm of each row that a covariance of the figures leaves open."""
    return np.einsum("ij,jk,ik->i", slopes, covariance, slopes) + rows.assumed


def widened(rows: Rows, found: Fit, covariance: Floats) -> Floats:
    """Return the covariance of the figures with what sources disagree by where that is more.

    A figure that one source sets, as what its host takes for a launch, is as sure as that source has rows,
    and no surer of other machines than what is left without it: the jackknife (Efron and Stein 1981) over
    sources says how far it moves.
    """
    sources = np.array([cluster_of(row) for row in rows.rows])
    names = dict.fromkeys(sources.tolist())
    moved = np.array([found.solve(sources != name)[0] for name in names])
    spread = (len(names) - 1) / len(names) * ((moved - moved.mean(axis=0)) ** 2).sum(axis=0)
    prior = np.array([each.spread for each in FIGURES.values()]) ** 2  # not less sure than without any row
    scale = np.sqrt(np.maximum(np.minimum(spread, prior) / np.diag(covariance), 1.0))
    return covariance * np.outer(scale, scale)


def spread_of(rows: Rows, found: Fit, covariance: Floats) -> float:
    """Return by how much steps differ from what other sources' rows say of them, beside the ``covariance`` of
    the figures: the standard deviation of the logarithm.

    With it 90 % of the rows, a source counted as in the fit, lie in the intervals that the presets say (their
    ``covariance`` is of all sources), around what is predicted without the rows of their cluster: whom a
    prediction is made for is of none of them either. As conformal prediction does for groups that were not
    seen (Dunn, Wasserman and Ramdas 2022), but of nine sources, two of which differ by far the most, and to
    first order: a measure, and no guarantee.
    """
    unseen = unseen_of(rows, found, rows, found.residuals, found.slopes)
    reached = np.log(rows.measured / unseen.seconds) / QUANTILE
    needed = np.sqrt(np.maximum(reached**2 - variances_of(rows, found.slopes, covariance), 0.0))
    order = np.argsort(needed)
    counted = np.cumsum(row_weights(rows)[order])
    return float(needed[order][np.searchsorted(counted, LEVEL * counted[-1])])


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
    parser.add_argument(
        "--begin", type=Path, metavar="CSV", help="begin at the figures of an earlier calibration.csv"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--write", action="store_true", help="put the figures into the presets")
    given = parser.parse_args()
    try:
        table = thinned([row for row in read_rows(given.tables) if measured(row, "iter_time_s")])
        judge = [row for row in read_rows(given.judge) if measured(row, "iter_time_s")] if given.judge else []
        begin = figures_in(given.begin) if given.begin else {}
    except (DistsimError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    with Rows(table, max(given.workers, 1)) as rows:
        print(f"{len(rows.rows)} of {len(table)} rows are laid out", file=sys.stderr)
        fit_and_write(rows, judge, begin, given)
    return 0


def fit_and_write(
    rows: Rows, judge: Sequence[Row], begin: Mapping[str, float], given: argparse.Namespace
) -> None:
    """Fit, print and write what the command line asks for."""
    found = fit(rows, lambda text: print(text, file=sys.stderr), begin)
    _, covariance = found.solve(np.ones(len(rows.rows), np.bool_))
    figures = print_figures(found, covariance)
    values, wide = figures_of(found.logs), widened(rows, found, covariance)
    tables = ", ".join(path.name for path in given.tables)
    known = FittedFigures(values, wide, spread_of(rows, found, wide), tables)
    for name, deviation in zip(known.values, np.sqrt(np.diag(known.covariance)), strict=True):
        print(f"{name:12} deviates by {deviation:.3f}, sources included")
    fitted = np.exp(found.residuals) * rows.measured
    print_errors(rows, fitted, "fitted")
    print(f"spread {known.spread:.4f} beside what the figures leave open")
    unseen = print_unseen(rows, found, known, rows, "with the source left out")
    if judge:
        with Rows(judge, max(given.workers, 1)) as judged:
            print(f"\n{len(judged.rows)} of {len(judge)} judged rows are laid out")
            name = ", ".join(map(str, given.judge))
            print_unseen(rows, found, known, judged, f"of {name}, with the source left out")
    given.out.mkdir(parents=True, exist_ok=True)
    write_table(given.out / "calibration.csv", figures)
    write_rows(given.out / "calibration_rows.csv", rows, fitted, unseen)
    draw(rows, fitted, given.out / "calibration.png")
    for row_id, why in rows.left_out:
        print(f"left out: {row_id}: {why}")
    if given.write:
        write_presets(known)


def figures_in(path: Path) -> dict[str, float]:
    """Return the figures of a table that was written.

    Raises :class:`DistsimError` for another table, and for a figure that is not positive.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            found = {row["figure"]: float(row["value"]) for row in csv.DictReader(file)}
    except (KeyError, TypeError, ValueError) as error:
        raise DistsimError(f"{path}: not figure,value,... as calibration.csv is: {error}") from error
    if wrong := [name for name, value in found.items() if not 0 < value < math.inf]:
        raise DistsimError(f"{path}: {wrong[0]}={found[wrong[0]]:g} must be positive and finite")
    return found


def print_figures(found: Fit, covariance: Floats) -> list[dict[str, str]]:
    """Print each figure with its interval (90 %) and its prior; return them as records."""
    widths = np.exp(QUANTILE * np.sqrt(np.diag(covariance)))
    figures = [
        {
            **{"figure": name, "value": f"{value:.4g}"},
            **{"low": f"{value / width:.4g}", "high": f"{value * width:.4g}"},
            **{"prior": f"{FIGURES[name].prior:g}", "about": FIGURES[name].source},
        }
        for (name, value), width in zip(figures_of(found.logs).items(), widths, strict=True)
    ]
    for each in figures:
        print(
            f"{each['figure']:12} {each['value']:>10}  ({each['low']} to {each['high']})  "
            f"prior {each['prior']}: {each['about']}"
        )
    return figures


def print_unseen(rows: Rows, found: Fit, known: FittedFigures, judged: Rows, how: str) -> Floats:
    """Print the errors of rows whose source is left out, and how many lie within intervals; return seconds.

    The intervals are those of the fit without that source, and those that the presets say.
    """
    residuals, slopes = found.residuals, found.slopes
    if judged is not rows:
        residuals = np.log(judged.predict(found.logs) / judged.measured)
        slopes = slopes_of(judged, found.logs, residuals)
        for row_id, why in judged.left_out:
            print(f"left out: {row_id}: {why}")
    unseen = unseen_of(rows, found, judged, residuals, slopes)
    print_errors(judged, unseen.seconds, how)
    print(f"by the fit without it: {unseen.text(judged.measured, known.spread)}")
    said = Unseen(unseen.seconds, variances_of(judged, slopes, known.covariance))
    print(f"by what the presets say: {said.text(judged.measured, known.spread)}")
    return unseen.seconds


def write_rows(path: Path, rows: Rows, fitted: Floats, unseen: Floats) -> None:
    """Write the seconds of each row: measured, fitted, and with its source left out."""
    columns = {"measured": rows.measured, "fitted": fitted, "left_out": unseen}
    write_table(
        path,
        [
            {"id": row["id"]} | {name: f"{seconds[place]:.6g}" for name, seconds in columns.items()}
            for place, row in enumerate(rows.rows)
        ],
    )


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
