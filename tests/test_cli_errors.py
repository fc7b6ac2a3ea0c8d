"""The command line given bad input, options without effect, and as installed."""

import subprocess
import sys
from pathlib import Path

import pytest
from cli_cases import (
    ONNX_MLP,
    PROGRESS,
    run,
)

from distsim.cli import main

# --- bad input ------------------------------------------------------------------------------------

SMALL = "mlp:layers=2,width=8,batch=8"


WIDE = "gpt:layers=2,hidden=64,heads=4,seq=8192,vocab=1048576"
GPT2 = ("gpt2-onnx", "--cluster", "dgx-a100", "--batch", "4")
BAD = {
    "unknown model": (
        ("nosuch", "--cluster", "dgx-a100"),
        "'nosuch'",
        "gpt2-onnx, gpt:..., llama:..., mlp:...",
    ),
    "no model": (("", "--cluster", "dgx-a100"), "model ''"),
    "missing file": (("missing.onnx", "--cluster", "dgx-a100"), "missing.onnx", "No such file"),
    "no option of a builder": (("mlp:depth=3", "--cluster", "dgx-a100"), "'depth'", "layers, width, batch"),
    "option without number": (("mlp:layers=two", "--cluster", "dgx-a100"), "layers=two", "2147483648"),
    "option without value": (("mlp:layers", "--cluster", "dgx-a100"), "'layers'", "name=number"),
    "option given twice": (("mlp:layers=1,layers=2", "--cluster", "dgx-a100"), "'layers=2'", "once"),
    "heads do not divide": (("gpt:heads=5,hidden=64", "--cluster", "dgx-a100"), "heads=5", "hidden=64"),
    "element type of a builder": (("mlp:dtype=f8", "--cluster", "dgx-a100"), "'f8'", "bfloat16"),
    "unknown cluster": ((SMALL, "--cluster", "dgx-3"), "'dgx-3'", "dgx-a100", ".toml"),
    "missing job file": (
        ("llama3-8b", "--cluster", "dgx-h100", "--torchtitan", "no.toml"),
        "distsim: cannot read no.toml: No such file",
    ),
    "missing cluster file": ((SMALL, "--cluster", "no.toml"), "no.toml is not a file"),
    "a count that is none": ((SMALL, "--cluster", "dgx-2:abc"), "'abc' is no number of nodes"),
    "a latency of ages": (
        (SMALL, "--cluster", "dgx-2", "--set", "nvlink.latency=1e300s"),
        "--set levels.nvlink.latency",
        "more than an hour",
    ),
    "floats of a GPU that has none": (
        ("gpt:layers=2,hidden=64,heads=4,seq=64,vocab=64", "--cluster", "dgx-a100", "--precision", "fp8"),
        "has no rate for float8e4m3fn",
        "choose --precision mixed",
    ),
    "no nodes": ((SMALL, "--cluster", "dgx-2:0"), "dgx-2:0"),
    "too many nodes": ((SMALL, "--cluster", "dgx-2:999999"), "15999984 devices", "1048576"),
    "plan without value": ((SMALL, "--cluster", "dgx-2", "--plan", "dp"), "'dp'", "key=value"),
    "empty plan": ((SMALL, "--cluster", "dgx-2", "--plan", ""), "key=value"),
    "interleaved without chunks": (
        (SMALL, "--cluster", "dgx-2", "--plan", "pp=2,microbatches=2,schedule=interleaved"),
        *("schedule=interleaved is of several stages a rank", "add chunks=2"),
    ),
    "trace of another kind": ((SMALL, "--cluster", "dgx-2", "--trace", "x.txt"), "as .json or .gz, not .txt"),
    "page of another kind": ((SMALL, "--cluster", "dgx-2", "--html", "x.pdf"), ".html or .htm, not .pdf"),
    "plan of zero": ((SMALL, "--cluster", "dgx-2", "--plan", "dp=0"), "dp=0", "1048576"),
    "negative plan": ((SMALL, "--cluster", "dgx-2", "--plan", "tp=-2"), "tp=-2", "1048576"),
    "plan of a word": ((SMALL, "--cluster", "dgx-2", "--plan", "tp=two"), "tp='two'", "integer"),
    "plan twice": ((SMALL, "--cluster", "dgx-2", "--plan", "dp=2,dp=4"), "twice", "2", "4"),
    "unknown field": ((SMALL, "--cluster", "dgx-2", "--plan", "gp=2"), "'gp'", "dp, tp, pp, microbatches"),
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
    "more bytes than are counted": (
        (WIDE, "--cluster", "dgx-a100", "--plan", "dp=8", "--batch", "2147483648"),
        "9.82e+18 bytes",
        "2^62",
        "smaller",
    ),
    "sums of more bytes than are counted": (
        (WIDE, "--cluster", "dgx-a100", "--batch", "67108864"),
        "bytes in its memory",
        "2^62",
    ),
    "more layers than are built": (
        ("mlp:layers=100000", "--cluster", "dgx-a100"),
        "layers=100000 is more than 10000",
    ),
    "a weight that no machine holds": (
        ("mlp:width=2147483647", "--cluster", "dgx-a100"),
        "w0 (2147483647 x 2147483647)",
        "more than 2^46",
    ),
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
    "bind twice": ((*GPT2, "--bind", "seq=8,seq=9"), "'seq=9'", "seq=8", "once"),
    "bind twice, apart": ((*GPT2, "--bind", "seq=8", "--bind", "seq=9"), "'seq=9'", "seq=8", "once"),
    "batch and bound batch": ((*GPT2, "--bind", "seq=8,batch=2"), "batch", "twice", "4", "2"),
    "bind beyond the positions": ((*GPT2, "--bind", "seq=2000"), "1999", "1024"),
    "bind the path": ((*GPT2, "--bind", "seq=8,path=1"), "dimension path", "batch, seq"),
    "bind an option": ((*GPT2, "--bind", "seq=8,load_values=1"), "dimension load_values"),
    "bind for a builder": ((SMALL, "--cluster", "dgx-2", "--bind", "seq=8"), "mlp:option=number"),
    "parameters of a builder": ((SMALL, "--cluster", "dgx-2", "--parameters", "w*"), "mlp:option=number"),
    "parameters that are not there": ((*GPT2, "--bind", "seq=8", "--parameters", "w*"), "'w*'", "input_ids"),
    "parameters that are not there, apart": (
        (ONNX_MLP, "--cluster", "dgx-2", "--parameters", "w*", "--parameters", "inp*"),
        "'w*'",
    ),
    "token ids as parameters": ((*GPT2, "--bind", "seq=8", "--parameters", "input_ids"), "floating-point"),
    "batch of a static file": ((ONNX_MLP, "--cluster", "dgx-2", "--batch", "8"), "[32, 1024]", "fixed"),
    "unknown loss": ((SMALL, "--cluster", "dgx-2", "--loss", "l1"), "'l1'", "cross_entropy"),
    "loss of a loss": ((SMALL, "--cluster", "dgx-2", "--loss", "mse"), "mse", "f32[]"),
    "unknown optimizer": (
        (SMALL, "--cluster", "dgx-2", "--optimizer", "lion"),
        "'lion'",
        "adam, adamw, momentum, sgd",
    ),
    "unknown attention": ((SMALL, "--cluster", "dgx-2", "--attention", "fast"), "'fast'", "flash, math"),
    "unknown precision": ((SMALL, "--cluster", "dgx-2", "--precision", "f8"), "'f8'", "mixed"),
    "integer state": ((SMALL, "--cluster", "dgx-2", "--optimizer", "adam:mean=int8"), "floating-point"),
    "unknown setting": ((SMALL, "--cluster", "dgx-2", "--optimizer", "sgd:beta1=1"), "'beta1=1'", "momentum"),
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


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="a folder that takes no files from anyone")
@pytest.mark.parametrize("option", ["--json", "--html", "--plot", "--trace", "--trace-dir", "--chakra"])
def test_a_folder_that_takes_no_files_is_named_before_the_work(capsys, option):
    path = "/proc/step" + {"--html": ".html", "--plot": ".png"}.get(option, ".json")
    assert main(["simulate", SMALL, "--cluster", "dgx-2", option, path]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and f"{path} cannot be written" in err and ".tmp" not in err


def test_a_trace_that_fails_midway_costs_neither_the_summary_nor_the_plot(capsys, tmp_path, monkeypatch):
    def full(simulation, devices):
        yield b"{}"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("distsim.report.trace._events", full)
    files = ["--trace", str(tmp_path / "step.json"), "--plot", str(tmp_path / "step.svg")]
    assert main(["simulate", SMALL, "--cluster", "dgx-2", *files]) == 2
    out, err = capsys.readouterr()
    assert "\nstep time " in out and out.endswith(f"timeline: {tmp_path / 'step.svg'}\n")
    assert "\ndistsim: [Errno 28] No space left on device\n" in err
    assert [path.name for path in tmp_path.iterdir()] == ["step.svg"]


def test_a_timeline_of_an_unknown_kind(capsys, tmp_path):
    reason = refused(capsys, "simulate", SMALL, "--cluster", "dgx-2", "--plot", tmp_path / "t.gif")
    assert "t.gif" in reason and "pdf, png, svg" in reason


def test_show_and_clusters_refuse_bad_input_too(capsys):
    assert "--plan needs --cluster" in refused(capsys, "show", SMALL, "--plan", "dp=2")
    reason = refused(capsys, "show", SMALL, "--plan", "dp=9", "--cluster", "dgx-a100")
    assert "9 devices" in reason and "has 8" in reason
    assert "'dgx-3'" in refused(capsys, "clusters", "dgx-3")


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
    for expected in (
        "{simulate,search,compare,explain,show,schedule,models,clusters,calibrate,validate,completion}",
        "exit status:",
        "examples:",
        "distsim simulate gpt2 --cluster dgx-a100:2",
    ):
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
        (["show", "mlp:layers=2,width=8", "--batch", "4", "--optimizer", "sgd"], "--optimizer has no effect"),
        (["show", "mlp:layers=2,width=8", "--batch", "4", "--cluster", "dgx-2"], "--cluster has no effect"),
        (
            ["show", "mlp:layers=2,width=8", "--training", "--kernels", "compiled"],
            "--kernels has no effect on what is shown: add --plan\n",
        ),
        (
            ["simulate", "mlp:layers=2,width=8", "--cluster", "dgx-2", "--optimizer", "adam:mean=int64"],
            "mean='int64'",
        ),
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
