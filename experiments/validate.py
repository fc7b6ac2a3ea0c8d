"""Predict every row of a table of published training steps, and compare with what was measured.

``python experiments/validate.py CSV ... --out predictions.csv`` translates each row by its columns
(:mod:`distsim.truth`), simulates it, and writes a line for each as it comes: ``id``, ``pred_iter_s``,
``low``, ``high`` (between which a measured step lies with 90 %), ``pred_mem_gb`` (in the unit, and of the
kind, that ``mem_kind`` says; GiB allocated if it says none) and ``pred_oom``. Rows
that cannot be expressed have empty cells and are listed with the missing feature, rows on which distsim
failed with the error. Then it prints the error by source, beside the baseline of 40 % MFU, and draws
predicted against measured seconds next to the CSV. No figure is fitted; nothing that was measured is read
to predict.

``--workers`` processes share the rows (default: one per core); a row that takes longer than ``--limit``
seconds, or more memory than there is, loses itself only.
"""

from __future__ import annotations

import argparse
import csv
import math
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import RESULTS, panels, save

from distsim.errors import DistsimError
from distsim.truth import MissingFeatureError, Row, case_of, predict, read_rows, shown_peak
from distsim.truth.prediction import measure_of
from distsim.truth.score import BASELINE_MFU, Score, baseline_seconds, by_count, measured, scores, source_of

COLUMNS = ("id", "pred_iter_s", "low", "high", "pred_mem_gb", "pred_oom")


@dataclass(frozen=True)
class Outcome:
    """What became of a row: a prediction, or why there is none; ``failed`` where distsim is at fault."""

    seconds: float = 0.0
    low: float = 0.0
    high: float = math.inf
    baseline: float = 0.0
    peak: float = 0.0
    fits: bool = True
    missing: str = ""
    failed: str = ""
    took: float = 0.0
    left_out: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()

    @property
    def predicted(self) -> bool:
        """Whether there is a prediction."""
        return not (self.missing or self.failed)


