"""Scripts that measure on a GPU: what they say of steps and kernels, and what distsim makes of that."""

import csv
import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from distsim.cost import CostModel
from distsim.errors import DistsimError
from distsim.hardware import load_cluster
from distsim.importer.configs import read_torchtitan
from distsim.simulation import Simulator
from distsim.transforms.autodiff.precision import precision_named
from distsim.truth import case_of, predict, read_rows
from distsim.truth.prediction import program_of

ROOT = Path(__file__).parents[1]
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT / "experiments"))
    steps = importlib.import_module("measure_steps")
    elements = importlib.import_module("element_rates")

MEASURED = ROOT / "experiments" / "measured"
OWN = {row["id"]: row for row in read_rows([MEASURED / "h200_steps.csv"])}
OF_H100 = {row["id"]: row for row in read_rows([MEASURED / "h100_steps.csv"])}


SHARDED = [step for step in steps.STEPS if step.sharded]


@pytest.mark.parametrize(
    "step", [step for step in steps.STEPS if not step.sharded], ids=lambda step: step.name
)
def test_a_step_is_laid_out_as_it_is_trained(step):
    row = {name: str(value) for name, value in steps.row_of(step).items()}
    case = case_of({**row, "hw_gpu": "H200", "gpu_mem_gb": "141", "framework": "PyTorch 2.11"})
    assert (case.batch, case.plan.microbatches) == (
        step.micro_batch * step.n_microbatches,
        step.n_microbatches,
    )
    policies = {"amp bf16": "amp", "bf16 pure": "bf16"}
    assert case.precision.name == policies.get(step.precision, step.precision)
    assert case.kernels == ("compiled" if step.compiled else "eager")
    kinds = {"math": "math", steps.EFFICIENT: "flash"}
    assert case.attention == kinds.get(step.attention, "cudnn")
    assert case.plan.remat == ("full_early" if step.recompute == "full" else "none")  # as torch's checkpoint
    assert case.sizes.tied == (step.arch == "gpt")
    assert OWN[step.name]["seq"] == str(step.seq)


@pytest.mark.parametrize("step", SHARDED, ids=lambda step: step.name)
def test_a_sharded_step_is_laid_out_as_torchtitan_trains(step):
    row = {name: str(value) for name, value in steps.row_of(step).items()}
    framework = "torchtitan's step, PyTorch 2.11.0 2026-11-27"
    case = case_of({**row, "hw_gpu": "H100", "gpu_mem_gb": "85", "framework": framework})
    assert (case.stack.name, case.kernels, case.attention) == ("torchtitan", "compiled_complex", "flash2")
    assert case.plan.zero == 3 and case.plan.remat.partition(":")[0] in ("ops", "full_early")
    assert case.precision.name == ("fsdp2_fp8" if "fp8" in step.precision else "fsdp2")
    scaling = step.precision.removeprefix("fp8 ")
    assert (case.precision.linear is not None) == (scaling != "bf16")
    assert case.precision.linear is None or case.precision.scaling == scaling


def test_products_of_8_bits_are_recomputed_as_others_are(tmp_path):
    """As a trace of torchao under torchtitan's checkpoints shows (measured/h100_step_kernels.csv)."""
    file = tmp_path / "job.toml"
    text = """
[model]
name = "llama3"
flavor = "8B"
converters = ["quantize.linear.float8"]
[training]
seq_len = 8192
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[quantize.linear.float8]
recipe_name = """
    file.write_text(f'{text}"rowwise"', encoding="utf-8")
    job = read_torchtitan(file)
    assert job.fields["remat"] == "ops:Float8MatMul/2+MatMul/2+Attention"
    assert precision_named(job.stack.precision).scaling == "rowwise"
    file.write_text(f'{text}"rowwise_with_gw_hp"', encoding="utf-8")
    with pytest.raises(DistsimError, match="rowwise_with_gw_hp.*must be one of tensorwise, rowwise"):
        read_torchtitan(file)


