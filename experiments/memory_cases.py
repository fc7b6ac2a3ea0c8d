"""Compare simulated peak memory with published peaks.

``python experiments/memory_cases.py TABLE ...`` reads tables of measurements (or all ``validate.csv`` and
``calibrate.csv`` of a folder), lays out every row that has a peak and that distsim can express
(:mod:`distsim.truth`), and prints the predicted and the measured peak of each, then the error by source. It
writes ``results/memory_cases.csv``, ``memory_cases_missing.csv`` (rows that cannot be expressed, with the
feature that is missing) and ``memory_cases.png``.

What was measured differs: bytes *allocated* are compared with the peak of what is in use, bytes *reserved* by
the allocator with that and the allowance of the preset for fragmentation, and what *nvidia-smi* shows with
the context of the driver and of NCCL on top. A column that names no kind is taken as allocated. GB is 10^9
bytes and GiB 2^30, as printed. No figure of the model of memory is fitted to a row.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import RESULTS, panels, progress, save, write_csv

from distsim.cost import CostModel
from distsim.errors import DistsimError
from distsim.simulation.memory.program_memory import program_memory
from distsim.truth import Case, MissingFeatureError, Row, case_of, read_rows, shown_peak
from distsim.truth.prediction import measure_of, measured_rank, program_of

TABLES = ("validate.csv", "calibrate.csv")

GIB = 2**30


def main() -> int:
    """Simulate the rows, print and write the errors; the exit status is 2 if no row has a peak."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tables", type=Path, nargs="+", help="CSV files, or folders with validate.csv, ...")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for what is written")
    given = parser.parse_args()
    rows = {row["id"]: row for row in read_rows(tables_of(given.tables)) if row["peak_mem_gb"]}
    if not rows:
        print("no row has a peak of memory", file=sys.stderr)
        return 2
    found: list[dict[str, Any]] = []
    missing: list[dict[str, str]] = []
    for name in progress([*rows]):
        try:
            found.append(compared(rows[name], case_of(rows[name])))
        except (MissingFeatureError, DistsimError) as error:
            missing.append({"id": name, "table": rows[name]["table"], "missing": str(error)})
    given.out.mkdir(parents=True, exist_ok=True)
    report(found, missing)
    if found:
        write_csv(given.out / "memory_cases.csv", found)
        draw(found, given.out / "memory_cases.png")
    if missing:
        write_csv(given.out / "memory_cases_missing.csv", missing)
    return 0


def tables_of(paths: Sequence[Path]) -> list[Path]:
    """Return the tables that are given, or those of a folder."""
    found = [path / name for path in paths if path.is_dir() for name in TABLES if (path / name).is_file()]
    return [path for path in paths if not path.is_dir()] + found


# --- one row --------------------------------------------------------------------------------------------


def compared(row: Row, case: Case) -> dict[str, Any]:
    """Return what a row measured and what is predicted, in GiB, with what was assumed."""
    topology = case.topology()
    memory = program_memory(program_of(case, CostModel(topology)))
    rank = measured_rank(case, memory.peaks)
    use = memory.ranks[rank]
    kind, unit = measure_of(row)
    predicted = shown_peak(use.peak, kind, topology.devices[0]) / GIB
    measured = float(row["peak_mem_gb"]) * unit / GIB
    return {
        "id": row["id"],
        "table": row["table"],
        "source": row["source"],
        "measured_GiB": measured,
        "kind": kind,
        "predicted_GiB": predicted,
        "error": predicted / measured - 1,
        "rank": rank,
        **{f"{name}_GiB": size / GIB for name, size in use.by_kind.items()},
        "plan": str(case.plan),
        "precision": case.precision.name,
        "stack": case.stack.name,
        "attention": case.attention,
        "kernels": case.kernels,
        "assumed": ", ".join(case.assumed),
    }


# --- all rows -------------------------------------------------------------------------------------------


def report(found: Sequence[dict[str, Any]], missing: Sequence[dict[str, str]]) -> None:
    """Print the rows, the error by source, and what the other rows lack."""
    for row in found:
        print(
            f"{row['id']:40} {row['predicted_GiB']:7.2f} GiB predicted, {row['measured_GiB']:7.2f} measured "
            f"({row['kind']}) {row['error']:+7.1%}"
        )
    print()
    for source in dict.fromkeys(row["source"] for row in found):
        errors = [row["error"] for row in found if row["source"] == source]
        print(error_line(source, errors))
    for table in dict.fromkeys(row["table"] for row in found):
        print(error_line(f"all of {table}", [row["error"] for row in found if row["table"] == table]))
    print(f"\n{len(missing)} rows cannot be expressed:")
    for feature, number in Counter(row["missing"] for row in missing).most_common():
        print(f"{number:4}  {feature}")


def error_line(what: str, errors: Sequence[float]) -> str:
    """Return the mean, the signed mean and the worst of errors as text."""
    mean = sum(map(abs, errors)) / len(errors)
    worst = max(errors, key=abs)
    return (
        f"{what}: {len(errors)} rows, mean error {mean:.1%}, signed {sum(errors) / len(errors):+.1%}, "
        f"worst {worst:+.1%}"
    )


def draw(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw predicted against measured peaks, a colour for each source."""
    figure, (axis,) = panels(1, 6, 5)
    for source in dict.fromkeys(row["source"] for row in found):
        rows = [row for row in found if row["source"] == source]
        measured, predicted = ([row[f"{key}_GiB"] for row in rows] for key in ("measured", "predicted"))
        axis.scatter(measured, predicted, s=24, label=source.partition(" (")[0][:40])
    top = 1.05 * max(max(row["measured_GiB"], row["predicted_GiB"]) for row in found)
    axis.plot([0, top], [0, top], color="black", linewidth=0.8)
    axis.set(xlabel="measured peak (GiB)", ylabel="simulated peak (GiB)", xlim=(0, top), ylim=(0, top))
    axis.legend(fontsize=7, frameon=False)
    save(figure, path)


if __name__ == "__main__":
    sys.exit(main())