def main() -> int:
    """Predict, write and compare; the exit status is 2 if a table cannot be read, 1 if a row failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tables", type=Path, nargs="+", metavar="CSV")
    parser.add_argument("--out", type=Path, default=RESULTS / "predictions.csv")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--limit", type=float, default=300.0, metavar="SECONDS", help="for one row")
    given = parser.parse_args()
    if given.workers < 1 or not 0 < given.limit < 1e6:
        parser.error("--workers must be at least 1, --limit positive")
    try:
        rows = read_rows(given.tables)
    except DistsimError as error:
        print(error, file=sys.stderr)
        return 2
    outcomes: dict[int, Outcome] = {}
    start = time.perf_counter()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with given.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for place, outcome in evaluated(rows, given.workers, given.limit):
            outcomes[place] = outcome
            writer.writerow(line(rows[place], outcome))
            file.flush()
            print(progress(rows[place], outcome, len(outcomes), len(rows)), file=sys.stderr)
    with given.out.open("w", newline="", encoding="utf-8") as file:  # again, in the order of the rows
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([COLUMNS, *(line(row, outcomes[place]) for place, row in enumerate(rows))])
    report(rows, [outcomes[place] for place in range(len(rows))], time.perf_counter() - start)
    picture = given.out.with_suffix(".png")
    pairs = comparisons(rows, outcomes)
    if pairs:
        draw(pairs, picture)
    print(f"table: {given.out}")
    return 1 if any(outcome.failed for outcome in outcomes.values()) else 0


# --- one row --------------------------------------------------------------------------------------------


def outcome_of(row: Row, limit: float) -> Outcome:
    """Return what becomes of a row; raises nothing that a row can cause."""
    start = time.perf_counter()
    alarm = signal.signal(signal.SIGALRM, _late)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        case = case_of(row)
        kind, unit = measure_of(row)
        found = predict(case)
        peak = shown_peak(found.peak, kind, found.device) / unit
        took = time.perf_counter() - start
        said = {"left_out": case.left_out, "assumed": case.assumed}
        low, high, _ = found.interval or (0.0, math.inf, 1.0)
        return Outcome(found.seconds, low, high, baseline_seconds(case), peak, found.fits, took=took, **said)
    except (MissingFeatureError, DistsimError) as error:
        return Outcome(missing=str(error), took=time.perf_counter() - start)
    except TimeoutError:
        return Outcome(failed=f"not done within {limit:g} s", took=limit)
    except Exception as error:  # a row must not cost the others
        return Outcome(failed=f"{type(error).__name__}: {error}"[:300], took=time.perf_counter() - start)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)


def _late(number: int, frame: object) -> None:
    raise TimeoutError


def evaluated(rows: Sequence[Row], workers: int, limit: float) -> Iterator[tuple[int, Outcome]]:
    """Yield the place of each row with what becomes of it, as they come.

    A process that dies takes the rows with it that others had or were waiting for: those that may have run
    are tried again, each in a process of its own, so that only the one that kills it is lost.
    """
    if workers == 1:
        for place, row in enumerate(rows):
            yield place, outcome_of(row, limit)
        return
    # Rows of a model lie side by side, so that a worker finds what the one before made.
    waiting = sorted(range(len(rows)), key=lambda place: [rows[place].get(c, "") for c in ("model", "batch")])
    while waiting:
        died: list[int] = []
        for place, outcome in shared(rows, waiting, workers, limit):
            if outcome is None:
                died.append(place)
            else:
                yield place, outcome
        left = [place for place in waiting if place in set(died)]
        suspects, waiting = left[: 2 * workers], left[2 * workers :]
        for place in suspects:
            ((_, outcome),) = shared(rows, [place], 1, limit)
            yield place, outcome or Outcome(failed="the process died, perhaps for want of memory")


def shared(
    rows: Sequence[Row], places: Sequence[int], workers: int, limit: float
) -> Iterator[tuple[int, Outcome | None]]:
    """Yield what becomes of some rows over so many processes; None for all that are left when one dies."""
    # Processes of their own from the start: one that is forked has the locks of threads that it lacks.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        under_way = {pool.submit(outcome_of, rows[place], limit): place for place in places}
        for future in as_completed(under_way):
            try:
                yield under_way[future], future.result()
            except BrokenProcessPool:
                yield under_way[future], None


def line(row: Row, outcome: Outcome) -> list[str]:
    """Return the cells of a row in the table of predictions."""
    if not outcome.predicted:
        return [row["id"], "", "", "", "", ""]
    oom = "false" if outcome.fits else "true"
    bounds = ["", ""] if outcome.high == math.inf else [f"{outcome.low:.6g}", f"{outcome.high:.6g}"]
    return [row["id"], f"{outcome.seconds:.6g}", *bounds, f"{outcome.peak:.6g}", oom]


def progress(row: Row, outcome: Outcome, done: int, total: int) -> str:
    """Return a line about a row that is done."""
    if outcome.predicted:
        seconds = measured(row, "iter_time_s")
        error = f"{outcome.seconds / seconds - 1:+.1%}" if seconds else "not measured"
        what = f"{outcome.seconds:.4g} s, {error}"
    else:
        what = f"missing: {outcome.missing}" if outcome.missing else f"FAILED: {outcome.failed}"
    return f"[{done}/{total}] {row['id']} ({outcome.took:.1f} s): {what}"


# --- all rows -------------------------------------------------------------------------------------------


def comparisons(rows: Sequence[Row], outcomes: dict[int, Outcome]) -> list[dict[str, Any]]:
    """Return the rows that are predicted and were measured."""
    found: list[dict[str, Any]] = []
    for place, row in enumerate(rows):
        seconds, outcome = measured(row, "iter_time_s"), outcomes[place]
        if outcome.predicted and seconds:
            found.append(
                {
                    **{"source": source_of(row), "table": row["table"], "measured": seconds},
                    **{"predicted": outcome.seconds, "baseline": outcome.baseline},
                    **{"low": outcome.low, "high": outcome.high, "group": group_of(row)},
                }
            )
    return found


def report(rows: Sequence[Row], outcomes: Sequence[Outcome], took: float) -> None:
    """Print the errors by source and table, what rows lack, and what took how long."""
    pairs = comparisons(rows, dict(enumerate(outcomes)))
    if pairs:
        print_errors(pairs)
        print_coverage(pairs)
        print_regret(pairs)
    print_memory(rows, outcomes)
    for what in ("missing", "failed"):
        texts = [getattr(outcome, what) for outcome in outcomes if getattr(outcome, what)]
        verb = "cannot be expressed" if what == "missing" else "FAILED"
        print(f"\n{len(texts)} of {len(rows)} rows {verb}{':' if texts else ''}")
        for text, count in by_count(texts):
            print(f"{count:4}  {text}")
    for what, about in (
        ("left_out", "said by columns, and left out, as no plan says it yet:"),
        ("assumed", "said by no column, and assumed:"),
    ):
        found = by_count([each for outcome in outcomes for each in getattr(outcome, what)])
        if found:
            print(f"\n{about}")
        for text, count in found:
            print(f"{count:4}  {text}")
    done = [outcome.took for outcome in outcomes if outcome.predicted]
    if done:
        print(
            f"\n{len(done)} predictions in {took:.0f} s; a row takes {sum(done) / len(done):.2f} s, "
            f"at most {max(done):.1f} s"
        )


def print_errors(pairs: Sequence[dict[str, Any]]) -> None:
    """Print the error of seconds by source and table, with that of the baseline."""
    baseline_name = f"{BASELINE_MFU:.0%} MFU"
    print(f"{'':58} rows   mean  median   bias   worst   {baseline_name}: mean   bias")
    for key in ("source", "table"):
        found = scores([(row[key], row["predicted"], row["measured"]) for row in pairs])
        base = scores([(row[key], row["baseline"], row["measured"]) for row in pairs])
        for group, score in found.items():
            print(error_line(group, score, base[group]))
    (score,) = scores([("", row["predicted"], row["measured"]) for row in pairs]).values()
    (base_score,) = scores([("", row["baseline"], row["measured"]) for row in pairs]).values()
    print(error_line("all", score, base_score))


def error_line(group: str, score: Score, base: Score) -> str:
    """Return a line of the table of errors."""
    return (
        f"{group:58.58} {len(score.errors):4} {score.mean:6.1%} {score.median:7.1%} {score.bias:+6.1%} "
        f"{score.worst:+7.1%} {'':11} {base.mean:6.1%} {base.bias:+6.1%}"
    )


def print_coverage(pairs: Sequence[dict[str, Any]]) -> None:
    """Print how many measured steps lie in their intervals, and how wide these are."""
    for table in dict.fromkeys(row["table"] for row in pairs):
        known = [row for row in pairs if row["table"] == table and row["high"] < math.inf]
        if known:
            inside = sum(row["low"] <= row["measured"] <= row["high"] for row in known)
            half = statistics.median([row["high"] / row["predicted"] - 1 for row in known])
            print(
                f"90 % intervals of {table}: {inside / len(known):.0%} of {len(known)} rows lie within, "
                f"the median one goes {half:.0%} up"
            )


def group_of(row: Row) -> tuple[str, ...]:
    """Return what rows have in common of which a user would choose one: source, model, devices, batch."""
    names = ("model", "hw_gpu", "n_gpus", "seq", "global_batch", "n_layers", "hidden", "precision")
    return (source_of(row), *[row.get(name, "") for name in names])


def print_regret(pairs: Sequence[dict[str, Any]]) -> None:
    """Print by how much the layout that is predicted to be fastest is slower than the fastest one."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in pairs:
        groups.setdefault(row["group"], []).append(row)
    found = [
        min(own, key=lambda row: row["predicted"])["measured"] / min(row["measured"] for row in own) - 1
        for own in groups.values()
        if len(own) > 1
    ]
    if found:
        print(
            f"choosing the fastest of a group costs {statistics.fmean(found):.1%} (mean), {max(found):.1%} "
            f"(worst), over {len(found)} groups of the same model, devices and batch"
        )


