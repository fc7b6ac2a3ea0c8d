"""Damaged ONNX files end in a result or an error of the library; and the fuzz sees what does not."""

import importlib
import random
from pathlib import Path

import pytest

from distsim.errors import ImportModelError, ModelLimitError
from distsim.importer import import_from_onnx, symbolic_dimensions

ROOT = Path(__file__).parents[1]
with pytest.MonkeyPatch.context() as patch:
    # The experiments are scripts: each finds the others next to itself.
    patch.syspath_prepend(str(ROOT / "experiments"))
    fuzz, damage, models = map(importlib.import_module, ("fuzz_files", "fuzz_damage", "fuzz_models"))


def test_damaged_files(tmp_path):
    record = fuzz.fuzz_files(150, 0, tmp_path, others=False)
    assert record.defects == {}, "\n".join(path.read_text() for path in tmp_path.glob("*.txt"))
    assert record.outcomes.total() == 150
    assert min(record.outcomes[kind] for kind in ("result", "limit", "ImportModelError")) > 0


def test_the_undamaged_models_are_imported(tmp_path):
    path = tmp_path / "m.onnx"
    for model in (*models.own_models(), *models.light_models()):
        path.write_bytes(model.SerializeToString())
        assert import_from_onnx(path, bindings=dict.fromkeys(symbolic_dimensions(path), 2)).outputs


def test_a_seed_makes_the_same_damage():
    model = models.perceptron()
    made = [damage.damaged(model, random.Random(seed)) for seed in ("1-7", "1-7", "1-8")]
    assert made[0] == made[1] != made[2]


@pytest.mark.parametrize(
    ("error", "cause", "kind"),
    [
        (ImportModelError("node 'a' (Add): needs a shape"), None, "ImportModelError"),
        (ModelLimitError("too many"), None, "limit"),
        (ImportModelError("cannot read m: no such file"), OSError("no such file"), "ImportModelError"),
        (ImportModelError("m is malformed: IndexError: list"), IndexError("list"), "DEFECT"),
        (ModelLimitError("too little memory"), MemoryError(), "DEFECT"),
        (ImportModelError("node making 'y' (Split):"), None, "DEFECT"),
        (ZeroDivisionError("division by zero"), None, "DEFECT"),
        (RuntimeWarning("invalid value"), None, "DEFECT"),
    ],
)
def test_what_counts_as_a_defect(monkeypatch, tmp_path, error, cause, kind):
    def use(path, rng):
        raise error from cause

    monkeypatch.setattr(fuzz, "_use", use)
    assert fuzz.outcome_of(tmp_path / "m.onnx", random.Random(0))[0] == kind


def test_a_file_that_hangs_or_kills_the_process_is_a_defect(monkeypatch, tmp_path):
    (tmp_path / "case_0.onnx").write_bytes(b"the file")
    program = tmp_path / "worker.py"
    program.write_text('print(\'["result", "", ""]\', flush=True); input(); import os; os.abort()')
    monkeypatch.setattr(fuzz, "__file__", str(program))
    record = fuzz.fuzz_files(2, 0, tmp_path, others=False)
    assert record.outcomes == {"result": 1, "DEFECT": 1}
    assert list(record.defects) == ["exit status -6 in ?"]
    assert (tmp_path / "defect_0_1.onnx").read_bytes() == b"the file"
    program.write_text("import time; time.sleep(30)")
    monkeypatch.setattr(fuzz, "SECONDS", -59.9)  # the first file has 60 s more
    assert list(fuzz.fuzz_files(1, 0, tmp_path, others=False).defects) == ["more than -60 s in ?"]
