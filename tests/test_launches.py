"""The host issues kernels on a stream of its own, in both engines, and waits for what a stage receives."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from training_models import assert_all_readers_agree, small_gpt

from distsim.compose import parallelize
from distsim.errors import CostError, TopologyError
from distsim.executor import CostModel, Simulator
from distsim.ir import (
    NO_ATTRIBUTES,
    Attributes,
    Device,
    Function,
    FunctionMaker,
    Link,
    Mesh,
    Tensor,
    Topology,
)
from distsim.ir.kernel_rates import KernelRates
from distsim.ir.topology import Level
from distsim.ir.type import Float
from distsim.models import gpt
from distsim.ops import Signature, op_label
from distsim.ops.kernel import KERNEL
from distsim.plan import Plan
from distsim.plan.stacks import STACKS
from distsim.simulation.explain import what_if
from distsim.transforms import SGD, Adam, differentiate
from distsim.transforms.autodiff.precision import precision_named
from distsim.transforms.kernels import KERNELS
from distsim.transforms.kernels.attention import set_attention

LAUNCH = 2.0**-17  # 7.6 us, on the grid of durations
RATES = KernelRates(
    launches=(("eager", LAUNCH), ("fused", LAUNCH), ("compiled", LAUNCH / 2)),
    tensor=LAUNCH / 8,
    slowdown=0.125,
)


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


def test_a_host_issues_kernels_of_nanotron_in_a_time_of_their_own_or_as_eager_ones():
    timed = replace(RATES, launches=(*RATES.launches, ("eager_waiting", 2 * LAUNCH)))
    assert KERNELS["eager_waiting"].way == STACKS["nanotron"].kernels == "eager_waiting"
    for rates, seconds in ((RATES, LAUNCH), (timed, 2 * LAUNCH)):
        topology = Topology.of_devices([Device(0, "gpu", 1e13, 1e12, 0.0, rates=rates)], [])
        function, costs = chain(topology, 64, 1), CostModel(topology, kernels="eager_waiting")
        found = Simulator(costs).interpret(function, function.inputs).step_time
        assert found == pytest.approx(64 * seconds, rel=1e-2)


def test_a_kernel_over_many_tensors_is_issued_once_but_gathers_them():
    topology = cluster(1)
    device, vector = topology.devices[0], Tensor(Float(), (8,), topology.devices[0])
    costs, work = CostModel(topology, kernels="eager"), {"flops": 8.0, "matrix": False}
    squares = Signature(KERNEL, Attributes({"ops": "SquareSum", **work}), (vector,) * 4, (vector,))
    scaled = Signature(KERNEL, Attributes({"ops": "ScaleGradient", **work}), (vector,) * 5, (vector,) * 4)
    for many in (squares, scaled):
        assert costs.launch_seconds(many, device) == LAUNCH * (1 + 3 / 8)
    fused = Signature(KERNEL, Attributes({"ops": "Mul+Split", **work}), (vector,), (vector,) * 4)
    single = Signature("LayerNormalizationGrad", NO_ATTRIBUTES, (vector,) * 3, (vector,) * 3)
    for one in (fused, single):
        assert costs.launch_seconds(one, device) == LAUNCH


@pytest.mark.parametrize("engine", ["maxplus", "events"])
@pytest.mark.parametrize("slowdown", [0.125, 0.5])
def test_computation_loses_a_share_of_a_collective_that_runs_beside_it(engine, slowdown):
    """Beside enough computation the share is lost; where computation waits for it, nothing."""
    rates = KernelRates(launches=(("eager", 2.0**-40),), slowdown=slowdown)
    device = Device(0, "gpu", 1e13, 1e12, 0.0, rates=rates)
    topology = Topology.hierarchical(device, 2, [Level("link", Link(1e10, 0.0))])
    mesh = Mesh(topology.devices, dp=2)
    for kernels, beside in ((64, True), (64, False)):
        maker = FunctionMaker("beside")
        x = maker.add_input_value("x", Tensor(Float(), (2**20,), mesh))
        (summed,) = maker.add("MPIAllreduce", [x], {"axis": "dp"})
        value = x if beside else summed
        for _ in range(kernels):
            (value,) = maker.add("Relu", [value])
        maker.set_outputs([value, summed])
        function = maker.finalize()
        times = [
            Simulator(costs, engine=engine).interpret(function, function.inputs).step_time
            for costs in (CostModel(topology, kernels="eager"), CostModel(topology))
        ]
        collective = 2**22 / 1e10
        each = 2 * 2**22 / 1e12
        plain = max(kernels * each, collective) if beside else collective + kernels * each
        assert times[1] == pytest.approx(plain, rel=1e-6)
        lost = slowdown * collective if beside else 0.0
        assert times[0] == pytest.approx(plain + lost, rel=1e-6)


def test_names_that_nobody_knows_are_refused():
    with pytest.raises(CostError, match="kernels='Eager'"):
        CostModel(cluster(1), kernels="Eager")
    with pytest.raises(TopologyError, match="'liner'"):
        KernelRates(shares=(("liner", 0.5),))
    assert CostModel(cluster(1), kernels="ops").kernels == ""


@cache
def trained(layers: int, attention: str = "") -> Function:
    model = small_gpt(layers=layers, batch=16)
    return differentiate(set_attention(model, attention) if attention else model, Adam())


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
    plan, joint = Plan.parse(text), trained(4, "flash" if "cp=" in text else "")
    topology = cluster(plan.devices)
    costs = CostModel(topology, kernels="eager")
    program = parallelize(joint, plan, topology, costs, kernels=KERNELS["eager"])
    assert_all_readers_agree(program, costs)
    plain = Simulator(CostModel(topology)).simulate(program).step_time
    assert Simulator(costs).simulate(program).step_time > plain


@pytest.mark.parametrize("name", ["eager", "fused_2022", "fused"])
def test_a_pass_starts_when_it_has_what_it_receives(name):
    """What is computed again waits as well; a host that waits issues nothing before either, torch's all."""
    joint = differentiate(small_gpt(layers=2, batch=4), SGD(lr=0.1))
    topology = cluster(2)
    costs = CostModel(topology, kernels=KERNELS[name].way)
    plan = Plan.parse("pp=2,microbatches=1,remat=full")
    program = parallelize(joint, plan, topology, costs, kernels=KERNELS[name])
    assert_all_readers_agree(program, costs)
    simulation = Simulator(costs).simulate(program)
    spans = list(simulation.spans())
    arrives = {
        span.stream.rank_class: span.end
        for span in spans
        if span.op.op_type == "Send" and span.stream.name.startswith("receive")
    }
    backward = [s for s in spans if s.path.startswith("B0@0") and s.end > s.start]
    first = {s.stream.name: s for s in reversed(backward)}
    arrived = arrives[backward[0].stream.rank_class]
    assert first["compute"].start >= arrived
    assert (first["host"].start >= arrived) == (name != "eager")


