"""The habits of a command line: help, versions, hints, widths, colours, completion, files to copy."""

import io
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import distsim
from distsim.cli import COMMANDS, main, parsers
from distsim.console import terminal
from distsim.hardware import load_cluster, presets

ROOT = Path(__file__).parents[1]
MLP = ["simulate", "mlp:layers=2,width=64", "--cluster", "dgx-a100", "--batch", "8"]


def refused(capsys, *arguments: str) -> str:
    """What is said of a command line that is none."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    return capsys.readouterr().err


def printed(capsys, *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_version_and_help_are_there_at_once(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0 and capsys.readouterr().out == f"distsim {distsim.__version__}\n"
    code = "import resource, subprocess, sys; subprocess.run([sys.executable, '-m', 'distsim', '--help'], "
    code += "check=True, stdout=subprocess.DEVNULL); r = resource.getrusage(resource.RUSAGE_CHILDREN)"
    said = subprocess.run(
        [sys.executable, "-c", f"{code}; print(r.ru_utime + r.ru_stime)"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    assert float(said.stdout) < 0.3, "CPU seconds"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_has_examples_that_are_of_the_command(command):
    parser = parsers()[command]
    examples = [line for line in parser.format_help().splitlines() if f"distsim {command}" in line]
    assert len(examples) > 1, "usage, and examples"
    known = set(parser.option_names())
    for line in COMMANDS[command].epilog.partition("examples:")[2].splitlines():
        if line.strip().startswith(f"distsim {command}"):
            assert set(re.findall(r"(?<= )--[a-z-]+", line.partition("   #")[0])) <= known, line


def test_one_thing_has_one_name_on_all_commands():
    named: dict[str, set[str | None]] = {}
    for parser in parsers().values():
        for action in parser.actions():
            for text in action.option_strings[:1]:
                named.setdefault(text, set()).add(str(action.type))
    assert {text: types for text, types in named.items() if len(types) > 1} == {}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["simulat"], "did you mean simulate?"),
        ([*MLP, "--bach", "8"], "unrecognized arguments: --bach 8; did you mean --batch?"),
        ([*MLP, "--precison=bf16"], "did you mean --precision?"),
        (["search", "gpt2", "--cluster", "dgx-a100", "--objective", "tim"], "did you mean time?"),
        (["completion", "bsh"], "did you mean bash?"),
        (["models", "--json", "llama3-8b"], "'llama3-8b' is no .json file; to print, give --json last"),
    ],
)
def test_what_is_not_known_may_have_been_meant_to_be_something_else(capsys, arguments, said):
    assert said in refused(capsys, *arguments)


# --- terminals ------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def narrow(monkeypatch) -> Terminal:
    """A terminal of 60 columns in place of standard output."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda *_: type("Size", (), {"columns": 60})())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return screen


def test_tables_fit_the_terminal_and_say_so(monkeypatch):
    screen = narrow(monkeypatch)
    assert main([*MLP, "--plan", "dp=2,tp=2"]) == 0
    plain = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue())
    assert max(map(len, plain.splitlines())) <= 85, "what is cut is said in a line"
    assert [line for line in plain.splitlines() if len(line) > 60] == [
        line for line in plain.splitlines() if line.startswith("rows are cut to 60 columns")
    ]
    assert "\x1b[32mfits\x1b[0m" in screen.getvalue()
    assert "".join(plain.split()).count("fordriverandlibraries") == 1, "sentences go on below"


def test_a_plan_that_is_too_long_for_its_row_stands_below_it():
    row = "1    28.7 s  69.3%  75.24 GiB  "
    plan = "dp=4,tp=2,microbatches=16,zero=1,sp=on,bucket=megatron,overlap_grads=off"
    assert terminal.fit(row + plan, 120) == row + plan
    first, *below = terminal.fit(row + plan, 60).split("\n")
    assert first == row.rstrip() and len(below) == 2 and max(map(len, below)) <= 60
    assert "".join(line.strip() for line in below) == plan


