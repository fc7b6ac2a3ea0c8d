"""Types, NumPy meaning, costs, lowering, the event engine and the figures of a simulation."""

import math
import warnings
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distsim.errors import CostError, SimulationError, TopologyError, TypeRuleError
from distsim.executor import (
    CostModel,
    SequentialExecutor,
    Simulator,
    UncostedOperatorWarning,
    infer_types,
)
from distsim.executor.events import run
from distsim.executor.tasks import lower
from distsim.hardware import load_cluster
from distsim.ir import Bool, Float, Float64, FunctionMaker, Int64, Mesh, Role, Tensor, Topology, verify
from distsim.ops import Operator, Signature, Work, register, signature_of

FLOPS, DRAM, LAUNCH, GBPS = 1e13, 1e12, 1e-5, 80  # 80 Gbit/s: 1e10 bytes/s


def cluster(count, launch=LAUNCH, gbps=GBPS, latency=0.0):
    topology = Topology()
    devices = [topology.add_device("gpu", FLOPS, DRAM, launch) for _ in range(count)]
    for i, a in enumerate(devices):
        for b in devices[i + 1 :]:
            topology.set_bandwidth(a, b, gbps, latency)
    return topology, devices


def f32(*shape, on=None):
    return Tensor(Float(), shape, on)


def simulate(topology, function, **options):
    return Simulator(CostModel(topology), **options).interpret(function, function.inputs)


def element_wise(shape):
    """Seconds of LossGrad: two operands read, one result written."""
    return LAUNCH + 3 * 4 * math.prod(shape) / DRAM


def add_grad(maker, a, b):
    return maker.add_op("LossGrad", inputs=[a, b], attributes={"N": 1})


register(
    Operator(
        "TestFree", types=lambda a, x: (x[0],), compute=lambda a, x: [x[0]], work=lambda s: Work(0, 0, 0)
    )
)
register(
    Operator(
        "TestWork", types=lambda a, x: (x[0],), work=lambda s: Work(s.attributes["flops"], 0, 0, matrix=True)
    )
)
register(Operator("TestUnknown", types=lambda a, x: (x[0],)))
register(Operator("TestView", types=lambda a, x: (x[0],), compute=lambda a, x: [x[0]], view=True))
register(Operator("TestWrong", types=lambda a, x: (x[0],), compute=lambda a, x: [x[0][:1]]))


# --- infer_types -------------------------------------------------------------------------------------


def layers(depth=3, mesh=None):
    """A callee called `depth` times, with a weight each."""
    inner = FunctionMaker("layer")
    x = inner.add_input_value("x", f32(4, 8, on=mesh))
    w = inner.add_input_value("w", f32(8, 8, on=mesh), Role.PARAMETER)
    y = inner.add_op("MatMul", inputs=[x, w])
    inner.add_op("LossGrad", inputs=[y, y], attributes={"N": 4})
    layer = inner.finalize()
    maker = FunctionMaker("model")
    h = maker.add_input_value("x", f32(4, 8, on=mesh))
    for i in range(depth):
        w = maker.add_input_value(f"w{i}", f32(8, 8, on=mesh), Role.PARAMETER)
        h = maker.add_op("Call", inputs=[h, w], subfunctions=[layer])
    return maker.finalize()


def test_infer_types_returns_the_function_itself_when_nothing_changes():
    function = layers()
    assert infer_types(function, function.inputs) is function
    assert infer_types(function, [f32(4, 8), *[f32(8, 8)] * 3]) is function


def test_infer_types_goes_through_calls_once_per_distinct_types():
    gpu = cluster(1)[1][0]
    function = layers()
    typed = infer_types(function, [f32(32, 8, on=gpu), *(v.type.on(gpu) for v in function.parameters)])
    verify(typed)
    assert typed.outputs[0].type == f32(32, 8, on=gpu)
    assert len({id(op.callee) for op in typed.ops}) == 1
    assert [v.role for v in typed.inputs] == [v.role for v in function.inputs]
    assert [v.name for v in typed.inputs] == [v.name for v in function.inputs]
    assert function.outputs[0].type == f32(4, 8)


