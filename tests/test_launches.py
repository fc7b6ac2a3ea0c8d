"""The host issues kernels on a stream of its own, in both engines, and waits for what a stage receives."""

from dataclasses import replace

import numpy as np
import pytest
from training_models import assert_all_readers_agree, small_gpt

from distsim.compose import parallelize
from distsim.errors import TopologyError
from distsim.executor import CostModel, Simulator
from distsim.ir import Device, FunctionMaker, Link, Tensor, Topology
from distsim.ir.device import KernelRates
from distsim.ir.topology import Level
from distsim.ir.type import Float
from distsim.plan import Plan
from distsim.simulate.explain import what_if
from distsim.transforms import SGD, Adam, differentiate
from distsim.transforms.kernels import KERNELS
from distsim.transforms.kernels.attention import set_attention

LAUNCH = 2.0**-17  # 7.6 us, on the grid of durations
RATES = KernelRates(launches=(("eager", LAUNCH), ("compiled", LAUNCH / 2)), tensor=LAUNCH / 8, slowdown=0.125)


def cluster(count: int, **figures) -> Topology:
    device = Device(0, "gpu", 1e13, 1e12, 0.0, rates=RATES, **figures)
    return Topology.hierarchical(device, count, [Level("link", Link(1e10, 1e-6))])


def chain(topology: Topology, kernels: int, size: int):
    """Return a function of so many kernels, one after the other."""
    maker = FunctionMaker("chain")
    value = maker.add_input_value("x", Tensor(Float(), (size,), topology.devices[0]))
    for _ in range(kernels):
        (value,) = maker.add("Relu", [value])
    maker.set_outputs([value])
    return maker.finalize()


@pytest.mark.parametrize("size", [1, 2**20])
@pytest.mark.parametrize("engine", ["maxplus", "events"])
def test_kernels_are_as_fast_as_their_launches_or_as_the_device(size, engine):
    topology = cluster(1)
    function, costs = chain(topology, 10, size), CostModel(topology, kernels="eager")
    each = Simulator(CostModel(topology)).interpret(function, function.inputs).step_time / 10
    found = Simulator(costs, engine=engine).interpret(function, function.inputs).step_time
    assert found == pytest.approx(10 * LAUNCH + each if each < LAUNCH else LAUNCH + 10 * each, rel=1e-6)


def test_the_way_to_launch_decides():
    topology = cluster(1)
    function = chain(topology, 64, 1)
    times = {
        kernels: Simulator(CostModel(topology, kernels=kernels))
        .interpret(function, function.inputs)
        .step_time
        for kernels in ("eager", "compiled", "ops")
    }
    assert times["eager"] == pytest.approx(2 * times["compiled"], rel=1e-3)
    assert times["ops"] < LAUNCH


def test_a_kernel_over_many_tensors_is_issued_once_but_gathers_them():
    topology = cluster(1)
    maker = FunctionMaker("split")
    x = maker.add_input_value("x", Tensor(Float(), (8,), topology.devices[0]))
    maker.set_outputs(maker.add("Split", [x], {"axis": 0, "num_outputs": 4}))
    function = maker.finalize()
    found = Simulator(CostModel(topology, kernels="eager")).interpret(function, function.inputs)
    device = Simulator(CostModel(topology)).interpret(function, function.inputs).step_time
    assert found.step_time == pytest.approx(LAUNCH * (1 + 3 / 8) + device)


PLANS = [
    "pp=2,microbatches=4",
    "dp=2,tp=2,pp=2,microbatches=4,sp=on",
    "dp=2,pp=2,microbatches=4,zero=3",
    "pp=4,microbatches=4,schedule=zb_h1",
    "pp=2,microbatches=4,schedule=interleaved,chunks=2,remat=full",
    "pp=2,microbatches=8,schedule=dualpipe",
    "dp=2,cp=2,pp=2,microbatches=2,cp_kind=ring",
]


@pytest.mark.parametrize("text", PLANS)
def test_all_readers_agree_on_steps_with_launches(text):
    model = small_gpt(layers=4, batch=16)
    if "cp=" in text:
        model = set_attention(model, "flash")
    plan = Plan.parse(text)
    topology = cluster(plan.devices)
    costs = CostModel(topology, kernels="eager")
    program = parallelize(differentiate(model, Adam()), plan, topology, costs, kernels=KERNELS["eager"])
    assert_all_readers_agree(program, costs)
    plain = Simulator(CostModel(topology)).simulate(program).step_time
    assert Simulator(costs).simulate(program).step_time > plain


def test_a_pass_starts_when_its_host_has_what_it_receives():
    """What is computed again waits as well: it is issued after the gradient that the pass receives."""
    joint = differentiate(small_gpt(layers=2, batch=4), SGD(lr=0.1))
    topology = cluster(2)
    costs = CostModel(topology, kernels="eager")
    plan = Plan.parse("pp=2,microbatches=1,remat=full")
    program = parallelize(joint, plan, topology, costs, kernels=KERNELS["eager"])
    simulation = Simulator(costs).simulate(program)
    spans = list(simulation.spans())
    arrives = {
        span.stream.rank_class: span.end
        for span in spans
        if span.op.op_type == "Send" and span.stream.name.startswith("receive")
    }
    backward = [s for s in spans if s.path.startswith("B0@0") and s.stream.name in ("host", "compute")]
    assert min(s.start for s in backward if s.end > s.start) >= arrives[backward[0].stream.rank_class]


def test_a_launch_is_no_work_of_the_device():
    topology = cluster(1)
    function, costs = chain(topology, 10, 1), CostModel(topology, kernels="eager")
    simulation = Simulator(costs).interpret(function, function.inputs)
    shares = simulation.shares(topology.devices[0])
    bare = Simulator(CostModel(topology)).interpret(function, function.inputs)
    assert shares.busy == pytest.approx(bare.step_time)
    assert shares.exposed_communication == 0
    assert simulation.flops == bare.flops
    assert simulation.breakdown("kind")["host"] == pytest.approx(10 * LAUNCH, rel=1e-6)
    assert simulation.again(what_if.FreeLaunches(costs)).step_time == pytest.approx(bare.step_time)


def test_the_slower_host_of_a_group_keeps_all_back():
    topology = cluster(2)
    slow = replace(RATES, launches=(("eager", 4 * LAUNCH),))
    devices = [topology.devices[0], replace(topology.devices[1], rates=slow)]
    uneven = Topology.of_devices(devices, [Level("link", Link(1e10, 1e-6))])
    joint = differentiate(small_gpt(batch=4), SGD(lr=0.1))
    times = []
    for each in (topology, uneven):
        costs = CostModel(each, kernels="eager")
        program = parallelize(joint, Plan.parse("dp=2"), each, costs, kernels=KERNELS["eager"])
        assert_all_readers_agree(program, costs)
        times.append(Simulator(costs).simulate(program).step_time)
    assert 3.5 < times[1] / times[0] < 4.1


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ({"shares": (("linear", 1.5),)}, "kernels.linear=1.5"),
        ({"launches": (("eager", -1.0),)}, "launches.eager=-1"),
        ({"tensor": np.inf}, "launches.tensor=inf"),
        ({"processors": -1}, "processors=-1"),
        ({"spread": -0.1}, "spread=-0.1"),
    ],
)
def test_rates_that_cannot_be(rates, message):
    with pytest.raises(TopologyError, match=message):
        KernelRates(**rates)
