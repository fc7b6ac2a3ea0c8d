"""The command ``distsim validate``: published training steps -> predictions, and how true they are."""

from __future__ import annotations

import argparse
import csv
import io
import os
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from distsim.console.terminal import complain, say
from distsim.errors import DistsimError
from distsim.report.output import check_format, check_target, replacing
from distsim.truth.accuracy import Accuracy
from distsim.truth.by_device import errors_by_device
from distsim.truth.evaluation import Outcome, evaluated
from distsim.truth.picture import plot_accuracy
from distsim.truth.row import Row, published_rows, read_rows
from distsim.truth.score import measured

COLUMNS = ("id", "pred_iter_s", "low", "high", "pred_mem_gb", "pred_oom")

FAILED = 1
"""Exit status where distsim failed on a row."""

LONGEST_LIMIT = 1e6


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "tables",
        type=Path,
        nargs="*",
        metavar="CSV",
        help="tables of measured steps, a row each (by default the published ones that come with distsim)",
    )
    parser.add_argument(
        *("--csv", "--out"),
        dest="out",
        type=Path,
        metavar="CSV",
        help=f"write the predictions ({','.join(COLUMNS)}): a line when a row is done, and at last "
        "all in the order of the rows",
    )
    parser.add_argument(
        "--regret",
        action="store_true",
        help="of each group of rows of one source, model, cluster and batch, name the layout predicted "
        "to be fastest, and by how much it is slower than the one that was measured to be",
    )
    parser.add_argument(
        "--errors",
        type=Path,
        metavar="CSV",
        help="write the errors by device and source, with the date, as pages have them",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw predicted against measured seconds")
    cores = os.cpu_count() or 1
    parser.add_argument(
        "--workers", type=int, default=cores, metavar="N", help=f"processes that share the rows ({cores})"
    )
    parser.add_argument(
        *("--time-limit", "--limit"),
        dest="limit",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="for one row (default 300)",
    )


def run(options: argparse.Namespace) -> int:
    """Predict each row, write and draw what comes out, and print how true it is."""
    if options.workers < 1:
        raise DistsimError(f"--workers {options.workers} must be at least 1")
    if not 0 < options.limit < LONGEST_LIMIT:
        raise DistsimError(
            f"--time-limit {options.limit:g} must be more than 0 and less than {LONGEST_LIMIT:g} seconds"
        )
    for path in filter(None, (options.out, options.plot, options.errors)):
        check_target(path)
    if options.plot:
        check_format(options.plot, "predicted against measured")
    rows = _rows(options.tables)
    start = time.perf_counter()
    outcomes = _outcomes(rows, options)
    accuracy = Accuracy(rows, outcomes)
    say(accuracy)
    if options.tables and accuracy.comparisons:
        say(f"\n{accuracy.ratios()}")
    if options.regret:
        say(f"\n{accuracy.recommendations()}")
    done = [outcome.took for outcome in outcomes if outcome.predicted]
    if done:
        say(
            f"\n{len(done)} predictions in {time.perf_counter() - start:.0f} s; a row takes "
            f"{sum(done) / len(done):.2f} s, at most {max(done):.1f} s"
        )
    if options.out:
        say(f"table: {options.out}")
    if options.errors:
        with replacing(options.errors) as file:
            file.write(errors_by_device(accuracy, date.today()).encode())
        say(f"errors: {options.errors}")
    if options.plot and accuracy.comparisons:
        plot_accuracy(accuracy.comparisons, options.plot)
        say(f"picture: {options.plot}")
    elif options.plot:
        complain(f"no picture {options.plot}: no row was both predicted and measured")
    return FAILED if any(outcome.failed for outcome in outcomes) else 0


def _rows(tables: Sequence[Path]) -> list[dict[str, str]]:
    """Return the rows of tables, or those that come with distsim."""
    rows = read_rows(tables) if tables else published_rows()
    if not rows:
        raise DistsimError(f"{', '.join(map(str, tables))}: no rows; give a table with a measured step a row")
    return rows


def _outcomes(rows: Sequence[Row], options: argparse.Namespace) -> list[Outcome]:
    """Return what becomes of the rows, in their order; say so as they come, and write them where asked."""
    found: dict[int, Outcome] = {}
    if options.out:
        options.out.write_bytes(_lines([COLUMNS]))
    for place, outcome in evaluated(rows, options.workers, options.limit):
        found[place] = outcome
        complain(_progress(rows[place], outcome, f"[{len(found)}/{len(rows)}]"))
        if options.out:
            with options.out.open("ab") as file:
                file.write(_lines([_cells(rows[place], outcome)]))
    outcomes = [found[place] for place in range(len(rows))]
    if options.out:
        with replacing(options.out) as file:
            file.write(_lines([COLUMNS, *map(_cells, rows, outcomes)]))
    return outcomes


def _lines(rows: Sequence[Sequence[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _cells(row: Row, outcome: Outcome) -> list[str]:
    """Return the cells of a row in the table of predictions: only its id, if there is none."""
    if not outcome.predicted:
        return [row["id"], *[""] * (len(COLUMNS) - 1)]
    bounds = [f"{outcome.low:.6g}", f"{outcome.high:.6g}"] if outcome.high < float("inf") else ["", ""]
    oom = "false" if outcome.fits else "true"
    return [row["id"], f"{outcome.seconds:.6g}", *bounds, f"{outcome.peak:.6g}", oom]


def _progress(row: Row, outcome: Outcome, place: str) -> str:
    """Return a line about a row that is done."""
    if outcome.predicted:
        seconds = measured(row, "iter_time_s")
        error = "not measured"
        if seconds:
            ratio = seconds / outcome.seconds
            error = f"{1 / ratio - 1:+.1%}, measured over predicted {ratio:.3f}"
        what = f"{outcome.seconds:.4g} s, {error}"
    else:
        what = f"missing: {outcome.missing}" if outcome.missing else f"FAILED: {outcome.failed}"
    return f"{place} {row['id']} ({outcome.took:.1f} s): {what}"