def test_infer_types_keeps_what_does_not_depend_on_the_change():
    maker = FunctionMaker("f")
    a, b = maker.add_input_value("a", f32(2)), maker.add_input_value("b", f32(3))
    maker.add_op("LossGrad", inputs=[a, a], attributes={"N": 1})
    maker.add_op("LossGrad", inputs=[b, b], attributes={"N": 1})
    function = maker.finalize()
    typed = infer_types(function, [f32(2), f32(7)])
    assert typed.ops[0] is function.ops[0]
    assert typed.ops[1].outputs[0].type == f32(7)


def test_infer_types_names_the_op_and_the_values():
    function = layers()
    with pytest.raises(TypeRuleError, match=r"layer: matmul0 = MatMul\(x: f32\[4, 9\], w: f32\[8, 8\]\)"):
        infer_types(function, [f32(4, 9), *function.inputs[1:]])
    with pytest.raises(TypeRuleError, match=r"takes 4 inputs \(x, w0, w1, w2\), 1 types given"):
        infer_types(function, [f32(4, 8)])


# --- SequentialExecutor ------------------------------------------------------------------------------


def compute(function, *inputs):
    return SequentialExecutor().compute(function, inputs)


def test_compute_through_calls():
    rng = np.random.default_rng(0)
    x, *ws = rng.normal(size=(4, 8)), *rng.normal(size=(3, 8, 8))
    (got,) = compute(layers(), x, *ws)
    assert got.dtype == np.float64  # arrays wider than the type stay as they are
    np.testing.assert_array_equal(got, np.zeros((4, 8)))


@pytest.mark.parametrize(("axis", "members"), [("dp", [(0, 2), (1, 3)]), ("tp", [(0, 1), (2, 3)])])
def test_collectives_run_over_the_groups_of_their_axis(axis, members):
    mesh = Mesh(cluster(4)[1], dp=2, tp=2)
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", f32(2, 4, on=mesh))
    ops = {
        "sum": maker.add_op("MPIAllreduce", inputs=[x], attributes={"axis": axis}),
        "all": maker.add_op("MPIAllgather", inputs=[x], attributes={"axis": axis, "dim": 1}),
        "part": maker.add_op("MPIReduceScatter", inputs=[x], attributes={"axis": axis, "dim": 0}),
        "own": maker.add_op("LocalSlice", inputs=[x], attributes={"axis": axis, "dim": 0}),
        "swap": maker.add_op("MPIAlltoall", inputs=[x], attributes={"axis": axis, "split": 0, "concat": 1}),
    }
    maker.set_outputs(list(ops.values()))
    ranks = [np.arange(8, dtype=np.float32).reshape(2, 4) + 10**i for i in range(4)]
    got = dict(zip(ops, compute(maker.finalize(), ranks), strict=True))
    for group in members:
        a, b = (ranks[i] for i in group)
        for place, rank in enumerate(group):
            np.testing.assert_array_equal(got["sum"][rank], a + b)
            np.testing.assert_array_equal(got["all"][rank], np.hstack([a, b]))
            np.testing.assert_array_equal(got["part"][rank], (a + b)[place : place + 1])
            np.testing.assert_array_equal(got["own"][rank], ranks[rank][place : place + 1])
            swapped = np.hstack([a[place : place + 1], b[place : place + 1]])
            np.testing.assert_array_equal(got["swap"][rank], swapped)


def test_transfers_between_a_device_and_meshes():
    devices = cluster(5)[1]
    first, second = Mesh(devices[:2], tp=2), Mesh(devices[2:4], tp=2)
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", f32(4, 2, on=devices[4]))
    shards = ((0, "tp", None),)
    parts = maker.add_op("MPIScatter", inputs=[x], attributes={"to": first, "shards": shards})
    everywhere = maker.add_op("MPIBroadcast", inputs=[x], attributes={"to": first})
    sent = maker.add_op("Send", inputs=[parts], attributes={"to": second})
    whole = {"to": devices[4], "shards": shards, "from_mesh": second}
    back = maker.add_op("MPIGather", inputs=[sent], attributes=whole)
    maker.set_outputs([parts, everywhere, sent, back])
    given_x = np.arange(8, dtype=np.float32).reshape(4, 2)
    parts, everywhere, sent, back = compute(maker.finalize(), given_x)
    np.testing.assert_array_equal(np.concatenate(parts), given_x)
    np.testing.assert_array_equal(everywhere, [given_x, given_x])
    np.testing.assert_array_equal(sent, parts)
    np.testing.assert_array_equal(back, given_x)