def test_what_scales_of_rows_take_longer_is_what_was_measured():
    lines = (MEASURED / "h100_columns.csv").read_text(encoding="utf-8").splitlines()[1:]
    device = load_cluster("dgx-h100").devices[0]
    cycles = [
        (float(row["seconds_rowwise"]) - float(row["seconds_bf16"]))
        / (int(row["layers"]) * float(row["elements"]))
        * (device.rates.processors * device.rates.clock)
        for row in csv.DictReader(lines)
    ]
    assert elements.CYCLES["Float8Turn"][0] == pytest.approx(sum(cycles) / len(cycles), rel=0.01)
    memory = []
    for name in ("titan_8b_8_layers", "titan_8b_8_layers_fp8_rowwise"):
        case = case_of(OF_H100[name])
        costs = CostModel(case.topology(), kernels="compiled")
        memory.append(Simulator(costs).simulate(program_of(case, costs)).breakdown("kind")["memory"])
    assert memory[1] - memory[0] == pytest.approx(0.0569, rel=0.1)  # the last of them


@pytest.mark.parametrize("name", OF_H100)
def test_sharded_steps_take_what_was_measured(name):
    """No figure of the preset is fitted to them but what casts along columns take."""
    predicted = predict(case_of(OF_H100[name]))
    assert predicted.seconds == pytest.approx(float(OF_H100[name]["iter_time_s"]), rel=0.04)
    assert predicted.peak / 2**30 == pytest.approx(float(OF_H100[name]["peak_mem_gb"]), rel=0.1)


@pytest.mark.parametrize(
    "name", ["gpt_1.3b_b4", "gpt_1.3b_b4_compiled", "llama_1b_s2048_b4", "llama_3b_s4096_b2_pure"]
)
def test_steps_whose_device_is_busy_take_what_was_measured(name):
    """Steps of this GPU are among what its preset is fitted to; what hosts take varies by a half."""
    predicted = predict(case_of(OWN[name]))
    assert predicted.seconds == pytest.approx(float(OWN[name]["iter_time_s"]), rel=0.1)
    assert predicted.peak / 2**30 == pytest.approx(float(OWN[name]["peak_mem_gb"]), rel=0.1)


def test_a_step_that_does_not_fit_is_a_row_that_says_so(tmp_path):
    class Error(Exception):
        pass

    def fail(*given):
        raise Error

    torch = SimpleNamespace(
        OutOfMemoryError=Error, manual_seed=fail, compiler=SimpleNamespace(reset=lambda: None)
    )
    row = steps.measured(torch, steps.STEPS[0], "cpu", None)
    steps.write(tmp_path / "steps.csv", iter([row]))
    (read,) = csv.DictReader((tmp_path / "steps.csv").read_text().splitlines())
    assert (read["id"], read["outcome"], read["iter_time_s"]) == (steps.STEPS[0].name, "oom", "")


def test_cycles_are_found_again():
    """Kernels that take as long as the table says show its cycles, and the bytes of what is bound by them."""
    device = load_cluster("dgx-h200").devices[0]
    a_second = device.rates.processors * device.rates.clock
    rows = [
        {"op": "Cast", "dtype": "bfloat16", "rows": "8192", "columns": str(columns)}
        | {"seconds": str(8192 * columns * 0.77 / a_second + device.kernel_launch_overhead)}
        for columns in (1024, 4096)
    ]
    (line,) = elements.compared(rows, device)
    assert (line["cycles"], line["kernels"], line["error"]) == ("0.77", 2, "0.0%")
    assert float(line["of_bytes"]) == pytest.approx(0.367, rel=0.01)
    assert float(line["error_of_bytes_alone"].rstrip("%")) == pytest.approx(100 * (1 - 0.367 / 0.77), abs=0.3)


def test_what_was_measured_of_elements_is_what_distsim_has():
    device = load_cluster("dgx-h200").devices[0]
    lines = elements.compared(elements.read(MEASURED / "h200_elements.csv"), device)
    of_steps = {"CrossEntropyLoss", "CrossEntropyLossGrad", "AdamOptimizer", "Float8Turn"}
    assert {line["op"] for line in lines} == set(elements.BYTES) == set(elements.CYCLES) - of_steps
    others = [line for line in lines if (line["op"], line["dtype"]) != ("SoftmaxGrad", "float32")]
    assert all(float(line["error"].rstrip("%")) < 20 for line in others)
