"""Jitter, slow devices, slow and failed links; costs and orders that cannot be run."""

import math
from dataclasses import replace

import numpy as np
import pytest
from executor_models import DRAM, LAUNCH, add_grad, cluster, f32
from network_models import ACROSS, GB, moves, nodes, seconds, sends, step

from distsim.errors import CostError, SimulationError, TopologyError
from distsim.executor import CostModel
from distsim.ir import FunctionMaker, Mesh
from distsim.simulation.events.disturbances import Disturbances
from distsim.simulation.events.engine import run
from distsim.simulation.events.network import Network
from distsim.simulation.tasks.grid import on_grid
from distsim.simulation.tasks.task_table import lower


def training(ranks, ops=10, nbytes=4000, lockstep=False):
    """Data parallelism: some ops on each rank, then an all-reduce."""
    topology, devices = cluster(ranks)
    maker = FunctionMaker("dp")
    x = maker.add_input_value("x", f32(nbytes // 4, on=Mesh(devices, dp=ranks)))
    for _ in range(ops):
        x = add_grad(maker, x, x)
    maker.add_op("MPIAllreduce", inputs=[x], attributes={"axis": "dp"})
    return lower(maker.finalize(), CostModel(topology), lockstep=lockstep, contention=True), topology


def end_of(tasks, **options):
    return run(tasks, disturbances=Disturbances(**options))[1].max()


def test_no_disturbance_is_the_plain_run_exactly():
    tasks, topology = training(4)
    devices = topology.devices
    options = Disturbances(jitter=0.0, seed=7, slow_devices={devices[0]: 1.0})
    np.testing.assert_array_equal(run(tasks, None, options), run(tasks))
    still = Disturbances(slow_links={(devices[0], devices[1]): 1.0})
    np.testing.assert_array_equal(run(tasks, Network(topology), still), run(tasks, Network(topology)))


def test_a_straggler_slows_data_parallelism_in_closed_form():
    tasks, topology = training(4, ops=10)
    op, reduce = on_grid(LAUNCH + 3 * 4000 / DRAM), on_grid(2 * 3 / 4 * 4000 / 1e10)
    assert end_of(tasks) == pytest.approx(10 * op + reduce, rel=1e-12)
    slow = {topology.devices[2]: 1.5}
    assert end_of(tasks, slow_devices=slow) == pytest.approx(1.5 * 10 * op + reduce, rel=1e-12)


def test_jitter_has_mean_one_and_the_spread_asked_for():
    tasks, _ = training(1, ops=20_000)
    start, end = run(tasks, disturbances=Disturbances(jitter=0.2, seed=3))
    factors = (end - start)[tasks.durations > 0] / tasks.durations[tasks.durations > 0]
    assert factors.mean() == pytest.approx(1.0, abs=4 * 0.2 / math.sqrt(len(factors)))
    assert factors.std() == pytest.approx(0.2, rel=0.03)


def test_jitter_is_the_same_for_the_same_seed_and_another_for_another():
    tasks, _ = training(4)
    one, same, other = (run(tasks, disturbances=Disturbances(jitter=0.3, seed=s)) for s in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert (one[1] != other[1]).all()


def test_jitter_costs_more_the_more_ranks_wait_for_each_other():
    """The step takes the slowest rank: the mean of the maximum of n grows with n."""
    means = []
    for ranks in (1, 2, 8, 32):
        tasks, _ = training(ranks, ops=4)
        plain = end_of(tasks)
        means.append(np.mean([end_of(tasks, jitter=0.3, seed=seed) for seed in range(60)]) / plain)
    assert means[0] == pytest.approx(1.0, abs=0.05)
    assert means == sorted(means)
    assert means[-1] > means[0] + 0.2


def test_jitter_and_contention_together():
    tasks, topology = step(per_port=2)
    network = Network(topology)
    one = run(tasks, network, Disturbances(jitter=0.1, seed=5))
    np.testing.assert_array_equal(one, run(tasks, network, Disturbances(jitter=0.1, seed=5)))
    assert one[1].max() != run(tasks, network)[1].max()


def test_a_slow_link_slows_what_crosses_it_by_its_factor():
    topology = nodes(2, per_port=1, latency=0.01)
    tasks, devices = sends(topology, (GB, 0, 2), (GB, 1, 3)), topology.devices
    plain, slow = 0.01 + GB / ACROSS, 0.01 + 3 * GB / ACROSS
    for name in ((devices[2], devices[0]), ("nic", devices[2])):
        got = seconds(tasks, topology, Disturbances(slow_links={name: 3.0}))
        assert got == pytest.approx([slow, plain], rel=1e-12)
    assert seconds(tasks, topology, Disturbances(slow_links={"nic": 3.0})) == pytest.approx([slow] * 2)
    twice = Disturbances(slow_links={"nic": 1.5, ("nic", devices[0]): 2.0})
    assert seconds(tasks, topology, twice)[0] == pytest.approx(slow)


def test_one_slow_link_slows_the_whole_ring():
    topology, devices = cluster(4)
    tasks = moves(topology, ("MPIAllreduce", GB, Mesh(devices, dp=4), "dp"))
    slow = Disturbances(slow_links={(devices[1], devices[2]): 5.0})
    assert seconds(tasks, topology, slow) == pytest.approx([5 * tasks.durations[0]], rel=1e-12)


@pytest.mark.parametrize(
    ("link", "says"),
    [
        ((0, 2), "link gpu:0 to gpu:2"),
        ((2, 0), "link gpu:0 to gpu:2"),
        (("nic", 3), "nic port of gpu:2..gpu:3, in"),
    ],
)
def test_a_failed_link_names_the_op_and_the_link(link, says):
    topology = nodes(3)
    devices = topology.devices
    name = tuple(part if isinstance(part, str) else devices[part] for part in link)
    failed = Disturbances(failed_links=(name,))
    with pytest.raises(SimulationError, match=rf"Send\(x0\) uses a link that has failed: {says}; lay"):
        run(sends(topology, (GB, 0, 2)), Network(topology), failed)
    around = sends(topology, (GB, 0, 4))
    assert seconds(around, topology, failed) == [on_grid(GB / ACROSS)]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"jitter": -0.1}, "jitter=-0.1 must lie in 0"),
        ({"jitter": math.nan}, "jitter=nan"),
        ({"seed": -1}, "seed=-1"),
        ({"slow_links": {"nic": 0.5}}, "nic slowed by 0.5: the factor must be finite and at least 1"),
        ({"slow_links": {"nic": math.inf}}, "slowed by inf"),
    ],
)
def test_disturbances_that_make_no_sense(options, says):
    with pytest.raises(SimulationError, match=says):
        Disturbances(**options)


