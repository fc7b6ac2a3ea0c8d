"""Run a folder of torch.fx partitioner cases and say for each whether distsim gives the same.

``python experiments/partition_cases.py DIR`` prints a line for every ``*.json`` below DIR: ``match``;
``defect of the original: why; ours is ...`` where what was recorded breaks a rule that a partition must
keep; ``difference: what``; or ``unreadable: why``. The exit status is 1 if there is a difference or an
unreadable case.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

from fx_cases import MODES, Case, CountedByReader, outcome, problem_of, recorded_latency, run
from fx_judge import crash, defects, differences, error_kind, explained, removal

from distsim.device_placement import Partition, Problem
from distsim.errors import PartitionError

COUNTS = (
    "it counts what comes into a part once for each op that reads it; counting so, distsim gives the same"
)


def main() -> int:
    """Run the folder, print the lines and the counts; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder with cases, one JSON file each")
    folder = parser.parse_args().folder
    paths = sorted(folder.rglob("*.json")) if folder.is_dir() else [folder]
    counts: Counter[str] = Counter()
    for path in paths:
        verdict = judge_file(path)
        counts[verdict.split(":")[0]] += 1
        print(f"{path.relative_to(folder) if folder.is_dir() else path}: {verdict}")
    print(", ".join(f"{counts[kind]} {kind}" for kind in sorted(counts)) or f"no cases in {folder}")
    bad = counts["difference"] + counts["unreadable"]
    return 1 if bad or not paths else 0


def judge_file(path: Path) -> str:
    """Return the verdict on one file, which may hold anything."""
    try:
        case = json.loads(path.read_text(encoding="utf-8"))
        return judge(case)
    except (OSError, UnicodeError, json.JSONDecodeError, RecursionError) as error:
        return f"unreadable: {error}"
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        return f"unreadable: not a case of this format ({type(error).__name__}: {error})"


def judge(case: Case) -> str:
    """Return the verdict on a case."""
    ours = attempt(case)
    found = compare(case, ours)
    if not found:
        return "match"
    text = say(ours)
    if (why := crash(case)) is not None:
        return f"defect of the original: {why}; ours is {text}"
    reasons = defects(case)
    replay = attempt(case, CountedByReader)
    if not compare(case, replay) and explained(case):
        reasons.insert(0, f"{COUNTS} ({found[0]})")
    elif MODES[case["mode"]] == "kernighan_lin" and not reasons and isinstance(ours, Partition):
        better = ours.latency < recorded_latency(case)
        reasons += ["it finds shorter swaps and discards them"] if better else []
    if reasons:
        return f"defect of the original: {'; '.join(dict.fromkeys(reasons))}; ours is {text}"
    return f"difference: {'; '.join(found)}"


def attempt(case: Case, kind: type[Problem] = Problem) -> Partition | PartitionError:
    """Return the partition that distsim makes, or the error that it raises."""
    problem = problem_of(case, kind)
    try:
        return run(case, problem)
    except PartitionError as error:
        return error


def compare(case: Case, ours: Partition | PartitionError) -> list[str]:
    """Return what differs between the record and ours."""
    if case.get("error"):
        expected = error_kind(case["error"])
        same = isinstance(ours, PartitionError) and type(ours) is expected
        return [] if same else [f"{case['error']!r}, but ours is {say(ours)}"]
    if isinstance(ours, PartitionError):
        return [f"a result, but ours is {say(ours)}"]
    return differences(case, outcome(case, ours), ours) + removal(case, ours)


def say(ours: Partition | PartitionError) -> str:
    """Return our result in a line."""
    if isinstance(ours, PartitionError):
        return f"{type(ours).__name__}: {ours}"
    names = [item.name for item in ours.problem.items]
    parts = [
        f"{part.index}: {'+'.join(names[op] for op in part.ops)} ({part.bytes} B on "
        f"{','.join(str(device.id) for device in part.devices)})"
        for part in ours.parts
    ]
    latency = f", latency {ours.latency:g}" if ours.transfer_rate else ""
    return f"{len(ours.parts)} parts [{'; '.join(parts)}]{latency}"


if __name__ == "__main__":
    sys.exit(main())
