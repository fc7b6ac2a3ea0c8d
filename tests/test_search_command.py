"""``distsim search``: what it prints and writes, whatever the processes, and after it was killed."""

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest
from cli_cases import run

import distsim
from distsim.cli import main
from distsim.plan_search.journal import JournalWriter, format_of
from distsim.plan_search.trial import PlanTrial

MODEL = ("search", "gpt:layers=2,hidden=64,heads=4,seq=32,vocab=100", "--cluster", "dgx-a100", "--batch", 16)
LITTLE = ("--set", "device.context=0GiB", "--set", "device.memory=2MiB")
SMALL = (*MODEL, "--plan", "tp=1|2,pp=1|2,dp=2|4|8,microbatch_size=1|2,remat=none,zero=1", "--top", 3)


class Whole(NamedTuple):
    """What a search says that one process made from the beginning to the end, and writes into a folder."""

    out: str
    err: str
    folder: Path


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder, out, err = tmp_path_factory.mktemp("whole"), io.StringIO(), io.StringIO()
    files = ("--csv", folder / "a.csv", "--json", folder / "a.json", "--journal", folder / "a.jsonl")
    with redirect_stdout(out), redirect_stderr(err):
        assert main([str(a) for a in (*SMALL, *files)]) == 0
    return Whole(out.getvalue().partition("\ntable: ")[0] + "\n", err.getvalue(), folder)


def test_the_best_plan_is_what_simulate_says_of_it(capsys, whole):
    out, err, folder = whole
    with (folder / "a.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = json.loads((folder / "a.json").read_text())["searches"][0]
    assert len(rows) == found["plans"] == sum(found["counts"].values())
    assert f"{len(rows)} plans: {found['counts']['simulated']} simulated" in out
    assert re.search(r"searching: \d+ of \d+ plans, \d+ tried, [\d.]+ plans/s", err)
    best = rows[0]
    assert [float(row["step_s"]) for row in rows[:3]] == sorted(float(row["step_s"]) for row in rows[:3])
    simulated, _ = run(capsys, "simulate", *MODEL[1:], "--plan", best["plan"])
    shown = re.search(r"step time +([\d.]+ \w+)", simulated)[1]
    assert re.search(rf"^1 +{shown} ", out, re.MULTILINE)
    assert f"MFU           {float(best['mfu']):.1%}" in simulated


def test_nothing_fits_is_status_3_and_says_what_nearly_does(capsys):
    status = main([str(a) for a in (*MODEL, "--plan", "dp=8,remat=none,microbatch_size=2", *LITTLE)])
    out, _ = capsys.readouterr()
    assert status == 3 and re.search(r"none of \d+ plans? fits in memory", out)


def test_clusters_and_sizes_are_compared_by_cost(capsys, tmp_path):
    sets = ("--plan", "tp=1,pp=1,remat=none,zero=0,microbatch_size=1", "--gpus", "2,16", "--tokens", "1e9")
    other = ("--cluster", "aws-p5", "--json", tmp_path / "a.json", "--journal", tmp_path / "j.jsonl")
    out, _ = run(capsys, *MODEL, *other, *sets, "--price", "2,4", "--objective", "cost")
    rows = re.findall(r"^(dgx-a100|aws-p5)(?::2)? \((\d+) GPUs\) .*\S  dp=(\d+)", out, re.MULTILINE)
    assert {(name, int(gpus)) for name, gpus, _ in rows} == {
        (name, gpus) for name in ("dgx-a100", "aws-p5") for gpus in (2, 16)
    }
    assert all(gpus == dp for _, gpus, dp in rows)
    assert "days for 1 billion tokens" in out
    assert out.count(": energy at 400 W") == out.count("4 $ a GPU-hour") == 1, "of all sizes at once"
    assert "no price is known" not in out
    found = {each["cluster"]: each for each in json.loads((tmp_path / "a.json").read_text())["searches"]}
    dollars = sorted((each["dollars"], each["price"], each["devices"]) for each in found.values())
    assert [(price, gpus) for _, price, gpus in dollars] == [
        ({"dgx-a100": 2.0, "aws-p5": 4.0}[name], int(gpus)) for name, gpus, _ in rows
    ]
    assert {path.name for path in tmp_path.glob("j-*.jsonl")} == {
        f"j-{name}{count}.jsonl" for name in ("dgx-a100", "aws-p5") for count in ("-2-GPUs", "-2-16-GPUs")
    }
    out, _ = run(capsys, *MODEL, *sets[:2], "--tokens", "1e9")
    assert "dgx-a100: without dollars: no price is known; give --price" in out and "GPU-hours" in out
    # The price of the preset, where it has one; nothing else knows dgx-a100's.
    assert main([*map(str, MODEL), *sets[:2], "--objective", "cost"]) == 2
    assert "dgx-a100 does not say its price: give --price" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--plan", "tp=3"), "no plan of 8 devices"),
        (("--plan", "tp=1,tp=2"), r"tp is given twice; write tp=1|2"),
        (("--plan", "foo=1"), "unknown field 'foo'"),
        (("--plan", "order=*"), "no end of values"),
        (("--plan", "tp=1|"), "is not field=value|value"),
        (("--plan", "microbatches=1,microbatch_size=2"), "say the same"),
        (("--top", "0"), "--top 0: at least 1"),
        (("--price", "2,3"), "2 prices for 1 clusters"),
        (("--price", "much"), "a number of dollars"),
        (("--tokens", "-1"), "--tokens -1: a number more than 0"),
        (("--pue", "0.9"), "--pue 0.9: a number of 1 or more"),
        (("--restart", "20"), "--restart 20 has no effect where no cost is asked for: add --tokens"),
        (("--resume",), "--resume goes on with a --journal"),
        (("--gpus", "8,x"), "is not numbers of GPUs"),
        (("--gpus", "12"), "a node of dgx-a100 has 8"),
    ],
)
def test_what_makes_no_sense_is_refused(capsys, options, said):
    assert main([*map(str, MODEL), *options]) == 2
    assert said in capsys.readouterr().err


