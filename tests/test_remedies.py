"""What would make a plan fit: every remedy is a plan that fits, simulated, near the one that does not."""

from dataclasses import replace
from functools import cache
from itertools import combinations

import expert_models
import pytest
from training_models import small_gpt, topology_of

from distsim.compose import parallelize
from distsim.cost import CostModel
from distsim.ir import Link, Topology
from distsim.plan import Plan
from distsim.plan_search import PlanTrials, remedies
from distsim.simulation import Simulator
from distsim.simulation.memory.program_memory import program_memory
from distsim.transforms import Adam, differentiate


@cache
def joint():
    """One step, whose plans share what is made of them."""
    return differentiate(small_gpt(layers=4, batch=16), Adam())


def with_hosts(count, **device):
    """Devices of ``topology_of``, each with a link to its host."""
    plain = topology_of(count, **device).devices
    topology = Topology.of_devices([replace(each, host_link=Link(25e9)) for each in plain], [])
    for a, b in combinations(topology.devices, 2):
        topology.set_bandwidth(a, b, gbps=100.0)
    return topology


def advised(plan, memory, count=4, **options):
    topology = with_hosts(count, memory=memory)
    simulator = Simulator(CostModel(topology))
    built = []

    def build(other):
        built.append(other)
        return parallelize(joint(), other, topology)

    options.setdefault("seconds", 600.0)
    asked = remedies(plan, PlanTrials(joint(), topology, build, simulator.simulate), **options)
    found = asked.fit
    assert built or not found
    for remedy in found:
        program = parallelize(joint(), remedy.plan, topology)
        assert program_memory(program).missing == 0
        assert simulator.simulate(program).step_period == remedy.seconds
        assert remedy.plan.devices <= count and str(remedy) == remedy.change
    assert [each.seconds for each in found] == sorted(each.seconds for each in found)
    return [each.change for each in found], found, len(built), asked.untried


def peak_of(plan, count=4):
    return max(program_memory(parallelize(joint(), plan, with_hosts(count))).peaks)


def test_one_change_is_enough_where_little_is_missing():
    plan = Plan(dp=4)
    changes, *_ = advised(plan, peak_of(plan) - 1, most=20)
    assert {"remat=full", "zero=1", "zero=3", "microbatches=2", "tp=2, dp=2"} <= set(changes)
    assert len(advised(plan, peak_of(plan) - 1)[0]) == 3


def test_two_changes_where_one_is_not():
    plan = Plan()
    alone = min(peak_of(Plan(tp=2), 2), peak_of(Plan(pp=2), 2), peak_of(Plan(remat="full"), 1))
    together = peak_of(Plan(tp=2, remat="full", microbatches=1), 2)
    assert together < alone
    changes, found, *_ = advised(plan, together, count=2)
    assert changes and all("," in change for change in changes)
    assert all(each.peak <= together for each in found)


def test_activations_are_divided_in_the_sequence_and_experts_over_data():
    plan = Plan(dp=2, tp=2)
    assert "sp=on" in advised(plan, peak_of(plan) - 1, most=20)[0]
    function = differentiate(expert_models.model("mixtral"), Adam())
    peak = max(program_memory(parallelize(function, Plan(dp=4), topology_of(4))).peaks)
    topology = with_hosts(4, memory=peak - 1)
    simulator = Simulator(CostModel(topology))
    trials = PlanTrials(
        function, topology, lambda plan: parallelize(function, plan, topology), simulator.simulate
    )
    assert "ep=4" in [each.change for each in remedies(Plan(dp=4), trials, most=20).fit]


def test_three_changes_where_two_are_not():
    least = peak_of(Plan(dp=4, zero=3, remat="full", microbatches=4))
    changes, *_ = advised(Plan(dp=4), least)
    assert "remat=full, zero=3, microbatches=4" in changes
    assert all(change.count("=") == 3 for change in changes)
    assert "remat=full, zero=3, dp=4, microbatches=4" in advised(Plan(dp=2), least)[0]
    assert advised(Plan(), least)[0] == ["microbatches=16, tp=4"]  # down to a sample
    assert "ep" not in remedies(Plan(dp=4), trials_of(1000)).fields
    assert "zero" in remedies(Plan(cp=4), trials_of(1000)).fields


def test_nothing_fits_where_the_states_do_not_and_nothing_is_built_then():
    assert advised(Plan(), 1000, count=1) == ([], (), 0, 0)


def test_without_time_nothing_is_tried_and_that_is_said():
    plan = Plan(dp=4)
    changes, _, built, untried = advised(plan, peak_of(plan) - 1, seconds=-1.0)
    assert (changes, built) == ([], 0) and untried >= 4


def test_idle_devices_divide_parameters_and_layers_go_to_the_host():
    """What a plan without ranks wants first, and one whose parameters are divided already."""
    divided = peak_of(Plan(dp=4, zero=3, remat="full"))
    changes, *_ = advised(Plan(), divided, most=20)
    assert "remat=full, dp=4, zero=3" in changes
    narrow = peak_of(Plan(tp=4), 4)
    assert "tp=4" in advised(Plan(), narrow, most=20)[0]
    changes, *_ = advised(Plan(), peak_of(Plan(offload=4), 1), count=1, most=20)
    assert "offload=4" in changes


def trials_of(memory):
    """Of devices on which nothing fits."""
    return PlanTrials(joint(), with_hosts(4, memory=memory), lambda _: pytest.fail("no room"), pytest.fail)


def test_where_nothing_fits_it_is_said_what_was_looked_at():
    topology = with_hosts(2, memory=1000)
    trials = PlanTrials(joint(), topology, lambda _: pytest.fail("there is no room"), pytest.fail)
    found = remedies(Plan(), trials)
    assert not found.fit and not found.untried and found.looked_at > 10
    assert {"remat", "zero", "dp", "microbatches", "tp", "pp", "offload"} <= set(found.fields)
