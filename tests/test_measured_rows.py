"""A row of published measurements becomes a model and a plan by its columns, or names what is missing."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest

from distsim.hardware import load_cluster
from distsim.ir import Float8E4M3FN
from distsim.models.decoder_sizes import DropoutRates
from distsim.plan import Plan

ROOT = Path(__file__).parents[1]
with pytest.MonkeyPatch.context() as patch:
    # The experiments are scripts: each finds the others next to itself.
    patch.syspath_prepend(str(ROOT / "experiments"))
    rows = importlib.import_module("measured_rows")
    cases = importlib.import_module("memory_cases")

GPT = {
    **{"id": "a", "table": "made_up", "source": "nobody", "notes": "", "framework": "Megatron-LM fork"},
    **{"hw_gpu": "A100-SXM4-80GB", "arch": "gpt", "n_layers": "6", "hidden": "64", "heads": "4"},
    **{"kv_heads": "4", "ffn": "256", "vocab": "", "seq": "32", "tied_emb": "no", "moe_experts": ""},
    **{"precision": "fp16", "attention": "", "dp": "1", "tp": "1", "sp": "no", "pp": "4", "vpp": "1"},
    **{"cp": "1", "ep": "1", "zero": "0", "fsdp": "", "schedule": "1f1b", "recompute": "none"},
    **{"micro_batch": "2?", "global_batch": "16", "peak_mem_gb": "0.01", "mem_kind": "GB as printed"},
}
LLAMA = GPT | {
    **{"framework": "torchtitan", "hw_gpu": "H100-SXM5-80GB", "arch": "llama3", "kv_heads": "2"},
    **{"vocab": "512", "precision": "fp8 linears", "attention": "SDPA flash", "dp": "4", "pp": "1"},
    **{"zero": "3", "schedule": "none", "recompute": "full", "mem_kind": "GiB max reserved"},
}


def test_a_row_of_megatron():
    case = rows.case_of(GPT)
    assert case.plan == Plan(pp=4, microbatches=8, stages="default")
    assert (case.precision.name, case.attention, case.kernels) == ("mixed_fp16", "math", "fused")
    assert case.sizes.vocab == 50304 and not case.sizes.tied
    assert case.sizes.dropout == DropoutRates(0.1, 0.1, 0.1)
    assert case.assumed == ("attention math", "vocabulary 50257", "dropout 0.1")


def test_a_row_of_torchtitan():
    case = rows.case_of(LLAMA)
    assert case.plan == Plan(dp=4, microbatches=2, remat="full_early", zero=3)
    assert case.precision.linear == Float8E4M3FN() and case.precision.used.itemsize == 2
    assert (case.attention, case.kernels, case.stack.name) == ("flash", "eager", "torchtitan")
    assert case.sizes.attention.groups == 2 and case.sizes.feed_forward.gated
    assert rows.case_of(LLAMA | {"notes": "torch.compile"}).kernels == "compiled"


def test_a_row_divides_the_sequence_where_it_divides_tensors():
    assert [rows.case_of(GPT | {"sp": "yes", "tp": tp}).plan.sp for tp in ("1", "2")] == ["off", "on"]


@pytest.mark.parametrize("stage", [1, 2])
def test_a_row_that_divides_state_or_gradients(stage):
    """In the types of the stack: those of torch's FSDP are for rows that divide parameters."""
    case = rows.case_of(GPT | {"zero": str(stage), "dp": "2", "tp": "2", "sp": "yes", "precision": "bf16"})
    assert (case.plan.zero, case.plan.sp, case.precision.name) == (stage, "on", "mixed")


@pytest.mark.parametrize("column", ["source", "id", "peak_mem_gb"])
def test_who_measured_and_what_does_not_matter(column):
    assert rows.case_of(GPT | {column: "another"}) == rows.case_of(GPT)


@pytest.mark.parametrize(
    ("changed", "missing"),
    [
        ({"cp": "2"}, "cp > 1"),
        ({"zero": "4"}, "zero=4 is out of range"),
        ({"schedule": "of my own"}, "the schedule 'of my own'"),
        ({"arch": "deepseek_v2"}, "sizes of a deepseek_v2"),
        ({"moe_experts": "8"}, "experts"),
        ({"hw_gpu": "TPU"}, "a preset for TPU"),
        ({"framework": "pencil"}, "a stack for pencil"),
        ({"hidden": ""}, "a number in column hidden"),
        ({"n_layers": "7"}, "7 layers do not divide"),
        ({"recompute": "some"}, "recompute 'some'"),
    ],
    ids=str,
)
def test_what_cannot_be_expressed_is_named(changed, missing):
    with pytest.raises(rows.MissingFeature, match=missing):
        rows.case_of(GPT | changed)


def test_a_peak_is_compared_with_what_was_measured():
    device = load_cluster("dgx-a100").devices[0]
    assert cases.shown(1000, "allocated", device) == 1000
    assert cases.shown(1000, "reserved", device) == 1000 * (1 + device.fragmentation)
    assert cases.shown(1000, "nvidia-smi", device) == 1000 * (1 + device.fragmentation) + device.context
    assert cases.measure_of(GPT) == ("allocated", 10**9)
    assert cases.measure_of(LLAMA) == ("reserved", 2**30)
    assert cases.measure_of({"mem_kind": "GiB nvidia-smi"}) == ("nvidia-smi", 2**30)


def test_the_tables_are_written(tmp_path, monkeypatch):
    table = tmp_path / "validate.csv"
    with table.open("w", newline="") as file:
        writer = rows.csv.DictWriter(file, [key for key in GPT if key != "table"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows([GPT, LLAMA | {"id": "b"}, GPT | {"id": "c", "cp": "2"}])
    monkeypatch.setattr("sys.argv", ["memory_cases.py", str(tmp_path), "--out", str(tmp_path)])
    assert cases.main() == 0
    found = {row["id"]: row for row in rows.read_rows([tmp_path / "memory_cases.csv"])}
    assert found.keys() == {"a", "b"} and (tmp_path / "memory_cases.png").is_file()
    for row in found.values():
        error = float(row["predicted_GiB"]) / float(row["measured_GiB"]) - 1
        assert float(row["error"]) == pytest.approx(error, rel=1e-4)
    (missing,) = rows.read_rows([tmp_path / "memory_cases_missing.csv"])
    assert missing["missing"] == "cp > 1"


def test_the_cluster_is_large_enough_for_the_plan():
    case = rows.case_of(GPT)
    assert len(case.topology().devices) == 8
    assert len(replace(case, plan=Plan(dp=9)).topology().devices) == 16
