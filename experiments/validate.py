"""Predict every row of a table of published training steps, and compare with what was measured.

``python experiments/validate.py CSV ... --out predictions.csv`` is ``distsim validate`` with its table in
``results/`` unless told otherwise, and its picture beside the table. Each row is laid out by its columns
(:mod:`distsim.truth`); no figure is fitted; nothing that was measured is read to predict.
"""

from __future__ import annotations

import argparse
import sys

from common import RESULTS

from distsim.commands.attempt import attempt
from distsim.commands.validate import add_options, run


def main() -> int:
    """Predict, write and compare; the exit status is that of the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_options(parser)
    parser.set_defaults(out=RESULTS / "predictions.csv")
    options = parser.parse_args()
    options.plot = options.plot or options.out.with_suffix(".png")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    return attempt(lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
