"""Activations at the peak, told apart by the module that made them: exact sums, closed forms, names."""

from dataclasses import replace
from functools import cache

import pytest
from test_activation_memory import DROPPING, GROUPS, LLAMA, LOG_SUM_EXP, SBH, A, B, F, S, joint
from training_models import small_gpt

from distsim.compose import parallelize
from distsim.cost import CostModel
from distsim.hardware import load_cluster
from distsim.ir import Float, FunctionMaker, Op, Role, Tensor
from distsim.ir.module_names import module_of
from distsim.models.decoder_sizes import DecoderSizes
from distsim.plan import Plan
from distsim.report.summary import summarize
from distsim.simulation import Simulation, Simulator
from distsim.simulation.memory.origins import grouped, origins
from distsim.transforms import SGD, differentiate, steady_state_transform
from distsim.transforms.kernels import KERNELS

CLUSTER = load_cluster("dgx-a100")
SBF = S * B * F


@cache
def simulated(sizes: DecoderSizes, plan: str, kernels: str = "ops") -> Simulation:
    program = parallelize(joint(sizes, "flash"), Plan.parse(plan), CLUSTER, kernels=KERNELS[kernels])
    return Simulator(CostModel(CLUSTER)).simulate(program)


PLANS = (
    *("dp=2,tp=2,pp=2,microbatches=2", "tp=2,remat=full", "remat=attention", "dp=2,zero=3"),
    *("pp=2,microbatches=4,schedule=zb_h1", "pp=2,chunks=2,microbatches=2,schedule=interleaved"),
    "pp=2,microbatches=4,schedule=pipedream",
)


@pytest.mark.parametrize("kernels", ["ops", "compiled"])
@pytest.mark.parametrize("plan", PLANS)
def test_modules_sum_to_the_activations(plan: str, kernels: str) -> None:
    """On every device, whatever runs again, in chunks, in kernels; and all that forward made has a module.

    What waits for the weights' gradients in a zero-bubble schedule has none.
    """
    model = differentiate(small_gpt(layers=4), SGD())
    program = parallelize(model, Plan.parse(plan), CLUSTER, kernels=KERNELS[kernels])
    simulation = Simulator(CostModel(CLUSTER)).simulate(program)
    for device, use in simulation.memory.items():
        modules = simulation.saved_by_module(device)
        assert sum(modules.values()) == use.by_kind["activations"]
        known = {"embedding", "h.norm", "h.attention", "h.mlp", "h.residual", "norm", "head"}
        assert modules.keys() - known == ({"other"} if "zb" in plan and "other" in modules else set())


def test_of_a_written_out_step_as_well() -> None:
    plan = Plan.parse("dp=2,pp=2,microbatches=2")
    program = parallelize(differentiate(small_gpt(), SGD()), plan, CLUSTER)
    function = steady_state_transform(program.to_function())[0]
    simulation = Simulator(CostModel(CLUSTER)).interpret(function, function.inputs)
    for device, use in simulation.memory.items():
        modules = simulation.saved_by_module(device)
        assert sum(modules.values()) == use.by_kind["activations"]
        assert "h.mlp" in modules


def layer(sizes: DecoderSizes, plan: str = "dp=1", kernels: str = "ops") -> dict[str, int]:
    """What one layer adds, by module."""
    four, three = (
        simulated(each, plan, kernels).saved_by_module(CLUSTER.devices[0])
        for each in (replace(sizes, layers=4), sizes)
    )
    return {name: four[name] - three[name] for name in four if four[name] != three[name]}


@pytest.mark.parametrize("kernels", ["ops", "eager", "fused", "compiled"])
def test_parts_of_34sbh(kernels: str) -> None:
    """Norms 4; attention 8 (q, k, v and its result) and the log-sum-exp; MLP 8 + 8; what norms read 4 and a
    mask of a byte for each branch: Korthikanti et al. 2022, section 4.1, by who makes what is saved.

    Of a fused bias and GELU the input is saved: of the product, which is the MLP's as well.
    """
    assert layer(DROPPING, kernels=kernels) == {
        "h.attention": 8 * SBH + LOG_SUM_EXP,
        "h.mlp": 16 * SBH,
        "h.residual": (4 + 2) * SBH,
        "h.norm": 4 * SBH,
    }


@pytest.mark.parametrize(("kernels", "inner"), [("eager", 8), ("fused", 6)])
def test_parts_of_a_llama(kernels: str, inner: int) -> None:
    parts = layer(LLAMA, kernels=kernels)
    assert parts["h.mlp"] == inner * SBF
    assert parts["h.attention"] == (4 + 4 * GROUPS // A) * SBH + LOG_SUM_EXP


def test_a_block_that_runs_again_saves_what_came_in() -> None:
    assert layer(DROPPING, "remat=full") == {"h.residual": 2 * SBH}


def test_layers_that_are_alike_are_one_function_still() -> None:
    model = joint(DROPPING, "flash")
    calls = [op for op in model.ops if op.is_call and op.callee.name == "layer"]
    assert len(calls) == DROPPING.layers and len({op.callee for op in calls}) == 1
    assert {module_of(op) for op in calls} == {"h"}
    deep = differentiate(small_gpt(layers=8), SGD())
    stages = parallelize(deep, Plan.parse("pp=4,stages=even"), CLUSTER).stages
    assert stages[1].forward.function is stages[2].forward.function


def test_origins_of_what_ops_without_a_module_make() -> None:
    """Views, casts and moves come from where their operand does; what is computed comes from nowhere."""
    maker = FunctionMaker("f")
    x = maker.add_input_value("x", Tensor(Float(), (4, 4)))
    w = maker.add_input_value("w", Tensor(Float(), (4, 4)), Role.PARAMETER)
    with maker.within("block.3"), maker.within("mlp"):
        product = maker.add_op("MatMul", inputs=[x, w])
    turned = maker.add_op("Transpose", inputs=[product])
    half = maker.add_op("Cast", inputs=[w], attributes={"to": 10})
    tanh = maker.add_op("Tanh", inputs=[turned])
    there = maker.add("Offload", [half, product])
    back = maker.add("Fetch", there)
    found = origins(maker.finalize())
    assert [found[v] for v in (product, turned, half, tanh)] == ["block.mlp", "block.mlp", "weights", "other"]
    assert [found[v] for v in (*there, *back)] == ["weights", "block.mlp"] * 2


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("model.layers.11.self_attn.q_proj/node_linear", "model.layers.self_attn.q_proj"),
        ("/transformer/h.0/mlp/Add_1", "transformer.h.mlp"),
        ("node_view_3", ""),
        ("", ""),
    ],
)
def test_modules_of_names(name: str, module: str) -> None:
    assert module_of(Op("Add", (), (), name=name)) == module


def test_groups_are_as_fine_as_there_is_room() -> None:
    amounts = {"m.h.attn.q": 4, "m.h.attn.k": 3, "m.h.mlp": 2, "m.head": 1}
    assert grouped(amounts, 4) == amounts
    assert grouped(amounts, 3) == {"m.h.attn": 7, "m.h.mlp": 2, "m.head": 1}
    assert grouped(amounts, 1) == {"m": 10}
    assert grouped({"a": 1, "b": 3, "c": 2}, 2) == {"b": 3, "other": 3}
    assert grouped({}, 3) == {}


def test_the_summary_names_modules_and_shares() -> None:
    simulation = simulated(DROPPING, "dp=1")
    line = next(each for each in summarize(simulation).splitlines() if each.startswith("activations"))
    assert line.startswith("activations   h.mlp 6.00 MiB (47%), h.attention 3.09 MiB (24%), ")
