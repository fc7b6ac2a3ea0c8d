"""The event engine: flows that share links, and the laws of sharing."""

import pickle
from operator import eq, ne

import numpy as np
import pytest
from executor_models import add_grad, cluster
from hypothesis import given, settings
from hypothesis import strategies as st
from network_models import ACROSS, GB, INSIDE, array, moves, nodes, seconds, sends, step

from distsim.compose import parallelize
from distsim.errors import SimulationError
from distsim.executor import CostModel, Simulator
from distsim.hardware.routes import GroupOfMany
from distsim.ir import FunctionMaker, Mesh
from distsim.models import mlp
from distsim.plan import Plan
from distsim.simulation.events.disturbances import Disturbances
from distsim.simulation.events.engine import run
from distsim.simulation.events.network import Network
from distsim.simulation.tasks.grid import on_grid
from distsim.simulation.tasks.task_table import lower
from distsim.transforms import SGD, differentiate

# --- shared links ------------------------------------------------------------------------------------


def test_two_flows_on_one_link_take_exactly_twice_as_long():
    topology = nodes(2)
    assert seconds(sends(topology, (GB, 0, 2)), topology) == [on_grid(GB / ACROSS)]
    assert seconds(sends(topology, (GB, 0, 2), (GB, 1, 3)), topology) == [2 * GB / ACROSS] * 2


def test_a_device_has_one_port_for_all_its_peers():
    topology = nodes(1, per_node=3, per_port=1)
    assert seconds(sends(topology, (GB, 0, 1), (GB, 0, 2)), topology) == [2 * GB / INSIDE] * 2
    both_ways = sends(topology, (GB, 0, 1), (GB, 1, 0))
    assert seconds(both_ways, topology) == [on_grid(GB / INSIDE)] * 2  # a direction each


def test_three_flows_over_two_links_get_their_max_min_shares():
    """A and B leave by one NIC, A and C arrive by another that carries 4/10: A and C have 2, B 8."""
    topology = nodes(4)
    tasks = sends(topology, (GB, 0, 2), (GB, 1, 4), (GB, 6, 3))
    slow = Disturbances(slow_links={("nic", topology.devices[2]): 2.5})
    unit = 10 * GB / ACROSS  # seconds of GB at 1/10 of a NIC
    assert seconds(tasks, topology, slow) == pytest.approx([unit / 2, unit / 8, unit / 2], rel=1e-12)
    # At full capacity all three bind at a half; when two of them end no one is left.
    assert seconds(tasks, topology) == [2 * GB / ACROSS] * 3


def test_what_one_flow_leaves_another_takes():
    topology = nodes(2)
    tasks = sends(topology, (GB, 0, 2), (3 * GB, 1, 3))
    assert seconds(tasks, topology) == pytest.approx([2 * GB / ACROSS, 4 * GB / ACROSS], rel=1e-12)


def test_latency_is_not_shared():
    topology = nodes(2, latency=0.01)
    tasks = sends(topology, (GB, 0, 2), (GB, 1, 3))
    assert seconds(tasks, topology) == pytest.approx([0.01 + 2 * GB / ACROSS] * 2, rel=1e-12)


def test_an_oversubscribed_uplink_is_shared_by_the_devices_of_a_group():
    topology = nodes(2, per_node=4, per_port=1, oversubscription=2)
    tasks = sends(topology, *[(GB, i, 4 + i) for i in range(4)])
    assert seconds(tasks, topology) == [2 * GB / ACROSS] * 4
    two = sends(topology, *[(GB, i, 4 + i) for i in range(2)])
    assert seconds(two, topology) == [on_grid(GB / ACROSS)] * 2


def test_a_pair_link_is_its_own_in_each_direction():
    topology, devices = cluster(3)
    wanted = [("Send", GB, a, b) for a in devices for b in devices if a != b]
    tasks = moves(topology, *wanted)
    assert seconds(tasks, topology) == pytest.approx(tasks.durations.tolist(), rel=1e-12)


def test_an_all_reduce_and_a_send_share_a_nic():
    """Between two nodes each direction of both NICs carries S; so does the send: half a NIC each."""
    topology = nodes(2)
    a, b, c, d = topology.devices
    both = ("MPIAllreduce", 2 * GB, Mesh((a, c), dp=2), "dp"), ("Send", GB, b, d)
    assert seconds(moves(topology, both[0]), topology) == [on_grid(2 * GB / ACROSS)]
    # The send is through after 2 GB of the NIC's time, the all-reduce after all 3.
    assert seconds(moves(topology, *both), topology) == pytest.approx(
        [3 * GB / ACROSS, 2 * GB / ACROSS], rel=1e-12
    )