def test_compute_gives_one_array_to_all_ranks_and_checks_what_it_is_given():
    mesh = Mesh(cluster(2)[1], tp=2)
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", f32(2, on=mesh))
    add_grad(maker, x, x)
    function = maker.finalize()
    ((a, b),) = compute(function, np.ones(2, np.float32))
    assert a is b  # computed once
    np.testing.assert_array_equal(a, np.zeros(2))
    for wrong, message in [
        ([np.ones(2, np.float32)] * 3, "give one array for all, or 2, not 3"),
        (np.ones(3, np.float32), r"input x: expected shape \(2,\) .* got \(3,\)"),
        ([np.ones(2), np.ones((2, 1))], r"input x on gpu:1: expected shape"),
        (np.ones(2, np.int64), "input x: expected float32 elements, got int64"),
    ]:
        with pytest.raises(SimulationError, match=message):
            compute(function, wrong)
    with pytest.raises(SimulationError, match=r"takes 1 inputs \(x\), 0 given"):
        compute(function)


@pytest.mark.parametrize(("dtype", "wrong"), [(Bool, np.float32), (Int64, np.bool_), (Float64, "U1")])
def test_compute_tells_kinds_of_elements_apart(dtype, wrong):
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", Tensor(dtype(), (1,)))
    maker.set_outputs([x])
    with pytest.raises(SimulationError, match=f"expected {dtype().name} elements"):
        compute(maker.finalize(), np.zeros(1, wrong))


def test_compute_refuses_a_list_for_a_value_on_one_device_and_a_result_of_the_wrong_shape():
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", f32(2))
    maker.add_op("TestWrong", inputs=[x])
    with pytest.raises(SimulationError, match="takes one array, not a list of 2"):
        compute(maker.finalize(), [np.ones(1), np.ones(1)])
    with pytest.raises(SimulationError, match=r"computes testwrong0 of shape \(1,\), its type says f32\[2\]"):
        compute(maker.finalize(), np.ones(2))


# --- CostModel ---------------------------------------------------------------------------------------


def signature(op_type, *inputs, **attributes):
    maker = FunctionMaker("f")
    values = [maker.add_input_value(f"x{i}", type_) for i, type_ in enumerate(inputs)]
    maker.add(op_type, values, attributes)
    return signature_of(maker.ops[0])


def test_roofline_takes_the_slower_of_flops_and_bytes():
    topology = Topology()
    gpu = topology.add_device("gpu", 1e13, 1e12, 1e-5, peaks=[("float32", 1e14)], flops_efficiency=0.5)
    slow = topology.add_device("gpu", 1e13, 1e12, 1e-5, bytes_efficiency=0.5)
    model = CostModel(topology)
    big = signature("MatMul", f32(4096, 4096, on=gpu), f32(4096, 4096, on=gpu))
    assert model.seconds(big, (gpu,)) == pytest.approx(1e-5 + 2 * 4096**3 / (1e14 * 0.5), rel=1e-12)
    thin = signature("LossGrad", f32(10**6, on=gpu), f32(10**6, on=gpu), N=1)
    assert model.seconds(thin, (gpu,)) == pytest.approx(1e-5 + 12e6 / 1e12, rel=1e-12)
    assert model.seconds(thin, (gpu, slow)) == pytest.approx(1e-5 + 12e6 / 0.5e12, rel=1e-12)


def test_views_and_constants_are_free_and_nothing_else():
    topology, (gpu,) = cluster(1)
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", f32(4, on=gpu))
    view = maker.add_op("TestView", inputs=[x])
    maker.add_op("TestFree", inputs=[view])
    simulation = simulate(topology, maker.finalize())
    assert [event["name"] for event in simulation.trace] == ["TestFree"]
    assert simulation.step_time == LAUNCH


