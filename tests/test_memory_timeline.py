"""Memory over simulated time: laws against the order of the function, the plot and the counter."""

import json
import pickle

import numpy as np
import pytest
from executor_models import add_grad, cluster, f32, simulate
from hypothesis import given, settings
from hypothesis import strategies as st
from training_models import SCHEDULES, laid_out, mesh_of, small_gpt, small_mlp, topology_of

from distsim.compose import parallelize
from distsim.executor import CostModel, Simulator
from distsim.hardware import load_cluster
from distsim.ir import FunctionMaker, Role
from distsim.models import gpt
from distsim.plan import Plan
from distsim.report import write_trace
from distsim.report.exports.memory_snapshot import write_memory_snapshot
from distsim.schedule import schedule
from distsim.simulation.memory.timeline import BUFFERS, memory_timeline
from distsim.simulation.memory.walk import KINDS
from distsim.transforms import SGD, Adam, differentiate, steady_state_transform


def of_plan(joint, plan, overlap=True, **device):
    topology = topology_of(plan.dp * plan.tp * plan.pp, **device)
    program = parallelize(joint, plan, topology)
    function, inputs = steady_state_transform(program.to_function())
    return Simulator(CostModel(topology), overlap).interpret(function, inputs)


def test_a_chain_takes_and_gives_back_one_value_after_the_other():
    topology, (gpu,) = cluster(1)
    maker = FunctionMaker("chain")
    w = maker.add_input_value("w", f32(100, on=gpu), Role.PARAMETER)
    x = maker.add_input_value("x", f32(100, on=gpu))
    for _ in range(3):
        x = add_grad(maker, x, w)
    simulation = simulate(topology, maker.finalize())
    (timeline,) = memory_timeline(simulation)
    one = simulation.step_time / 3
    # w all the time; x until the first op ends; each result from the start of its op.
    assert timeline.times == pytest.approx([0, one, 2 * one, 3 * one])
    assert timeline.in_use.tolist() == [1200, 1200, 1200, 800]
    assert timeline.peak == simulation.memory[gpu].peak


def test_what_is_sent_is_there_from_the_start_of_the_send():
    topology, (a, b) = cluster(2)
    maker = FunctionMaker("send")
    x = maker.add_input_value("x", f32(100, on=a))
    y = maker.add_op("Send", inputs=[add_grad(maker, x, x)], attributes={"to": b})
    add_grad(maker, y, y)
    simulation = simulate(topology, maker.finalize())
    source, target = memory_timeline(simulation)
    send = next(span for span in simulation.spans() if span.op.op_type == "Send")
    assert source.times == pytest.approx([0, send.start, send.end])
    assert source.in_use.tolist() == [800, 400, 0]
    assert target.times == pytest.approx([0, send.start, send.end, simulation.step_time])
    assert target.in_use.tolist() == [0, 400, 800, 400]


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_it_ends_as_the_order_of_the_function_does(data):
    plan = Plan(
        dp=data.draw(st.sampled_from([1, 2])),
        tp=data.draw(st.sampled_from([1, 2])),
        pp=data.draw(st.sampled_from([1, 2])),
        microbatches=data.draw(st.sampled_from([1, 2, 4])),
        schedule=data.draw(st.sampled_from(list(SCHEDULES))),
    )
    model = data.draw(st.sampled_from([small_mlp, small_gpt]))
    joint = differentiate(model(), data.draw(st.sampled_from([SGD(), Adam()])))
    simulation = of_plan(joint, plan, overlap=data.draw(st.booleans()))
    for timeline in memory_timeline(simulation):
        use = simulation.memory[timeline.devices[0]]
        assert timeline.in_use[-1] == use.end
        assert (timeline.by_kind >= 0).all()
        assert (np.diff(timeline.times) > 0).all()
        assert timeline.times[0] == 0 and timeline.times[-1] <= simulation.step_time * (1 + 1e-12)
        start = [v for v in simulation.function.inputs if timeline.devices[0] in v.type.device]
        assert timeline.in_use[0] >= sum(value.type.nbytes for value in start)


@pytest.mark.parametrize("model", [small_mlp, small_gpt])
def test_on_one_device_the_peak_over_time_is_that_of_the_order(model):
    simulation = of_plan(differentiate(model(), Adam()), Plan(microbatches=2))
    (timeline,) = memory_timeline(simulation)
    (use,) = simulation.memory.values()
    assert timeline.peak == use.peak
    fullest = timeline.by_kind[timeline.in_use.argmax()]
    assert fullest.tolist() == list(use.by_kind.values())


