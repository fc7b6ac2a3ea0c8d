"""What the pages show of a command is what the command prints; what they say to type is understood."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from distsim.cli import main, parsers
from distsim.hardware import load_cluster
from distsim.schedule import SCHEDULES

ROOT = Path(__file__).parents[1]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
}


def blocks(text: str, *languages: str) -> list[str]:
    """The blocks of code of a page, or those in some languages."""
    found = re.findall(r"^```(\S*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [body for language, body in found if not languages or language in languages]


def shown() -> dict[tuple[str, str], list[str]]:
    """The lines that stand under each command, in its block or, where that ends with it, in the next."""
    found: dict[tuple[str, str], list[str]] = {}
    for page, text in PAGES.items():
        each = [body.splitlines() for body in blocks(text)]
        for number, (first, *lines) in enumerate(each):
            command = re.match(r"\$ .*?(distsim .*)", first)
            if command:
                found[page, command[1]] = lines or each[number + 1]
    return found


def typed() -> list[tuple[str, str]]:
    """The commands that the pages tell people to type, and do not show the output of."""
    lines = [
        (page, line.split("#")[0].strip())
        for page, text in PAGES.items()
        for body in blocks(text, "sh", "")
        for line in body.replace("\\\n", " ").splitlines()
    ]
    return [(page, line) for page, line in lines if line.startswith("distsim ")]


def test_commands_are_found():
    assert len(shown()) == 7
    assert len(typed()) >= 10


@pytest.mark.parametrize(("page", "command"), shown())
def test_a_command_prints_what_is_shown(capsys, monkeypatch, tmp_path, page, command):
    """Every line, in order; ... stands for those that are left out, also at the end."""
    (tmp_path / "tests").symlink_to(ROOT / "tests")  # for what it reads
    monkeypatch.chdir(tmp_path)  # for what it writes
    assert main(shlex.split(command)[1:]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    place = skipped = 0
    for line in map(str.rstrip, shown()[page, command]):
        if line == "...":
            skipped = True
            continue
        assert line in printed[place:], f"not printed, or not in its place: {line}"
        found = printed.index(line, place)
        assert skipped or not place or not any(printed[place:found]), f"lines before: {line}"
        place, skipped = found + 1, False


@pytest.mark.parametrize(("page", "command"), typed())
def test_a_command_is_understood(page, command):
    """Its options exist, and take what they are given."""
    _, name, *arguments = shlex.split(command)
    assert vars(parsers()[name].parse_args(arguments))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(PAGES[page], "toml")])
def test_a_cluster_of_a_page_is_one(tmp_path, page):
    for text in blocks(PAGES[page], "toml"):
        file = tmp_path / "ours.toml"
        file.write_text(text, encoding="utf-8")
        assert load_cluster(str(file)).devices


def test_a_study_in_five_lines(monkeypatch, tmp_path):
    """The blocks of the tutorial that are no doctest: a table of pandas and a picture."""
    pytest.importorskip("pandas")
    (code,) = [body for body in blocks(PAGES["docs/tutorial.md"], "python") if ">>>" not in body]
    assert len([line for line in code.splitlines() if line]) == 5
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(code, "docs/tutorial.md", "exec"), names)
    assert {"plan", "step_s", "mfu", "fits"} <= set(names["table"].columns) and len(names["table"]) > 4
    assert (tmp_path / "plans.png").stat().st_size > 5000


def test_the_page_of_schedules_names_those_of_the_catalogue():
    listed = re.search(r"\bSchedules are (.*?) `--csv`", PAGES["docs/how-to/schedule.md"], re.DOTALL)
    assert listed is not None
    names = [name for name in re.findall(r"`(.*?)`", listed[1]) if not name.startswith("--")]
    assert sorted(names) == sorted(SCHEDULES)


def test_links_between_pages_lead_somewhere():
    """Those in the README and CONTRIBUTING; the documentation's own are checked when it is built."""
    for page in ("README.md", "CONTRIBUTING.md"):
        targets = re.findall(r"\]\((?!http)([^)#]+)", PAGES[page])
        assert [target for target in targets if not (ROOT / target).exists()] == []


def test_the_documentation_builds_without_a_warning(tmp_path):
    pytest.importorskip("sphinx")
    pytest.importorskip("myst_parser")
    pytest.importorskip("furo")
    # Without sphinx.ext.viewcode, which is half of the time: it makes pages of the source.
    used = "extensions=myst_parser,sphinx.ext.autodoc,sphinx.ext.napoleon"
    command = f"-m sphinx -q -W --keep-going -b html -D {used} docs {tmp_path}".split()
    built = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (built.returncode, built.stderr) == (0, "")
    assert "distsim.simulate" in (tmp_path / "reference.html").read_text(encoding="utf-8")
