"""The command line as a process: signals, and streams that are closed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from optimal_models import layered_problem, make_devices

from distsim.partition.optimal import optimal_partition, search

ROOT = Path(__file__).parents[1]
SMALL = ["simulate", "mlp:layers=2,width=8,batch=8", "--cluster", "dgx-2"]

# A process that says when it has come to a place, and stays there.
AT_REST = """
import ctypes, sys, time
from distsim import __main__, cli
from distsim.report import trace
from distsim.report.output import replacing

def rest(*arguments):
    print("at rest", file=sys.stderr, flush=True)
    time.sleep(60)

def writing():
    with replacing(sys.argv[1]) as file:
        file.write(b"half")
        file.flush()
        rest()

def in_a_callback():
    ctypes.CFUNCTYPE(None)(rest)()  # what is raised in there is lost
    time.sleep(60)

def turned_into_another_error():
    try:
        rest()
    except BaseException:
        raise RuntimeError("something is missing")
"""
FINISH = "sys.exit(__main__.main())"


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a process that rests somewhere; return it when it does."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"{AT_REST}\n{code}\n{FINISH}", *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs something in the background has it ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    for line in process.stderr:
        if line.endswith("at rest\n"):
            return process
    raise AssertionError(process.wait())


def stop(process: subprocess.Popen[str], number: int) -> tuple[int, str, str]:
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_a_command_with_a_line_and_no_draft(tmp_path, name):
    number = signal.Signals[name]
    (tmp_path / "step.json").write_text("from before")
    process = start("cli.main = writing", tmp_path / "step.json")
    assert len(list(tmp_path.iterdir())) == 2, "a draft beside it"
    assert stop(process, number) == (128 + number, "", f"distsim: stopped by {name}\n")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["from before"]


@pytest.mark.parametrize("place", ["in_a_callback", "turned_into_another_error"])
def test_a_signal_that_a_library_loses_ends_the_command_too(place):
    # Numba compiles with callbacks from LLVM, in which no exception gets out.
    assert stop(start(f"cli.main = {place}"), signal.SIGINT) == (130, "", "distsim: stopped by SIGINT\n")


def test_a_command_that_is_stopped_while_it_writes_a_trace_has_said_its_result(tmp_path):
    process = start("trace._memory = rest", *SMALL, "--trace", tmp_path / "step.json")
    status, out, err = stop(process, signal.SIGTERM)
    assert (status, "step time" in out, list(tmp_path.iterdir())) == (143, True, [])
    assert err.endswith("s\ndistsim: stopped by SIGTERM\n") and "Traceback" not in err


def test_ctrl_c_ends_the_threads_of_a_search(monkeypatch):
    def beam(jobs, machines, memory, width, upper, clock, *weight):
        os.kill(os.getpid(), signal.SIGINT)
        while not clock.over:
            time.sleep(0.001)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    search.compile_search()
    monkeypatch.setattr(search, "beam", beam)
    start = time.perf_counter()
    try:
        with pytest.raises(KeyboardInterrupt):
            optimal_partition(layered_problem(0, 20, 4, 0.5), make_devices(4), 1.0, time_limit=60.0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.perf_counter() - start < 30.0
