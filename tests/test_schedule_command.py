"""The command ``distsim schedule``, and the experiment that runs tables of schedules."""

import shutil
import sys
from pathlib import Path

import pytest
from cli_cases import run

from distsim.cli import main
from distsim.commands.schedule import MOST_PAIRS
from distsim.schedule import read_csv, schedule, torch_csv, write_csv

DATA = Path(__file__).parent / "data" / "schedules"

with pytest.MonkeyPatch.context() as patch:
    # The experiments are scripts: each finds the others next to itself.
    patch.syspath_prepend(str(Path(__file__).parents[1] / "experiments"))
    import schedule_cases


def refused(capsys, *arguments):
    status = main(["schedule", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert status == 2 and not out
    return err.splitlines()[-1]


def test_a_schedule_is_printed_drawn_and_written(capsys, tmp_path):
    table, plot = tmp_path / "table.csv", tmp_path / "plot.svg"
    sizes = ("--stages", 4, "--chunks", 2, "--microbatches", 8)
    out, _ = run(capsys, "schedule", "interleaved", *sizes, "--csv", table, "--plot", plot)
    # 3 m v + 3 (p - 1), and p v + p - 1 - 2 r in flight on rank r.
    assert "\nmakespan   57\n" in out and "\nbubble     15.79%" in out
    assert [line.split()[-1] for line in out.splitlines() if line[:1] in "0123" and line] == [
        "11",
        "9",
        "7",
        "5",
    ]
    assert out.endswith(f"table: {table}\nschedule: {plot}\n")
    order = schedule("interleaved", 4, 8, 2)
    assert table.read_text() == write_csv(order)
    drawn = plot.read_text()
    assert all(f"<!-- {number} -->" in drawn for number in range(8)), "microbatches are written as text"
    again, _ = run(capsys, "schedule", "--schedule-csv", table)
    assert again.splitlines()[1:] == out.splitlines()[1:-2]
    assert again.startswith("table: 4 ranks, 2 stages a rank, 8 microbatches;")


def test_what_is_no_table_is_drawn_before_it_is_refused(capsys, monkeypatch, tmp_path):
    table, plot = tmp_path / "table.csv", tmp_path / "plot.svg"
    monkeypatch.setattr(torch_csv, "_LETTERS", "FIW")
    sizes = ("--stages", 2, "--microbatches", 2, "--csv", table, "--plot", plot)
    assert main([*map(str, ("schedule", "1f1b", *sizes))]) == 2
    said = capsys.readouterr()
    assert said.out.endswith(f"schedule: {plot}\n") and plot.exists() and not table.exists()
    assert "torch's tables have no B (backward)" in said.err and "table:" not in said.out


@pytest.mark.parametrize(
    ("unit", "sizes"),
    [(0.5, (1, 2)), (0.5, (2, 4)), (0.25, (1, 4)), (1, (4, 8)), (0.125, (2, 2)), (1e-6, (2, 2))],
)
def test_times_above_a_schedule_stand_apart(capsys, unit, sizes):
    times = [
        each for name in ("forward", "backward-input", "backward-weight") for each in (f"--{name}", unit)
    ]
    out, _ = run(capsys, "schedule", "zb_h1", "--stages", sizes[0], "--microbatches", sizes[1], *times)
    shown = [float(each) for each in out.splitlines()[2].split()]
    assert len(shown) > 1 and shown[0] == 0
    assert all(time == pytest.approx(place * shown[1]) for place, time in enumerate(shown))


def test_a_schedule_is_searched_for_the_times_that_are_given(capsys, tmp_path):
    table = tmp_path / "table.csv"
    times = ("--forward", 2, "--backward-input", 1, "--backward-weight", 0.5, "--send", 0.25)
    sizes = ("--stages", 3, "--microbatches", 6, "--memory-limit", 4, "--weight-share", 0.5)
    run(capsys, "schedule", "zb_auto", *sizes, *times, "--csv", table)
    options = {"memory_limit": 4, "weight_share": 0.5, "seconds": (2, 1, 0.5), "send": 0.25}
    made = schedule("zb_auto", 3, 6, **options)
    assert made != schedule("zb_auto", 3, 6, memory_limit=4)
    assert read_csv(table, "zb_auto") == made


def test_versions_of_the_weights_are_told(capsys):
    out, _ = run(capsys, "schedule", "pipedream", "--stages", 3, "--microbatches", 6)
    rows = [line.split() for line in out.splitlines() if line[:1].isdigit()]
    assert [(row[0], row[-1]) for row in rows] == [("0", "3"), ("1", "2"), ("2", "1")]
    assert "versions: of the weights, the most; microbatches an update: 1, in no time here" in out
    sizes = ("--stages", 2, "--microbatches", 8, "--update-every", 4)
    out, _ = run(capsys, "schedule", "pipedream_2bw", *sizes)
    assert "microbatches an update: 4" in out


def test_the_rate_of_a_schedule_without_a_flush_is_that_of_its_steady_state(capsys):
    out, _ = run(capsys, "schedule", "pipedream", "--stages", 4, "--microbatches", 12)
    steady = out.index(
        "\nsteady     3 a microbatch once it runs on without a flush, of which ranks do nothing 0.00%"
    )
    assert (
        steady
        < out.index("\nmakespan   45, from an empty pipeline to an empty one\n")
        < out.index("\nbubble ")
    )
    assert "note" not in out
    out, _ = run(capsys, "schedule", "pipedream_2bw", "--stages", 4, "--microbatches", 7)
    assert "note: in a step of 7 microbatches alone stage 0 would hold 1 version" in out
    out, _ = run(capsys, "schedule", "1f1b", "--stages", 4, "--microbatches", 12)
    assert "steady" not in out and "busy: of the makespan, while the bubble is of the rank span" in out


def test_pairs_of_copies_run_in_turn_or_together(capsys):
    table = DATA / "DualPipe-p4-v2-m8.csv"
    in_turn, _ = run(capsys, "schedule", "--schedule-csv", table, "--copies", 2)
    together, _ = run(capsys, "schedule", "--schedule-csv", table, "--copies", 2, "--together")
    assert "4 microbatches for each of 2 copies of the model" in in_turn
    assert "\nmakespan   25\n" in in_turn and "\nmakespan   26\n" in together  # 3 m + p / 2 - 1, 3 m + p - 2
    assert "F3a+B1b" in together and "+B" not in in_turn


SMALL = ("--stages", 4, "--microbatches", 8)
BAD = {
    "no name": (SMALL, "name a schedule, one of 1f1b,"),
    "unknown name": (("2f2b", *SMALL), "unknown schedule '2f2b'; choose one of"),
    "no sizes": (("1f1b",), "1f1b: say how many: --stages and --microbatches"),
    "no such name, before sizes": (("zbh1", "--pp", 4), "unknown schedule 'zbh1'"),
    "no microbatches": (("1f1b", "--stages", 2), "say how many: --microbatches"),
    "chunks that it has not": (("1f1b", *SMALL, "--chunks", 2), "1f1b: chunks=2"),
    "sizes that do not fit": (
        ("interleaved", "--stages", 4, "--chunks", 2, "--microbatches", 7),
        "choose 4 or 8",
    ),
    "too many": (("1f1b", "--stages", 1000, "--microbatches", 1000), f"over {MOST_PAIRS:,}"),
    "negative sizes": (("1f1b", "--stages", -1000, "--microbatches", -1000), "num_ranks=-1000"),
    "no time": (("1f1b", *SMALL, "--forward", 0), "forward=0 must be between"),
    "no number": (("1f1b", *SMALL, "--backward-weight", "nan"), "backward_weight=nan must be between"),
    "slow messages": (("1f1b", *SMALL, "--send", 2), "send=2 must be between 0 and"),
    "limit that it has not": (("1f1b", *SMALL, "--memory-limit", 2), "unknown option memory_limit"),
    "copies of a name": (("1f1b", *SMALL, "--copies", 2), "--copies goes with --schedule-csv"),
    "name and table": (("1f1b", "--schedule-csv", DATA / "generated.csv"), "leave out the name 1f1b"),
    "sizes and table": (("--stages", 2, "--schedule-csv", DATA / "generated.csv"), "leave out --stages"),
    "no table": (
        ("--schedule-csv", DATA / "generated.csv"),
        "generated.csv: line 1, column 1: 'name' is no action",
    ),
    "missing table": (("--schedule-csv", "missing.csv"), "cannot read missing.csv"),
    "together without pairs": (
        ("1f1b", *SMALL, "--together"),
        "pairs of actions that overlap, and 1f1b has none",
    ),
    "picture of another kind": (("1f1b", *SMALL, "--plot", "x.gif"), "written as one of pdf, png, svg"),
    "table nowhere": (("1f1b", *SMALL, "--csv", "missing/x.csv"), "there is no folder missing"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(capsys, case):
    arguments, said = BAD[case]
    assert said in refused(capsys, *arguments)


def test_streams_are_for_the_picture(capsys):
    status = main(["simulate", "mlp", "--cluster", "dgx-2", "--batch", "8", "--streams"])
    assert status == 2 and "--streams is for the picture: add --plot" in capsys.readouterr().err


# --- experiments/schedule_cases.py ---------------------------------------------------------------------


def cases(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["schedule_cases.py", *map(str, arguments)])
    status = schedule_cases.main()
    return status, capsys.readouterr().out


def small_folder(tmp_path, rows=("GPipe-p2", "ZBVZeroBubble-p2", "V-Half-p2", "DualPipeV-p2")):
    folder = tmp_path / "tables"
    folder.mkdir()
    header, *lines = (DATA / "generated.csv").read_text().splitlines(keepends=True)
    chosen = [line for line in lines if line.startswith(rows)]
    (folder / "index.csv").write_text("".join([header, *chosen]))
    for line in chosen:
        shutil.copy(DATA / f"{line.split(',')[0]}.csv", folder)
    return folder


def test_tables_have_the_figures_of_their_index(monkeypatch, capsys, tmp_path):
    folder = small_folder(tmp_path)
    status, out = cases(monkeypatch, capsys, folder, "--out", tmp_path)
    assert status == 0
    assert "GPipe: 1 cases, 10 figures equal, 0 different; 1 made by name as the same table\n" in out
    assert "\n40 figures equal, 0 different\n" in out
    assert len((tmp_path / "schedule_cases_tables.csv").read_text().splitlines()) == 5


def test_differences_are_named_and_counted(monkeypatch, capsys, tmp_path):
    folder = small_folder(tmp_path, ("GPipe-p2", "DualPipeV-p2"))
    index = folder / "index.csv"
    index.write_text(
        index.read_text().replace("GPipe,2,1,3,3 3,", "GPipe,2,1,3,3 2,").replace("12.2", "12.3")
    )
    table = folder / "DualPipeV-p2-v2-m5.csv"
    table.write_text(table.read_text().replace("0F0,", "", 1))
    status, out = cases(monkeypatch, capsys, folder, "--out", tmp_path)
    assert status == 1
    assert "GPipe-p2-v1-m3: peak_inflight_per_rank is 3 3, the index says 3 2\n" in out
    assert "GPipe-p2-v1-m3: makespan_send0.1 is 12.2, the index says 12.3\n" in out
    assert "GPipe-p2-v1-m3: peak memory per rank is 3 3, the index says 3 2\n" in out
    assert "\nDualPipeV: 1 cases, 0 figures equal, 10 different; " in out


def test_a_folder_without_tables_is_no_success(monkeypatch, capsys, tmp_path):
    assert cases(monkeypatch, capsys, tmp_path)[0] == 2