def test_an_operator_without_work_is_costed_by_its_bytes_and_reported_once():
    topology, (gpu,) = cluster(1)
    model = CostModel(topology)
    small, large = (signature("TestUnknown", f32(n, on=gpu)) for n in (10**6, 2 * 10**6))
    with pytest.warns(UncostedOperatorWarning, match="operator TestUnknown has no work rule"):
        assert model.seconds(small, (gpu,)) == pytest.approx(LAUNCH + 8e6 / DRAM)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.seconds(large, (gpu,)) == pytest.approx(LAUNCH + 16e6 / DRAM)
    assert model.uncosted == ("TestUnknown",)
    with pytest.raises(CostError, match="TestUnknown.*has no work rule"):
        CostModel(topology, strict=True).seconds(small, (gpu,))


@pytest.mark.parametrize("flops", [-1e20, math.nan, math.inf])
@pytest.mark.parametrize("make", [CostModel, CostModel.distir])
def test_unusable_costs_are_refused(flops, make):
    topology, (gpu,) = cluster(1)
    bad = signature("TestWork", f32(1, on=gpu), flops=flops)
    with pytest.raises(CostError, match="TestWork.*must give finite figures, none negative"):
        make(topology).seconds(bad, (gpu,))


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_rules_that_give_unusable_seconds_are_refused(seconds):
    class Wrong:
        def compute(self, signature, demand, device):
            return seconds

        def communicate(self, kind, nbytes, group, topology):
            return seconds

    topology, (a, b) = cluster(2)
    model = CostModel(topology, rules=Wrong())
    with pytest.raises(CostError, match=r"LossGrad\(.*costs .* s; a cost must be finite and not negative"):
        model.seconds(signature("LossGrad", f32(1), f32(1), N=1), (a,))
    with pytest.raises(CostError, match=r"Send\(.*costs .* s"):
        model.communication_seconds(signature("Send", f32(1, on=a), to=b), (a, b))


def test_communication_needs_a_communication_op_and_a_link():
    topology = Topology()
    a, b = topology.add_device("gpu"), topology.add_device("gpu")
    model = CostModel(topology)
    send = signature("Send", f32(1000, on=a), to=b)
    with pytest.raises(TopologyError, match="no link between gpu:0 and gpu:1"):
        model.communication_seconds(send, (a, b))
    topology.set_bandwidth(a, b, gbps=8)
    assert model.communication_seconds(send, (a, b)) == pytest.approx(4e-6)
    topology.set_bandwidth(a, b, gbps=16)  # a change is seen
    assert model.communication_seconds(send, (a, b)) == pytest.approx(2e-6)
    with pytest.raises(CostError, match="moves nothing"):
        model.communication_seconds(signature("LossGrad", f32(1), f32(1), N=1), (a, b))
    with pytest.raises(CostError, match="runs on no device"):
        model.seconds(signature("LossGrad", f32(1), f32(1), N=1), ())


def test_distir_rules():
    topology, devices = cluster(4)
    topology.set_bandwidth(devices[0], devices[1], 2 * GBPS)
    model, gpu = CostModel.distir(topology), devices[0]
    m, k, n = 64, 128, 256
    product = LAUNCH + 4 * (m * k + k * n) / DRAM + 2 * m * k * n / FLOPS
    x, w, dy = f32(m, k, on=gpu), f32(k, n, on=gpu), f32(m, n, on=gpu)
    assert model.seconds(signature("MatMul", x, w), (gpu,)) == pytest.approx(product, rel=1e-12)
    assert model.seconds(signature("MatMulGrad", x, w, dy), (gpu,)) == pytest.approx(2 * product, rel=1e-12)
    binary = signature("LossGrad", x, x, N=1)
    assert model.seconds(binary, (gpu,)) == pytest.approx(
        LAUNCH + 8 * m * k / DRAM + m * k / FLOPS, rel=1e-12
    )
    unary = signature("TestFree", x)
    assert model.seconds(unary, (gpu,)) == pytest.approx(LAUNCH + 4 * m * k / DRAM + m * k / FLOPS, rel=1e-12)
    mesh = Mesh(devices, dp=4)
    mean = (5 * 1e10 + 2e10) / 6
    reduce = signature("MPIAllreduce", f32(1000, on=mesh), axis="dp")
    assert model.communication_seconds(reduce, mesh.devices) == pytest.approx(2 * 4000 * 3 / 4 / mean)
    gather = signature("MPIAllgather", f32(1000, on=mesh), axis="dp", dim=0)
    assert model.communication_seconds(gather, mesh.devices) == pytest.approx(16000 * 3 / 4 / mean)
    send = signature("Send", f32(1000, on=devices[0]), to=devices[1])
    assert model.communication_seconds(send, (devices[0], devices[1])) == pytest.approx(4000 / 2e10)


