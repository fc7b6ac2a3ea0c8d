"""The critical path: closed forms, and the path of a Program against that of the step written out."""

import dataclasses
import math
from itertools import pairwise

import pytest
from executor_models import add_grad, cluster, f32, simulate
from hypothesis import given, settings
from hypothesis import strategies as st
from test_report import two_stages

from distsim.compose import parallelize
from distsim.executor import CostModel, Simulator
from distsim.ir import FunctionMaker
from distsim.models import gpt, mlp
from distsim.plan import Plan
from distsim.schedule import Action, Kind, Schedule
from distsim.transforms import SGD, Adam, differentiate

MODELS = {
    "mlp": differentiate(mlp(layers=8, width=64, batch=96), SGD(lr=0.1)),
    "gpt": differentiate(gpt(layers=4, hidden=64, heads=4, seq=16, batch=96, vocab=64), Adam()),
}


def consists(path, step_time):
    """Whether a path runs from 0 to the step time without a gap, and its parts sum to it."""
    assert path.step_time == step_time
    assert path.segments[0].start == 0 and path.segments[-1].end == step_time
    assert all(a.end == b.start and a.start <= a.end for a, b in pairwise(path.segments))
    for seconds in ([part.seconds for part in path.parts], path.by_kind.values(), path.by_stage.values()):
        assert math.fsum(seconds) == pytest.approx(step_time, rel=1e-12)


def sums(path):
    return {(part.kind, part.stage): (part.seconds, part.tasks) for part in path.parts}


def same(one, other):
    """Whether two paths have the same segments and the same sums."""
    assert [(s.name, s.stage) for s in one.segments] == [(s.name, s.stage) for s in other.segments]
    assert sums(one).keys() == sums(other).keys()
    for key, (seconds, tasks) in sums(one).items():
        assert (seconds, tasks) == (
            pytest.approx(sums(other)[key][0], rel=1e-9, abs=1e-15),
            sums(other)[key][1],
        )


def test_a_chain_on_one_device_is_all_critical():
    topology, (gpu,) = cluster(1)
    maker = FunctionMaker("chain")
    x = maker.add_input_value("x", f32(64, 64, on=gpu))
    y = maker.add_op("MatMul", inputs=[x, x])
    add_grad(maker, y, maker.add_op("MatMul", inputs=[y, x]))
    simulation = simulate(topology, maker.finalize())
    path = simulation.critical_path
    consists(path, simulation.step_time)
    assert [(part.kind, part.stage, part.tasks) for part in path.parts] == [
        ("MatMul", 0, 2),
        ("LossGrad", 0, 1),
    ]


def test_what_runs_beside_the_longer_branch_is_not_on_it():
    """Two devices work at once and one waits for the other: only the longer branch and the send count."""
    topology, (a, b) = cluster(2)
    maker = FunctionMaker("fork")
    x, y = maker.add_input_value("x", f32(256, 256, on=a)), maker.add_input_value("y", f32(256, 256, on=b))
    for _ in range(3):
        x = maker.add_op("MatMul", inputs=[x, x])
    y = add_grad(maker, y, y)
    add_grad(maker, maker.add_op("Send", inputs=[x], attributes={"to": b}), y)
    simulation = simulate(topology, maker.finalize())
    consists(simulation.critical_path, simulation.step_time)
    assert {key: tasks for key, (_, tasks) in sums(simulation.critical_path).items()} == {
        ("MatMul", 0): 3,
        ("send", 0): 1,
        ("LossGrad", 1): 1,
    }


def test_a_collective_is_named_by_its_axis_and_a_call_by_its_name():
    simulation = two_stages(microbatches=3)
    path = simulation.critical_path
    consists(path, simulation.step_time)
    assert {part.kind for part in path.parts} <= {"MatMul", "collective tp", "send"}
    assert (path.segments[0].name, path.segments[-1].name) == ("F0@0", "F2@1")


def test_nothing_takes_no_path():
    topology, (gpu,) = cluster(1)
    maker = FunctionMaker("nothing")
    maker.set_outputs([maker.add_input_value("x", f32(4, on=gpu))])
    path = simulate(topology, maker.finalize()).critical_path
    assert (path.step_time, path.segments, path.parts) == (0.0, (), ())


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(sorted(MODELS)),
    st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 2, 2), (2, 2, 2), (1, 1, 3), (2, 1, 4), (1, 4, 2)]),
    st.sampled_from([1, 2, 3, 4, 8, 24]),
    st.sampled_from(["1f1b", "gpipe"]),
    st.booleans(),
    st.floats(0.05, 400),
    st.sampled_from([0.0, 1e-5]),
)
def test_the_path_of_a_program_is_that_of_the_step_written_out(
    model, degrees, microbatches, schedule, overlap, gbps, latency
):
    (dp, tp, pp), text = degrees, f"microbatches={microbatches},schedule={schedule}"
    topology, _ = cluster(dp * tp * pp, gbps=gbps, latency=latency)
    program = parallelize(MODELS[model], Plan.parse(f"dp={dp},tp={tp},pp={pp},{text}"), topology)
    cost_model = CostModel(topology)
    simulation = Simulator(cost_model, overlap).simulate(program)
    consists(simulation.critical_path, simulation.step_time)
    flat = Simulator(cost_model, overlap, engine="events").simulate(program)
    consists(flat.critical_path, flat.step_time)
    same(simulation.critical_path, flat.critical_path)


def test_the_path_of_a_hand_made_order():
    """Backwards first where they can: neither schedule that has a name."""
    topology, _ = cluster(2)
    program = parallelize(MODELS["mlp"], Plan.parse("pp=2,microbatches=3"), topology)
    f, b = Kind.FORWARD, Kind.BACKWARD
    first = [Action(*t) for t in ((f, 0, 0), (f, 0, 1), (b, 0, 0), (f, 0, 2), (b, 0, 2), (b, 0, 1))]
    last = [Action(*t) for t in ((f, 1, 0), (b, 1, 0), (f, 1, 1), (f, 1, 2), (b, 1, 2), (b, 1, 1))]
    program = dataclasses.replace(program, schedule=Schedule("mine", 2, 3, (tuple(first), tuple(last))))
    simulation = Simulator(CostModel(topology)).simulate(program)
    flat = Simulator(CostModel(topology), engine="events").simulate(program)
    consists(simulation.critical_path, simulation.step_time)
    same(simulation.critical_path, flat.critical_path)
    assert not [w for w in simulation.explain().what_ifs if "always full" in w.change]


def test_slow_devices_and_thin_links_are_followed():
    """Several rank classes on a stage: the path goes over the slow ones."""
    topology, devices = cluster(4)
    topology.set_bandwidth(devices[1], devices[3], 0.5)
    program = parallelize(MODELS["mlp"], Plan.parse("dp=2,pp=2,microbatches=4"), topology)
    for overlap in (True, False):
        simulation = Simulator(CostModel(topology), overlap).simulate(program)
        flat = Simulator(CostModel(topology), overlap, lockstep=False).simulate(program)
        consists(simulation.critical_path, simulation.step_time)
        assert flat.step_time == pytest.approx(simulation.step_time, rel=1e-9)
        ours, theirs = simulation.critical_path.by_kind, flat.critical_path.by_kind
        assert ours["send"] == pytest.approx(theirs["send"], rel=1e-9)
