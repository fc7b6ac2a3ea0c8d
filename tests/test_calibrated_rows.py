"""Processes that lay out the rows that experiments/calibrate.py fits to."""

import multiprocessing
from pathlib import Path

import numpy as np

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


def test_processes_end_as_they_should_when_the_fit_is_done(monkeypatch):
    """Each answers until it is told that there is no more, and none ends with an error."""
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    from calibrated_figures import FIGURES
    from calibrated_rows import Rows

    before = {*multiprocessing.active_children()}
    with Rows([{"id": "of nothing"}, {"id": "of nothing else"}], 2) as rows:
        own = {*multiprocessing.active_children()} - before
        assert len(own) == 2
        assert [row for row, _ in rows.left_out] == ["of nothing", "of nothing else"]
        assert rows.predict(np.zeros(len(FIGURES))).size == 0
    assert [process.exitcode for process in own] == [0, 0]
