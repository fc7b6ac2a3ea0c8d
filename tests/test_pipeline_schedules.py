"""Every schedule computes what one device computes: NumPy over every rank, losses and parameters to 1e-9."""

import math
from functools import cache

import pytest
from training_models import assert_same_step, mesh_of, random_inputs, small_gpt, small_mlp, tied

from distsim.compose import build_program, parallelize
from distsim.errors import PlanError
from distsim.executor import CostModel, SequentialExecutor, Simulator
from distsim.hardware import load_cluster
from distsim.plan import Plan
from distsim.schedule import SCHEDULES, schedule
from distsim.transforms import SGD, Adam, differentiate

FLUSHED = [name for name in SCHEDULES if not name.startswith("pipedream")]  # see test_pipedream.py
MODELS = {
    "mlp": lambda: differentiate(small_mlp(layers=16, batch=16), Adam()),
    "gpt": lambda: differentiate(small_gpt(layers=3, batch=16), SGD()),
    "tied": lambda: differentiate(tied(layers=4, batch=16), Adam()),
}


@cache
def known(model):
    joint = MODELS[model]()
    inputs = random_inputs(joint)
    return joint, inputs, SequentialExecutor().compute(joint, inputs)


def order_of(name, pp, microbatches, chunks=None):
    """A schedule of so many microbatches in all, two copies of the model sharing them."""
    copies = 2 if SCHEDULES[name].placement == "two copies" else 1
    if SCHEDULES[name].chunks is not None or chunks is None:
        chunks = SCHEDULES[name].chunks or 2
    return schedule(name, pp, microbatches, chunks) if copies == 1 else schedule(name, pp, microbatches)


def check(model, order, dp=1, tp=1, **layout):
    joint, inputs, expected = known(model)
    plan = Plan(dp, tp, order.num_ranks, order.num_microbatches * order.copies, **layout)
    program = build_program(joint, mesh_of(dp, tp, order.num_ranks), plan, None, order)
    assert_same_step(joint, program, inputs, expected)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", FLUSHED)
def test_every_schedule_computes_the_step(name, model):
    check(model, order_of(name, 2, 8))


@pytest.mark.parametrize("name", FLUSHED)
def test_on_four_ranks(name):
    check("mlp", order_of(name, 4, 8))


@pytest.mark.parametrize("name", ["interleaved", "looped_bfs", "interleaved_zb"])
@pytest.mark.parametrize("chunks", [1, 3, 4])
def test_any_number_of_stages_a_rank(name, chunks):
    check("mlp", order_of(name, 2, 4, chunks))


@pytest.mark.parametrize("name", ["interleaved", "zb_h2", "interleaved_zb", "zb_v", "dualpipe_v", "dualpipe"])
@pytest.mark.parametrize(
    "layout",
    [
        {"remat": "full"},
        {"remat": "matmuls"},
        {"dp": 2, "zero": 3},
        {"dp": 2, "zero": 3, "reshard": "never", "remat": "full"},
        {"dp": 2, "tp": 2},
    ],
    ids=str,
)
def test_with_recomputation_divided_parameters_and_tensor_parallelism(name, layout):
    check("tied" if layout.get("remat") != "matmuls" else "gpt", order_of(name, 2, 4), **layout)


def test_what_a_chunk_reduces_does_not_wait_for_the_chunks_before():
    """Backward of the last chunk ends first: its all-reduces run within its last pass, before the others'."""
    topology = load_cluster("dgx-a100")
    joint = differentiate(small_mlp(layers=16, width=512, batch=64), SGD())
    plan = Plan(dp=4, pp=2, microbatches=4, schedule="looped_bfs", chunks=2)
    simulation = Simulator(CostModel(topology)).simulate(parallelize(joint, plan, topology))
    starts: dict[tuple[str, bool], float] = {}
    ends: dict[tuple[str, bool], float] = {}
    for span in simulation.spans():
        key = span.path.split("/")[0], span.op.op_type == "MPIAllreduce"
        starts[key], ends[key] = min(starts.get(key, math.inf), span.start), max(ends.get(key, 0.0), span.end)
    reduced = {path for path, reduces in starts if reduces}
    assert {path[:2] for path in reduced} == {"B0", "U@"}  # the last microbatch; the loss
    assert starts["B0@2", True] < ends["B0@2", False] <= starts["B0@0", False] < starts["B0@0", True]


def test_stages_are_as_many_as_a_table_has():
    order = schedule("interleaved", 2, 2, 2)
    plan = Plan(pp=2, microbatches=2, stages="8-8")
    with pytest.raises(PlanError, match="stages=8-8 has 2 numbers, the schedule interleaved 4 stages"):
        build_program(known("mlp")[0], mesh_of(1, 1, 2), plan, None, order)


@pytest.mark.parametrize(
    ("name", "m"), [("interleaved_torch", 5), ("interleaved_zb", 5), ("zb_auto", 3), ("v_min", 3)]
)
def test_any_step_is_explained(name, m):
    topology = load_cluster("dgx-a100")
    chunks = SCHEDULES[name].stages_a_rank or 2
    plan = Plan(pp=3, microbatches=m, schedule=name, chunks=chunks)
    joint = differentiate(small_mlp(layers=16, batch=30), SGD())
    simulation = Simulator(CostModel(topology)).simulate(parallelize(joint, plan, topology))
    assert "critical path" in str(simulation.explain())


def test_a_searched_schedule_holds_an_activation_at_least():
    topology = load_cluster("dgx-a100")
    with pytest.raises(PlanError, match=r"schedule=zb_auto:0.1: .*; give at least 0.5"):
        parallelize(known("mlp")[0], Plan(pp=2, microbatches=4, schedule="zb_auto:0.1"), topology)
