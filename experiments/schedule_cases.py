"""Simulate tables of pipeline schedules, and say whether the figures are those that their index gives.

``python experiments/schedule_cases.py FOLDER`` reads every table of FOLDER/index.csv (or of another index:
give the file), simulates it with F = I = W = 1, B = 2 and each time of a message that the index has columns
for, and compares makespan, rank span and peaks per rank: those read off the order, and the peak memory in
which a stage holds a byte for each microbatch. Pairs of actions run in turn, or as one in the columns that
end in ``_atomic``. It makes the same schedule by name, and says whether that is the same table, or another
with the same figures. Where FOLDER has zb_table9.csv, the profiled times of Qi et al. 2023 ("Zero bubble
pipeline parallelism"), it simulates the schedules of zb_table5_replayed.csv with them, for the published
bubble rates to four decimals. It prints the first differences and counts by schedule; the exit status is 1 if
there are any.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from common import RESULTS, write_csv

from distsim.errors import ScheduleError
from distsim.schedule import SCHEDULES, Schedule, read_csv, schedule
from distsim.simulation.action_times import ActionTimes, timed_program
from distsim.simulation.memory.program_memory import program_memory
from distsim.simulation.schedule_times import time_schedule

NAMES = {
    "GPipe": "gpipe",
    "1F1B": "1f1b",
    "Interleaved1F1B": "interleaved_torch",
    "LoopedBFS": "looped_bfs",
    "InterleavedZeroBubble": "interleaved_zb",
    "ZBVZeroBubble": "zb_v",
    "DualPipeV": "dualpipe_v",
    "DualPipe": "dualpipe",
    "ZB-H1": "zb_h1",
    "ZB-H2": "zb_h2",
    "ZB-1p": "zb_auto",
    "ZB-2p": "zb_auto",
    "ZB-V": "zb_v_greedy",
    "V-Half": "v_half",
    "V-Min": "v_min",
    "1F1B-V": "1f1b_v",
    "1F1B-I": "interleaved",
}
"""How this library calls the schedules of the tables."""

TOLERANCE = 1e-9
SHOWN = 20
"""Differences that are printed."""

MODELS = {"1.5B": (2304, 24), "6.2B": (4096, 32), "14.6B": (5120, 40), "28.3B": (6144, 48)}
"""Hidden size and heads of the models of the paper, its table 3; sequences have 1024 tokens."""

_TIME = re.compile(r"(makespan|rank_span)(_atomic)?(?:_send([0-9.]+))?")
_PEAKS = {
    "peak_inflight_per_rank": Schedule.in_flight,
    "peak_until_I_per_rank": Schedule.until_i,
    "peak_pending_W_per_rank": Schedule.pending_w,
}
_MEMORY = "peak memory per rank"

Figures = dict[str, tuple[float, ...]]
"""What an index gives of a table, by column."""


@dataclass
class Tally:
    """What was compared, of the schedules of one name."""

    tables: int = 0
    equal: int = 0
    different: int = 0
    generated: Counter[str] = field(default_factory=Counter[str])


def main() -> int:
    """Run the folder, print differences and counts, write them; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="with index.csv or zb_table9.csv; or an index")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the counts (default: results)")
    given = parser.parse_args()
    index = given.folder if given.folder.is_file() else given.folder / "index.csv"
    times = index.parent / "zb_table9.csv"
    if not (index.is_file() or (times.is_file() and given.folder.is_dir())):
        print(f"{given.folder} has neither index.csv nor zb_table9.csv", file=sys.stderr)
        return 2
    tallies: dict[str, Tally] = {}
    said: list[str] = []
    if index.is_file():
        said += compare_tables(index, tallies)
    if times.is_file() and given.folder.is_dir():
        said += compare_rates(times, index.parent / "zb_table5_replayed.csv", tallies)
    print("\n".join(said[:SHOWN]))
    if len(said) > SHOWN:
        print(f"... and {len(said) - SHOWN} more")
    report(tallies, given.out / f"schedule_cases_{index.parent.name}.csv")
    bad = sum(tally.different for tally in tallies.values())
    return 1 if bad or not tallies else 0


def report(tallies: dict[str, Tally], path: Path) -> None:
    """Print the counts of each schedule, and write them."""
    rows = []
    for name, tally in tallies.items():
        made = ", ".join(f"{number} {what}" for what, number in tally.generated.items())
        print(
            f"{name}: {tally.tables} cases, {tally.equal} figures equal, {tally.different} different; {made}"
        )
        counts = {"cases": tally.tables, "equal": tally.equal, "different": tally.different}
        rows.append({"schedule": name, **counts, "generated": made})
    equal, different = (sum(row[key] for row in rows) for key in ("equal", "different"))
    print(f"{equal} figures equal, {different} different")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_csv(path, rows)


# --- tables ---------------------------------------------------------------------------------------------


