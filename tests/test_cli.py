"""The command line: simulate, show and clusters."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from cli_cases import (
    ONNX_MLP,
    PROGRESS,
    run,
)

import distsim
from distsim.cli import main
from distsim.errors import PlanError
from distsim.hardware import presets
from distsim.simulation.explain.interval import correction

MLP = "mlp:layers=4,width=64"
GPT = "gpt:layers=2,hidden=64,heads=4,seq=16,vocab=100"
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def simulate(capsys, model: str, *arguments: object, cluster: str = "dgx-a100") -> str:
    return run(capsys, "simulate", model, "--cluster", cluster, *arguments)[0]


def step_time(out: str) -> float:
    number, unit = re.search(r"^step time +([\d.e+-]+) (\w+)(?: \(.*\))?$", out, re.MULTILINE).groups()
    return float(number) * SECONDS[unit]


def peak_memory(out: str) -> float:
    number, unit = re.search(r"the most is ([\d.]+) (\w+) on gpu:0", out).groups()
    return float(number) * 2.0 ** {"B": 0, "KiB": 10, "MiB": 20, "GiB": 30}[unit]


# --- simulate -------------------------------------------------------------------------------------


def test_simulating_gpt2_prints_a_summary_and_writes_a_trace_and_a_timeline(capsys, tmp_path):
    trace, plot = tmp_path / "step.json", tmp_path / "timeline.png"
    plan = "dp=2,tp=4,pp=2,microbatches=2"
    arguments = [
        "--plan",
        plan,
        "--batch",
        8,
        "--bind",
        "seq=16",
        "--trace",
        trace,
        "--plot",
        plot,
        "--strict",
    ]
    command = ["simulate", "gpt2-onnx", "--cluster", "dgx-a100:2", *arguments]
    out, err = run(capsys, *command)

    assert out.startswith(
        f"gpt2-onnx on dgx-a100:2, {plan},schedule=1f1b, batch 8\n\ngpt2_training: 16 devices\n"
    )
    speed = float(re.search(r"^throughput +([\d.]+) samples/s$", out, re.MULTILINE)[1])
    assert speed == pytest.approx(8 / step_time(out), rel=1e-3)
    for expected in ("MFU ", "HFU ", "memory        fits", "MPIAllreduce ", "Send ", "Gemm "):
        assert f"\n{expected}" in out
    assert f"\ntrace: {trace} " in out and out.endswith(f"\ntimeline: {plot}\n")

    lines = err.splitlines()
    assert all(PROGRESS.fullmatch(line) for line in lines), err
    steps = ["reading", "differentiating", "parallelizing:", "simulating", "writing", "drawing"]
    assert [line.split()[0] for line in lines] == steps
    assert not [line for line in lines if " ... failed" in line]

    assert plot.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    events = json.loads(trace.read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == set(range(16))
    end = max(event["ts"] + event["dur"] for event in slices)
    assert end * 1e-6 == pytest.approx(step_time(out), rel=1e-3)
    lanes = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in slices} == lanes
    starts = [event["id"] for event in events if event["ph"] == "s"]
    assert starts and sorted(starts) == sorted(event["id"] for event in events if event["ph"] == "f")


@pytest.mark.parametrize(
    ("model", "arguments", "samples"),
    [
        (MLP, ["--batch", 32, "--plan", "dp=2,tp=2"], 32),
        ("mlp:layers=4,width=64,batch=16", ["--plan", "pp=2,microbatches=4,schedule=gpipe"], 16),
        (GPT, ["--batch", 8, "--plan", "tp=2,pp=2,microbatches=2"], 8),
        (ONNX_MLP, ["--plan", "dp=4"], 32),
        (ONNX_MLP, ["--plan", "dp=4", "--loss", "cross_entropy", "--optimizer", "sgd"], 32),
    ],
)
def test_builders_and_files_are_simulated(capsys, model, arguments, samples):
    out = simulate(capsys, model, *arguments)
    assert out.startswith(f"{model} on dgx-a100, ")
    assert f", batch {samples}\n" in out
    assert step_time(out) > 0


def test_the_command_of_the_page_takes_what_its_python_says(capsys):
    text = (Path(__file__).parents[1] / "docs/how-it-works.md").read_text(encoding="utf-8")
    command = re.search(r"`distsim simulate (mlp:[^`]+)`", text)[1].split()
    assert f"'{re.search('step time +([^(]+) ', run(capsys, 'simulate', *command)[0])[1]}'\n" in text


def test_without_a_plan_one_device_does_everything(capsys):
    out = simulate(capsys, MLP, "--batch", 8, "--kernels", "ops")  # without a host, which it would wait for
    assert "dp=1,tp=1,pp=1,microbatches=1,schedule=1f1b" in out
    assert "mlp_training: 1 device\n" in out
    assert re.search(r"^gpu:0 +100\.0% +0\.0% +0\.0% ", out, re.MULTILINE)
    assert "communication" not in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "15 of 16 devices of dgx-2 are idle, as the plan uses dp . tp . pp = 1; dp=16 would use 16"),
        (["--plan", "tp=5"], "11 of 16 .* = 5; dp=2 would use 10"),
        (
            ["--plan", "dp=4,microbatches=8"],
            "12 of 16 .* = 4; a batch of 32 in 8 .* no larger dp, but tp or pp",
        ),
        (["--plan", "dp=2,microbatches=4"], "14 of 16 .* = 2; dp=8 would use 8"),
        (["--plan", "dp=8,microbatches=4"], "8 of 16 .* = 8; .* no larger dp, but tp or pp"),  # as it says
        (["--plan", "dp=8,pp=2"], ""),
    ],
)
def test_devices_that_a_plan_leaves_idle_are_a_note(capsys, arguments, said):
    out = simulate(capsys, "mlp:layers=2,width=40", "--batch", 32, *arguments, cluster="dgx-2")
    notes = re.findall(r"^note: (.*idle.*)$", out, re.MULTILINE)
    assert len(notes) == bool(said) and all(re.fullmatch(said, note) for note in notes), notes


def test_idle_devices_are_counted_with_cp(capsys):
    command = [GPT, "--batch", 32, "--attention", "flash", "--plan", "cp=2,tp=2"]
    out = simulate(capsys, *command, cluster="dgx-2")
    assert "12 of 16 devices of dgx-2 are idle, as the plan uses dp * cp * tp * pp = 4; dp=4 would" in out


def test_without_overlap_a_step_takes_longer(capsys):
    command = ["mlp:layers=4,width=2048", "--batch", 4096, "--plan", "dp=4,pp=2,microbatches=4"]
    together, one_by_one = simulate(capsys, *command), simulate(capsys, *command, "--no-overlap")
    assert step_time(one_by_one) > step_time(together)


def test_without_communication_overlap_makes_no_difference(capsys):
    command = [GPT, "--batch", 16]
    assert simulate(capsys, *command) == simulate(capsys, *command, "--no-overlap")


def test_bfloat16_is_faster_and_smaller_than_float32(capsys):
    command = ["mlp:layers=4,width=4096", "--batch", 4096, "--optimizer", "sgd"]
    single = simulate(capsys, *command)
    half = simulate(capsys, *command, "--precision", "bf16")
    assert "(float32, 1 device" in single and "(bfloat16, 1 device" in half
    assert step_time(half) < 0.6 * step_time(single)
    assert peak_memory(half) == pytest.approx(peak_memory(single) / 2, rel=0.01)


def test_adam_keeps_two_moments_per_parameter_and_sgd_none(capsys):
    command = ["mlp:layers=4,width=1024", "--batch", 8]
    adam, sgd = simulate(capsys, *command), simulate(capsys, *command, "--optimizer", "sgd")
    asked = simulate(capsys, *command, "--optimizer", "adam")
    assert asked == adam.replace("assumed: kernels eager, optimizer adam", "assumed: kernels eager")
    assert "parameters 16.00 MiB, state 32.00 MiB" in adam
    assert "parameters 16.00 MiB" in sgd and "state" not in sgd
    assert "\nAdamOptimizer " in adam and "\nSGDOptimizer " in sgd
    assert step_time(sgd) < step_time(adam)


def test_two_nodes_are_slower_than_one_for_the_same_plan(capsys):
    command = ["mlp:layers=2,width=4096", "--batch", 64, "--plan", "dp=16", "--kernels", "ops"]
    near = simulate(capsys, *command, "--set", "devices_per_node=16")
    far = simulate(capsys, *command, cluster="dgx-a100:2")
    exposed = [float(re.search(r"^gpu:\S+ +[\d.]+% +([\d.]+)%", out, re.MULTILINE)[1]) for out in (near, far)]
    assert exposed[0] < exposed[1] and step_time(near) < step_time(far)


def test_a_step_that_does_not_fit_is_reported_with_status_3(capsys, tmp_path):
    trace = tmp_path / "step.json"
    large = ["simulate", "mlp:layers=2,width=65536", "--cluster", "dgx-a100", "--batch", "8"]
    assert main([*large, "--trace", str(trace)]) == 3
    out, err = capsys.readouterr()
    assert "\nmemory        OUT OF MEMORY on 1 device: gpu:0 needs " in out and step_time(out) > 0
    assert "\nMatMulGradA " in out and f"\ntrace: {trace} " in out and json.loads(trace.read_text())
    assert all(PROGRESS.fullmatch(line) for line in err.splitlines()), err
    advice = [line for line in out.splitlines() if line.startswith("note: it would fit with ")]
    assert advice and all(
        re.search(r"(tp|pp)=[248].*: [\d.]+ ms, at most [\d.]+ GiB", line) for line in advice
    )
    assert main([*large, "--plan", "tp=8"]) == 0
    assert "memory        fits" in capsys.readouterr().out
    assert main([*large, "--partition", "single"]) == 0, "a forward pass needs no gradients"


def test_the_same_command_prints_the_same(capsys):
    command = [GPT, "--batch", 8, "--plan", "dp=2,tp=2,pp=2,microbatches=2"]
    assert simulate(capsys, *command) == simulate(capsys, *command)


# --- show and clusters ----------------------------------------------------------------------------


def test_show_prints_the_forward_function(capsys):
    out, err = run(capsys, "show", "mlp:layers=2,width=8", "--batch", 4)
    assert out.startswith("function mlp(\n  x: f32[4, 8],\n")
    assert "  w1: f32[8, 8],  # parameter\n" in out
    assert re.search(r"^  loss: f32\[\] = Loss\(\w+, target, N=4\)$", out, re.MULTILINE)
    assert "Grad" not in out and "Optimizer" not in out
    assert PROGRESS.fullmatch(err.strip())


def test_bindings_that_are_given_one_by_one_add_up(capsys):
    joined, _ = run(capsys, "show", "gpt2-onnx", "--bind", "batch=2,seq=8")
    assert "input_ids: i64[2, 8]" in joined
    assert (
        run(capsys, "show", "gpt2-onnx", "--bind", "batch=2", "--bind", "seq=8", "--bind", "seq=8")[0]
        == joined
    )


def test_show_prints_the_precision_it_is_given(capsys):
    out, _ = run(capsys, "show", "mlp:layers=2,width=8", "--batch", 4, "--precision", "bf16")
    assert "x: bf16[4, 8]" in out and "f32" not in out


def test_attention_is_one_kernel_in_half_precision_unless_asked_otherwise(capsys):
    command = ["gpt:layers=2,hidden=64,heads=4,seq=256,vocab=64", "--batch", 8]
    half = [*command, "--precision", "bf16"]
    flash, note = simulate(capsys, *half), "note: attention: 2 as one kernel each (flash)\n"
    assert note in flash and flash == simulate(capsys, *half, "--attention", "flash")
    math, single = simulate(capsys, *half, "--attention", "math"), simulate(capsys, *command)
    for text in (math, single):
        assert "note: attention: as the model writes it (math)\n" in text
    assert note in simulate(capsys, *command, "--attention", "flash")
    assert step_time(flash) < step_time(math) and peak_memory(flash) < 0.7 * peak_memory(math)


def test_amp_multiplies_in_half_precision_and_so_has_one_kernel_of_attention(capsys):
    command = ["gpt:layers=2,hidden=64,heads=4,seq=256,vocab=64", "--batch", 8]
    assert "2 as one kernel each (flash)" in simulate(capsys, *command, "--precision", "amp")
    assert "as the model writes it (math)" in simulate(capsys, *command, "--precision", "tf32")


def test_show_training_adds_the_backward_pass_and_the_optimizer(capsys):
    out, _ = run(capsys, "show", ONNX_MLP, "--training", "--optimizer", "sgd", "--loss", "mse")
    assert out.startswith("function mlp_training(\n  input: f32[32, 1024],\n")
    assert "  target: f32[32, 1024]," in out
    for name in ("Gemm", "Relu", "Loss", "LossGrad", "ReluGrad", "GemmGrad", "SGDOptimizer"):
        assert re.search(rf" = {name}\(", out), f"{name} is missing"
    assert "@" not in out, "nothing is placed yet"


def test_show_plan_prints_the_step_on_its_devices(capsys):
    plan = ["--cluster", "dgx-a100", "--plan", "dp=2,tp=2,pp=2,microbatches=2"]
    out, _ = run(capsys, "show", "mlp:layers=4,width=8", "--batch", 8, *plan)
    first, second = "Mesh(dp=2, tp=2)[gpu:0..gpu:3]", "Mesh(dp=2, tp=2)[gpu:4..gpu:7]"
    assert f"x: f32[2, 8] @ {first}" in out, "a quarter of the batch: two ranks, two microbatches"
    for stage in (0, 1):
        assert f"function stage{stage}_forward(" in out and f"function stage{stage}_backward(" in out
        assert len(re.findall(rf" = Call stage{stage}_forward(_next)?\(", out)) == 2
    assert f"f32[2, 8] @ {second} = Send(" in out and f"f32[2, 8] @ {first} = Send(" in out
    assert "MPIAllreduce" in out and "axis=dp" in out and "axis=tp" in out
    assert "MPIScatter" not in out, "in steady state the inputs are there"


def test_clusters_lists_the_presets_and_describes_one(capsys):
    listed = run(capsys, "clusters")[0].splitlines()
    assert [line.split()[0] for line in listed] == list(presets())
    assert re.search(
        r"^dgx-h100 +NVIDIA DGX H100: 8 H100 .* \(1 x 8 H100-SXM5-80GB\)$", "\n".join(listed), re.M
    )
    out, _ = run(capsys, "clusters", "dgx-a100:3")
    assert out.startswith("dgx-a100: ") and "(3 x 8 " in out.splitlines()[0]
    assert "device.throughput" in out and "levels.infiniband.bandwidth" in out
    assert all(len(line.split()) >= 4 for line in out.splitlines()), "a figure, its unit and its source"


def test_a_stack_sets_what_is_not_asked_for_and_says_so(capsys):
    command = ["gpt:layers=4,hidden=64,heads=4,seq=64,vocab=64", "--batch", 8]
    out = simulate(capsys, *command, "--stack", "torchtitan", "--clip", 2)
    assert "remat=every_early:2" in out.splitlines()[0]
    assert "note: assumed: precision fsdp2, attention flash2, kernels eager_complex, optimizer adamw\n" in out
    own = ["--precision", "bf16", "--kernels", "compiled", "--plan", "dp=1,remat=none"]
    own = simulate(capsys, *command, "--stack", "megatron", *own)
    assert "note: assumed: attention cudnn, optimizer adamw, clip 1.0\n" in own
    assert "remat" not in own.splitlines()[0] and "note: precision bf16:" in own
    times = [step_time(simulate(capsys, *command, "--kernels", name)) for name in ("eager", "compiled")]
    assert times[0] > times[1]


def test_what_says_nothing_of_its_types_is_trained_as_torch_does(capsys):
    command = ["gpt2:layers=4", "--cluster", "dgx-2", "--batch", 8, "--seq", 64, "--plan", "pp=2"]
    out = simulate(capsys, *command)
    assert ",stages=default," in out.splitlines()[0]
    assert "note: assumed: stack torch, precision amp, kernels eager, optimizer adamw\n" in out
    assert "no rate for products in bfloat16, which run at 15.7 TFLOP/s; --precision mixed_fp16" in out
    assert "no rate" not in simulate(capsys, *command, "--precision", "mixed_fp16")
    plain = simulate(capsys, *command, "--stack", "plain")
    assert "precision" not in plain and "stages=" not in plain.splitlines()[0] and "(float32, " in plain
    assert "assumed: kernels eager" in simulate(capsys, MLP, "--batch", 8), "a builder says its types"


def test_a_stack_divides_the_sequence_and_parameters_where_there_are_ranks_to(capsys):
    command = ["gpt:layers=3,hidden=64,heads=4,seq=64,vocab=64", "--batch", 8, "--stack"]
    for stack, plan, said, unsaid in (
        ("torchtitan", "tp=2", ",sp=dtensor,tp_overlap=off,", "sp=off"),
        ("torchtitan", "tp=2,sp=off", "tp_overlap=off,sp=off,", "sp=dtensor"),
        ("torchtitan", "dp=2", "zero=3,reshard=auto,bucket=fsdp2,", "sp="),
        ("torchtitan", "dp=2,zero=0", "zero=0,", "bucket="),
        ("composer", "dp=2", "zero=3,", "remat"),
        ("torchtitan", "dp=1", "remat=every_early:2,", "zero="),
        ("megatron", "tp=2", "tp=2", "tp_overlap"),
    ):
        first = simulate(capsys, *command, stack, "--plan", plan).splitlines()[0]
        assert said in first and unsaid not in first


def test_what_a_stack_recomputes_and_a_model_cannot_is_left_out_with_a_note(capsys):
    one_layer = ["gpt:layers=1,hidden=64,heads=4,seq=64,vocab=64", "--batch", 8]
    out = simulate(capsys, *one_layer, "--stack", "torchtitan")
    assert "remat=none," in out.splitlines()[0]
    said = "note: nothing is recomputed, as the default of torchtitan does not fit: remat=every_early:2"
    assert said in out
    for plan, said in (("dp=1,remat=every:2", "nothing would be recomputed"), ("dp=3", "dp=3")):
        command = ["simulate", *map(str, one_layer), "--cluster", "dgx-a100", "--plan", plan]
        assert main([*command, "--stack", "torchtitan"]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (["1.1", "--kernels", "ops"], "with --kernels ops no host takes time"),
        (["1.1", "--partition", "single"], "with --partition no host takes time"),
        (["1.1", "0"], "0 is no ratio of measured to predicted seconds"),
    ],
)
def test_own_runs_that_correct_nothing_are_refused(capsys, others, said):
    assert main(["simulate", MLP, "--cluster", "dgx-a100", "--batch", "8", "--own-runs", *others]) == 2
    assert said in capsys.readouterr().err


def test_own_runs_are_a_line_of_the_summary(capsys):
    out = simulate(capsys, MLP, "--batch", 8, "--own-runs", 1.2, 1.2, 1.2)
    seconds, own = (
        float(found[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[found[2]]
        for name in ("step time", "own runs")
        if (found := re.search(rf"^{name} +([0-9.]+) (\w+)", out, re.MULTILINE))
    )
    assert own / seconds == pytest.approx(correction([1.2] * 3), rel=2e-3)
    assert "3 runs took 1.2 times as long as predicted" in out
    apart = simulate(capsys, MLP, "--batch", 8, "--own-runs", 0.5, 2)
    assert "2 runs took 1 times as long as predicted; 1 times is taken" in apart
    rates = [float(each) for each in re.findall(r"([0-9.e+]+) samples/s", out)]
    assert rates[0] == pytest.approx(rates[1] / correction([1.2] * 3), rel=1e-5)
    assert "what follows is not corrected\nthroughput " in out
    assert "look for what differs" not in out
    assert "look for what differs" in simulate(capsys, MLP, "--batch", 8, "--own-runs", 3, 3)


def test_own_runs_are_in_json_and_python_beside_what_they_correct(capsys):
    ratios = [1.2, 1.1, 1.3]
    printed = json.loads(simulate(capsys, MLP, "--batch", 8, "--json", "--own-runs", *ratios))
    step = distsim.simulate(MLP, "dgx-a100", batch=8, own_runs=ratios)
    plain = distsim.simulate(MLP, "dgx-a100", batch=8)
    assert printed == step.to_dict()
    names = ("own_runs", "corrected_step_s", "corrected_low_s", "corrected_high_s")
    assert [plain.to_dict()[name] for name in names] == [[], None, None, None]
    assert {n: v for n, v in printed.items() if n not in names} == {
        n: v for n, v in plain.to_dict().items() if n not in names
    }
    own = plain.interval(own=ratios)
    assert [printed[name] for name in names] == [
        ratios,
        plain.step_period * correction(ratios),
        own.low,
        own.high,
    ]
    with pytest.raises(PlanError, match="with --kernels ops no host takes time"):
        distsim.simulate(MLP, "dgx-a100", batch=8, kernels="ops", own_runs=1.1 * np.ones(1))


@pytest.mark.parametrize(
    ("option", "value", "choices"),
    [("--stack", "jax", "plain, torch, megatron"), ("--kernels", "triton", "ops, eager, fused, fused_loss")],
)
def test_an_unknown_stack_or_kernels_are_refused(capsys, option, value, choices):
    assert main(["simulate", GPT, "--cluster", "dgx-a100", option, value]) == 2
    err = capsys.readouterr().err
    assert f"{value!r}" in err and choices in err
