"""What the README shows of a command is what the command prints."""

import re
import shlex
from pathlib import Path

import pytest

from distsim.cli import main

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def shown() -> dict[str, list[str]]:
    """The lines that stand under each command, in its block or, where that ends with it, in the next."""
    blocks = [body.splitlines() for body in re.findall(r"^```\w*\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)]
    found: dict[str, list[str]] = {}
    for number, (first, *lines) in enumerate(blocks):
        command = re.match(r"\$ .*?(distsim .*)", first)
        if command:
            found[command[1]] = lines or blocks[number + 1]
    return found


def test_commands_are_found():
    assert len(shown()) == 6


@pytest.mark.parametrize("command", shown())
def test_a_command_prints_what_is_shown(capsys, monkeypatch, tmp_path, command):
    """Every line, in order; ... stands for those that are left out, also at the end."""
    (tmp_path / "tests").symlink_to(ROOT / "tests")  # for what it reads
    monkeypatch.chdir(tmp_path)  # for what it writes
    assert main(shlex.split(command)[1:]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    place = skipped = 0
    for line in map(str.rstrip, shown()[command]):
        if line == "...":
            skipped = True
            continue
        assert line in printed[place:], f"not printed, or not in its place: {line}"
        found = printed.index(line, place)
        assert skipped or not place or not any(printed[place:found]), f"lines before: {line}"
        place, skipped = found + 1, False