def test_groups_of_one_collective_share_the_nics_that_they_cross():
    topology = nodes(4)
    mesh = Mesh(topology.devices, dp=4, tp=2)
    dp = moves(topology, ("MPIAllreduce", GB, mesh, "dp"))
    assert len(dp) == 2
    assert seconds(dp, topology) == pytest.approx((2 * dp.durations).tolist(), rel=1e-12)
    tp = moves(topology, ("MPIAllreduce", GB, mesh, "tp"))
    assert seconds(tp, topology) == pytest.approx(tp.durations.tolist(), rel=1e-12)


def test_without_contention_ranks_that_do_the_same_divide_their_ports():
    """Eight reductions and eight sends over one port, as long as when the engine divides it among them."""
    steps: dict[tuple[str, str], float] = {}
    for ports in ("own", "shared"):
        topology = nodes(4, per_node=8, per_port=8 if ports == "shared" else 1)
        for fields in (
            "dp=4,tp=8",
            "dp=4,tp=8,zero=1",
            "tp=8,pp=4,microbatches=1",
            "dp=3,tp=4,zero=1",
            "dp=12",
        ):
            joint = differentiate(mlp(layers=4, width=256, batch=96), SGD())
            program = parallelize(joint, Plan.parse(fields), topology)
            steps[fields, ports] = Simulator(CostModel(topology)).simulate(program).step_time
            shared = Simulator(CostModel(topology), engine="events", contention=True).simulate(program)
            assert steps[fields, ports] == pytest.approx(shared.step_time, rel=1e-6)
    assert all(steps[fields, "own"] < steps[fields, "shared"] for fields, _ in steps)


ORDERS = ("pp-cp-ep-dp-tp", "cp-ep-dp-tp-pp", "tp-cp-ep-dp-pp", "dp-tp-cp-ep-pp")


def test_what_is_known_of_one_order_of_ranks_is_not_taken_for_another():
    """Ports are as crowded as ranks lie: a cost model that has seen other orders says what a new one does."""
    joint, steps = differentiate(mlp(layers=4, width=512, batch=8), SGD()), dict[str, float]()
    seen = CostModel(nodes(4, per_node=2, per_port=2))
    for order in (*ORDERS, *reversed(ORDERS)):
        plan = Plan.parse(f"dp=2,tp=2,pp=2,microbatches=2,order={order}")
        for engine, costs in (("maxplus", seen), ("events", CostModel(nodes(4, per_node=2, per_port=2)))):
            program = parallelize(joint, plan, costs.topology, costs)
            found = Simulator(costs, engine=engine).simulate(program).step_time
            assert steps.setdefault(order, found) == found
    assert len(set(steps.values())) == 3


def test_a_group_beside_others_is_another_than_alone():
    a, b, c, d = nodes(2).devices
    beside, alike = (GroupOfMany((a, b), ((a, b), (c, d))) for _ in range(2))
    assert beside == alike and not ne(beside, alike) and len({beside, alike}) == 1
    for other in ((a, b), GroupOfMany((a, b), ((a, b),)), GroupOfMany((c, d), ((a, b), (c, d)))):
        assert beside != other and not eq(beside, other) and other != beside
    assert pickle.loads(pickle.dumps(beside)) == beside


def test_an_all_reduce_that_crosses_a_shared_nic_slows_the_pipeline_sends_that_share_it():
    tasks, topology = step(per_port=2)
    alone, shared = run(tasks), run(tasks, Network(topology))
    slower = (shared[1] - shared[0]) / np.maximum(alone[1] - alone[0], 1e-30)
    names = [tasks.op_of(i).op_type for i in range(len(tasks))]
    of_sends = [ratio for name, ratio in zip(names, slower, strict=True) if name == "Send"]
    # Both ranks of a node send at one time: half a NIC each; beside an all-reduce, a third.
    shortest = min((alone[1] - alone[0])[[name == "Send" for name in names]])
    grid = 3 * 2.0**-40 / shortest  # what rounding a duration to its grid moves a ratio by
    assert all(min(abs(ratio - 2), abs(ratio - 3)) <= grid for ratio in of_sends)
    assert {round(ratio) for ratio in of_sends} == {2, 3}
    reduced = [i for i, name in enumerate(names) if name == "MPIAllreduce"]
    sent = [i for i, ratio in enumerate(slower) if names[i] == "Send" and ratio > 2.5]
    assert all(
        any(shared[0][r] < shared[1][s] and shared[0][s] < shared[1][r] for r in reduced) for s in sent
    )
    assert shared[1].max() > alone[1].max()
    compute = [i for i, name in enumerate(names) if name not in ("Send", "MPIAllreduce")]
    np.testing.assert_allclose((shared[1] - shared[0])[compute], tasks.durations[compute], rtol=1e-9)


