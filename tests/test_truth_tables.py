"""Tables of measurements are read, predicted and scored; a row that fails loses itself only."""

import csv
import importlib
import io
import multiprocessing
import re
import time
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from truth_rows import GPT, LLAMA

from distsim.cli import main
from distsim.commands import validate as command
from distsim.compose import parallelize
from distsim.cost import CostModel
from distsim.errors import DistsimError
from distsim.hardware import load_cluster
from distsim.ir import Topology
from distsim.ir.kernel_rates import NO_RATES
from distsim.simulation import Simulator
from distsim.transforms.kernels.policies import kernels_named
from distsim.truth import MissingFeatureError, case_of, evaluation, predict, read_rows, shown_peak
from distsim.truth.accuracy import Accuracy
from distsim.truth.by_device import errors_by_device
from distsim.truth.evaluation import Outcome, evaluated, outcome_of
from distsim.truth.prediction import measure_of
from distsim.truth.score import after_own_runs, detection, mfu_seconds, regret, scores

ROOT = Path(__file__).parents[1]
with pytest.MonkeyPatch.context() as patch:
    # The experiments are scripts: each finds the others next to itself.
    patch.syspath_prepend(str(ROOT / "experiments"))
    cases = importlib.import_module("memory_cases")
    validate = importlib.import_module("validate")


def test_a_peak_is_compared_with_what_was_measured():
    device = load_cluster("dgx-a100").devices[0]
    assert shown_peak(1000, "allocated", device) == 1000
    assert shown_peak(1000, "reserved", device) == 1000 * (1 + device.fragmentation)
    assert shown_peak(1000, "nvidia-smi", device) == 1000 * (1 + device.fragmentation) + device.context
    assert measure_of(GPT) == ("allocated", 10**9)
    assert measure_of(LLAMA) == ("reserved", 2**30)
    assert measure_of({"mem_kind": "GiB nvidia-smi"}) == ("nvidia-smi", 2**30)
    assert measure_of({}) == ("allocated", 2**30)
    left_open = {"mem_kind": "GB (torch peak; GB vs GiB not stated)"}
    assert measure_of(left_open) == ("allocated", 2**30)
    assert measure_of(left_open | {"framework": "nanotron"}) == ("reserved", 2**30)
    assert measure_of({"mem_kind": "GiB allocated", "framework": "nanotron"}) == ("allocated", 2**30)
    with pytest.raises(MissingFeatureError, match="unit"):
        measure_of({"mem_kind": "pages"})


def test_scores():
    score = scores([("a", 1.1, 1.0), ("a", 0.7, 1.0), ("b", 1.0, 1.0)])["a"]
    assert (score.mean, score.bias, score.worst) == pytest.approx((0.2, -0.1, -0.3))