@pytest.mark.parametrize("name", ["fused_waiting", "fused_2022"])
@pytest.mark.parametrize(
    "text",
    [
        "microbatches=4",
        "dp=2,tp=2,pp=2,microbatches=4,sp=on",
        *[f"pp=2,microbatches=8,schedule={schedule}" for schedule in ("dualpipe", "zb_h1")],
    ],
)
def test_hosts_that_wait_for_their_device_before_each_microbatch(text, name):
    """No kernel of a forward pass is issued before the device has computed all that it had been given; where
    timers wait, none of a backward pass or of the update either."""
    plan = Plan.parse(text)
    topology = cluster(plan.devices)
    costs = CostModel(topology, kernels="fused")
    topology = costs.topology
    joint = trained(4)
    free = replace(KERNELS[name], name="free", waiting="nowhere", receiving="stream")
    made = [parallelize(joint, plan, topology, costs, kernels=kernels) for kernels in (free, KERNELS[name])]
    assert_all_readers_agree(made[1], costs)
    free, waits = (Simulator(costs).simulate(program) for program in made)
    assert waits.step_time > free.step_time
    if plan.devices == 1:
        spans = [span for span in waits.spans() if span.end > span.start]
        pairs = [(f"B{i - 1}@0", f"F{i}@0") for i in (1, 2, 3)]
        if name == "fused_2022":
            pairs += [("B3@0", "U@0"), *[(f"F{i}@0", f"B{i}@0") for i in range(4)]]
        for before, pass_ in pairs:
            first = min(s.start for s in spans if s.path.startswith(pass_) and s.stream.name == "host")
            assert first >= max(
                s.end for s in spans if s.path.startswith(before) and s.stream.name == "compute"
            )


