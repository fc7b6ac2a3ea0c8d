"""Outlined functions under plans, at size, and on the command line."""

import time
from functools import cache
from pathlib import Path

import pytest
from cli_cases import run
from outline_models import (
    calls,
    distinct,
    flat,
    layers,
)
from test_onnx_models import PACKAGED, SIZES, TOPOLOGY
from training_models import (
    assert_same_step,
    bert,
    flat_mlp,
    laid_out,
    mesh_of,
    random_inputs,
    small_gpt,
)

from distsim.compose import parallelize
from distsim.executor import CostModel, SequentialExecutor, Simulator
from distsim.importer import import_from_onnx
from distsim.ir import Function
from distsim.models import mlp
from distsim.plan import Plan
from distsim.schedule import schedule
from distsim.transforms import (
    SGD,
    Adam,
    add_loss,
    differentiate,
    outline,
    steady_state_transform,
)

# --- through plans --------------------------------------------------------------------------------

PLANS = [
    Plan(dp=2),
    Plan(tp=2),
    Plan(tp=4, microbatches=2),
    Plan(pp=2, microbatches=4),
    Plan(dp=2, tp=2, pp=2, microbatches=2),
]
JOINTS = {
    "notebook": lambda: outline(flat_mlp(8, optimizer=True)),
    "mlp": lambda: differentiate(outline(layers(8)), SGD(0.1)),
    "gpt": lambda: differentiate(outline(flat(small_gpt(layers=4))), Adam()),
    "gpt, joint": lambda: outline(differentiate(flat(small_gpt(layers=4)), Adam())),
    "bert": lambda: differentiate(outline(bert()), SGD(0.1)),
}


@cache
def case(name: str):
    """An outlined joint function, inputs, and what one device makes of them without its Calls."""
    joint = JOINTS[name]()
    inputs = random_inputs(joint)
    return joint, inputs, SequentialExecutor().compute(flat(joint), inputs)


@pytest.mark.parametrize("name", JOINTS)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_an_outlined_step_computes_the_same_under_a_plan(name, plan):
    joint, inputs, expected = case(name)
    order = schedule(plan.schedule, plan.pp, plan.microbatches)
    if joint.inputs[0].type.shape[0] % (plan.dp * plan.microbatches):
        pytest.skip("the batch is not divisible")
    program = laid_out(joint, mesh_of(plan.dp, plan.tp, plan.pp), order)
    assert_same_step(joint, program, inputs, expected)


def step_time(joint: Function, plan: Plan) -> float:
    step, inputs = steady_state_transform(parallelize(joint, plan, TOPOLOGY).to_function())
    return Simulator(CostModel(TOPOLOGY)).interpret(step, inputs).step_time


@cache
def flat_and_outlined(name: str) -> tuple[Function, Function]:
    """The joint functions of a model as it is, and outlined."""
    if name == "mlp":
        function = flat(mlp(16, 2048, 2048))
    else:
        function = add_loss(import_from_onnx(PACKAGED["gpt2"], **SIZES["gpt2"] | {"seq": 512}))
    return differentiate(function, SGD()), differentiate(outline(function), SGD())


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_an_outlined_model_takes_as_long(name, plan):
    """Without stages exactly as long as flat; stages are cut between blocks, not inside of them."""
    long, short = (step_time(each, plan) for each in flat_and_outlined(name))
    assert short == pytest.approx(long, rel=0.05 if plan.pp > 1 else 0.005)


# --- size -----------------------------------------------------------------------------------------


def test_fifty_thousand_ops_take_seconds():
    function = flat_mlp(10_000, 2, 2, optimizer=True)
    assert len(function.ops) == 50_002
    start = time.process_time()
    found = outline(function)
    assert time.process_time() - start < 5
    assert calls(found) == {"block0": 5_000, "block1": 5_000, "block2": 5_000}
    assert distinct(found) == 15_012


# --- the command line -----------------------------------------------------------------------------


def test_show_outline_prints_the_layers_once_and_how_often_they_are_called(capsys):
    command = ["show", "gpt2-onnx", "--batch", 2, "--bind", "seq=16", "--outline"]
    out, err = run(capsys, *command)
    assert out.startswith(
        "# h: 36 ops, called 12 times\n# composites: 12 Gelu, spelled out, as one op each\n"
    )
    assert out.count(" = Call h(") == 12 and out.count("function h(\n") == 1
    assert [line.split()[0] for line in err.splitlines()] == ["reading", "outlining"]


def test_show_outline_goes_through_training_and_says_when_nothing_repeats(capsys):
    path = Path(PACKAGED["mlp"])
    out, _ = run(capsys, "show", path, "--outline", "--training", "--optimizer", "sgd", "--loss", "mse")
    assert out.startswith("# block0: 4 ops, called 4 times\nfunction mlp_training(\n")
    assert out.count(" = Call block0_backward(") == 4
    out, _ = run(capsys, "show", PACKAGED["zfnet512"], "--outline")
    assert out.startswith("# nothing repeats\n")