def write(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(
            file, [key for key in GPT if key != "table"] + ["iter_time_s", "outcome"], extrasaction="ignore"
        )
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_the_tables_of_memory_are_written(tmp_path, monkeypatch):
    write(tmp_path / "validate.csv", GPT, LLAMA | {"id": "b"}, GPT | {"id": "c", "hw_gpu": "TPU"})
    monkeypatch.setattr("sys.argv", ["memory_cases.py", str(tmp_path), "--out", str(tmp_path)])
    assert cases.main() == 0
    with (tmp_path / "memory_cases.csv").open() as file:
        found = {row["id"]: row for row in csv.DictReader(file)}
    assert found.keys() == {"a", "b"} and (tmp_path / "memory_cases.png").is_file()
    for row in found.values():
        error = float(row["predicted_GiB"]) / float(row["measured_GiB"]) - 1
        assert float(row["error"]) == pytest.approx(error, rel=1e-4)
    assert "a preset for 'TPU'" in (tmp_path / "memory_cases_missing.csv").read_text()


def predictions(path: Path) -> dict[str, dict[str, str]]:
    with path.open() as file:
        return {row["id"]: row for row in csv.DictReader(file)}


def test_predictions_are_written_whatever_becomes_of_a_row(tmp_path, monkeypatch, capsys):
    """What is predicted, what is missing, and a row on which distsim fails."""
    table = write(
        tmp_path / "rows.csv",
        *(GPT | {"iter_time_s": "1.0"}, GPT | {"id": "b", "hw_gpu": "TPU"}),
        *(GPT | {"id": "c", "source": "x"}, GPT | {"id": "d", "micro_batch": "4", "iter_time_s": "2"}),
    )

    def failing(case):
        if case.plan.microbatches == 4:
            raise ZeroDivisionError("of a test")
        return predict(case)

    monkeypatch.setattr(evaluation, "predict", failing)
    out = tmp_path / "new" / "predictions.csv"
    monkeypatch.setattr("sys.argv", ["validate.py", str(table), "--out", str(out), "--workers", "1"])
    assert validate.main() == 1
    found = predictions(out)
    assert list(found) == ["a", "b", "c", "d"]
    assert list(found["a"]) == ["id", "pred_iter_s", "low", "high", "pred_mem_gb", "pred_oom"]
    expected = predict(case_of(GPT))
    for name in "ac":
        assert float(found[name]["pred_iter_s"]) == pytest.approx(expected.seconds, rel=1e-5)
        assert float(found[name]["pred_mem_gb"]) == pytest.approx(expected.peak / 1e9, rel=1e-5)
        assert found[name]["pred_oom"] == "false"
        bounds = float(found[name]["low"]), float(found[name]["high"])
        assert bounds == pytest.approx(expected.interval[:2], rel=1e-5)
    assert all(not cell for name in "bd" for key, cell in found[name].items() if key != "id")
    printed = capsys.readouterr().out
    assert "a preset for 'TPU'" in printed and "ZeroDivisionError: of a test" in printed
    said = f"A100-SXM4-80GB: --own-runs {1 / expected.seconds:.3f}  (far from 1: is iter_time_s in seconds"
    assert said in printed
    assert out.with_suffix(".png").is_file()


# --- the command ----------------------------------------------------------------------------------


def test_the_command_compares_with_the_baselines(tmp_path, capsys):
    """Two layouts of one model: the errors printed are those of what is predicted and costed here."""
    table = write(
        tmp_path / "rows.csv",
        GPT | {"iter_time_s": "0.05"},
        GPT | {"id": "b", "pp": "2", "tp": "2", "n_layers": "6", "iter_time_s": "0.2", "outcome": "oom"},
    )
    out, picture = tmp_path / "predictions.csv", tmp_path / "picture.svg"
    arguments = [table, "--out", out, "--plot", picture, "--workers", "1"]
    assert main(["validate", *map(str, arguments)]) == 0
    printed, progress = capsys.readouterr()
    first, second = [case_of(row) for row in read_rows([table])]
    steps = [predict(case) for case in (first, second)]
    assert [float(row["pred_iter_s"]) for row in predictions(out).values()] == pytest.approx(
        [step.seconds for step in steps], rel=1e-5
    )
    predicted = ([step.seconds for step in steps], [mfu_seconds(case) for case in (first, second)])
    errors = [
        [seconds / real - 1 for seconds, real in zip(each, (0.05, 0.2), strict=True)]
        for each in (*predicted, [step.best_shape for step in steps])
    ]
    own, *others = [f"{sum(map(abs, each)) / 2:.1%}" for each in errors]
    (line,) = [line for line in printed.splitlines() if line.startswith("all rows ")]
    assert [line.split()[index] for index in (3, 7, 9)] == [own, *others]
    for name in ("pp", r"tp\+pp"):
        assert re.findall(rf"^  {name} +(\d+) ", printed, re.MULTILINE) == ["1"]
    assert f"regret of taking the layout that is predicted to be fastest, {GROUP}" in printed
    assert "recall 0% (of 1 that did not), 2 rows" in printed
    assert progress.count("[") == 2 and "[2/2] b (" in progress
    assert picture.read_text().startswith("<?xml")


GROUP = "1 group of one model, cluster and batch"


def test_rows_that_were_not_measured_are_predicted(tmp_path, capsys):
    table = write(tmp_path / "rows.csv", GPT)
    out, picture = tmp_path / "predictions.csv", tmp_path / "picture.png"
    arguments = [table, "--out", out, "--plot", picture, "--workers", "1"]
    assert main(["validate", *map(str, arguments)]) == 0
    printed, said = capsys.readouterr()
    assert predictions(out)["a"]["pred_iter_s"] and "error of seconds" not in printed
    assert not picture.exists() and "no row was both predicted and measured" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.csv"], "none.csv is not a file"),
        (["empty.csv"], "empty.csv: no rows; give a table"),
        (["empty.csv", "--workers", "0"], "--workers 0 must be at least 1"),
        (["empty.csv", "--limit", "nan"], "--time-limit nan must be more than 0"),
        (["empty.csv", "--plot", "picture.txt"], "picture.txt: predicted against measured is written as one"),
        (["empty.csv", "--out", "nowhere/out.csv"], "there is no folder nowhere"),
    ],
)
def test_bad_input_of_the_command(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    write(Path("empty.csv"))
    assert main(["validate", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["empty.csv"]


def test_the_published_rows_say_where_they_are_from(monkeypatch, capsys):
    """Without a table it is they; all but one are laid out."""
    taken = []

    def evaluated(rows, workers, limit):
        taken.extend(rows)
        return enumerate([Outcome(missing="not tried")] * len(rows))

    monkeypatch.setattr(command, "evaluated", evaluated)
    assert main(["validate"]) == 0
    assert f"{len(taken)} of {len(taken)} rows cannot be expressed" in capsys.readouterr().out
    assert len(taken) == len({row["id"] for row in taken}) == 101
    assert all(row["source"] and row["source_url"] and float(row["iter_time_s"]) > 0 for row in taken)
    for row in taken:
        measure_of(row)
        case_of(row)


def test_the_sweep_of_all_layouts_can_be_laid_out_but_where_the_head_is_not_on_the_last_stage():
    rows = read_rows([Path(__file__).parents[1] / "experiments" / "measured" / "nanotron_sweep.csv"])
    refused: list[str] = []
    for row in rows[::12]:
        try:
            case = case_of(row)
        except MissingFeatureError as error:
            refused.append(str(error))
        else:
            assert case.left_out == () and "the link between nodes" not in case.assumed
    assert all("with the head on stage" in each for each in refused) and len(refused) < len(rows) / 60


# --- figures --------------------------------------------------------------------------------------


def test_a_case_without_tables_is_that_of_devices_without_rates():
    case = case_of(GPT)
    found = case.topology()
    devices = [replace(device, rates=NO_RATES) for device in found.devices]
    bare = Topology.of_devices(devices, found.levels)
    kernels = kernels_named(case.kernels)
    program = parallelize(case.joint(), case.plan, bare, CostModel(bare), kernels=kernels)
    assert predict(case).best_shape == Simulator(CostModel(bare)).simulate(program).step_period


def made_up(measured: float, seconds: float, **changed: object) -> tuple[dict[str, str], Outcome]:
    row = GPT | {"iter_time_s": str(measured), "peak_mem_gb": "", "model": "m"}
    figures = {"low": 0.8 * seconds, "high": 1.2 * seconds, "mfu_seconds": 1.0, "best_shape": 1 / measured}
    return row, replace(Outcome(seconds, layouts=("pp",)), **{**figures, **changed})


def test_errors_by_device_and_source():
    pairs = [
        made_up(1.0, 1.1),
        made_up(2.0, 1.0),
        made_up(1.0, 1.0, high=float("inf")),
        made_up(9.0, 0.0, missing="a wheel"),
    ]
    rows, outcomes = zip(*pairs, strict=True)
    rows = [*rows[:2], rows[2] | {"hw_gpu": "H100-SXM5", "source": "another"}, rows[3]]
    table = csv.DictReader(io.StringIO(errors_by_device(Accuracy(rows, outcomes), date(2026, 1, 31))))
    first, second = sorted(table, key=lambda row: row["rows"], reverse=True)
    assert first["device"].startswith("A100") and second["device"] == "H100-SXM5-80GB"
    assert {name: first[name] for name in ("rows", "inside", "intervals", "date")} == {
        **{"rows": "2", "inside": "1", "intervals": "2", "date": "2026-01-31"}
    }
    assert [float(first[name]) for name in ("mean", "bias", "worst")] == [0.3, -0.2, -0.5]
    assert (second["source"], second["intervals"]) == ("another", "0")


def test_the_figures_of_made_up_outcomes():
    pairs = [
        made_up(1.0, 2.0),  # outside of its interval
        made_up(2.0, 1.75, layouts=("tp", "zero")),  # taken, and 100 % slower than the fastest
        made_up(4.0, 4.0, fits=False),
        made_up(1.0, 1.0, high=float("inf")),
        made_up(9.0, 0.0, missing="a wheel"),
    ]
    pairs[3][0]["model"] = "another"
    pairs[2][0]["outcome"] = "OOM at once"
    pairs[0][0]["peak_mem_gb"] = "10"
    pairs[0] = (pairs[0][0], replace(pairs[0][1], peak=11.0))
    accuracy = Accuracy(*zip(*pairs, strict=True))
    assert [each.measured for each in accuracy.comparisons] == [1.0, 2.0, 4.0, 1.0]
    assert [[each.measured for each in group] for group in accuracy.choices] == [[1.0, 2.0, 4.0]]
    text = re.sub(" +", " ", str(accuracy))
    # Errors 100 %, -12.5 %, 0, 0; at 1 s each: 0, -50 %, -75 %, 0; at 1 / measured: 0, -75 %, -93.75 %, 0.
    assert "\nall rows 4 28.1% 6.2% +21.9% +100.0% 31.2% -31.2% 42.2% -42.2%\n" in text
    assert "\n zero 1 12.5% 12.5% -12.5% -12.5% 50.0% -50.0% 75.0% -75.0%" in text
    assert "\n pp 3 33.3%" in text and " dp only " not in text
    # All alike: the mean of 1, 2 and 4 s is taken; by 1 / measured the one of 4.
    assert "\n distsim 100.0% mean, 100.0% worst nobody, m\n 40% MFU 133.3% mean," in text
    assert "\n no tables 300.0% mean," in text
    group, taken = accuracy.recommendations().splitlines()
    assert group.split()[:3] == ["group", "rows", "regret"] and "100.0%" in taken
    assert Accuracy([], []).recommendations().startswith("no two rows")
    assert "90 % intervals: 66.7% of 3 rows lie within; the median half width is 20.0%" in text
    assert "peak of memory: 1 row, 10.0% mean" in text
    assert (
        "precision 100% (1 of the 1 that are said not to fit), recall 100% (of 1 that did not), 4 rows"
        in text
    )
    assert "1 of 5 rows cannot be expressed:\n 1 a wheel\n0 of 5 rows FAILED" in text


@given(st.lists(st.tuples(st.booleans(), st.booleans())))
def test_precision_and_recall_go_together(pairs):
    found = detection(pairs)
    assert (found.precision is None) == (not found.said) and (found.recall is None) == (not found.happened)
    if found.said and found.happened:
        assert found.precision * found.said == pytest.approx(found.recall * found.happened)
        assert (found.precision == found.recall == 1.0) == all(said == happened for said, happened in pairs)


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1))
def test_regret_is_none_where_the_order_is_right(pairs):
    assert regret(pairs) >= -1e-12
    assert regret([(measured, measured) for _, measured in pairs]) == pytest.approx(0.0, abs=1e-12)


# --- rows and tables ------------------------------------------------------------------------------


def test_a_row_that_takes_too_long_loses_itself_only():
    assert "not done within" in outcome_of(GPT | {"hidden": "512"}, 0.0005).failed
    assert outcome_of(GPT, 100.0).predicted


NAMES = b"id,iter_time_s,framework,hw_gpu,seq,model,global_batch,n_gpus\n"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "must name the columns"),
        (b"framework,framework\n", "each once"),
        (b"id,framework,seq,iter_time_s\n", "framework, hw_gpu, seq, model or n_layers, global_batch or n_m"),
        (NAMES + b"a,1.0\na,2.0\n", "line 3: the id 'a' is that of a row before it"),
        (NAMES + b"a,-5\n", "row a: iter_time_s is '-5', and must be a positive number"),
        (NAMES + b"a,1.0\nb,six\n", "row b: iter_time_s is 'six'"),
        (b"\xff", "UTF-8"),
        (None, "not a file"),
    ],
)
def test_a_table_that_is_none(tmp_path, data, message):
    path = tmp_path / "table.csv"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(DistsimError, match=message):
        read_rows([path])


