"""The linters pass, each run as a person would run it from the repository root."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "command",
    [("ruff", "check"), ("ruff", "format", "--check"), ("pyright",)],
    ids=lambda command: "-".join(command),
)
def test_lint(command):
    # pyright resolves third-party imports with the interpreter that it is told about.
    where = ["--pythonpath", sys.executable] if command[0] == "pyright" else ["."]
    # Node looks for garbage among young objects every 16 MiB, a third of the CPU seconds of pyright.
    young = {**os.environ, "NODE_OPTIONS": "--max-semi-space-size=256"}
    result = subprocess.run(
        [sys.executable, "-m", *command, *where],
        cwd=ROOT,
        env=young,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