# --- processes and journals ---------------------------------------------------------------------------


def test_workers_find_the_same_also_where_one_is_killed(capsys, monkeypatch, whole):
    submit, killed = ProcessPoolExecutor.submit, []

    def kill_first(pool, *task):
        future = submit(pool, *task)
        if not killed:
            killed.append(next(iter(pool._processes)))
            os.kill(killed[0], signal.SIGKILL)
        return future

    monkeypatch.setattr(ProcessPoolExecutor, "submit", kill_first)
    assert run(capsys, *SMALL, "--workers", 2)[0] == whole.out and killed


def test_a_worker_that_died_while_it_had_nothing_to_do_is_replaced(capsys, monkeypatch, whole):
    submit, broken = ProcessPoolExecutor.submit, []

    def broken_first(pool, *task):
        if not broken:
            broken.append(pool)
            raise BrokenProcessPool("died")
        return submit(pool, *task)

    monkeypatch.setattr(ProcessPoolExecutor, "submit", broken_first)
    assert run(capsys, *SMALL, "--workers", 2)[0] == whole.out and broken


UNGUARDED = """
import distsim
model = "gpt:layers=48,hidden=64,heads=2,seq=16,vocab=64"  # over 64 KiB, which a pipe does not hold
distsim.search(model, "dgx-a100", "dp=8|4,tp=1|2", 16, workers=2, journal="journal.jsonl")
"""


def test_a_script_that_each_process_runs_again_is_told_what_to_do(tmp_path):
    """Each process imports it, and would search before it has started: the first waited for that forever."""
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    said = "a process of a search ended before it had started: put what starts the search under `if __name__"
    assert said in done.stderr.splitlines()[-1]
    assert "a process of a search searches itself before it has started: put what" in done.stderr
    assert "bootstrapping" not in done.stderr and "want of memory" not in done.stderr


