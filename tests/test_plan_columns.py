"""The one table of columns of plans: records, texts, notebooks and pages follow it."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from training_models import small_mlp

from distsim.hardware import load_cluster
from distsim.plan_search import columns, search
from distsim.plan_search.columns import PageCell, PlanColumn, page_cells, plan_columns, record_of
from distsim.plan_search.trial import PlanTrial
from distsim.plan_search.views.page import plans_part
from distsim.plan_search.views.text import best_table
from distsim.report import page
from distsim.transforms import SGD, differentiate


@pytest.fixture(scope="module")
def found():
    step = differentiate(small_mlp(), SGD())
    return search(step, load_cluster("dgx-a100"), "dp=8|4,pp=1,remat=none,microbatches=1,zero=0", top=1)


def test_what_is_added_to_the_table_is_everywhere(found, monkeypatch):
    own = PlanColumn(
        lambda trial: 7 * trial.seconds,
        record="week_s",
        name="week",
        text=lambda trial: f"{7 * trial.seconds!r} s",
        label="a week",
        html="of a week",
        page=PageCell(9, "each week", "seconds"),
    )
    before, memory = (found.rows(), best_table(found), found._repr_html_()), columns._memory
    monkeypatch.setattr(columns, "_memory", lambda: (*memory(), own))
    week, text = 7 * found.best.seconds, f"{7 * found.best.seconds!r} s"
    assert found.rows()[0] == before[0][0] | {"week_s": week}
    assert [cell for cell in found.rows()[0] if cell not in before[0][0]] == ["week_s"]
    head, first = best_table(found)[:2]
    assert head.index("memory") < head.index("a week") < head.index("bound by") and text in first
    assert "of a week" in found._repr_html_() and text in found._repr_html_()
    part = plans_part(found)
    assert dict(zip(part["columns"], part["rows"][0], strict=True))["week"] == week
    assert part["shown"][-1] == ["each week", "seconds", "week"]


def test_the_interval_has_the_unit_of_the_step_and_what_is_left_is_of_what_is_usable(found):
    """Of a step of 64.96 ms the interval stood in seconds, 0.0563 to 0.0749."""
    trial = PlanTrial("dp=1", 0.06496, peak=60 << 30, usable=80.0 * 2**30, low=0.0563, high=0.0749)
    made = {column.label: column for column in plan_columns(found.step)}
    assert made["step"].text(trial) == "64.96 ms" and made["90 %"].text(trial) == "56.3 to 74.9 ms"
    assert made["left"].text(trial) == "25%"
    assert made["left"].text(replace(trial, usable=math.inf)) == "-"
    assert record_of(found.step, trial)["usable_bytes"] == 80 * 2**30


def test_a_page_shows_values_that_it_has_in_forms_that_it_knows(found):
    script = (Path(page.__file__).parent / "assets" / "plans.js").read_text(encoding="utf-8")
    forms = set(re.findall(r"^  (\w+): ", script.split("const FORMS = {")[1].split("\n};")[0], re.M))
    made = plan_columns(found.step)
    shown = page_cells(made)
    assert {form for _, form, *_ in shown} == forms
    assert {name for _, _, *names in shown for name in names} <= {column.name for column in made}
    assert [label for label, *_ in shown] == [
        *("plan", "step", "memory", "MFU", "samples/s/device", "90 %", "status", "bound by, or why not")
    ]
