"""The seconds from a step to the next: closed forms of schedules, long runs of steps, both engines."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program_models import invent

import distsim
from distsim.executor import Simulator
from distsim.report import summarize
from distsim.schedule import SCHEDULES, schedule
from distsim.simulation.action_times import ActionTimes, timed_program
from distsim.simulation.schedule_times import time_schedule
from distsim.simulation.steady_state import cycle_time, step_column

GPT = "gpt:layers=16,hidden=256,heads=4,seq=64,vocab=128"


def timed(name, ranks=4, microbatches=8, times=ActionTimes()):  # noqa: B008
    """The times of a schedule, and its simulated step."""
    made = schedule(name, ranks, microbatches, None if SCHEDULES[name].chunks else 2)
    program, costs = timed_program(made, times)
    return time_schedule(made, times), Simulator(costs).simulate(program)


def simulated(schedule, plan="pp=4,microbatches=8,stages=layers", **options):
    """The step of a small model."""
    settings = {"optimizer": "sgd", "kernels": "ops", "clip": 0} | options
    return distsim.simulate(GPT, "dgx-h100", f"{plan},schedule={schedule}", 8, **settings)


@pytest.mark.parametrize("times", [ActionTimes(), ActionTimes({"F": 1.0, "I": 1.0, "W": 1.0}, 0.25)])
@pytest.mark.parametrize("name", ["zb_h2", "zb_v"])
def test_a_parallelogram_overlaps_the_next_step(name, times):
    found, step = timed(name, times=times)
    assert step.step_period == pytest.approx(found.rank_span) and step.step_time == found.makespan
    assert step.step_period < found.makespan


def test_a_zero_bubble_step_follows_after_its_work_alone():
    found, step = timed("zb_h2")
    assert (found.makespan, step.step_period, found.bubble) == (27.0, 24.0, 0.0)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved", "looped_bfs", "zb_h1", "dualpipe"])
def test_where_the_rank_that_begins_first_ends_last_steps_do_not_overlap(name):
    _, step = timed(name)
    assert step.step_period == step.step_time


@pytest.mark.parametrize("name", ["1f1b", "zb_h2", "zb_v,chunks=2"])
def test_a_norm_over_all_stages_holds_every_rank_up(name):
    free, held = simulated(name), simulated(name, clip=1.0)
    assert held.step_period == pytest.approx(held.step_time, rel=0.01)
    assert held.step_period > free.step_period or name == "1f1b"


def test_what_is_said_of_a_step_that_overlaps_the_next():
    step = simulated("zb_h2")
    assert step.samples_per_second == 8 / step.step_period and step.to_dict()["step_s"] == step.step_period
    assert step.to_dict()["makespan_s"] == step.step_time > step.step_period
    said = summarize(step, 8)
    assert re.search(r"step time +\S+ .s from the first start to the last end\nsteady +\S+ .s .*a step", said)
    assert f"throughput    {8 / step.step_period:.6g} samples/s\n" in said
    assert "steady" not in summarize(simulated("1f1b"), 8)


@given(st.integers(0, 10**6))
@settings(max_examples=30)
def test_a_step_follows_within_a_step_and_after_what_a_rank_computes(seed):
    case = invent(seed)
    step = Simulator(case.cost_model, case.overlap).simulate(case.program)
    busy = max([step.shares(members[0]).busy for members in step.classes.members], default=0.0)
    assert busy <= step.step_period <= step.step_time
    ranks = range(len(step.classes.members))
    columns = np.column_stack([step_column(step.timeline, rank) for rank in ranks])
    assert columns.max(initial=0.0) == step.step_time
    if step.step_time > 0:
        assert step.step_period == cycle_time(columns) >= columns.diagonal().max()
    flat = Simulator(case.cost_model, case.overlap, engine="events").simulate(case.program)
    assert flat.step_period == step.step_period
    # Begun at times of their own classes go on as all of their devices do.
    alone = Simulator(case.cost_model, case.overlap, lockstep=False, engine="events").simulate(case.program)
    devices = [members[0] for members in alone.classes.members]
    of, begins = [step.class_of(device) for device in devices], np.arange(len(ranks)) * 0.25
    ends = step.timeline.ends_after(begins)
    np.testing.assert_array_equal(alone.timeline.ends_after(begins[of]), ends[of])
    # Steps that follow each other take a period each; a rank is ahead or behind by no more than a step.
    begins, steps = np.zeros(len(ranks)), 16
    for _ in range(steps):
        begins = step.timeline.ends_after(begins)
    assert begins.max(initial=0.0) == pytest.approx(steps * step.step_period, abs=2 * step.step_time)


@given(st.integers(1, 6), st.randoms(use_true_random=False))
def test_the_eigenvalue_is_the_greatest_mean_of_a_circuit(count, rng):
    edges = [[rng.choice([-np.inf, rng.randint(0, 50)]) for _ in range(count)] for _ in range(count)]
    matrix = np.array(edges, float)
    means, power = [0.0], matrix  # what waits for nobody waits for itself
    for length in range(1, count + 1):
        means.append(power.diagonal().max() / length)
        power = (matrix[:, :, None] + power[None]).max(axis=1)
    assert cycle_time(matrix) == pytest.approx(max(means))