def test_hosts_of_stages_that_read_the_batch_alone_wait_for_their_device():
    """The first, which reads tokens, and the last, which reads labels: those between receive all."""
    plan = Plan.parse("pp=4,microbatches=8")
    topology = cluster(plan.devices)
    joint = trained(8)
    waiting = {}
    for name in ("eager", "eager_waiting", "fused_waiting", "fused"):
        program = parallelize(joint, plan, topology, kernels=KERNELS[name])
        blocks = [block for block in program.table().blocks if block.kind == "F"]
        waiting[name] = {
            block.stages[0]
            for block in blocks
            if any(op.op_type == "Await" and op.attributes.get("all") for op in block.callee.ops)
        }
    # Those that receive wait besides, where a host does.
    every = {0, 1, 2, 3}
    assert waiting == {"eager": set(), "eager_waiting": every, "fused_waiting": every, "fused": {1, 2, 3}}


@pytest.mark.parametrize("text", ["dp=1", "dp=2,pp=2,microbatches=4"])
def test_hosts_of_megatron_read_the_norm_before_they_launch_what_scales_gradients(text):
    """No kernel behind the norm is issued before it is there, on any stage; other hosts issue them ahead."""
    plan = Plan.parse(text)
    topology = cluster(plan.devices)
    costs = CostModel(topology, kernels="fused")
    joint = differentiate(small_gpt(batch=8), Adam(), clip=1.0)
    ahead = replace(KERNELS["fused"], name="ahead", reads_norm=False)
    for kernels, reads in ((KERNELS["fused"], True), (ahead, False)):
        program = parallelize(joint, plan, topology, costs, kernels=kernels)
        assert_all_readers_agree(program, costs)
        spans = [span for span in Simulator(costs).simulate(program).spans() if span.end > span.start]
        factor = min(span.end for span in spans if span.op.op_type == "GradientFactor")
        scales = [span for span in spans if op_label(span.op) in ("ScaleGradient", "AdamOptimizer")]
        for stream in {span.stream.rank_class for span in scales}:
            own = [span for span in spans if span.stream.rank_class == stream]
            count = sum(span.stream.rank_class == stream for span in scales)
            last = sorted(span.start for span in own if span.stream.name == "host")[-count]
            assert (last >= factor) == reads


@pytest.mark.parametrize("text", ["dp=1", "dp=2,pp=2,microbatches=4"])
def test_deepspeed_reads_of_each_gradient_in_float16_whether_it_overflowed(text):
    """Two launches a parameter, and the host waits for both; nothing of that where gradients are wide."""
    plan = Plan.parse(text)
    topology = cluster(plan.devices)
    costs = CostModel(topology, kernels="fused")
    plain = replace(KERNELS["fused_deepspeed"], name="plain", checks_gradients=False)
    for precision, checks in (("mixed_fp16", True), ("mixed", False)):
        joint = differentiate(gpt(2, 8, 4, 4, 8, 16), Adam(), precision=precision_named(precision))
        made = [
            parallelize(joint, plan, topology, costs, kernels=kernels)
            for kernels in (KERNELS["fused_deepspeed"], plain)
        ]
        assert_all_readers_agree(made[0], costs)
        blocks = [b.callee for b in made[0].table().blocks if b.kind == "U"]
        ops = [op for function in blocks for op in function.ops]
        read = {value for op in ops if op.op_type == "Await" for value in op.inputs[1:]}
        asked, without = (Simulator(costs).simulate(program) for program in made)
        if not checks:
            assert not read and asked.step_time == without.step_time
            continue
        copies = [op for op in ops if op.op_type == "GradientCopy"]
        assert {value for op in copies for value in op.inputs} <= {
            op.outputs[0] for op in ops if op.op_type == "Await"
        }
        # Of each layer's three weights of queries, keys and values, one tensor, it asks once.
        asks = [op for op in ops if op_label(op) == "ReduceSum" and not op.outputs[0].type.shape]
        assert len(read) == len(copies) and len(asks) == len(copies) - 2 * 2
        if plan.devices == 1:
            waits = asked.step_time - without.step_time
            assert 2 * len(asks) * LAUNCH < waits < 4 * len(asks) * LAUNCH


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
        ({"slowdown": -0.1}, "slowdown=-0.1"),
        ({"launches": (("eagr", 1.0),)}, "'eagr'"),
        ({"attentions": (("flash2", 0.0),)}, "attention.flash2=0"),
        ({"attentions": (("flash9", 1.0),)}, "'flash9'"),
    ],
)
def test_rates_that_cannot_be(rates, message):
    with pytest.raises(TopologyError, match=message):
        KernelRates(**rates)
