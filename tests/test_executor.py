"""Types, NumPy over all ranks, and costs."""

import math
import warnings

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
    signature,
    simulate,
)

from distsim.errors import CostError, SimulationError, TopologyError, TypeRuleError
from distsim.executor import (
    CostModel,
    SequentialExecutor,
    UncostedOperatorWarning,
    infer_types,
)
from distsim.ir import Bool, Float64, FunctionMaker, Int64, Mesh, Tensor, Topology, verify
from distsim.simulation.tasks.grid import on_grid


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
    assert simulation.step_time == on_grid(LAUNCH)


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
    with pytest.raises(CostError, match=r"LossGrad\(.*costs .* s; a cost must be a number"):
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