def test_nics_of_their_own_contend_less():
    own, shared = ((run(t, Network(topology)), t) for t, topology in (step(per_port=1), step(per_port=2)))
    assert own[0][1].max() < shared[0][1].max()
    assert len(own[1]) == len(shared[1])


# --- laws --------------------------------------------------------------------------------------------


@st.composite
def functions(draw, topology, dependent):
    """Random moves between meshes of four devices; ``dependent``: each waits for all before it."""
    devices = topology.devices
    meshes = [Mesh(devices[4 * i : 4 * i + 4], dp=2, tp=2) for i in range(len(devices) // 4)]
    maker = FunctionMaker("random")
    values = [maker.add_input_value(f"x{i}", array(1 << 20, mesh)) for i, mesh in enumerate(meshes)]
    for _ in range(draw(st.integers(1, 12))):
        x = values[-1] if dependent else draw(st.sampled_from(values))
        kind = draw(st.sampled_from(["LossGrad", "Send", "MPIAllreduce", "MPIAlltoall"]))
        if kind == "LossGrad":
            values.append(add_grad(maker, x, x))
        elif kind == "Send":
            to = draw(st.sampled_from([m for m in meshes if m != x.type.device]))
            values.append(maker.add_op("Send", inputs=[x], attributes={"to": to}))
        else:
            axis = draw(st.sampled_from(["dp", "tp"]))
            extra = {} if kind == "MPIAllreduce" else {"split": 0, "concat": 0}
            values.append(maker.add_op(kind, inputs=[x], attributes={"axis": axis, **extra}))
    return maker.finalize()


@given(st.data())
@settings(max_examples=40)
def test_without_overlap_the_results_are_those_of_the_plain_engine(data):
    topology = nodes(3, per_node=4, per_port=1, latency=1e-6)
    tasks = lower(
        data.draw(functions(topology, dependent=True)), CostModel(topology), lockstep=False, contention=True
    )
    for got, expected in zip(run(tasks, Network(topology)), run(tasks), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-9)


@given(st.data())
@settings(max_examples=40)
def test_contention_never_makes_anything_earlier(data):
    topology = nodes(3, per_node=4, per_port=2, latency=1e-6)
    function = data.draw(functions(topology, dependent=False))
    tasks = lower(function, CostModel(topology), lockstep=False, contention=True)
    alone, shared = run(tasks), run(tasks, Network(topology))
    for i in (0, 1):
        assert (shared[i] >= alone[i] * (1 - 1e-9)).all()
    took = shared[1] - shared[0]
    assert (took >= tasks.durations * (1 - 1e-9) - 1e-15).all()
    again = run(tasks, Network(topology))
    np.testing.assert_array_equal(shared, again)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=10))
@settings(max_examples=40)
def test_twice_the_bandwidth_is_half_the_time(wanted):
    wanted = [(size * GB, a, b) for size, a, b in wanted if a != b] or [(GB, 0, 1)]
    slow, fast = nodes(3), nodes(3, scale=2)
    took = seconds(sends(slow, *wanted), slow)
    np.testing.assert_allclose(seconds(sends(fast, *wanted), fast), np.array(took) / 2, rtol=1e-9)


@pytest.mark.parametrize("sizes", [(4, 512, 64), (2, 256, 256), (6, 128, 32)])
def test_more_bandwidth_is_not_slower_in_a_training_step(sizes):
    layers, width, batch = sizes
    tasks, topology = step(per_port=2, layers=layers, width=width, batch=batch)
    crowded = Disturbances(slow_links={"nic": 2.0})
    network = Network(topology)
    assert run(tasks, network)[1].max() <= run(tasks, network, crowded)[1].max()


def test_other_cost_rules_keep_their_times_when_nothing_is_shared():
    topology = nodes(2, per_port=1)
    devices = topology.devices
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", array(GB, Mesh(devices, dp=4)))
    x = maker.add_op("MPIAllreduce", inputs=[x], attributes={"axis": "dp"})
    maker.add_op("Send", inputs=[x], attributes={"to": Mesh(devices[::-1], dp=4)})
    tasks = lower(maker.finalize(), CostModel.distir(topology), lockstep=False, contention=True)
    _, end = run(tasks, Network(topology))
    np.testing.assert_allclose(end, run(tasks)[1], rtol=1e-9)


def test_devices_in_lock_step_cannot_share_links():
    topology = nodes(2)
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", array(GB, Mesh(topology.devices, dp=4)))
    maker.add_op("MPIAllreduce", inputs=[x], attributes={"axis": "dp"})
    tasks = lower(maker.finalize(), CostModel(topology))
    with pytest.raises(SimulationError, match=r"gpu:0 stands for 4 devices of f.*lockstep=False"):
        run(tasks, Network(topology))
