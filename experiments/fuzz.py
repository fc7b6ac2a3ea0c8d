"""Random functions and plans, and damaged files: what is right, what is refused and why, what is wrong.

``python experiments/fuzz.py`` checks 5,000 random (function, plan) pairs, computed with NumPy over every rank
and simulated by every engine; so 5,000 random layouts of random decoders; the gradients of 1,000 random
functions, held against difference quotients; and 10,000 damaged ONNX files (:mod:`fuzz_files`). It prints
counts by outcome and reason, writes them to ``results/fuzz.csv``, and exits with 1 if anything is wrong. Case
i has the seed ``--seed`` + i, printed where it is wrong: ``--pairs 1 --layouts 0 --gradients 0 --files 0
--seed N`` repeats a pair alone.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from random import Random
from typing import NamedTuple

from common import RESULTS, write_csv
from fuzz_checks import Verdict, check_gradients, check_plan, checked, random_plan
from fuzz_files import fuzz_files
from fuzz_functions import invent
from fuzz_layouts import distinct_tokens, invent_decoder, random_layout

from distsim.ir import all_ops, pformat

CHUNK = 25
"""Cases that a process takes at a time."""


class Case(NamedTuple):
    """A case: its seed, its verdict, what it is in words."""

    seed: int
    verdict: Verdict
    text: str


def pair(seed: int) -> Case:
    """Check a random plan of a random function."""
    function = invent(seed)
    plan = random_plan(Random(seed), function.inputs[0].type.shape[0])
    verdict = checked(lambda: check_plan(function, plan, seed))
    return Case(seed, verdict, f"{plan}\n{pformat(function)}")


def gradient(seed: int) -> Case:
    """Check the gradients of a random function."""
    function = invent(seed)
    return Case(seed, checked(lambda: check_gradients(function, seed)), pformat(function))


def layout(seed: int) -> Case:
    """Check a random layout of a random decoder."""
    function, tokens = invent_decoder(seed), distinct_tokens(seed)
    plan = random_layout(seed, experts=any(op.op_type == "GroupedMatMul" for op in all_ops(function)))
    verdict = checked(lambda: check_plan(function, plan, seed, tokens))
    return Case(seed, verdict, f"{plan}\n{pformat(function)}")


CHECKS: dict[str, Callable[[int], Case]] = {"pairs": pair, "layouts": layout, "gradients": gradient}


def main() -> int:
    """Run what is asked for; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5000, help="(function, plan) pairs (default: 5000)")
    parser.add_argument("--layouts", type=int, default=5000, help="layouts of decoders (default: 5000)")
    parser.add_argument("--gradients", type=int, default=1000, help="functions (default: 1000)")
    parser.add_argument("--files", type=int, default=10_000, help="damaged ONNX files (default: 10000)")
    parser.add_argument("--seed", type=int, default=0, help="of the first case of each kind (default: 0)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (default: all cores)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of fuzz.csv (default: results)")
    given = parser.parse_args()
    counts: Counter[Outcome] = Counter()
    for kind, check in CHECKS.items():
        for case in progress(kind, run(check, given.seed, getattr(given, kind), given.workers)):
            outcome, reason = case.verdict.outcome, case.verdict.reason
            if outcome == "wrong":
                print(f"{kind}, seed {case.seed}: {reason}\n{case.text}\n")
            counts[Outcome(kind, outcome, "" if outcome == "wrong" else reason)] += 1
    counts.update(damaged_files(given.files, given.seed))
    rows = [{**found._asdict(), "cases": count} for found, count in sorted(counts.items(), key=in_order)]
    for row in rows:
        print(f"{row['kind']:10} {row['cases']:6} {': '.join(filter(None, (row['outcome'], row['reason'])))}")
    if rows:
        given.out.mkdir(parents=True, exist_ok=True)
        write_csv(given.out / "fuzz.csv", rows)
    return 1 if any(found.outcome == "wrong" for found in counts) else 0


class Outcome(NamedTuple):
    """What is counted: ``equal``, ``refused`` with the reason, or ``wrong``."""

    kind: str
    outcome: str
    reason: str


def in_order(counted: tuple[Outcome, int]) -> tuple[str, str, int]:
    """Return a key: by kind and outcome, the most frequent first."""
    return counted[0].kind, counted[0].outcome, -counted[1]


def damaged_files(count: int, seed: int) -> Counter[Outcome]:
    """Use damaged files; a result counts as equal, an error of the library as refused."""
    counts: Counter[Outcome] = Counter()
    if not count:
        return counts
    folder = Path(tempfile.mkdtemp(prefix="fuzz_files_"))
    record = fuzz_files(count, seed, folder)
    for kind, times in record.outcomes.items():
        named = {"result": "equal", "DEFECT": "wrong"}.get(kind, "refused")
        counts[Outcome("files", named, kind if named == "refused" else "")] += times
    for reason, number in record.defects.items():
        print(f"files, {reason}: {folder}/defect_{seed}_{number}.onnx")
    return counts


def run(check: Callable[[int], Case], seed: int, count: int, workers: int) -> Iterator[Case]:
    """Yield the cases of ``count`` seeds in their order, whatever the number of processes."""
    seeds = range(seed, seed + count)
    if workers == 1 or count <= CHUNK:
        yield from map(check, seeds)
        return
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(check, seeds, chunksize=CHUNK)


def progress(kind: str, cases: Iterator[Case]) -> Iterator[Case]:
    """Yield the cases, and say on stderr now and then how many there were."""
    start = said = time.perf_counter()
    for number, case in enumerate(cases, 1):
        yield case
        if time.perf_counter() - said > 10:
            said = time.perf_counter()
            print(f"{kind}: {number} cases, {said - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
