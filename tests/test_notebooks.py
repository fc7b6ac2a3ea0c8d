"""The notebooks run from top to bottom at their small sizes, and show what their cells end with."""

import ast
import io
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"


def cells(path: Path) -> list[str]:
    every = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in every if cell["cell_type"] == "code"]


def run(code: str, where: str, names: dict[str, object]) -> None:
    """As a kernel does; what a cell ends with is made into text and, where that is known, into HTML."""
    tree, last = ast.parse(code, where), None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body.pop().value)
    exec(compile(tree, where, "exec"), names)
    if last is not None:
        value = eval(compile(last, where, "eval"), names)
        assert repr(value)
        if hasattr(value, "_repr_html_"):
            value._repr_html_()


def test_there_are_notebooks():
    assert list(FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs(monkeypatch, path):
    """In this process, that has the library loaded and compiled: a kernel takes seconds to start."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.chdir(FOLDER)
    names: dict[str, object] = {"__name__": "__main__"}
    with matplotlib.rc_context():
        assert cells(path)
        for number, code in enumerate(cells(path)):
            run(code, f"{path.name}, code cell {number}", names)
            for figure in map(pyplot.figure, pyplot.get_fignums()):  # a kernel draws them, and begins anew
                figure.savefig(io.BytesIO(), format="png", bbox_inches="tight", dpi=40)
            pyplot.close("all")