def test_killed_and_resumed_it_says_the_same(capsys, tmp_path, whole):
    journal = tmp_path / "search.jsonl"
    lines = (whole.folder / "a.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) > 8
    code = "import sys; from distsim.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, *map(str, SMALL), "--journal", str(journal)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not journal.exists() or journal.read_bytes().count(b"\n") < 4:
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    # What was found before is there; a line that was being written is damaged.
    with journal.open("ab") as file:
        file.write(lines[5][:40])
    assert journal.read_bytes().count(b"\n") >= 4
    assert run(capsys, *SMALL, "--journal", journal, "--resume")[0] == whole.out
    resumed = journal.read_bytes().splitlines(keepends=True)
    assert sorted(map(len, resumed)) == sorted(map(len, lines))  # nothing was tried twice
    # More of the best from the same journal are those of a new search.
    more = [*SMALL[:-1], 5]
    known, new = tmp_path / "known.csv", tmp_path / "new.csv"
    resumed = run(capsys, *more, "--csv", known, "--journal", journal, "--resume")[0]
    assert resumed.replace("known.csv", "new.csv") == run(capsys, *more, "--csv", new)[0]
    assert known.read_bytes() == new.read_bytes()


def test_lines_that_were_changed_count_for_nothing(capsys, tmp_path):
    journal = tmp_path / "search.jsonl"
    few = (*MODEL, "--plan", "dp=8,tp=1,remat=none,zero=0|1", "--journal", journal)
    whole, _ = run(capsys, *few)
    head, first, *others = journal.read_text().splitlines()
    faster = re.sub(r'"seconds": [\d.e-]+', '"seconds": 1e-9', first)
    wrong = ['{"text": "dp=8", "seconds": "fast"}', "[" * 9999, "null", '{"text": 7}', faster]
    journal.write_text("\n".join([head, *wrong, *others]) + "\n")
    out, err = run(capsys, *few, "--resume")
    assert out == whole and f"{len(others)} plan" in err and f"{len(wrong)} damaged lines left out" in err


def test_a_journal_of_another_search_is_refused(capsys, tmp_path):
    journal = tmp_path / "search.jsonl"
    few = ("--plan", "dp=8,remat=none,zero=0,microbatch_size=2", "--journal", str(journal))
    run(capsys, *MODEL, *few)
    other = [str(a) for a in MODEL]
    other[3] = "dgx-h100"
    assert main([*other, *few, "--resume"]) == 2
    err = capsys.readouterr().err
    assert "is the journal of another search: gpt:layers=2" in err and "on dgx-a100, batch=16, not" in err
    assert "cluster is dgx-h100, and was dgx-a100; name its own" in err
    for more, said in (
        (["--batch", "32"], "batch is 32, and was 16; name its own"),
        (["--clip", "0.5"], "clip is 0.5, and was not given; name its own"),
        (["--kernels", "compiled"], "kernels is compiled, and was eager; name its own"),
        (
            ["--set", "device.memory=40GiB"],
            "set is device.memory=40GiB, and was not given; device.memory is 42949672960.0, and was 85899",
        ),
    ):
        assert main([*map(str, MODEL), *more, *few, "--resume"]) == 2
        assert said in capsys.readouterr().err
    older = json.loads(journal.read_text().splitlines()[0])
    without = {name: value for name, value in older.items() if name != "asked"} | {"digest": "another"}
    for head in (without, older | {"digest": "another"}, older | {"digest": "another", "asked": [1]}):
        journal_of_old = tmp_path / "old.jsonl"
        journal_of_old.write_text(json.dumps(head) + "\n")
        assert main([*map(str, MODEL), *few[:2], "--journal", str(journal_of_old), "--resume"]) == 2
        assert "but not the file of the model, or the devices" in capsys.readouterr().err

    head, *lines = journal.read_text().splitlines(keepends=True)
    older = head.replace(f'"{format_of(PlanTrial)}"', "4") + "".join(lines)
    journal.write_text(older)
    assert main([*map(str, MODEL), *few, "--resume"]) == 2
    said = capsys.readouterr().err
    assert "another version of distsim" in said and "format 4, not" in said and "without --resume" in said
    assert journal.read_text() == older
    for foreign in ("not a journal\n", "my notes", '{"a": 1}\n[', ""):
        journal.write_text(foreign)
        assert main([*map(str, MODEL), *few, "--resume"]) == 2
        assert "is no journal of a search" in capsys.readouterr().err
        assert journal.read_text() == foreign  # nothing is cut off what is not ours
    Path(journal).unlink()
    assert main([*map(str, MODEL), *few, "--resume"]) == 2
    assert "there is no journal to resume" in capsys.readouterr().err


def test_a_journal_is_not_replaced(capsys, tmp_path):
    files = {gpus: tmp_path / f"j-dgx-a100-{gpus}-GPUs.jsonl" for gpus in (2, 4)}
    sets = ("--plan", "tp=1,pp=1,remat=none,zero=0,microbatch_size=2", "--gpus", "2,4")
    few = [*map(str, MODEL), *sets, "--journal", str(tmp_path / "j.jsonl")]
    files[4].write_text("hours of work\n")
    assert main(few) == 2 and files[4].read_text() == "hours of work\n" and not files[2].exists()
    assert f"{files[4]} has 14 bytes already" in (said := capsys.readouterr().err) and "add --resume" in said
    files[4].unlink()
    # One that was stopped before it came to the second cluster goes on with the first.
    run(capsys, *few)
    files[4].unlink()
    assert "1 plan known" in run(capsys, *few, "--resume")[1] and files[4].exists()


def test_stopped_it_says_how_to_go_on(capsys, tmp_path, monkeypatch):
    journal = tmp_path / "j.jsonl"

    def stop(self, trial):
        raise KeyboardInterrupt

    monkeypatch.setattr(JournalWriter, "append", stop)
    sets = ("--plan", "dp=8,remat=none,zero=0,microbatch_size=2", "--workers", "1")
    with pytest.raises(KeyboardInterrupt):
        main([*map(str, MODEL), *sets, "--journal", str(journal)])
    assert f"--journal {journal} --resume" in capsys.readouterr().err


def test_tp_is_given_in_one_place(capsys):
    assert main([*map(str, SMALL), "--max-tp", "1"]) == 2
    assert "max_tp=1 and tp=1|2 of the plan both say which tp to try; give one" in capsys.readouterr().err


def test_a_kernel_that_a_cluster_has_no_figure_for_is_noted(capsys):
    few = ("--plan", "dp=8,remat=none,zero=0,microbatch_size=2")
    out, _ = run(capsys, *MODEL, *few, "--attention", "flash3", "--precision", "fp32")
    assert "note: attention flash3: the cluster has no figure for it" in out
    assert "note: attention flash3: such kernels take 16 bits; fp32 computes in more" in out


def test_shares_on_nodes_of_several_kinds_are_those_of_the_step(tmp_path):
    """The peak is that of all devices together; the fullest device is the one that has least left."""
    cluster = tmp_path / "two.toml"
    kinds = '[[nodes]]\ncount = 1\n[[nodes]]\ncount = 1\nbase = "dgx-a100"\n'
    cluster.write_text(f'base = "dgx-h200"\nname = "two"\n{kinds}', encoding="utf-8")
    found = distsim.search("gpt2", str(cluster), "dp=8,pp=2,microbatches=4,zero=1", batch=64, workers=1)
    step = distsim.simulate("gpt2", str(cluster), str(found.best.plan), batch=64)
    assert found.step.mfu(found.best.seconds) == pytest.approx(step.mfu, rel=1e-12)
    fullest = max(step.memory, key=lambda device: step.memory[device].peak / device.usable)
    assert (found.best.peak, found.best.usable) == (step.memory[fullest].peak, fullest.usable)
