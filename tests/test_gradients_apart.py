"""Gradients of products as kernels of their own: what ranks wait for first, then the collective, the rest."""

from dataclasses import replace
from functools import cache
from itertools import takewhile

import pytest
from training_models import (
    F64,
    assert_all_readers_agree,
    assert_same_step,
    random_inputs,
    small_gpt,
    small_llama,
    topology_of,
)

from distsim.compose import parallelize
from distsim.executor import CostModel, SequentialExecutor, Simulator
from distsim.ir import Float32, Function, FunctionMaker, Role, Tensor, all_ops, callees
from distsim.models import llama
from distsim.plan import Plan
from distsim.schedule import SCHEDULES
from distsim.transforms import SGD, Adam, differentiate, precision_named
from distsim.transforms.kernels.policies import KERNELS

PLAIN = replace(KERNELS["ops"], name="apart", gradients_apart=True)


def product(rows: int, width: int) -> Function:
    """Four products, each with a Relu behind it, and the squares of what they miss the target by."""
    maker = FunctionMaker("products")
    x = maker.add_input_value("x", Tensor(F64, (rows, width)), Role.INPUT)
    target = maker.add_input_value("target", Tensor(F64, (rows, width)), Role.INPUT)
    for name in "abcd":
        weight = maker.add_input_value(name, Tensor(F64, (width, width)), Role.PARAMETER)
        x = maker.add("MatMul", [x, weight], output_names=[f"x{name}"])[0]
        x = maker.add("Relu", [x], output_names=[f"r{name}"])[0]
    loss = maker.add("Loss", [x, target], {"N": rows}, output_names=["loss"])
    maker.set_outputs(loss)
    return maker.finalize()


@cache
def trained(build):
    """A joint function, inputs, and what one device makes of them."""
    joint = differentiate(build(batch=8), Adam())
    inputs = random_inputs(joint)
    return joint, inputs, SequentialExecutor().compute(joint, inputs)


TEXTS = (
    *("dp=1", "tp=2", "dp=2,tp=2,microbatches=2,sp=on,remat=full", "tp=2,pp=2,microbatches=4"),
    "dp=2,tp=2,microbatches=2,sp=on,tp_overlap=off",
)
WAYS = ("eager", "eager_waiting", "fused")


@pytest.mark.parametrize(  # of a plan, kernels and one of two models any two are there together
    ("build", "text", "kernels"),
    [
        ((small_gpt, small_llama)[(i + j) % 2], text, kernels)
        for i, text in enumerate(TEXTS)
        for j, kernels in enumerate(WAYS)
    ],
)
def test_the_step_is_the_same(build, text, kernels):
    joint, *known = trained(build)
    program = parallelize(joint, Plan.parse(text), topology_of(4), kernels=KERNELS[kernels])
    assert_same_step(joint, program, *known)


@pytest.mark.parametrize(
    ("schedule", "kernels"),
    [*[(name, PLAIN) for name in ("1f1b", "zb_h1", "dualpipe_v")], ("1f1b", KERNELS["eager_waiting"])],
    ids=lambda given: getattr(given, "name", given),
)
def test_engines_and_memories_agree(schedule, kernels):
    chunks = SCHEDULES[schedule].stages_a_rank or 1
    costs = CostModel(topology_of(4))
    plan = Plan(tp=2, pp=2, microbatches=4, schedule=schedule, chunks=chunks, sp="on")
    program = parallelize(
        differentiate(small_llama(4, batch=8), Adam()), plan, costs.topology, costs, None, kernels
    )
    assert_all_readers_agree(program, costs)


def test_with_tp_overlap_off_an_all_reduce_runs_after_both_gradients():
    """As long as the one kernel that makes both, then the collective."""
    topology = topology_of(2, gbps=1.0, throughput=1e12, kernel_launch_overhead=0.0)
    joint = differentiate(product(512, 512), SGD(lr=0.1))
    costs = CostModel(topology)
    ways = ((KERNELS["ops"], "on"), (PLAIN, "off"))
    together, apart = (
        Simulator(costs)
        .simulate(parallelize(joint, Plan(tp=2, tp_overlap=overlap), topology, costs, None, kernels))
        .step_time
        for kernels, overlap in ways
    )
    assert apart == pytest.approx(together, rel=1e-6)


def test_an_all_reduce_of_inputs_runs_beside_the_gradients_of_weights():
    """Of four products two are divided by columns: one's gradient of the input is summed over the ranks.

    The first one's input is data.
    """
    topology = topology_of(2, gbps=1.0, throughput=1e12, kernel_launch_overhead=0.0)
    joint = differentiate(product(512, 512), SGD(lr=0.1))
    costs = CostModel(topology)
    programs = [
        parallelize(joint, Plan(tp=2), topology, costs, None, each) for each in (KERNELS["ops"], PLAIN)
    ]
    ops = [op.op_type for op in all_ops(programs[1].to_function(steady=True))]
    assert "MatMulGrad" not in ops and ops.count("MatMulGradA") + ops.count("MatMulGradB") == 7
    together, apart = (Simulator(costs).simulate(program).step_time for program in programs)
    hidden = together - apart
    weight = 2 * 512 * 512 * 256 / 1e12  # what one gradient of a divided weight takes
    assert hidden == pytest.approx(weight, rel=1e-3)


def kinds_of_backward(joint: Function, plan: Plan, name: str) -> list[list[str]]:
    """The ops of the backward passes of such a name."""
    program = parallelize(joint, plan, topology_of(plan.devices), kernels=KERNELS["eager"])
    function = program.to_function(steady=True)
    bodies = [each for each in callees(function) if name in each.name and len(each.ops) > 30]
    assert bodies
    return [[op.op_type for op in body.ops] for body in bodies]


def test_every_product_of_one_collective_is_ahead_of_the_weights():
    """Queries, keys, values: three gradients of the input, their sum, its collective, then the weights'."""
    for kinds in kinds_of_backward(differentiate(small_llama(batch=8), None), Plan(tp=2), "backward"):
        last = max(place for place, kind in enumerate(kinds) if kind == "MPIAllreduce")
        assert kinds[last + 1 : last + 4] == ["MatMulGradB"] * 3


@pytest.mark.parametrize(
    ("text", "collective"), [("tp=2", "MPIAllreduce"), ("tp=2,sp=on", "MPIReduceScatter")]
)
def test_gradients_of_8_bits_are_in_the_same_order(text, collective):
    """Behind their collectives those of a gate and of what it gates, and the three of attention."""
    model = llama(2, 16, 4, 2, 24, 4, 8, 32, dtype=Float32())
    joint = differentiate(model, None, precision=precision_named("fp8"))
    found: dict[str, list[int]] = {}
    for overlap in ("on", "off"):
        plan = Plan.parse(f"{text},tp_overlap={overlap}")
        (kinds,) = kinds_of_backward(joint, plan, "layer_backward")
        moved = [place for place, kind in enumerate(kinds) if kind == collective]
        runs = [takewhile("Float8MatMulGradB".__eq__, kinds[place + 1 :]) for place in moved]
        found[overlap] = [len([*run]) for run in runs]
    assert found == {"on": [2, 3], "off": [0, 0]}