def test_disturbances_that_do_not_fit_the_run():
    tasks, topology = training(4)
    other = cluster(8)[1][7]
    network = Network(topology)
    with pytest.raises(SimulationError, match="slow device gpu:7 does not occur in dp"):
        run(tasks, disturbances=Disturbances(slow_devices={other: 2.0}))
    with pytest.raises(SimulationError, match="need a network: run"):
        run(tasks, disturbances=Disturbances(slow_links={"nic": 2.0}))
    with pytest.raises(SimulationError, match=r"no level 'nic' in .*; its levels: none; or name a link"):
        run(tasks, network, Disturbances(failed_links=("nic",)))
    with pytest.raises(TopologyError, match="gpu:7 is not one of the 4 devices"):
        run(tasks, network, Disturbances(failed_links=((topology.devices[0], other),)))
    together, topology = training(4, lockstep=True)
    for options in ({"jitter": 0.1}, {"slow_devices": {topology.devices[1]: 2.0}}):
        with pytest.raises(SimulationError, match=r"gpu:0 stands for 4 devices of dp.*lockstep=False"):
            run(together, disturbances=Disturbances(**options))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_a_cost_that_is_no_time_names_the_op(bad):
    tasks, _ = training(1, ops=2)
    durations = np.array([1.0, bad, 0.0])
    with pytest.raises(CostError, match=rf"lossgrad1 = LossGrad\(.*\) takes {bad} s; a cost must be finite"):
        run(replace(tasks, durations=durations))


def test_a_deadlock_names_the_cycle_and_what_each_waits_for():
    tasks, _ = training(1, ops=3)
    # The first op wants the second, which comes after it on the compute stream; the third waits too.
    knot = replace(tasks, dep_start=np.array([0, 1, 1, 2, 3]), deps=np.array([1, 1, 2]))
    says = (
        r"dp deadlocks: 4 of 4 tasks wait for each other in a cycle: lossgrad0 = LossGrad\(.*\) waits for "
        r"lossgrad1 = LossGrad\(.*\) \(for its lossgrad1\); lossgrad1 = .* waits for lossgrad0 = .* "
        r"\(before it on stream 'compute' of gpu:0\); make the order"
    )
    with pytest.raises(SimulationError, match=says):
        run(knot)


def test_a_long_cycle_is_shortened():
    tasks, _ = training(1, ops=30)
    chain = np.arange(30)
    knot = replace(tasks, dep_start=np.arange(32), deps=np.array([30, *chain]))
    with pytest.raises(SimulationError, match=r"31 of 31 tasks .*; \.\.\. 23 more \.\.\.; ") as caught:
        run(knot)
    assert str(caught.value).count("waits for") == 8