def test_columns_in_any_case_and_short_rows(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(
        "\ufeffID, Framework ,hidden,hw_gpu,seq,n_layers,dp,global_batch\nx,nanotron\n\n,plain,7,8\n",
        encoding="utf-8",
    )
    first, second = read_rows([path])
    assert first == {"id": "x", "framework": "nanotron", "table": "rows"}
    assert (second["hidden"], second["table"]) == ("7", "rows")
    with pytest.raises(MissingFeatureError):
        case_of(first)


def test_rows_over_two_processes():
    rows = [
        GPT | {"hw_gpu": name} for name in ("TPU", "IPU", "CPU")
    ]  # no prediction: it takes seconds to start
    found = dict(evaluated(rows, 2, 100.0))
    assert [found[place].missing for place in range(3)] == [outcome_of(row, 1.0).missing for row in rows]


def test_who_wants_no_more_rows_waits_for_none():
    """All of them take over a minute."""
    slow = GPT | {"model": "slow", "hidden": "4096", "n_layers": "96", "heads": "32", "pp": "1"}
    rows = [GPT | {"hw_gpu": "TPU"}, *[slow | {"seq": str(64 * times)} for times in range(1, 40)]]
    before = set(multiprocessing.active_children())
    found = evaluated(rows, 2, 100.0)
    next(found)
    start = time.perf_counter()
    found.close()
    assert set(multiprocessing.active_children()) == before
    assert time.perf_counter() - start < 10


def test_dropout_beside_sequence_parallelism_leaves_no_activation_whole():
    """A mask, which dropout makes of scores, is no choice of places: only routers have their own rows.

    A layer more saves as many bytes less as Korthikanti et al. 2022, table 2, say.
    """
    large = {"hidden": "6144", "heads": "64", "kv_heads": "64", "ffn": "24576", "seq": "2048"}
    large |= {"tp": "8", "pp": "1", "micro_batch": "4", "global_batch": "4", "attention": "no flash"}
    row = GPT | large | {"recompute": "selective(attention core)"}
    saved: list[float] = []
    for layers in "12":
        apart, whole = (predict(case_of(row | {"sp": sp, "n_layers": layers})).peak for sp in ("yes", "no"))
        saved.append(whole - apart)
    assert saved[1] - saved[0] == (10 + 24 / 8 - 34 / 8) * 2048 * 4 * 6144


def test_own_runs_of_a_large_table_are_drawn():
    """Of 5 of 300 steps there are 2e10 choices; those drawn say what all of 20 say of the same ratios."""
    ratios = [1.3, 1.1, 1.4, 1.2, 1.25] * 4
    few, many = (np.mean(np.abs(after_own_runs(each, 5, most=400))) for each in (ratios, ratios * 15))
    assert few == pytest.approx(many, rel=0.1) and few < np.mean([abs(1 / ratio - 1) for ratio in ratios])