def test_a_short_plan_is_not_cut_off_either():
    row = "1  520.6 ms  0.431 to 0.629           15,737  69.0%  20.81 GiB  linear 73%  "
    assert terminal.fit(f"{row}microbatches=1", 60).split("\n")[1].strip() == "microbatches=1"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["simulate", "gpt2", "--clusters", "dgx-a100"], "there is no --clusters; did you mean --cluster?"),
        (["simulate", "gpt2", "--cluster", "a100"], "did you mean dgx-a100, a100-pcie or dgx-a100-40gb?"),
        (["simulate", "gpt2", "--cluster", "dgx-a100", "--plan", "dp=2 tp=2"], "separate fields by commas"),
        (["simulate", "gpt2", "--cluster", "dgx-a100", "--set", "device.memory=40"], "write it as 40 GiB"),
        (["search", "gpt2", "--cluster", "dgx-a100", "--tokens", "300X"], "a number, as 1e12, 300B or 1.5T"),
    ],
)
def test_slips_are_told_with_the_way_out(capsys, arguments, said):
    try:
        assert main(arguments) == 2
    except SystemExit as stopped:
        assert stopped.code == 2
    err = capsys.readouterr().err
    assert said in err and len(err.splitlines()) <= 3, "no page of usage before it"


def test_colours_are_left_out_where_nobody_wants_them(monkeypatch):
    screen = narrow(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(MLP) == 0
    assert "\x1b" not in screen.getvalue()


def test_a_file_gets_whole_lines_without_colours(capsys):
    out = printed(capsys, *MLP)
    assert "\x1b" not in out and max(map(len, out.splitlines())) > 100
    assert not terminal.is_coloured()


# --- clusters -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", presets())
def test_the_file_of_a_cluster_loads_back(capsys, tmp_path, name):
    path = tmp_path / "copy.toml"
    path.write_text(printed(capsys, "clusters", name, "--toml"))
    assert same(load_cluster(str(path)), load_cluster(name))
    assert same(load_cluster(f"{path}:2"), load_cluster(f"{name}:2"))


def test_the_file_of_a_cluster_has_what_was_changed(capsys, tmp_path):
    mixed = tmp_path / "mixed.toml"
    mixed.write_text(
        'base = "dgx-a100"\n[[nodes]]\ncount = 1\n[[nodes]]\ncount = 1\ndevice = { memory = "40 GiB" }\n'
        "[[slow]]\nnodes = [1]\nfactor = 1.5\n"
    )
    copy = tmp_path / "copy.toml"
    copy.write_text(printed(capsys, "clusters", str(mixed), "--toml", "--set", "nvlink.latency=9us"))
    assert same(load_cluster(str(copy)), load_cluster(str(mixed), ["nvlink.latency=9us"]))
    assert "FILE.toml:4" not in copy.read_text()
    assert main(["clusters", "--toml"]) == 2


def same(one, other) -> bool:
    """Whether two topologies have the same devices and links."""
    figures = [
        (each.devices, [device.rates for device in each.devices], each.levels) for each in (one, other)
    ]
    return figures[0] == figures[1]


# --- completion -----------------------------------------------------------------------------------


def completed(script: str, *words: str) -> list[str]:
    code = (
        f"{script}\nCOMP_WORDS=({' '.join(words)})\nCOMP_CWORD={len(words) - 1}\n"
        '_distsim\nprintf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_options_and_names(capsys):
    script = printed(capsys, "completion", "bash")
    assert completed(script, "distsim", "si") == ["simulate"]
    assert completed(script, "distsim", "simulate", "--prec") == ["--precision"]
    assert completed(script, "distsim", "simulate", "--cluster", "dgx-h1") == ["dgx-h100"]
    assert completed(script, "distsim", "simulate", "--stack", "mega") == ["megatron", "megatron_2021"]
    assert completed(script, "distsim", "search", "llama3-8") == ["llama3-8b"]
    assert completed(script, "distsim", "schedule", "zb_h") == ["zb_h1", "zb_h2"]
    assert set(completed(script, "distsim", '""')) == {*COMMANDS, "--help", "--version"}


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_the_same_words(capsys, shell):
    script = printed(capsys, "completion", shell)
    assert all(word in script for word in (*COMMANDS, "precision", "dgx-h100", "megatron_2021", "llama3-8b"))
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)
