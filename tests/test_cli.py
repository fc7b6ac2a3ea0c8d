"""The command line: what it prints and writes, and that bad input is a line on stderr and status 2."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from distsim.cli import main
from distsim.hardware import presets

MLP = "mlp:layers=4,width=64"
GPT = "gpt:layers=2,hidden=64,heads=4,seq=16,vocab=100"
ONNX_MLP = str(Path(__file__).parent / "data" / "mlp.onnx")
PROGRESS = re.compile(r".+ \.\.\. (done|failed), \d+\.\d\d s")
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def run(capsys, *arguments: object) -> tuple[str, str]:
    """Run a command that must succeed; return its stdout and stderr."""
    status = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert status == 0, err
    return out, err


def simulate(capsys, model: str, *arguments: object, cluster: str = "dgx-a100") -> str:
    return run(capsys, "simulate", model, "--cluster", cluster, *arguments)[0]


def step_time(out: str) -> float:
    number, unit = re.search(r"^step time +([\d.e+-]+) (\w+)$", out, re.MULTILINE).groups()
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
    command = ["simulate", "gpt2", "--cluster", "dgx-a100:2", *arguments]
    out, err = run(capsys, *command)

    assert out.startswith(f"gpt2 on dgx-a100:2, {plan},schedule=1f1b, batch 8\n\ngpt2_training: 16 devices\n")
    speed = float(re.search(r"^throughput +([\d.]+) samples/s$", out, re.MULTILINE)[1])
    assert speed == pytest.approx(8 / step_time(out), rel=1e-3)
    for expected in ("MFU ", "HFU ", "memory        fits", "MPIAllreduce ", "Send ", "AdamOptimizer "):
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


def test_without_a_plan_one_device_does_everything(capsys):
    out = simulate(capsys, MLP, "--batch", 8)
    assert "dp=1,tp=1,pp=1,microbatches=1,schedule=1f1b" in out
    assert "mlp_training: 1 device\n" in out
    assert re.search(r"^gpu:0 +100\.0% +0\.0% +0\.0% ", out, re.MULTILINE)
    assert "communication" not in out


def test_without_overlap_a_step_takes_longer(capsys):
    command = [GPT, "--batch", 16, "--plan", "dp=4,pp=2,microbatches=4"]
    together, one_by_one = simulate(capsys, *command), simulate(capsys, *command, "--no-overlap")
    assert step_time(one_by_one) > step_time(together)


def test_without_communication_overlap_makes_no_difference(capsys):
    command = [GPT, "--batch", 16]
    assert simulate(capsys, *command) == simulate(capsys, *command, "--no-overlap")


def test_bfloat16_is_faster_and_smaller_than_float32(capsys):
    command = ["mlp:layers=4,width=4096", "--batch", 4096, "--optimizer", "sgd"]
    single = simulate(capsys, *command)
    half = simulate(capsys, *command, "--dtype", "bfloat16")
    assert "(float32, 1 device" in single and "(bfloat16, 1 device" in half
    assert step_time(half) < 0.6 * step_time(single)
    assert peak_memory(half) == pytest.approx(peak_memory(single) / 2, rel=0.01)


def test_adam_keeps_two_moments_per_parameter_and_sgd_none(capsys):
    command = ["mlp:layers=4,width=1024", "--batch", 8]
    adam, sgd = simulate(capsys, *command), simulate(capsys, *command, "--optimizer", "sgd")
    assert simulate(capsys, *command, "--optimizer", "adam") == adam
    assert "parameters 16.00 MiB, state 32.00 MiB" in adam
    assert "parameters 16.00 MiB" in sgd and "state" not in sgd
    assert "\nAdamOptimizer " in adam and "\nSGDOptimizer " in sgd
    assert step_time(sgd) < step_time(adam)


def test_two_nodes_are_slower_than_one_for_the_same_plan(capsys):
    command = ["mlp:layers=2,width=4096", "--batch", 64, "--plan", "dp=16"]
    near = simulate(capsys, *command, cluster="dgx-2")
    far = simulate(capsys, *command, cluster="dgx-a100:2")
    exposed = [float(re.search(r"^gpu:\S+ +[\d.]+% +([\d.]+)%", out, re.MULTILINE)[1]) for out in (near, far)]
    assert exposed[0] < exposed[1]


def test_an_export_with_its_own_backward_pass_is_taken_as_it_is(capsys):
    out, err = run(capsys, "show", ONNX_MLP, "--parameters", "inp*", "--training")
    assert "input: f32[32, 1024],  # parameter" in out
    assert "loss" not in out and "differentiating" not in err


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


def test_show_prints_the_dtype_it_is_given(capsys):
    out, _ = run(capsys, "show", "mlp:layers=2,width=8", "--batch", 4, "--dtype", "bfloat16")
    assert "x: bf16[4, 8]" in out and "f32" not in out


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
    assert run(capsys, "clusters") == ("\n".join(presets()) + "\n", "")
    out, _ = run(capsys, "clusters", "dgx-a100:3")
    assert out.startswith("dgx-a100: ") and "(3 x 8 " in out.splitlines()[0]
    assert "device.throughput" in out and "levels.infiniband.bandwidth" in out
    assert all(len(line.split()) >= 4 for line in out.splitlines()), "a figure, its unit and its source"


# --- bad input ------------------------------------------------------------------------------------

SMALL = "mlp:layers=2,width=8,batch=8"
GPT2 = ("gpt2", "--cluster", "dgx-a100", "--batch", "4")
BAD = {
    "unknown model": (("nosuch", "--cluster", "dgx-a100"), "'nosuch'", "gpt2, gpt:..., mlp:..."),
    "no model": (("", "--cluster", "dgx-a100"), "model ''"),
    "missing file": (("missing.onnx", "--cluster", "dgx-a100"), "missing.onnx", "No such file"),
    "no option of a builder": (("mlp:depth=3", "--cluster", "dgx-a100"), "'depth'", "layers, width, batch"),
    "option without number": (("mlp:layers=two", "--cluster", "dgx-a100"), "layers=two", "2147483648"),
    "option without value": (("mlp:layers", "--cluster", "dgx-a100"), "'layers'", "name=number"),
    "option given twice": (("mlp:layers=1,layers=2", "--cluster", "dgx-a100"), "'layers=2'", "once"),
    "heads do not divide": (("gpt:heads=5,hidden=64", "--cluster", "dgx-a100"), "heads=5", "hidden=64"),
    "element type of a builder": (("mlp:dtype=f8", "--cluster", "dgx-a100"), "'f8'", "bfloat16"),
    "unknown cluster": ((SMALL, "--cluster", "dgx-1"), "'dgx-1'", "dgx-a100", ".toml"),
    "missing cluster file": ((SMALL, "--cluster", "no.toml"), "no.toml is not a file"),
    "no nodes": ((SMALL, "--cluster", "dgx-2:0"), "dgx-2:0"),
    "too many nodes": ((SMALL, "--cluster", "dgx-2:999999"), "15999984 devices", "1048576"),
    "plan without value": ((SMALL, "--cluster", "dgx-2", "--plan", "dp"), "'dp'", "key=value"),
    "empty plan": ((SMALL, "--cluster", "dgx-2", "--plan", ""), "key=value"),
    "plan of zero": ((SMALL, "--cluster", "dgx-2", "--plan", "dp=0"), "dp=0", "1048576"),
    "negative plan": ((SMALL, "--cluster", "dgx-2", "--plan", "tp=-2"), "tp=-2", "1048576"),
    "plan of a word": ((SMALL, "--cluster", "dgx-2", "--plan", "tp=two"), "tp='two'", "integer"),
    "plan twice": ((SMALL, "--cluster", "dgx-2", "--plan", "dp=2,dp=4"), "twice", "2", "4"),
    "unknown field": ((SMALL, "--cluster", "dgx-2", "--plan", "ep=2"), "'ep'", "dp, tp, pp, microbatches"),
    "unknown schedule": ((SMALL, "--cluster", "dgx-2", "--plan", "schedule=x"), "'x'", "1f1b, gpipe"),
    "plan too large": ((SMALL, "--cluster", "dgx-a100", "--plan", "dp=4,tp=4"), "16 devices", "has 8"),
    "batch not divided": ((SMALL, "--cluster", "dgx-2", "--plan", "dp=3"), "dp=3", "of 8", "1, 2, 4, 8"),
    "microbatches do not divide": (
        (SMALL, "--cluster", "dgx-2", "--plan", "dp=2,microbatches=8"),
        "dp=2 times microbatches=8",
        "of 8",
        "1, 2, 4, 8",
    ),
    "more stages than ops": ((SMALL, "--cluster", "dgx-2", "--plan", "pp=9"), "pp=9", "at most"),
    "batch of zero": ((SMALL, "--cluster", "dgx-2", "--batch", "0"), "batch=0", "1 to"),
    "batch beyond all sizes": (
        (*GPT2[:3], "--batch", "9" * 30, "--bind", "seq=8"),
        "batch=99999",
        "2147483647",
    ),
    "unbound symbols": (GPT2[:3], "batch, seq"),
    "unbound symbol": (GPT2, "seq", "no size"),
    "unknown symbol": ((*GPT2, "--bind", "seq=8,heads=2"), "heads", "batch, seq"),
    "bind without number": ((*GPT2, "--bind", "seq"), "'seq'", "name=number"),
    "bind without name": ((*GPT2, "--bind", "=4"), "'=4'", "name=number"),
    "bind to nothing": ((*GPT2, "--bind", "seq="), "seq=", "whole number"),
    "bind to a fraction": ((*GPT2, "--bind", "seq=1.5"), "seq=1.5", "whole number"),
    "bind to zero": ((*GPT2, "--bind", "seq=0"), "seq=0", "from 1"),
    "bind twice": ((*GPT2, "--bind", "seq=8,seq=9"), "'seq=9'", "once"),
    "batch and bound batch": ((*GPT2, "--bind", "seq=8,batch=2"), "batch", "twice", "4", "2"),
    "bind beyond the positions": ((*GPT2, "--bind", "seq=2000"), "1999", "1024"),
    "bind the path": ((*GPT2, "--bind", "seq=8,path=1"), "path=1"),
    "bind an option": ((*GPT2, "--bind", "seq=8,load_values=1"), "load_values=1"),
    "bind for a builder": ((SMALL, "--cluster", "dgx-2", "--bind", "seq=8"), "mlp:option=number"),
    "parameters of a builder": ((SMALL, "--cluster", "dgx-2", "--parameters", "w*"), "mlp:option=number"),
    "parameters that are not there": ((*GPT2, "--bind", "seq=8", "--parameters", "w*"), "'w*'", "input_ids"),
    "token ids as parameters": ((*GPT2, "--bind", "seq=8", "--parameters", "input_ids"), "floating-point"),
    "batch of a static file": ((ONNX_MLP, "--cluster", "dgx-2", "--batch", "8"), "[32, 1024]", "fixed"),
    "unknown loss": ((SMALL, "--cluster", "dgx-2", "--loss", "l1"), "'l1'", "cross_entropy"),
    "loss of a loss": ((SMALL, "--cluster", "dgx-2", "--loss", "mse"), "mse", "f32[]"),
    "unknown optimizer": ((SMALL, "--cluster", "dgx-2", "--optimizer", "lion"), "'lion'", "adam, sgd"),
    "unknown element type": ((SMALL, "--cluster", "dgx-2", "--dtype", "f8"), "'f8'", "bfloat16"),
    "integer training": ((SMALL, "--cluster", "dgx-2", "--dtype", "int64"), "floating-point"),
}


def refused(capsys, *arguments: object) -> str:
    """Run a command that must fail well; return the reason."""
    status = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert status == 2
    *before, last = err.splitlines()
    assert last.startswith("distsim: ") and len(last) > len("distsim: ") + 10
    assert all(PROGRESS.fullmatch(line) for line in before), err
    assert "Traceback" not in err
    assert "step time" not in out or before[-1].startswith(("writing", "drawing"))
    return last


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_a_line_with_the_reason_and_status_2(capsys, monkeypatch, tmp_path, case):
    monkeypatch.chdir(tmp_path)
    arguments, *parts = BAD[case]
    reason = refused(capsys, "simulate", *arguments)
    assert [part for part in parts if part not in reason] == [], reason
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_model_and_one_that_is_no_cluster(capsys, tmp_path):
    (tmp_path / "x.onnx").write_text("not a model")
    (tmp_path / "x.toml").write_text("not a cluster")
    assert "x.onnx is not an ONNX model" in refused(capsys, "show", tmp_path / "x.onnx")
    reason = refused(capsys, "simulate", SMALL, "--cluster", tmp_path / "x.toml")
    assert "x.toml is not a TOML file" in reason


@pytest.mark.parametrize("option", ["--trace", "--plot"])
@pytest.mark.parametrize(
    ("name", "part"),
    [("", ""), ("none/step.png", "there is no folder"), (f"{'n' * 300}.png", "")],
    ids=["folder", "missing folder", "long name"],
)
def test_a_file_that_cannot_be_written(capsys, tmp_path, option, name, part):
    path = tmp_path / name
    reason = refused(capsys, "simulate", SMALL, "--cluster", "dgx-2", option, path)
    assert part in reason and str(path)[:60] in reason
    assert list(tmp_path.iterdir()) == []


def test_a_timeline_of_an_unknown_kind(capsys, tmp_path):
    reason = refused(capsys, "simulate", SMALL, "--cluster", "dgx-2", "--plot", tmp_path / "t.gif")
    assert "t.gif" in reason and "pdf, png, svg" in reason


def test_show_and_clusters_refuse_bad_input_too(capsys):
    assert "--plan needs --cluster" in refused(capsys, "show", SMALL, "--plan", "dp=2")
    reason = refused(capsys, "show", SMALL, "--plan", "dp=9", "--cluster", "dgx-a100")
    assert "9 devices" in reason and "has 8" in reason
    assert "'dgx-1'" in refused(capsys, "clusters", "dgx-1")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["train"],
        ["simulate"],
        ["simulate", SMALL],
        ["simulate", SMALL, "--cluster", "dgx-2", "--batch", "many"],
        ["simulate", SMALL, "--cluster", "dgx-2", "--fast"],
        ["clusters", "dgx-2", "dgx-2"],
    ],
    ids=str,
)
def test_a_command_line_that_makes_no_sense_is_status_2_with_the_usage(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    out, err = capsys.readouterr()
    assert (caught.value.code, out) == (2, "")
    assert err.startswith("usage: distsim") and ": error: " in err.splitlines()[-1]


# --- installed ------------------------------------------------------------------------------------


def test_the_installed_script_prints_its_help():
    script = Path(sys.executable).with_name("distsim")
    if not script.exists():
        pytest.skip("distsim is not installed next to this Python")
    done = subprocess.run([script, "--help"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: distsim ")
    for expected in ("{simulate,show,clusters}", "examples:", "distsim simulate gpt2 --cluster dgx-a100:2"):
        assert expected in done.stdout


def test_the_examples_of_the_help_run(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    help_text, _ = capsys.readouterr()
    examples = [line.split()[1:] for line in help_text.splitlines() if line.startswith("  distsim ")]
    assert len(examples) == 3
    for example in examples[1:]:  # the first is the GPT-2 of the first test, larger
        assert run(capsys, *example)[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["simulate", "gpt2", "--cluster", "dgx-a100", "--parameters", "p_*", "--loss", "mse"],
            "--parameters",
        ),
        (["show", "mlp:layers=2,width=8", "--batch", "4", "--optimizer", "sgd"], "--optimizer has no effect"),
        (["show", "mlp:layers=2,width=8", "--batch", "4", "--cluster", "dgx-2"], "--cluster has no effect"),
        (["simulate", "mlp:layers=2,width=8", "--cluster", "dgx-2", "--dtype", "int64"], "--dtype int64"),
        (
            ["simulate", "mlp:layers=2,width=9", "--cluster", "dgx-2", "--plan", "tp=2"],
            "tp=2 divides no matrix",
        ),
    ],
)
def test_an_option_without_effect_is_refused(arguments, words, capsys):
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


def test_replicated_work_is_a_note(capsys):
    model = "mlp:layers=3,width=30,input_width=32,output_width=30"
    arguments = ["simulate", model, "--cluster", "dgx-a100", "--batch", "2"]
    assert main([*arguments, "--plan", "tp=4"]) == 0  # which does not divide 30
    assert "note: tp=4: " in capsys.readouterr().out
    assert main([*arguments, "--plan", "tp=2"]) == 0
    assert "of the matrix FLOPs" not in capsys.readouterr().out
