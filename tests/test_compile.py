"""Compiled functions: like the plain ones, one calling another, cached where that is possible."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from distsim.compile import anywhere, compiled, inner, when_compiling


class Pair(NamedTuple):
    first: int
    second: object


@compiled
def square(x: int) -> int:
    """Return x squared."""
    return x * x


@anywhere
def tripled(x):
    return 3 * x


@compiled
def tripled_square(x: int) -> int:
    return tripled(square(x))


@compiled
def norm(pair: Pair) -> int:
    total = square(pair.first)
    for x in pair.second:
        total += square(x)
    return total


def test_it_computes_what_the_plain_function_does_and_calls_others():
    pair = Pair(2, np.arange(4))
    assert norm(pair) == norm.function(pair) == 18
    assert square(1.5) == 2.25  # another type of argument: another compilation
    assert square.__doc__ == "Return x squared." and square.__name__ == "square"


def test_what_runs_anywhere_is_plain_in_python_and_compiled_in_compiled_functions():
    assert tripled([1]) == [1, 1, 1] and tripled(np.arange(3)).tolist() == [0, 3, 6]
    assert tripled_square(2) == tripled_square.function(2) == 12


def test_nothing_is_imported_before_the_first_call():
    code = (
        "import sys; from distsim.compile import compiled\n"
        "double = compiled(lambda x: 2 * x); print('numba' in sys.modules, double(4), 'numba' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False 8 True\n", "")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Two modules, the compiled function of one calling that of the other."""
    (tmp_path / "below.py").write_text(
        "from distsim.compile import compiled\n\n@compiled\ndef inner(x):\n    return x + 1\n"
    )
    (tmp_path / "above.py").write_text(
        "from distsim.compile import compiled\nfrom below import inner\n\n"
        "@compiled\ndef outer(x):\n    return inner(x) * 10\n"
    )
    return tmp_path


def outer_of_one(package: Path) -> tuple[str, str]:
    """What a new process computes, and how many functions it had to compile."""
    code = (
        "import above; print(above.outer(1), sum(above.outer.dispatcher.stats.cache_misses.values()),"
        " sum(above.outer.dispatcher.stats.cache_hits.values()))"
    )
    path = os.pathsep.join([str(package), str(Path(__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.stderr == ""
    return tuple(done.stdout.split())


def test_a_second_process_finds_the_code_and_sees_a_change_in_what_is_called(package):
    assert outer_of_one(package) == ("20", "1", "0")
    assert outer_of_one(package) == ("20", "0", "1")
    below = package / "below.py"
    below.write_text(below.read_text().replace("x + 1", "x + 2"))
    assert outer_of_one(package) == ("30", "1", "0")


def test_without_a_place_for_the_code_it_is_compiled_each_time():
    # Numba finds no place for the code of a function that is in no file.
    scope: dict[str, object] = {}
    exec(compile("def triple(x):\n    return 3 * x\n", "/nowhere/at/all.py", "exec"), scope)
    triple = compiled(scope["triple"])
    assert triple(5) == 15
    assert triple.dispatcher.stats.cache_path is None


def test_an_error_other_than_of_the_cache_is_raised(monkeypatch):
    numba = importlib.import_module("numba")

    def broken(**options: bool) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(numba, "njit", broken)
    with pytest.raises(RuntimeError, match="out of luck"):
        compiled(lambda x: x)(1)


def test_each_part_says_once_that_it_compiles(tmp_path, monkeypatch):
    told = []
    when_compiling(told.append)
    monkeypatch.syspath_prepend(tmp_path)  # a new place each time: nothing is cached there
    parts = ["maxplus.kernels", "maxplus.row_loop", "memory.kernel", "maxplus.kernels"]
    for number, part in enumerate(parts):
        source = f"""
from distsim.compile import compiled
__name__ = "distsim.simulation.{part}"

@compiled
def add(n):
    return n + {number}
"""
        (tmp_path / f"adds_{number}.py").write_text(source)
        assert importlib.import_module(f"adds_{number}").add(1) == 1 + number
    assert told == ["the engine", "the count of memory"]


def test_what_is_for_compiled_functions_alone_is_not_called_from_python():
    """It has no wrapper that Python could call: that ended the process."""

    def half(x: float) -> float:
        return x / 2

    with pytest.raises(TypeError, match="half is for compiled functions: Python cannot call it"):
        inner(half)(3.0)
