"""Bounds of pipelines: what layers and stages take, against every cut, and against simulated schedules."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distsim.plan import Plan
from distsim.plan_search.bounds.layer_figures import LayerPassage, LayerWork, StageWork
from distsim.plan_search.bounds.pipeline_bounds import (
    HeldParts,
    bytes_of_stages,
    flights,
    layers_counted,
    seconds_of_layers,
    seconds_of_stages,
)
from distsim.schedule import SCHEDULES, schedule
from distsim.simulation import Simulator
from distsim.simulation.action_times import ActionTimes, timed_program
from distsim.simulation.schedule_times import time_schedule


def work(layers, layer, head):
    seconds = layers * layer + head
    stage = StageWork(seconds, layers, 0)
    return LayerWork(seconds, seconds, 0.0, 0.0, 0.0, 0, stage.layers, layer, head, (stage,))


@given(st.integers(1, 6), st.integers(2, 4), st.integers(1, 5), st.floats(0.1, 2.0), st.floats(0.0, 3.0))
def test_whole_layers_find_room_as_in_the_best_of_all_cuts(layers, ranks, microbatches, layer, head):
    def busiest(cut):
        return max(layer * count + (head if rank == 0 else 0.0) for rank, count in enumerate(cut))

    cuts = [cut for cut in product(range(layers + 1), repeat=ranks) if sum(cut) == layers]
    found = seconds_of_layers(Plan(pp=ranks, microbatches=microbatches), work(layers, layer, head))
    assert found == pytest.approx(microbatches * min(map(busiest, cuts)))


def test_nothing_is_said_of_layers_that_are_not_known():
    assert seconds_of_layers(Plan(pp=2, microbatches=2), work(4, 0.0, 0.0)) == 0.0


@pytest.mark.parametrize(
    ("name", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("looped_bfs", 2), ("1f1b_v", 2)]
)
def test_a_step_takes_the_work_of_its_busiest_rank(name, chunks):
    plan = Plan(pp=4, microbatches=8, schedule=name, chunks=chunks)
    own = schedule(name, 4, 8, None if name == "1f1b_v" else chunks)
    stages = [StageWork(2.0, 1, 1)] * own.num_stages
    busy = time_schedule(own, ActionTimes({"F": 1.0, "I": 0.5, "W": 0.5})).busy
    assert seconds_of_stages(plan, stages) == pytest.approx(max(busy))
    longer = seconds_of_stages(plan, [StageWork(3.0, 1, 1), *stages[1:]])
    assert longer == pytest.approx(max(busy) + 8 * 1.0)


def test_what_ranks_hold_is_what_is_in_flight_in_their_stages():
    plan = Plan(pp=4, microbatches=8)
    assert flights(plan).least == (4, 3, 2, 1)
    stages = [StageWork(1.0, layers, saved) for layers, saved in ((1, 10), (1, 10), (1, 10), (1, 100))]
    nothing = HeldParts(0.0, 0.0)
    assert bytes_of_stages(plan, stages, nothing, nothing) == 100
    # The first rank holds a quarter of what layers hold, of gradients too, and four microbatches.
    assert bytes_of_stages(plan, stages[:3] + stages[:1], nothing, HeldParts(40.0, 80.0)) == 10 + 20 + 40


@pytest.mark.parametrize(
    ("fields", "behind"),
    [
        ({"microbatches": 1}, (-1, -1, -1, -1)),
        ({"microbatches": 2}, (1, 1, 1, 1)),
        ({"microbatches": 4}, (3, 3, 2, 1)),
        ({"microbatches": 8}, (4, 3, 2, 1)),
        ({"microbatches": 8, "schedule": "gpipe"}, (7, 7, 7, 7)),
        # Each stage is done with all microbatches before the one ahead of it begins backward.
        ({"microbatches": 4, "schedule": "interleaved", "chunks": 2}, (-1, -1, -1, -1)),
        ({"microbatches": 8, "schedule": "interleaved", "chunks": 2}, (4, 4, 3, 1)),
    ],
)
def test_sums_of_gradients_are_held_from_the_first_microbatch_until_the_last(fields, behind):
    assert flights(Plan(pp=4, **fields)).behind_sums == behind


@pytest.mark.parametrize("name", ["dualpipe", "pipedream", "zb_auto"])
def test_of_other_schedules_nothing_is_said(name):
    plan = Plan(pp=2, microbatches=4, schedule=name)
    assert flights(plan) is None and seconds_of_stages(plan, [StageWork(1.0, 1, 1)] * 2) == 0.0


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2)])
def test_where_stages_are_a_chain_of_layers_ranks_wait_for_those_ahead(name, chunks):
    plan = Plan(pp=4, microbatches=8, schedule=name, chunks=chunks)
    stages = [StageWork(3.0, 1, 0)] * plan.num_stages
    simulated = time_schedule(
        schedule(name, 4, 8, chunks), ActionTimes({"F": 1.0, "I": 1.0, "W": 1.0})
    ).makespan
    # The gradient of what the first layer takes in is none that the bound counts: a backward pass of inputs.
    least = seconds_of_stages(plan, stages, LayerPassage(1.0, 2.0, 0.0))
    assert least == simulated - 2.0
    # What computes after a gradient was sent does so while the stages ahead compute theirs.
    assert seconds_of_stages(plan, stages, LayerPassage(1.0, 1.0, 1.0)) == 24.0 * chunks + 3 * 1.0 + 2 - 1


@pytest.mark.parametrize(("name", "chunks"), [("zb_h1", 1), ("zb_h2", 1), ("zb_v", 2), ("interleaved_zb", 2)])
def test_what_a_rank_waits_for_at_first_counts_where_it_comes_back(name, chunks):
    """Steps of a parallelogram follow each other faster than one takes."""
    plan = Plan(pp=4, microbatches=8, schedule=name, chunks=chunks)
    made = schedule(name, 4, 8, None if SCHEDULES[name].chunks else chunks)
    program, costs = timed_program(made, ActionTimes({"F": 1.0, "I": 1.0, "W": 1.0}))
    step = Simulator(costs).simulate(program)
    least = seconds_of_stages(plan, [StageWork(3.0, 1, 0)] * plan.num_stages, LayerPassage(1.0, 1.0, 0.0))
    assert 24.0 * chunks <= least <= step.step_period


def test_layers_are_counted_as_plans_count_them():
    def counted(stages, pp=4):
        return layers_counted(Plan(pp=pp, microbatches=8, stages=stages), 12)

    assert (counted("layers"), counted("layers", 8)) == ((3, 3, 3, 3), ())
    assert (counted("default"), counted("2-4-4-2"), counted("2-4-4-4")) == ((3, 4, 3, 2), (2, 4, 4, 2), ())
    assert counted("even") == counted("auto") == layers_counted(Plan(pp=4, stages="layers"), 0) == ()
