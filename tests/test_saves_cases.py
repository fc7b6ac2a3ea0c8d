"""Saved sets beside those that PyTorch and AutoParallel chose, through the experiment that prints them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"
EXPERIMENTS = Path(__file__).parents[1] / "experiments"
REMAT = sorted((DATA / "remat").glob("*.json"))
REPLAY = sorted((DATA / "replay").glob("*.json"))


@pytest.fixture
def remat_cases(monkeypatch):
    # The experiments are scripts: each finds the others next to itself.
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    import remat_cases

    return remat_cases


@pytest.mark.parametrize("path", [*REMAT, *REPLAY], ids=lambda path: path.stem)
def test_saved_sets_are_those_recorded(remat_cases, path):
    case = remat_cases.read_case(path)
    assert case.expected
    for partitioner, expected in case.expected.items():
        verdict = remat_cases.compare(case, partitioner, expected)
        corrected = ("LOST" in case.name and partitioner == "replay") or "DEFECT" in case.name
        assert verdict.kind == ("corrected" if corrected else "match"), str(verdict)


def test_the_runner_prints_a_line_for_each_and_the_reason_for_a_correction(remat_cases, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["remat_cases.py", str(DATA / "replay")])
    assert remat_cases.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 * len(REPLAY) + 1
    assert lines[0].startswith(
        "corrected  cse_second_tagged_LOST [replay]: the original loses the tag of exp_"
    )
    assert "1 corrected, 0 difference, 0 unreadable" in lines[-1]


def test_a_wrong_record_is_a_difference(remat_cases, tmp_path):
    case = json.loads((DATA / "remat" / "cos3.json").read_text())
    case["saved"] = [["cos", 256]]
    (tmp_path / "case.json").write_text(json.dumps(case))
    (verdict,) = remat_cases.run_folder(tmp_path)
    assert verdict.kind == "difference"
    assert "saved ['primals_1'], recorded ['cos']" in verdict.reason


BROKEN = {
    "not JSON": (lambda case: "{", "Expecting"),
    "no object": (lambda case: [], "expected an object"),
    "no graph": (lambda case: {**case, "joint": None}, "'joint' is missing or no list"),
    "no node": (lambda case: {**case, "joint": [3]}, "expected an object"),
    "no name": (lambda case: {**case, "joint": [{}]}, "'name' is missing"),
    "unknown input": (lambda case: changed(case, 2, inputs=["nowhere"]), "reads 'nowhere'"),
    "inputs of inputs": (lambda case: changed(case, 3, inputs=[["cos"]]), "'inputs' of cos_1"),
    "two of a name": (lambda case: {**case, "joint": case["joint"][:1] + case["joint"]}, "two nodes"),
    "a negative size": (lambda case: changed(case, 2, bytes=-4), "bytes of cos"),
    "a size of nothing on earth": (lambda case: changed(case, 2, bytes=10**400), "bytes of cos"),
    "a shape of words": (lambda case: changed(case, 2, shape=[2.5]), "shape of cos"),
    "a budget of words": (lambda case: {**case, "budget": "half"}, "budget"),
    "a budget of 2": (lambda case: {**case, "budget": 2}, "share from 0 to 1"),
    "a strange partitioner": (lambda case: {**case, "partitioner": "metis"}, "unknown partitioner 'metis'"),
    "nothing recorded": (lambda case: {**case, "results": {"default": {}}}, "nothing was recorded"),
}


def changed(case, row, **fields):
    return {
        **case,
        "joint": [{**each, **(fields if i == row else {})} for i, each in enumerate(case["joint"])],
    }


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_no_case_is_named_and_passed_over(remat_cases, tmp_path, monkeypatch, capsys, name):
    change, message = BROKEN[name]
    good = (DATA / "remat" / "cos3.json").read_text()
    broken = change(json.loads(good))
    (tmp_path / "a.json").write_text(broken if isinstance(broken, str) else json.dumps(broken))
    (tmp_path / "b.json").write_text(good)
    monkeypatch.setattr("sys.argv", ["remat_cases.py", str(tmp_path)])
    assert remat_cases.main() == 1
    first, second, _ = capsys.readouterr().out.splitlines()
    assert first.startswith(("unreadable", "difference"))
    assert message in first
    assert second == "match      cos3 [min_cut]"
