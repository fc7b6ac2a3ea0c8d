"""Every schedule computes what one device computes: NumPy over every rank, losses and parameters to 1e-9."""

from functools import cache

import pytest
from training_models import assert_same_step, mesh_of, random_inputs, small_gpt, small_mlp, tied

from distsim.compose import build_program
from distsim.executor import SequentialExecutor
from distsim.plan import Plan
from distsim.schedule import SCHEDULES, schedule
from distsim.transforms import SGD, Adam, differentiate

FLUSHED = [name for name, known in SCHEDULES.items() if known.flush]
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
        {"dp": 2, "fsdp": "reshard"},
        {"dp": 2, "fsdp": "keep", "remat": "full"},
        {"dp": 2, "tp": 2},
    ],
    ids=str,
)
def test_with_recomputation_divided_parameters_and_tensor_parallelism(name, layout):
    check("tied" if layout.get("remat") != "matmuls" else "gpt", order_of(name, 2, 4), **layout)