def test_a_transfer_costs_what_each_rank_takes():
    topology, devices = cluster(5)
    mesh, host = Mesh(devices[:4], dp=2, tp=2), devices[4]
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", f32(1000, on=host))
    shards = ((0, "dp", None),)
    parts = maker.add_op("MPIScatter", inputs=[x], attributes={"to": mesh, "shards": shards})
    gather = {"to": host, "shards": shards, "from_mesh": mesh}
    maker.add_op("MPIGather", inputs=[parts], attributes=gather)
    scatter, gather = (event["dur"] for event in _per_op(simulate(topology, maker.finalize())))
    assert scatter == pytest.approx(4 * 2000 / 1e10)  # half of it to each of four
    assert gather == pytest.approx(2 * 2000 / 1e10)  # the two halves; the copies stay


def _per_op(simulation):
    return {id(event["op"]): event for event in simulation.trace}.values()


# --- lowering and events -----------------------------------------------------------------------------


def test_a_chain_on_one_device_is_the_sum():
    topology, (gpu,) = cluster(1)
    maker = FunctionMaker("chain")
    x = maker.add_input_value("x", f32(100, on=gpu))
    for _ in range(50):
        x = add_grad(maker, x, x)
    simulation = simulate(topology, maker.finalize())
    assert simulation.step_time == pytest.approx(50 * element_wise((100,)), rel=1e-12)
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
    op, send = element_wise((1000,)), 4000 / 1e10
    assert send < op
    simulation = simulate(topology, pipeline(devices, microbatches))
    assert simulation.step_time == pytest.approx(
        (stages + microbatches - 1) * op + (stages - 1) * send, rel=1e-12
    )
    busy = [simulation.shares(device).busy for device in devices]
    assert busy == pytest.approx([microbatches * op] * stages, rel=1e-12)


def test_without_overlap_a_rank_does_one_thing_at_a_time():
    topology, (a, b) = cluster(2)
    op, send = element_wise((1000,)), 4000 / 1e10
    function = pipeline([a, b], 3)
    together, serial = simulate(topology, function), simulate(topology, function, overlap=False)
    assert together.step_time == pytest.approx(4 * op + send, rel=1e-12)
    assert serial.step_time == pytest.approx(4 * op + 3 * send, rel=1e-12)
    assert {event["stream"] for event in serial.trace} == {"all"}
    one = [event for event in serial.trace if event["device"] == a]
    assert serial.timestamps[a] == pytest.approx(sum(event["dur"] for event in one), rel=1e-12)
    shares = serial.shares(a)
    assert shares.exposed_communication == pytest.approx(3 * send, rel=1e-9)


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
    assert simulation.step_time == pytest.approx(100 * element_wise((10**6,)), rel=1e-12)
    assert simulation.shares(devices[0]).exposed_communication == pytest.approx(0.0, abs=1e-15)


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
    np.testing.assert_array_equal(calls.start, plain.start)
    np.testing.assert_array_equal(calls.end, plain.end)
    tasks = calls.tasks
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
        tasks = simulation.tasks
        for task in range(len(tasks)):
            for dep in tasks.deps[tasks.dep_start[task] : tasks.dep_start[task + 1]]:
                assert simulation.end[dep] <= simulation.start[task]


@given(st.data())
@settings(max_examples=40)
def test_lock_step_and_device_by_device_agree(data):
    topology, meshes = four_by_three()
    function = random_function(data, meshes)
    one, each = simulate(topology, function), simulate(topology, function, lockstep=False)
    assert one.tasks.classes.lockstep and not each.tasks.classes.lockstep
    assert len(each.tasks.classes.members) == 12
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
    assert not simulation.tasks.classes.lockstep
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
    assert not simulation.tasks.classes.lockstep
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
    assert [len(group) for group in simulation.tasks.classes.members] == [64] * 8
    assert len(simulation.tasks) == 8 * 3 + 7
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
