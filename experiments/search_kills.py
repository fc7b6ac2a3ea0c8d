"""A search that is killed and resumed: is its final table that of one that was left alone?

``python experiments/search_kills.py`` writes ``results/search_kills.csv``: per seed the moment at which the
process was killed (SIGKILL, its workers too or not), how many lines the journal had then, and whether the
resumed search prints what the undisturbed one prints. Moments are drawn from the seeds: up to a fifth of a
second after the journal has a number of lines, of those that it has at the end. Each search is killed twice,
the second time while it resumes. ``--seeds 0 1 2``: other seeds; ``--small``: two.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import common

MODEL = ("gpt:layers=4,hidden=64,heads=4,seq=32,vocab=100", "--cluster", "dgx-a100", "--batch", "32")
SETS = "tp=1|2,pp=1|2|4,remat=none|full,zero=0|1,microbatch_size=1|2|4"
SEARCH = (sys.executable, "-m", "distsim", "search", *MODEL, "--plan", SETS, "--top", "5")


def main() -> None:
    """Search once, then kill and resume."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="two seeds")
    parser.add_argument("--seeds", type=int, nargs="+", help="from which moments are drawn (default 0 to 9)")
    parser.add_argument("--out", type=Path, help="folder for what is written (default: results)")
    given = parser.parse_args()
    out = given.out or (common.RESULTS / "small" if given.small else common.RESULTS)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "search.jsonl"
        whole = subprocess.run([*SEARCH, "--journal", str(journal)], check=True, capture_output=True).stdout
        total = lines_of(journal)
    seeds = given.seeds or range(2 if given.small else 10)
    rows = [killed(seed, total, whole) for seed in common.progress(seeds)]
    common.write_csv(out / "search_kills.csv", rows)
    print(f"the same table as undisturbed: {sum(row['same'] for row in rows)} of {len(rows)}")


def lines_of(journal: Path) -> int:
    """Return how many lines a journal has."""
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def killed(seed: int, total: int, whole: bytes) -> dict[str, Any]:
    """Return what became of a search that was killed twice and then left alone."""
    rng = Random(seed)
    workers = rng.choice([1, 2])
    row: dict[str, Any] = {"seed": seed, "workers": workers}
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "search.jsonl"
        command = [*SEARCH, "--workers", str(workers), "--journal", str(journal)]
        for kill in ("first", "second"):
            group, after = rng.random() < 0.5, rng.uniform(0, 0.2)
            lines = rng.randrange(lines_of(journal), total)
            process = subprocess.Popen(
                [*command, *(["--resume"] if journal.exists() else [])],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            while lines_of(journal) < lines and process.poll() is None:
                time.sleep(0.005)
            time.sleep(after)
            (os.killpg if group else os.kill)(process.pid, signal.SIGKILL)
            row |= {
                f"{kill}_workers_too": group,
                f"{kill}_status": process.wait(),
                f"{kill}_lines": lines_of(journal),
            }
        found = subprocess.run([*command, *(["--resume"] if journal.exists() else [])], capture_output=True)
        row |= {"lines": lines_of(journal), "undisturbed_lines": total}
    return {**row, "same": found.stdout == whole and found.returncode == 0}


if __name__ == "__main__":
    main()
