"""What both engines refuse: schedules of other stages, costs that are none, unusable disturbances."""

import math
from dataclasses import replace

import pytest

from distsim.compose import parallelize
from distsim.errors import CostError, ScheduleError, SimulationError
from distsim.executor import CostModel, Disturbances, Simulator
from distsim.hardware import load_cluster
from distsim.models import mlp
from distsim.plan import Plan
from distsim.schedule import schedule
from distsim.transforms import SGD, differentiate

ENGINES = ["maxplus", "events"]


def program():
    topology = load_cluster("dgx-a100")
    joint = differentiate(mlp(layers=4, width=16, batch=16), SGD(lr=0.1))
    return parallelize(joint, Plan.parse("dp=2,pp=2,microbatches=4"), topology), topology


@pytest.mark.parametrize("stages", [1, 3])
def test_a_schedule_of_other_stages_is_refused(stages):
    made, _ = program()
    with pytest.raises(ScheduleError, match=f"is for {stages} stages, the program has 2"):
        replace(made, schedule=schedule("1f1b", stages, 4))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("cost", [-1.0, math.nan, math.inf, None, "1"])
@pytest.mark.parametrize("name", ["seconds", "communication_seconds"])
def test_a_cost_model_that_gives_no_cost_is_refused_by_the_op(engine, cost, name):
    made, topology = program()
    broken = type("Broken", (CostModel,), {name: lambda *_: cost})
    with pytest.raises(CostError, match=r"costs .* a cost must be a number, finite and not negative"):
        Simulator(broken(topology), engine=engine).simulate(made)


@pytest.mark.parametrize("jitter", [-0.1, math.nan, math.inf, 1e200])
def test_a_jitter_out_of_range_is_refused(jitter):
    with pytest.raises(SimulationError, match=r"must lie in 0\.\.10"):
        Disturbances(jitter=jitter)


def test_the_linear_engine_refuses_what_is_not_linear():
    with pytest.raises(SimulationError, match='use engine="events"'):
        Simulator(CostModel(load_cluster("dgx-a100")), contention=True)


def test_throughput_is_of_at_least_one_sample():
    made, topology = program()
    with pytest.raises(SimulationError, match="samples=-3"):
        Simulator(CostModel(topology)).simulate(made).throughput(-3)


def test_slow_links_want_contention():
    _, topology = program()
    slow = Disturbances(slow_links={(topology.devices[0], topology.devices[1]): 2.0})
    with pytest.raises(SimulationError, match="need contention=True"):
        Simulator(CostModel(topology), engine="events", disturbances=slow)
