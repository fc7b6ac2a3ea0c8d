"""Tables of measurements are read, predicted and scored; a row that fails loses itself only."""

import csv
import importlib
from pathlib import Path

import pytest
from truth_rows import GPT, LLAMA

from distsim.errors import DistsimError
from distsim.hardware import load_cluster
from distsim.truth import MissingFeatureError, case_of, predict, read_rows, shown_peak
from distsim.truth.prediction import measure_of
from distsim.truth.score import scores

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
    with pytest.raises(MissingFeatureError, match="unit"):
        measure_of({"mem_kind": "pages"})


def test_scores():
    score = scores([("a", 1.1, 1.0), ("a", 0.7, 1.0), ("b", 1.0, 1.0)])["a"]
    assert (score.mean, score.bias, score.worst) == pytest.approx((0.2, -0.1, -0.3))


def write(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(
            file, [key for key in GPT if key != "table"] + ["iter_time_s"], extrasaction="ignore"
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

    monkeypatch.setattr(validate, "predict", failing)
    out = tmp_path / "predictions.csv"
    monkeypatch.setattr("sys.argv", ["validate.py", str(table), "--out", str(out), "--workers", "1"])
    assert validate.main() == 1
    with out.open() as file:
        found = {row["id"]: row for row in csv.DictReader(file)}
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
    assert out.with_suffix(".png").is_file()


def test_a_row_that_takes_too_long_loses_itself_only():
    assert "not done within" in validate.outcome_of(GPT | {"hidden": "512"}, 0.0005).failed
    assert validate.outcome_of(GPT, 100.0).predicted


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "must name the columns"),
        (b"framework,framework\n", "each once"),
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
    path.write_text("\ufeffID, Framework ,hidden\nx,nanotron\n\n,plain,7,8\n", encoding="utf-8")
    first, second = read_rows([path])
    assert first == {"id": "x", "framework": "nanotron", "table": "rows"}
    assert (second["hidden"], second["table"]) == ("7", "rows")
    with pytest.raises(MissingFeatureError):
        case_of(first)


def test_rows_over_two_processes(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))  # where the processes find the script
    rows = [
        GPT | {"hw_gpu": name} for name in ("TPU", "IPU", "CPU")
    ]  # no prediction: it takes seconds to start
    found = dict(validate.evaluated(rows, 2, 100.0))
    assert [found[place].missing for place in range(3)] == [
        validate.outcome_of(row, 1.0).missing for row in rows
    ]


def test_dropout_beside_sequence_parallelism_leaves_no_activation_whole():
    """A mask, which dropout makes of scores, is no choice of places: only routers have their own rows."""
    large = {
        "hidden": "6144",
        "heads": "64",
        "kv_heads": "64",
        "ffn": "24576",
        "seq": "2048",
        "n_layers": "1",
    }
    large |= {"tp": "8", "pp": "1", "micro_batch": "4", "global_batch": "4", "attention": "no flash"}
    row = GPT | large | {"recompute": "selective(attention core)"}
    apart, whole = (predict(case_of(row | {"sp": sp})).peak for sp in ("yes", "no"))
    assert whole - apart > (10 + 24 / 8 - 34 / 8) * 2048 * 4 * 6144  # Korthikanti et al. 2022, table 2
