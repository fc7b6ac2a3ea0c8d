"""Lowering to tasks and the event engine."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from executor_models import (
    DRAM,
    FLOPS,
    GBPS,
    LAUNCH,
    add_grad,
    cluster,
    f32,
    layers,
    simulate,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from distsim.errors import SimulationError
from distsim.executor import (
    CostModel,
    Simulator,
)
from distsim.hardware import load_cluster
from distsim.ir import FunctionMaker, Mesh, Topology
from distsim.ops import Signature, Work
from distsim.simulation.events.engine import run
from distsim.simulation.tasks.grid import on_grid
from distsim.simulation.tasks.task_table import lower


def element_wise(shape):
    """Seconds of LossGrad: two operands read, one result written."""
    return on_grid(LAUNCH + 3 * 4 * math.prod(shape) / DRAM)


# --- lowering and events -----------------------------------------------------------------------------


def test_a_chain_on_one_device_is_the_sum():
    topology, (gpu,) = cluster(1)
    maker = FunctionMaker("chain")
    x = maker.add_input_value("x", f32(100, on=gpu))
    for _ in range(50):
        x = add_grad(maker, x, x)
    simulation = simulate(topology, maker.finalize())
    assert simulation.step_time == 50 * element_wise((100,))
    assert simulation.timestamps == {gpu: simulation.step_time}
    assert len(simulation.trace) == 50
    assert simulation.throughput(8) == pytest.approx(8 / simulation.step_time)
    assert simulation.flops == 50 * 2 * 100


def test_ring_all_reduce_in_closed_form():
    topology, devices = cluster(8, latency=1e-6)
    mesh = Mesh(devices, dp=8)
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", f32(10**6, on=mesh))
    maker.add_op("MPIAllreduce", inputs=[x], attributes={"axis": "dp"})
    simulation = simulate(topology, maker.finalize())
    assert simulation.step_time == pytest.approx(2 * 7 / 8 * 4e6 / 1e10 + 2 * 7 * 1e-6, rel=1e-12)
    assert len(simulation.trace) == 8
    shares = simulation.shares(devices[3])
    assert (shares.busy, shares.exposed_communication) == (0.0, simulation.step_time)


def pipeline(meshes, microbatches, shape=(1000,)):
    """Each stage runs one op per microbatch and sends its result on."""
    maker = FunctionMaker("pipeline")
    for i in range(microbatches):
        x = maker.add_input_value(f"x{i}", f32(*shape, on=meshes[0]))
        for mesh in meshes:
            if mesh is not meshes[0]:
                x = maker.add_op("Send", inputs=[x], attributes={"to": mesh})
            x = add_grad(maker, x, x)
    return maker.finalize()


@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_pipeline_overlaps_its_stages(stages, microbatches):
    topology, devices = cluster(stages)
    op, send = element_wise((1000,)), on_grid(4000 / 1e10)
    assert send < op
    simulation = simulate(topology, pipeline(devices, microbatches))
    assert simulation.step_time == (stages + microbatches - 1) * op + (stages - 1) * send
    busy = [simulation.shares(device).busy for device in devices]
    assert busy == [microbatches * op] * stages


def test_without_overlap_a_rank_does_one_thing_at_a_time():
    topology, (a, b) = cluster(2)
    op, send = element_wise((1000,)), on_grid(4000 / 1e10)
    function = pipeline([a, b], 3)
    together, serial = simulate(topology, function), simulate(topology, function, overlap=False)
    assert together.step_time == 4 * op + send
    assert serial.step_time == 4 * op + 3 * send
    assert {event["stream"] for event in serial.trace} == {"all"}
    one = [event for event in serial.trace if event["device"] == a]
    assert serial.timestamps[a] == sum(event["dur"] for event in one)
    shares = serial.shares(a)
    assert shares.exposed_communication == 3 * send


def test_communication_beside_compute_is_not_exposed():
    topology, devices = cluster(2)
    mesh = Mesh(devices, dp=2)
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", f32(10**6, on=mesh))
    maker.add_op("MPIAllreduce", inputs=[x], attributes={"axis": "dp"})
    y = x
    for _ in range(100):
        y = add_grad(maker, y, y)
    simulation = simulate(topology, maker.finalize())
    assert simulation.step_time == 100 * element_wise((10**6,))
    assert simulation.shares(devices[0]).exposed_communication == 0


def test_a_send_to_a_rank_itself_takes_no_time():
    topology, (a, b) = cluster(2)
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", f32(1000, on=Mesh((a, b), tp=2)))
    maker.add_op("Send", inputs=[x], attributes={"to": Mesh((a, b), tp=2)})
    assert simulate(topology, maker.finalize()).step_time == 0.0


def test_a_callee_gives_what_its_ops_written_out_give():
    topology, devices = cluster(4)
    mesh = Mesh(devices, dp=2, tp=2)

    def body(maker, x, w):
        y = maker.add_op("MatMul", inputs=[x, w])
        y = maker.add_op("MPIAllreduce", inputs=[y], attributes={"axis": "tp"})
        maker.add_op("MPIAllreduce", inputs=[w], attributes={"axis": "dp"})
        return maker.add_op("TestView", inputs=[y])

    flat = FunctionMaker("flat")
    y = flat.add_input_value("x", f32(8, 8, on=mesh))
    w = flat.add_input_value("w", f32(8, 8, on=mesh))
    for _ in range(16):
        y = body(flat, y, w)
    flat = flat.finalize()

    def nested(depth):
        maker = FunctionMaker(f"nested{depth}")
        x = maker.add_input_value("x", f32(8, 8, on=mesh))
        w = maker.add_input_value("w", f32(8, 8, on=mesh))
        for _ in range(2):
            if depth:
                x, w = maker.add("Call", [x, w], subfunctions=[nested(depth - 1)])
            else:
                x = body(maker, x, w)
        maker.set_outputs([x, w])
        return maker.finalize()

    calls, plain = simulate(topology, nested(3)), simulate(topology, flat)
    np.testing.assert_array_equal(calls.timeline.start, plain.timeline.start)
    np.testing.assert_array_equal(calls.timeline.end, plain.timeline.end)
    tasks = calls.timeline.tasks
    last = len(tasks) - 1
    assert [op.callee.name for op in tasks.path(last)] == ["nested2", "nested1", "nested0"]
    assert calls.trace[0]["path"] == "nested2/nested1/nested0"
    assert tasks.path(0) != tasks.path(last)


def random_function(data, meshes):
    """A random function over several meshes: compute, collectives, sends, and calls of a block."""
    blocks = {}
    for mesh in meshes:
        inner = FunctionMaker("block")
        x = inner.add_input_value("x", f32(4, 64, on=mesh))
        y = inner.add_op("MPIAllreduce", inputs=[add_grad(inner, x, x)], attributes={"axis": "tp"})
        inner.set_outputs([add_grad(inner, x, y), x])
        blocks[mesh] = inner.finalize()
    maker = FunctionMaker("random")
    values = [maker.add_input_value(f"x{i}", f32(4, 64, on=mesh)) for i, mesh in enumerate(meshes)]
    for _ in range(data.draw(st.integers(1, 25))):
        x = values[data.draw(st.integers(0, len(values) - 1))]
        kind = data.draw(st.sampled_from(["compute", "dp", "tp", "send", "call"]))
        if kind == "compute":
            same = [v for v in values if v.type == x.type]
            values.append(add_grad(maker, x, same[data.draw(st.integers(0, len(same) - 1))]))
        elif kind == "send":
            values.append(
                maker.add_op("Send", inputs=[x], attributes={"to": data.draw(st.sampled_from(meshes))})
            )
        elif kind == "call":
            values.extend(maker.add("Call", [x], subfunctions=[blocks[x.type.device]]))
        else:
            values.append(maker.add_op("MPIAllreduce", inputs=[x], attributes={"axis": kind}))
    return maker.finalize()


def four_by_three():
    topology, devices = cluster(12, launch=1e-7)
    return topology, [Mesh(devices[4 * i : 4 * i + 4], dp=2, tp=2) for i in range(3)]


@given(st.data())
@settings(max_examples=60)
def test_laws_of_a_simulation(data):
    topology, meshes = four_by_three()
    function = random_function(data, meshes)
    together, serial = simulate(topology, function), simulate(topology, function, overlap=False)
    assert together.step_time <= serial.step_time
    for simulation in (together, serial):
        lanes = {}
        for event in simulation.trace:
            lanes.setdefault((event["device"], event["stream"]), []).append(event)
        for events in lanes.values():
            for before, after in pairwise(events):
                assert before["ts"] + before["dur"] <= after["ts"] * (1 + 1e-12)
        for device, last in simulation.timestamps.items():
            shares = simulation.shares(device)
            total = shares.busy + shares.exposed_communication + shares.bubble
            assert total == pytest.approx(simulation.step_time, rel=1e-12)
            assert min(shares.busy, shares.exposed_communication) >= 0
            assert shares.bubble >= -1e-15
            assert last <= simulation.step_time
        tasks = simulation.timeline.tasks
        for task in range(len(tasks)):
            for dep in tasks.deps[tasks.dep_start[task] : tasks.dep_start[task + 1]]:
                assert simulation.timeline.end[dep] <= simulation.timeline.start[task]


@given(st.data())
@settings(max_examples=40)
def test_lock_step_and_device_by_device_agree(data):
    topology, meshes = four_by_three()
    function = random_function(data, meshes)
    one, each = simulate(topology, function), simulate(topology, function, lockstep=False)
    assert one.classes.lockstep and not each.classes.lockstep
    assert len(each.classes.members) == 12
    assert one.timestamps == each.timestamps
    assert one.flops == each.flops
    for device in one.timestamps:
        assert one.shares(device) == each.shares(device)


def recurrence(tasks):
    """Start and end by the definition, in the order of the tasks."""
    free, start, end = {}, [], []
    for task in range(len(tasks)):
        streams = tasks.streams_of(task)
        deps = tasks.deps[tasks.dep_start[task] : tasks.dep_start[task + 1]]
        begin = max([0.0, *(free.get(s, 0.0) for s in streams), *(end[d] for d in deps)])
        start.append(begin)
        end.append(begin + float(tasks.durations[task]))
        free.update(dict.fromkeys(streams, end[-1]))
    return np.array(start), np.array(end)


@given(st.data())
@settings(max_examples=40)
def test_the_event_engine_follows_the_definition(data):
    topology, meshes = four_by_three()
    tasks = lower(random_function(data, meshes), CostModel(topology))
    for got, expected in zip(run(tasks), recurrence(tasks), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_unequal_ranks_are_simulated_one_by_one():
    topology = Topology()
    fast, slow = topology.add_device("gpu", FLOPS, DRAM), topology.add_device("gpu", FLOPS, DRAM / 2)
    topology.set_bandwidth(fast, slow, GBPS)
    mesh = Mesh([fast, slow], dp=2)
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", f32(10**6, on=mesh))
    y = add_grad(maker, x, x)
    maker.add_op("MPIAllreduce", inputs=[y], attributes={"axis": "dp"})
    simulation = simulate(topology, maker.finalize())
    assert not simulation.classes.lockstep
    assert simulation.shares(fast).busy == pytest.approx(LAUNCH + 12e6 / DRAM)
    assert simulation.shares(slow).busy == pytest.approx(LAUNCH + 24e6 / DRAM)
    reduce = 4e6 / 1e10  # starts when the slower one is ready
    assert simulation.step_time == pytest.approx(LAUNCH + 24e6 / DRAM + reduce)


def test_one_slow_link_in_one_group_is_not_averaged():
    topology, devices = cluster(4)
    topology.set_bandwidth(devices[0], devices[1], GBPS / 10)
    mesh = Mesh(devices, dp=2, tp=2)
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", f32(10**6, on=mesh))
    maker.add_op("MPIAllreduce", inputs=[x], attributes={"axis": "tp"})
    simulation = simulate(topology, maker.finalize())
    assert list(simulation.timestamps.values()) == pytest.approx([4e6 / 1e9] * 2 + [4e6 / 1e10] * 2)


def test_crossed_sends_are_simulated_one_by_one():
    topology, devices = cluster(4)
    a, b, crossed = Mesh(devices[:2], tp=2), Mesh(devices[2:], tp=2), Mesh(devices[:1:-1], tp=2)
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", f32(1000, on=a))
    maker.add_op("Send", inputs=[x], attributes={"to": b})
    maker.add_op("Send", inputs=[x], attributes={"to": crossed})
    simulation = simulate(topology, maker.finalize())
    assert not simulation.classes.lockstep
    assert simulation.step_time == pytest.approx(4000 / 1e10)  # two peers, two streams


def test_nodes_of_a_large_cluster_are_one_class_per_stage():
    topology = load_cluster("dgx-a100:64")
    devices = topology.devices
    meshes = [Mesh(devices[64 * i : 64 * i + 64], dp=8, tp=8) for i in range(8)]
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", f32(64, 64, on=meshes[0]))
    for mesh in meshes:
        if mesh is not meshes[0]:
            x = maker.add_op("Send", inputs=[x], attributes={"to": mesh})
        x = add_grad(maker, x, x)
        for axis in ("tp", "dp"):
            x = maker.add_op("MPIAllreduce", inputs=[x], attributes={"axis": axis})
    simulation = simulate(topology, maker.finalize())
    assert [len(group) for group in simulation.classes.members] == [64] * 8
    assert len(simulation.timeline) == 8 * 3 + 7
    each = simulate(topology, maker.finalize(), lockstep=False)
    assert each.step_time == simulation.step_time


def test_a_deadlock_names_the_ops():
    topology, (gpu,) = cluster(1)
    maker = FunctionMaker("knot")
    x = maker.add_input_value("x", f32(4, on=gpu))
    add_grad(maker, add_grad(maker, x, x), x)
    tasks = lower(maker.finalize(), CostModel(topology))
    knot = replace(tasks, dep_start=np.array([0, 1, 2]), deps=np.array([1, 0]))
    with pytest.raises(SimulationError, match=r"knot deadlocks: 2 of 2 tasks .*lossgrad0 = LossGrad"):
        run(knot)


def test_what_is_on_no_device_cannot_be_simulated():
    topology, _ = cluster(1)
    with pytest.raises(SimulationError, match="is on no device; give the inputs"):
        simulate(topology, layers(1))


def test_a_function_without_ops():
    topology, (gpu,) = cluster(1)
    maker = FunctionMaker("empty")
    maker.set_outputs([maker.add_input_value("x", f32(4, on=gpu))])
    simulation = simulate(topology, maker.finalize())
    assert (simulation.step_time, simulation.trace, simulation.flops) == (0.0, [], 0.0)
    assert simulation.timestamps == {gpu: 0.0}
    with pytest.raises(SimulationError, match="has no throughput"):
        simulation.throughput(1)
    with pytest.raises(SimulationError, match="gpu:1 does not occur"):
        simulation.shares(cluster(2)[1][1])


def test_signatures_are_costed_once():
    topology, (gpu,) = cluster(1)
    asked = []

    class Counting:
        def compute(self, signature: Signature, demand: Work, device):
            asked.append(signature.op_type)
            return 1.0

        def communicate(self, kind, nbytes, group, topology):
            return 1.0

    model = CostModel(topology, rules=Counting())
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", f32(4, on=gpu))
    for _ in range(10):
        x = add_grad(maker, x, x)
    function = maker.finalize()
    assert Simulator(model).interpret(function, function.inputs).step_time == 10.0
    Simulator(model).interpret(function, function.inputs)
    assert asked == ["LossGrad"]
