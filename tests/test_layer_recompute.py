"""Recomputation that counts the layers of a stage, as Megatron-LM's block and uniform do; experts too."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from training_models import F64, assert_same_step, laid_out, mesh_of, random_inputs, small_gpt, small_llama

from distsim.compose import build_program, parallelize
from distsim.errors import PlanError
from distsim.executor import CostModel, SequentialExecutor, Simulator, count_flops
from distsim.hardware import load_cluster
from distsim.ir import Function, all_ops
from distsim.ir.type import as_tensor
from distsim.models import moe
from distsim.models.decoder import decoder
from distsim.models.decoder_sizes import DecoderSizes
from distsim.models.parts.attention import GroupedHeads
from distsim.models.parts.feed_forward import FeedForward
from distsim.plan import Plan
from distsim.schedule import schedule
from distsim.simulation.memory.peak import peak_memory
from distsim.simulation.memory.program_memory import program_memory
from distsim.transforms import SGD, differentiate, inline, rematerialize, split_joint

MODELS = {
    "gpt": lambda: small_gpt(layers=6),
    "llama": lambda: small_llama(layers=8),
    "moe": lambda: moe(
        2, hidden=16, heads=4, kv_heads=2, seq=6, vocab=16, ffn=8, experts=4, batch=8, dtype=F64
    ),
}
CLUSTER = load_cluster("dgx-a100")


@cache
def case(name: str):
    joint = differentiate(MODELS[name](), SGD(lr=0.1))
    inputs = random_inputs(joint, 0)
    return joint, inputs, SequentialExecutor().compute(joint, inputs)


def layer_flops(joint: Function) -> list[float]:
    """Of the forward pass of each layer."""
    return [count_flops(op.callee) for op in joint.ops if op.is_call and op.callee.name.endswith("layer")]


PLANS = [
    ("gpt", "pp=2,dp=2,microbatches=2,stages=4-2,remat=block:3", 3 + 2),
    ("gpt", "pp=2,tp=2,microbatches=2,stages=layers,remat=block:1", 1 + 1),
    ("gpt", "pp=3,microbatches=4,stages=layers,remat=uniform:2", 6),
    ("llama", "pp=2,microbatches=4,schedule=interleaved,chunks=2,stages=layers,remat=block:1", 4),
    ("llama", "pp=2,microbatches=4,schedule=interleaved,chunks=2,stages=3-2-2-1,remat=uniform:2", 8),
    ("llama", "dp=2,pp=2,microbatches=2,stages=default,remat=uniform:3", 8),
    ("llama", "dp=2,microbatches=2,zero=3,remat=uniform:3", 8),
    ("llama", "dp=2,microbatches=2,zero=3,reshard=never,remat=block:2", 2),
    ("moe", "pp=2,microbatches=2,stages=layers,remat=uniform:1", 2),
]


@pytest.mark.parametrize(("name", "text", "layers"), PLANS, ids=str)
def test_so_many_layers_run_again(name: str, text: str, layers: int) -> None:
    """The same step on every rank, engines and memory agree, and each layer that runs again does once."""
    joint, inputs, expected = case(name)
    plan = Plan.parse(text)
    order = schedule(plan.schedule, plan.pp, plan.microbatches, plan.chunks)
    mesh = mesh_of(plan.dp, plan.tp, plan.pp)
    program = build_program(joint, mesh, plan, CostModel(CLUSTER), order)
    assert_same_step(joint, program, inputs, expected)
    peaks = peak_memory(program.to_function(steady=True))
    for device, use in program_memory(program).devices.items():
        assert use.peak == peaks[device].peak
    costs = CostModel(CLUSTER)
    program = parallelize(joint, plan, CLUSTER)
    fast, events = (Simulator(costs, engine=engine).simulate(program) for engine in ("maxplus", "events"))
    assert fast.step_time == pytest.approx(events.step_time)
    more = fast.flops - Simulator(costs).simulate(program.saving_all()).flops
    own = layer_flops(joint)
    if plan.tp == 1:  # norms run on each rank
        assert more == pytest.approx(layers * sum(own) / len(own))


@pytest.mark.parametrize("remat", ["attention", "ops:MatMul+Softmax", "uniform:1", "block:1", "full"])
@pytest.mark.parametrize("plan", ["tp=2", "pp=2,dp=2,microbatches=2,stages=layers"])
def test_experts_compute_the_same(remat: str, plan: str) -> None:
    joint, inputs, expected = case("moe")
    parsed = Plan.parse(f"{plan},remat={remat}")
    order = schedule(parsed.schedule, parsed.pp, parsed.microbatches)
    program = laid_out(joint, mesh_of(parsed.dp, parsed.tp, parsed.pp), order, remat, stages=parsed.stages)
    assert_same_step(joint, program, inputs, expected)


GROUPED = DecoderSizes(2, 16, 16, GroupedHeads(4, 2), FeedForward(24))


@cache
def grouped(kv_heads: int):
    """A step of fused attention, inputs, and what one device computes of them: the same as written out."""
    sizes = replace(GROUPED, attention=GroupedHeads(4, kv_heads))
    joint = differentiate(decoder(sizes, 8, 4, F64, attention="flash"), SGD(lr=0.1))
    inputs = random_inputs(joint, 0)
    expected = SequentialExecutor().compute(joint, inputs)
    written = differentiate(decoder(sizes, 8, 4, F64, attention="math"), SGD(lr=0.1))
    for one, other in zip(SequentialExecutor().compute(written, inputs), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-11)
    return joint, inputs, expected


@pytest.mark.parametrize("plan", ["tp=2", "tp=4", "dp=2,tp=2,pp=2,microbatches=2", "pp=3,dp=2"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_saves_what_the_output_projection_reads(kv_heads: int, plan: str) -> None:
    """[batch, seq, heads x size], on every rank as the projection has it; no copy in the order of heads."""
    joint, inputs, expected = grouped(kv_heads)
    grads = [op for op in all_ops(joint) if op.op_type == "AttentionGrad"]
    assert [as_tensor(op.inputs[3].type, "Y").shape for op in grads] == [(8, 4, 16)] * 2
    parsed = Plan.parse(plan)
    order = schedule("1f1b", parsed.pp, parsed.microbatches)
    for remat in ("none", "attention"):
        program = laid_out(joint, mesh_of(parsed.dp, parsed.tp, parsed.pp), order, remat)
        assert_same_step(joint, program, inputs, expected)


@cache
def gathers(remat: str, zero: str) -> int:
    """How often parameters are gathered, in the same step."""
    joint, inputs, expected = case("llama")
    program = laid_out(joint, mesh_of(2, 1, 1), schedule("1f1b", 1, 2), remat, zero)
    assert_same_step(joint, program, inputs, expected)
    return sum(op.op_type == "MPIAllgather" for op in all_ops(program.to_function()))


@pytest.mark.parametrize("remat", ["attention", "ops:MatMul", "uniform:4", "block:3"])
@pytest.mark.parametrize("zero", ["zero=3", "zero=3,reshard=never"])
def test_divided_parameters_are_gathered_as_without(remat: str, zero: str) -> None:
    """And no more: a layer that runs again reads what backward gathered, or what forward did."""
    assert gathers(remat, zero) == gathers("none", zero)


def test_a_group_saves_its_input_alone() -> None:
    """Of eight layers in groups of three: what comes out of the third, sixth and last, and the embedding."""
    joint = case("llama")[0]
    again = rematerialize(joint, "uniform:3")
    saved = [value.name for value in split_joint(inline(again)).saved if value.name[0] == "x"]
    assert [name for name in saved if name[1:].isdigit()] == ["x2", "x5", "x7"]
    ahead = [op for op in again.ops if op.is_call and op.callee.name == "llama_layer"]
    assert all(len(op.outputs) == 1 for op in ahead[:8])


def test_layers_that_a_stage_lacks_are_refused() -> None:
    joint = case("gpt")[0]

    def refused(text: str, match: str) -> None:
        with pytest.raises(PlanError, match=match):
            parallelize(joint, Plan.parse(text), CLUSTER)

    refused("pp=2,remat=block:1", "stages=even may begin within a layer.* use stages=layers, stages=default")
    refused("pp=2,stages=auto,remat=uniform:1", "may begin within a layer")
    refused("pp=2,stages=layers,remat=block:4", "at most 3 a stage, .* use at most block:3; or min_cut")
    refused("remat=uniform:7", "6 blocks that repeat, so nothing .* use at most uniform:6")
    with pytest.raises(PlanError, match="the stages have 5 layers, .* has 6 blocks"):
        rematerialize(joint, "block:1", stages=(3, 2))


@pytest.mark.parametrize("plan", ["tp=2", "pp=2,microbatches=4,stages=layers"])
def test_groups_of_one_and_all_first_layers_are_full_recomputation(plan: str) -> None:
    joint = case("gpt")[0]

    def measured(remat: str) -> tuple[float, float, list[int]]:
        program = parallelize(joint, Plan.parse(f"{plan},remat={remat}"), CLUSTER)
        simulation = Simulator(CostModel(CLUSTER)).simulate(program)
        uses = program_memory(program).devices.values()
        return simulation.step_time, simulation.flops, [use.peak for use in uses]

    layers = 6 // Plan.parse(plan).pp
    full = measured("full")
    assert measured(f"block:{layers}") == full
    assert measured("uniform:1") == full
