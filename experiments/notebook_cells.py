"""Run the code cells of a text notebook written for DistIR against distsim.

``python experiments/notebook_cells.py PATH`` reads a notebook that was saved as text (cells start with
``In [None]:``, headings with ``##``), renames ``dist_ir`` to ``distsim`` and runs the cells from top to
bottom in a temporary folder, without a display. It reports the CPU seconds of every cell, the figures that
were written and how many configurations the grid search covered. The code in the file is executed: only
give it files that you trust.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIGURES = 5
CELL = "In [None]:"


@dataclass(frozen=True)
class Run:
    """What running the cells gave: CPU seconds per cell, sizes of the figures, and the variables."""

    seconds: tuple[float, ...]
    figures: Mapping[str, int]
    variables: Mapping[str, Any]

    @property
    def configurations(self) -> int:
        """Number of points that the grid search left in ``results``."""
        by_degree = self.variables.get("results", {})
        return sum(len(row) for rows in by_degree.values() for row in rows.values())


def cells(text: str) -> list[str]:
    """Return the code cells in order, without headings and ``%%`` magics, renamed to distsim.

    >>> cells("In [None]:\\n%%time\\nimport dist_ir\\n\\n## B\\n\\nIn [None]:\\nx = 1\\n")
    ['import distsim', 'x = 1']
    """
    found: list[str] = []
    for part in text.split(CELL)[1:]:
        code = re.split(r"^#{2,6} .*$", part, maxsplit=1, flags=re.MULTILINE)[0]
        lines = [line for line in code.splitlines() if not line.startswith("%")]
        found.append(re.sub(r"\bdist_ir\b", "distsim", "\n".join(lines)).strip())
    return [cell for cell in found if cell]


def run_cells(code: Sequence[str]) -> Run:
    """Run the cells in one namespace and a temporary working folder, with figures off screen.

    ``pp_results`` starts as an empty dict: DistIR's notebook reads it two cells before it makes it.
    """
    import matplotlib

    matplotlib.use("Agg")
    variables: dict[str, Any] = {"__name__": "__main__", "pp_results": {}}
    seconds: list[float] = []
    with _temporary_folder() as folder, matplotlib.rc_context():
        for index, cell in enumerate(code):
            start = time.process_time()
            exec(compile(cell, f"<cell {index}>", "exec"), variables)
            seconds.append(time.process_time() - start)
        figures = {path.name: path.stat().st_size for path in sorted(folder.glob("*.pdf"))}
    matplotlib.pyplot.close("all")
    return Run(tuple(seconds), figures, variables)


@contextlib.contextmanager
def _temporary_folder() -> Iterator[Path]:
    """Work in a new folder, and come back before it goes."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        try:
            yield Path(name)
        finally:
            os.chdir(before)


def main() -> None:
    """Run a notebook and report; exit with 1 when a figure is missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", type=Path, help="a notebook saved as text")
    code = cells(parser.parse_args().path.read_text(encoding="utf-8"))
    with contextlib.redirect_stdout(sys.stderr):
        done = run_cells(code)
    for index, (cell, seconds) in enumerate(zip(code, done.seconds, strict=True)):
        print(f"cell {index:2}: {seconds:7.2f} CPU s  {cell.splitlines()[0][:70]}")
    print(f"{len(code)} cells: {sum(done.seconds):.2f} CPU seconds")
    print(f"grid: {done.configurations} configurations")
    print(f"figures: {', '.join(f'{name} ({size} bytes)' for name, size in done.figures.items())}")
    if len(done.figures) != FIGURES:
        sys.exit(f"{len(done.figures)} figures were written, not {FIGURES}")


if __name__ == "__main__":
    main()
