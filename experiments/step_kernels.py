"""What kernels of training steps took: traces of torch's profiler as a table, an op and its shapes a row.

``python experiments/step_kernels.py FOLDER --out kernels.csv`` reads the traces that ``measure_steps.py
--trace FOLDER`` has written (``NAME.json.gz``). Of each step it writes the ops that launched kernels, or the
kernels themselves where a compiler's have no op, whose shapes and types are the same: how often, the median
of the seconds of all kernels of one, and what the op was given. Those that take less than ``--least`` of the
kernels' time of their step are left out.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COLUMNS = ("step", "op", "shapes", "types", "count", "seconds")
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")


def rows_of(path: Path, least: float) -> Iterator[dict[str, object]]:
    """Yield the rows of a trace, those that take longest first."""
    with gzip.open(path) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    ops = {each["args"].get("External id"): each for each in events if each.get("cat") == "cpu_op"}
    calls: dict[tuple[str, str, str], dict[object, float]] = {}
    for event in events:
        if event.get("cat") in KERNELS:
            number = event["args"].get("External id")
            op = ops.get(number)
            args = op["args"] if op is not None else {}
            shapes, types = args.get("Input Dims", []), args.get("Input type", [])
            name = event["name"] if op is None else op["name"]
            of_kernel = name, json.dumps([each for each in shapes if each]), " ".join(filter(None, types))
            seconds = calls.setdefault(of_kernel, {})
            seconds[number] = seconds.get(number, 0.0) + event["dur"] * 1e-6
    total = sum(sum(each.values()) for each in calls.values())
    for (name, shapes, types), found in sorted(calls.items(), key=lambda each: -sum(each[1].values())):
        if sum(found.values()) >= least * total:
            values = (path.name.split(".json")[0], name, shapes, types, len(found))
            yield dict(zip(COLUMNS, (*values, f"{statistics.median(found.values()):.4g}"), strict=True))


def main() -> int:
    """Write the table; the exit status is 2 where there is no trace."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("kernels.csv"))
    parser.add_argument("--least", type=float, default=0.004, help="share of the kernels' time of a step")
    given = parser.parse_args()
    traces = sorted(given.folder.glob("*.json.gz"))
    if not traces:
        print(
            f"{given.folder} has no trace, NAME.json.gz; measure_steps.py --trace writes them",
            file=sys.stderr,
        )
        return 2
    with given.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for path in traces:
            writer.writerows(rows_of(path, given.least))
    print(f"table: {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