def print_memory(rows: Sequence[Row], outcomes: Sequence[Outcome]) -> None:
    """Print the error of peaks, and how often what fits was told from what does not."""
    pairs = [
        ("peak of memory", outcome.peak, peak)
        for row, outcome in zip(rows, outcomes, strict=True)
        if outcome.predicted and (peak := measured(row, "peak_mem_gb"))
    ]
    for group, score in scores(pairs).items():
        print(f"\n{group}: {len(pairs)} rows, {score}")
    ran = [
        (row.get("outcome", "").lower().startswith("oom"), not outcome.fits)
        for row, outcome in zip(rows, outcomes, strict=True)
        if outcome.predicted and row.get("outcome")
    ]
    if ran:
        said, wrong = sum(oom for _, oom in ran), sum(oom and not was for was, oom in ran)
        missed = sum(was and not oom for was, oom in ran)
        print(
            f"out of memory: said of {said} rows, of which {wrong} ran; "
            f"{sum(was for was, _ in ran)} did not run, of which {missed} were said to fit"
        )


def draw(pairs: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw predicted against measured seconds, both logarithmic, a colour and a sign for each source."""
    figure, (axis,) = panels(1, 7.5, 6)
    marks = "osD^vP*X<>hp"
    sources = list(dict.fromkeys(row["source"] for row in pairs))
    for place, source in enumerate(sources):
        rows = [row for row in pairs if row["source"] == source]
        axis.scatter(
            [row["measured"] for row in rows],
            [row["predicted"] for row in rows],
            s=22,
            alpha=0.75,
            marker=marks[place % len(marks)],
            color=f"C{place % 10}",
            label=f"{source[:44]}, {len(rows)} rows",
        )
    times = [row[key] for row in pairs for key in ("measured", "predicted")]
    ends = [min(times) / 1.3, max(times) * 1.3]
    axis.plot(ends, ends, color="black", linewidth=0.8)
    for share, style in ((0.8, ":"), (1.2, ":")):
        axis.plot(ends, [share * end for end in ends], color="grey", linewidth=0.8, linestyle=style)
    axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axis.set(xlabel="measured seconds a step", ylabel="predicted seconds a step (dotted: 20 % off)")
    axis.legend(fontsize=7, frameon=False, loc="upper left")
    save(figure, path)


if __name__ == "__main__":
    sys.exit(main())