def compare_tables(index: Path, tallies: dict[str, Tally]) -> Iterator[str]:
    """Yield a line for every difference of the tables of an index; count them all."""
    for row in rows_of(index):
        tally = tallies.setdefault(row["schedule"], Tally())
        tally.tables += 1
        expected = expected_of(row)
        try:
            table = read_csv(index.parent / f"{row['name']}.csv", NAMES.get(row["schedule"]), copies_of(row))
            figures = figures_of(table, expected)
        except ScheduleError as error:
            tally.different += len(expected)
            yield f"{row['name']}: {error}"
            continue
        for column, numbers in expected.items():
            if same(numbers, figures[column]):
                tally.equal += 1
            else:
                tally.different += 1
                yield f"{row['name']}: {column} is {shown(figures[column])}, the index says {shown(numbers)}"
        verdict = generated(row, table, expected)
        tally.generated[verdict] += 1
        if verdict == OTHER:
            tally.different += 1
            yield f"{row['name']}: {NAMES[row['schedule']]} makes another table, with other figures"


SAME, EQUAL, OTHER = "made by name as the same table", "another table of the same figures", "other figures"


def generated(row: dict[str, str], table: Schedule, expected: Figures) -> str:
    """Say whether the schedule of that name is the table of a row, or has its figures."""
    name = NAMES.get(row["schedule"])
    if name not in SCHEDULES:
        return "without a name"
    p, v, m = (int(row[key]) for key in "pvm")
    options = {"memory_limit": 2 * p} if row["schedule"] == "ZB-2p" else {}
    made = schedule(name, p, m, v, **options)
    if made == table:
        return SAME
    figures = figures_of(made, expected)
    return EQUAL if all(same(expected[column], figures[column]) for column in expected) else OTHER


def expected_of(row: dict[str, str]) -> Figures:
    """Return what a row of an index says, with the peak memory that it implies: a byte for each in flight."""
    chosen = [key for key in row if _TIME.fullmatch(key) or key in _PEAKS]
    found = {key: tuple(map(float, row[key].split())) for key in chosen if row[key]}
    found[_MEMORY] = found["peak_inflight_per_rank"]
    return found


def figures_of(table: Schedule, columns: Figures) -> Figures:
    """Return the figures of a table in these columns."""
    found: Figures = {}
    runs = {}
    for column in columns:
        matched = _TIME.fullmatch(column)
        if matched:
            what, atomic, send = matched.groups()
            key = (float(send or 0), bool(atomic))
            if key not in runs:
                runs[key] = time_schedule(table, ActionTimes(send=key[0]), together=key[1])
            found[column] = (runs[key].makespan if what == "makespan" else runs[key].rank_span,)
        elif column in _PEAKS:
            found[column] = tuple(float(_PEAKS[column](table, rank)) for rank in range(table.num_ranks))
        else:
            found[column] = tuple(map(float, program_memory(timed_program(table)[0]).peaks))
    return found


def copies_of(row: dict[str, str]) -> int:
    """Return the number of copies of the model in a table: none says it."""
    known = SCHEDULES.get(NAMES.get(row["schedule"], ""))
    return 2 if known is not None and known.placement == "two copies" else 1


def same(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Whether figures are the same number by number."""
    return len(one) == len(other) and all(abs(a - b) <= TOLERANCE for a, b in zip(one, other, strict=True))


def shown(numbers: tuple[float, ...]) -> str:
    """Return figures as text."""
    return " ".join(f"{number:.12g}" for number in numbers)


# --- published bubble rates -----------------------------------------------------------------------------


def compare_rates(times: Path, rates: Path, tallies: dict[str, Tally]) -> Iterator[str]:
    """Yield a line for every bubble rate that profiled times do not give; count them all.

    The rates are the published ones, but for 1F1B-I, whose published rates follow from no table known
    (schedule_facts.md beside the times): these are what a replay of Megatron's gave.
    """
    profiled = {(row["model"], row["p"], row["m"]): row for row in rows_of(times)}
    for row in rows_of(rates):
        name, _, chunks = row["schedule"].partition(" v=")
        which = "replayed" if chunks else "published"
        tally = tallies.setdefault(f"{name}, {which} rates", Tally())
        case = (row["model"], row["p"], row["m"])
        tally.tables += 1
        found, expected = (
            f"{rate_of(name, int(chunks or 1), profiled[case]):.4f}",
            row[f"bubble_rate_{which}"],
        )
        if found == expected:
            tally.equal += 1
        else:
            tally.different += 1
            yield f"{row['schedule']} of {' '.join(case)}: {found}, {which} {expected}"


def rate_of(name: str, chunks: int, row: dict[str, str]) -> float:
    """Return the bubble rate of a schedule with a row's times, those of a rank."""
    p, m = int(row["p"]), int(row["m"])
    forward, backward_input, weight, send = (float(row[f"T_{what}_ms"]) for what in ("F", "B", "W", "comm"))
    options: dict[str, object] = {}
    if NAMES[name] == "zb_auto":
        hidden, heads = MODELS[row["model"]]
        # What W frees of an activation, by table 1 of the paper: 32 h of 34 h + 5 a s bytes a token.
        share = 32 * hidden / (34 * hidden + 5 * heads * 1024)
        options = {"memory_limit": int(name[3]) * p, "weight_share": share, "send": send}
        options["seconds"] = (forward, backward_input, weight)
    made = schedule(NAMES[name], p, m, chunks, **options)
    times = ActionTimes({"F": forward / chunks, "I": backward_input / chunks, "W": weight / chunks}, send)
    return time_schedule(made, times).bubble


def rows_of(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    sys.exit(main())
