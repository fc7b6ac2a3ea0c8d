"""A plan whose schedule is a table of one's own: ``distsim simulate --schedule-csv``."""

import pytest
from cli_cases import run

from distsim.cli import main
from distsim.compose import parallelize
from distsim.errors import PlanError, ScheduleError
from distsim.hardware import load_cluster
from distsim.models import mlp
from distsim.plan import Plan
from distsim.schedule import SCHEDULES, TABLE, register_schedule, schedule, write_csv
from distsim.transforms import add_loss, differentiate

MODEL = "mlp:layers=12,width=64"
UNEVEN = "\n".join(
    [
        "0F0,4F0,0F1,4F1,4B0,0B0,4B1,0B1",
        *[",".join(f"{stage}{kind}{m}" for kind in "FB" for m in range(2)) for stage in (1, 2, 3)],
    ]
)
"""Five stages on four ranks, of which the first has two."""


def simulate(capsys, tmp_path, text, plan, *more):
    table = tmp_path / "own.csv"
    table.write_text(text)
    arguments = ("simulate", MODEL, "--cluster", "dgx-a100", "--batch", 32, "--schedule-csv", table)
    status = main([str(each) for each in (*arguments, "--plan", plan, *more)])
    out, err = capsys.readouterr()
    return status, out, err


def test_chunks_are_those_of_the_table(capsys, tmp_path):
    text = write_csv(schedule("zb_v", 4, 8))
    for chunks in ("", ",chunks=2", ",schedule=table"):
        status, out, err = simulate(capsys, tmp_path, text, f"pp=4,microbatches=8{chunks}")
        assert status == 0, err
        header = out.splitlines()[0]
        assert "dp=1,tp=1,pp=4,microbatches=8,schedule=table,chunks=2 (schedule of own.csv)" in header
    status, out, err = simulate(capsys, tmp_path, text, "pp=4,microbatches=8,chunks=1")
    assert status == 2 and not out
    assert "chunks=1, but a rank of the table own holds 2 stages; say chunks=2" in err


def test_two_copies_of_a_model_are_one_stage_a_rank(capsys, tmp_path):
    text = write_csv(schedule("dualpipe", 4, 8))
    status, out, err = simulate(capsys, tmp_path, text, "pp=4,microbatches=8", "--copies", 2)
    assert status == 0, err
    assert "schedule=table (schedule of own.csv)" in out and "1f1b" not in out + err
    status, _, err = simulate(capsys, tmp_path, text, "pp=4,microbatches=8")
    assert status == 2 and "as two copies of the model it runs, which no table says: say copies=2" in err


def test_ranks_may_hold_unequal_numbers_of_stages(capsys, tmp_path):
    for stages in ("", ",stages=3-3-3-2-1", ",chunks=2,stages=3-3-3-2-1"):
        status, _, err = simulate(capsys, tmp_path, UNEVEN, f"pp=4,microbatches=2{stages}")
        assert status == 0, err
    status, _, err = simulate(capsys, tmp_path, UNEVEN, "pp=4,microbatches=2,stages=3-3-3-3")
    assert status == 2 and "stages=3-3-3-3 has 4 numbers, the schedule own 5 stages" in err


def test_ranks_that_even_stages_load_unevenly_are_noted(capsys):
    model = "gpt:layers=6,hidden=256,heads=4,seq=128,vocab=50000"
    plan = "pp=2,microbatches=4,schedule=zb_v,chunks=2"
    arguments = ("simulate", model, "--cluster", "dgx-a100", "--batch", 16, "--plan")
    out, _ = run(capsys, *arguments, plan)
    said = "note: stages=even makes stages even, not the ranks that hold 2 of them: the busiest computes 1."
    assert said in out
    out, _ = run(capsys, *arguments, "pp=2,microbatches=4")
    assert "the busiest" not in out


def test_a_plan_of_a_table_needs_one():
    plan = Plan(pp=2, microbatches=4, schedule=TABLE)
    assert Plan.parse(str(plan)) == plan
    joint = differentiate(add_loss(mlp(16, 4, 16)), None)
    with pytest.raises(PlanError, match="schedule=table is one that is given beside the plan; give it"):
        parallelize(joint, plan, load_cluster("dgx-a100"))
    with pytest.raises(ScheduleError, match="there is a schedule 'table' already"):
        register_schedule(TABLE, SCHEDULES["gpipe"])


def test_a_table_written_of_a_schedule_without_a_flush_says_what_it_leaves_out(capsys, tmp_path):
    table = tmp_path / "x.csv"
    sizes = ("--stages", 2, "--microbatches", 4, "--csv", table)
    _, err = run(capsys, "schedule", "pipedream", *sizes)
    said = f"note: a table says no more than the order: read from {table}, pipedream has one update, after"
    assert said in err
    _, err = run(capsys, "schedule", "1f1b", *sizes)
    assert "note" not in err
