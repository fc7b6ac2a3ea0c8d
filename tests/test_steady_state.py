"""The steady state of pipelines without a flush: a microbatch's time, memory, steps too short for it."""

import re

import pytest
from pipedream_models import PLANS, joint_of, planned, replace_name
from training_models import small_mlp

from distsim.compose import parallelize
from distsim.errors import ScheduleError
from distsim.executor import CostModel, Simulator
from distsim.hardware import load_cluster
from distsim.plan import Plan
from distsim.report import summarize
from distsim.schedule import (
    longer,
    schedule,
)
from distsim.simulation.memory.program_memory import program_memory
from distsim.transforms import SGD, Adam, differentiate


class FreeSends:
    """Every op takes the time of its bytes, a message none."""

    def compute(self, signature, demand, device):
        return (demand.flops + demand.bytes_read + demand.bytes_written) * 1e-9

    def communicate(self, kind, nbytes, group, topology):
        return 0.0


def busy(simulation):
    """Seconds of compute on each device."""
    found = dict.fromkeys(simulation.timestamps, 0.0)
    for event in simulation.trace:
        if event["stream"] == "compute":
            found[event["device"]] += event["dur"]
    return found


@pytest.mark.parametrize("name", ["pipedream", "pipedream_2bw"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_microbatch_takes_what_the_slowest_stage_does(name, ranks):
    costs = CostModel(load_cluster("dgx-a100"), rules=FreeSends())
    joint = differentiate(small_mlp(layers=8, batch=16), Adam())
    program = parallelize(joint, Plan(pp=ranks, microbatches=16, schedule=name), costs.topology, costs)
    simulation = Simulator(costs).simulate(program)
    more = [busy(simulation.longer(count)) for count in (48, 64)]
    slowest = max(more[1][device] - more[0][device] for device in simulation.timestamps)
    if name == "pipedream" or ranks == 1:
        assert simulation.microbatch_time == pytest.approx(slowest / 16, rel=1e-9)
    else:  # only the last of a batch is followed by an update: for that the other stages may have to wait
        assert slowest / 16 * (1 - 1e-9) <= simulation.microbatch_time < slowest / 16 * 1.1
    assert simulation.step_time > simulation.step_period == 16 * simulation.microbatch_time or ranks == 1
    assert simulation.throughput(16) == 16 / simulation.step_period
    assert f"{simulation.throughput(16):.6g} samples/s in the steady state" in summarize(simulation, 16)
    again = Simulator(costs, engine="events").simulate(program)
    assert again.microbatch_time == simulation.microbatch_time


def test_a_step_with_a_flush_has_no_steady_state():
    costs = CostModel(load_cluster("dgx-a100"))
    joint = differentiate(small_mlp(batch=16), SGD())
    program = parallelize(joint, Plan(pp=2, microbatches=4), costs.topology, costs)
    simulation = Simulator(costs).simulate(program)
    assert simulation.microbatch_time is None and simulation.step_period == simulation.step_time
    assert "steady" not in summarize(simulation, 16)


def test_a_table_is_not_known_to_run_on():
    order = schedule("pipedream", 2, 4)
    assert longer(order, 9) == schedule("pipedream", 2, 9)
    with pytest.raises(ScheduleError, match="how it runs on over 9 microbatches"):
        longer(replace_name(order, "mine"), 9)


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("pp=2,microbatches=4,schedule=pipedream", ""),
        (
            "pp=4,microbatches=2,schedule=pipedream",
            "step of 2 microbatches alone stage 0 would hold 2 versions .* of 2 microbatches, and 4 versions",
        ),
        (
            "pp=2,microbatches=1,schedule=pipedream",
            "step of 1 microbatch alone stage 0 would hold 1 version .* of 1 microbatch, and 2 versions",
        ),
        (
            "pp=2,microbatches=4,schedule=pipedream_2bw:4",
            "stage 0 would hold 1 version .*, and 2 versions",
        ),
    ],
)
def test_a_step_that_is_too_short_for_its_versions_says_so(text, note):
    costs = CostModel(load_cluster("dgx-a100"))
    program = parallelize(joint_of("mlp", SGD(0.5)), Plan.parse(text), costs.topology, costs)
    notes = "; ".join(Simulator(costs).simulate(program).notes)
    assert re.search(note, notes) if note else "alone" not in notes


STEPS = [("pipedream", 1), ("pipedream", 3), ("pipedream_2bw", 4), ("pipedream_2bw:8", 8)]


@pytest.mark.parametrize(("name", "microbatches"), STEPS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_memory_is_that_of_the_steady_state_however_short_the_step(name, microbatches, ranks):
    costs = CostModel(load_cluster("dgx-a100"))

    def simulated(count):
        joint = differentiate(small_mlp(layers=8, batch=2 * count), Adam())
        plan = Plan(pp=ranks, microbatches=count, schedule=name)
        return Simulator(costs).simulate(parallelize(joint, plan, costs.topology, costs))

    short, long = simulated(microbatches), simulated(64)
    for (device, use), other in zip(short.memory.items(), long.memory.values(), strict=True):
        data = other.by_kind["inputs"] - use.by_kind["inputs"]
        assert use.peak == other.peak - data == short.peak_memory[device]
    own = max(program_memory(short.simulated).peaks)
    assert max(use.peak for use in short.memory.values()) > own or microbatches == 8


@pytest.mark.parametrize("text", [text for text in PLANS if "dp" not in text])
def test_the_time_of_a_microbatch_is_a_mean_that_is_off_by_little(text):
    program, costs = planned(text)
    simulation = Simulator(costs).simulate(program)
    ends = [simulation.longer(count).step_time for count in (480, 960)]
    assert simulation.microbatch_time == pytest.approx((ends[1] - ends[0]) / 480, rel=3e-3)


def test_a_full_pipeline_is_no_what_if_of_one_that_is_full():
    program, costs = planned(PLANS[1])
    assert not [w for w in Simulator(costs).simulate(program).explain().what_ifs if "full" in w.change]