@pytest.mark.parametrize("text", ["pp=4,microbatches=4", "dp=2,pp=4,microbatches=4,schedule=zb_h2"])
def test_what_ranks_hold_is_told_of_those_ranks(tmp_path, text):
    """Stages are numbered in another order where the step is written out; the last one has the head."""
    plan = Plan.parse(f"{text},stages=default")
    topology = load_cluster("dgx-a100")
    model = gpt(layers=8, hidden=64, heads=4, seq=32, vocab=500, batch=16)
    simulation = Simulator(CostModel(topology)).simulate(
        parallelize(differentiate(model, Adam()), plan, topology)
    )
    timelines = memory_timeline(simulation)
    assert [timeline.devices for timeline in timelines] == list(simulation.classes.members)
    of_ranks = {device: timeline for timeline in timelines for device in timeline.devices}
    write_memory_snapshot(simulation, tmp_path / "m.pickle", ranks=range(plan.devices))
    traces = pickle.loads((tmp_path / "m.pickle").read_bytes())["device_traces"]
    seen = set()
    for (device, timeline), trace in zip(
        sorted(of_ranks.items(), key=lambda own: own[0].id), traces, strict=True
    ):
        held = timeline.by_kind[0, KINDS.index("parameters")]
        assert held == simulation.memory[device].by_kind["parameters"]
        assert timeline.in_use[-1] == simulation.memory[device].end
        assert sum(event["size"] for event in trace if event["action"] == "alloc") >= timeline.peak
        seen.add(int(held))
    assert len(seen) > 2


def test_launches_and_what_collectives_cost_use_no_memory():
    """A host takes time, and no memory: where nothing runs beside compute the peak is as in order."""
    topology = load_cluster("dgx-a100")
    costs = CostModel(topology, kernels="eager")
    plan = Plan(microbatches=4)
    program = parallelize(differentiate(small_mlp(), SGD()), plan, topology, costs)
    simulation = Simulator(costs).simulate(program)
    for timeline in memory_timeline(simulation):
        assert timeline.peak == simulation.memory[timeline.devices[0]].peak
    last = max(timeline.times[-1] for timeline in memory_timeline(simulation))
    assert last == pytest.approx(simulation.step_time)


@pytest.mark.parametrize("bucket", ["megatron", "nanotron"])
@pytest.mark.parametrize("text", ["dp=2,microbatches=2", "dp=2,zero=1", "dp=2,pp=2,microbatches=2"])
def test_gradient_buffers_are_there_all_step(tmp_path, bucket, text):
    """At every moment, in the kind of gradients and in a snapshot; the end is that of the order."""
    plan = Plan.parse(f"{text},bucket={bucket}")
    topology = topology_of(plan.dp * plan.pp)
    program = parallelize(differentiate(small_gpt(), Adam()), plan, topology)
    simulation = Simulator(CostModel(topology)).simulate(program)
    write_memory_snapshot(simulation, tmp_path / "memory.pickle")
    snapshot = pickle.loads((tmp_path / "memory.pickle").read_bytes())
    for timeline, trace in zip(memory_timeline(simulation), snapshot["device_traces"], strict=True):
        use = simulation.memory[timeline.devices[0]]
        gradients = timeline.by_kind[:, KINDS.index("gradients")]
        parameters = timeline.by_kind[0, KINDS.index("parameters")]
        more = 1.0 if bucket == "megatron" else 2.0  # with those of DDP's buckets
        assert set(gradients.tolist()) == {more * parameters} == {use.by_kind["gradients"]}
        assert timeline.in_use[-1] == use.end
        (held,) = [each for each in trace if each.get("frames") and each["frames"][0]["name"] == BUFFERS]
        assert held["action"] == "alloc" and abs(held["size"] - gradients[0]) < 512


def test_each_device_on_its_own_has_the_same_timeline():
    program = laid_out(differentiate(small_mlp(), SGD()), mesh_of(dp=2, pp=2), schedule("1f1b", 2, 2))
    function, inputs = steady_state_transform(program.to_function())
    topology = topology_of(4)
    in_step, alone = (
        memory_timeline(Simulator(CostModel(topology), lockstep=lockstep).interpret(function, inputs))
        for lockstep in (True, False)
    )
    of = {device: timeline for timeline in in_step for device in timeline.devices}
    assert len(alone) == 4
    for timeline in alone:
        same = of[timeline.devices[0]]
        assert timeline.times == pytest.approx(same.times)
        assert (timeline.by_kind == same.by_kind).all()


# --- reports ------------------------------------------------------------------------------------------


def test_the_trace_has_a_counter_per_device(tmp_path):
    simulation = of_plan(differentiate(small_mlp(), SGD()), Plan(dp=2, pp=2, microbatches=2))
    path = tmp_path / "trace.json"
    write_trace(simulation, path)
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "C"]
    assert {event["pid"] for event in events} == {0, 1, 2, 3}
    for timeline in memory_timeline(simulation):
        for device in timeline.devices:
            own = [sum(event["args"].values()) for event in events if event["pid"] == device.id]
            assert own == timeline.in_use.tolist()
