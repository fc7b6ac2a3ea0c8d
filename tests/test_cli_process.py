"""The command line as a process: signals, and streams that are closed."""

import ctypes
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_cases import PROGRESS
from optimal_models import layered_problem, make_devices

from distsim import __main__
from distsim.device_placement.optimal import optimal_partition, search
from distsim.report.output import replacing
from distsim.report.progress import Progress

ROOT = Path(__file__).parents[1]
SMALL = ["simulate", "mlp:layers=2,width=8,batch=8", "--cluster", "dgx-2"]


# --- signals --------------------------------------------------------------------------------------


@pytest.fixture
def own_signals():
    """What a process does with signals and lost exceptions is put back after the test."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        signal.signal(number, signal.default_int_handler)
    hook = sys.unraisablehook
    yield
    sys.unraisablehook = hook
    for number, handler in before.items():
        signal.signal(number, handler)


def stopped(capfd, monkeypatch, number: int, command) -> str:
    """Run the process around a command that gets a signal; return what it says."""
    monkeypatch.setattr("distsim.cli.main", command)
    assert __main__.main() == 128 + number
    out, err = capfd.readouterr()
    assert out == ""
    return err


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_ends_a_command_with_a_line_and_no_draft(capfd, monkeypatch, tmp_path, own_signals, name):
    path, number = tmp_path / "step.json", signal.Signals[name]
    path.write_text("from before")

    def writing():
        with replacing(path) as file:
            file.write(b"half")
            assert len(list(tmp_path.iterdir())) == 2, "a draft beside it"
            os.kill(os.getpid(), number)
            time.sleep(60)

    assert stopped(capfd, monkeypatch, number, writing) == f"distsim: stopped by {name}\n"
    assert [path.read_text() for path in tmp_path.iterdir()] == ["from before"]


def test_a_signal_that_a_library_loses_ends_the_command_too(capfd, monkeypatch, own_signals):
    # Numba compiles with callbacks from LLVM, in which no exception gets out.
    def in_a_callback():
        ctypes.CFUNCTYPE(None)(lambda: os.kill(os.getpid(), signal.SIGINT) or time.sleep(0.01))()
        time.sleep(60)

    def turned_into_another_error():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        except BaseException:
            raise RuntimeError("something is missing") from None

    for command in (in_a_callback, turned_into_another_error):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        assert stopped(capfd, monkeypatch, signal.SIGINT, command) == "distsim: stopped by SIGINT\n"


def test_an_error_without_a_signal_is_raised(monkeypatch, own_signals):
    monkeypatch.setattr("distsim.cli.main", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        __main__.main()


def test_a_signal_while_libraries_are_imported_ends_the_command_with_a_line():
    code = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored behind a shell's &
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from distsim import __main__
sys.exit(__main__.main())
"""
    done = subprocess.run([sys.executable, "-c", code, *SMALL], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "distsim: stopped by SIGINT\n")


def test_a_command_that_is_killed_while_it_writes_a_trace_has_said_its_result(tmp_path):
    code = """
import sys, time
from distsim import __main__
from distsim.report import trace
trace._memory = lambda *arguments: print("at rest", file=sys.stderr, flush=True) or time.sleep(60)
sys.exit(__main__.main())
"""
    command = [sys.executable, "-c", code, *SMALL, "--trace", str(tmp_path / "step.json")]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert any(line.endswith("at rest\n") for line in process.stderr)
        assert len(list(tmp_path.iterdir())) == 1, "a draft"
        process.terminate()
        out, err = process.communicate(timeout=60)
    assert (process.returncode, "step time" in out, list(tmp_path.iterdir())) == (143, True, [])
    assert re.fullmatch(r"stopped, [\d.]+ s\ndistsim: stopped by SIGTERM\n", err), err


def test_ctrl_c_ends_the_threads_of_a_search(monkeypatch, own_signals):
    def beam(jobs, machines, memory, width, upper, clock, *weight):
        os.kill(os.getpid(), signal.SIGINT)
        while not clock.over:
            time.sleep(0.001)

    search.compile_search()
    monkeypatch.setattr(search, "beam", beam)
    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        optimal_partition(layered_problem(0, 20, 4, 0.5), make_devices(4), 1.0, time_limit=60.0)
    assert time.perf_counter() - start < 30.0


# --- streams --------------------------------------------------------------------------------------


def run_with(arguments: list[object], **streams: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "distsim", *map(str, arguments)]
    buffered = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(command, cwd=ROOT, env=buffered, text=True, timeout=120, **streams)


@pytest.fixture
def left_pipe():
    """The end for writing of a pipe from which nobody reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


def test_a_closed_stderr_does_not_cost_the_result(tmp_path):
    trace = tmp_path / "step.json"
    done = run_with([*SMALL, "--trace", trace], stdout=subprocess.PIPE, preexec_fn=lambda: os.close(2))
    assert (done.returncode, done.stdout.count("\nstep time ")) == (0, 1)
    assert json.loads(trace.read_text())["traceEvents"], "no line of progress got into the trace"


def test_a_reader_that_has_gone_does_not_cost_the_trace(tmp_path, left_pipe):
    trace = tmp_path / "step.json"
    done = run_with([*SMALL, "--trace", trace], stdout=left_pipe, stderr=subprocess.PIPE)
    assert done.returncode == 0 and json.loads(trace.read_text())["traceEvents"]
    assert all(PROGRESS.fullmatch(line) for line in done.stderr.splitlines()), done.stderr


def test_a_help_that_nobody_reads_ends_quietly(left_pipe):
    done = run_with(["--help"], stdout=left_pipe, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, "")


def test_progress_that_cannot_be_written_does_not_cost_the_work():
    class Full(io.StringIO):
        def flush(self):
            raise OSError(28, "No space left on device")

    assert Progress(Full()).run("counting", lambda: 3) == 3
