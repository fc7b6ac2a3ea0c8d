"""Rematerialisation: the same numbers from fewer saved values, recomputed where and when they are needed."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from remat_models import ATTENDING, MODELS, POLICIES, case, cluster, recomputed
from training_models import (
    F64,
    Maker,
    assert_same_step,
    flat_mlp,
    laid_out,
    mesh_of,
    random_inputs,
    small_gpt,
    small_llama,
)

from distsim.compose import parallelize
from distsim.errors import PlanError
from distsim.executor import CostModel, SequentialExecutor, Simulator, count_flops
from distsim.ir import all_ops, verify
from distsim.plan import Plan
from distsim.schedule import schedule
from distsim.simulation.memory.peak import peak_memory
from distsim.simulation.memory.program_memory import program_memory
from distsim.transforms import (
    SGD,
    differentiate,
    inline,
    rematerialize,
    split_joint,
)
from distsim.transforms.recompute import Joint, recompute

# --- the same numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", POLICIES)
def test_computes_the_same_to_the_bit(name: str, policy: str) -> None:
    joint, inputs, expected = case(name)
    again = recomputed(rematerialize(joint, policy))
    assert again.inputs == joint.inputs and [v.name for v in again.outputs] == [v.name for v in joint.outputs]
    for made, array in zip(SequentialExecutor().compute(again, inputs), expected, strict=True):
        np.testing.assert_array_equal(made, array)


@pytest.mark.parametrize("name", ATTENDING)
@pytest.mark.parametrize("written_out", [False, True])
def test_attention_is_computed_again_whole_and_nothing_else(name: str, written_out: bool) -> None:
    """Of each layer: two products of activations, or one kernel; no product with a weight, no collective."""
    joint = differentiate(ATTENDING[name](), SGD(lr=0.1))
    joint = inline(joint) if written_out else joint
    again = recomputed(rematerialize(joint, "attention"))
    inputs = random_inputs(joint, 0)
    one, other = (SequentialExecutor().compute(each, inputs) for each in (joint, again))
    for made, array in zip(other, one, strict=True):
        np.testing.assert_array_equal(made, array)
    before, after = (Counter(op.op_type for op in all_ops(each)) for each in (inline(joint), inline(again)))
    more, layers = after - before, before["Softmax"] + before["Attention"]
    del more["OptimizationBarrier"]
    if "flash" in name:
        assert more == {"Attention": layers}
    else:
        assert more["MatMul"] == 2 * layers and more["Softmax"] == layers
        assert not more.keys() - {"MatMul", "Softmax", "Mul", "Add", "Dropout"}
        assert more["Dropout"] == (layers if "dropout" in name else 0)


def test_a_softmax_without_two_products_is_no_attention() -> None:
    make = Maker("router")
    x, t = make.data("x", 8, 4), make.data("t", 8, 4)
    share = make("Softmax", make("MatMul", x, make.parameter("w", 4, 4)))
    joint = differentiate(make.end(make("Loss", make("Mul", share, x), t, N=8)), SGD(lr=0.1))
    with pytest.raises(PlanError, match=r"remat=attention: router\w* has no attention .*use matmuls"):
        rematerialize(joint, "attention")
    with pytest.raises(PlanError, match="has no attention"):
        rematerialize(case("mlp")[0], "attention")


def test_a_list_of_ops_saves_their_results_and_no_other() -> None:
    """As in torchtitan: what the listed ops make, and the inputs of the block."""
    joint = case("gpt")[0]
    for policy, saved in (("ops:MatMul+Softmax", {"MatMul", "Softmax"}), ("ops:Gelu", {"Gelu"})):
        assert {op.op_type for op in saved_of_a_layer(joint, policy)} == saved


def saved_of_a_layer(joint, policy):
    """The ops of a layer whose results are saved for its backward pass."""
    again = rematerialize(joint, policy)
    ahead, *_, behind = [op for op in again.ops if op.is_call and op.callee.name.startswith("layer")]
    read = [ahead.callee.outputs[ahead.outputs.index(v)] for v in behind.inputs if v in ahead.outputs]
    return [op for op in ahead.callee.ops if not set(op.outputs).isdisjoint(read)]


def test_each_second_op_of_a_type_runs_again() -> None:
    """As torchtitan's policy counts products within a block: the first is saved, the second is not."""
    joint = case("llama")[0]
    layer = next(op.callee for op in joint.ops if op.is_call and op.callee.name.startswith("layer"))
    products = [op.name for op in layer.ops if op.op_type == "MatMul"]
    every, second, third = (
        {op.name for op in saved_of_a_layer(joint, f"ops:MatMul{n}")} for n in ("", "/2", "/3")
    )
    assert second == every - set(products[1::2]) < every
    assert third == every - set(products[2::3]) < every


PLANS = [
    ("gpt", Plan(2, 2, 2, 2), "attention"),
    ("llama", Plan(1, 2, 4, 2), "attention"),  # cut within a layer
    ("llama", Plan(2, 1, 3, 2, "gpipe"), "ops:MatMul"),
    ("llama", Plan(2, 2, 1, 2), "full"),
    ("llama", Plan(1, 1, 2, 4), "full"),  # cut within a layer
    ("llama", Plan(1, 2, 4, 2), "full"),
    ("gpt", Plan(1, 1, 3, 2, "gpipe"), "full_early"),
    ("llama", Plan(1, 2, 4, 2), "min_cut"),
    ("llama", Plan(2, 1, 3, 2, "gpipe"), "every:2"),
    ("gpt", Plan(2, 1, 3, 2), "full"),
    ("gpt", Plan(1, 2, 2, 2), "budget:0.5"),
    ("gpt", Plan(1, 1, 2, 4), "matmuls"),
    ("mlp", Plan(2, 2, 3, 2), "full"),
    ("mlp", Plan(1, 1, 4, 4), "budget:0"),
]


@pytest.mark.parametrize(("name", "plan", "policy"), PLANS, ids=str)
def test_every_rank_computes_the_same_step(name: str, plan: Plan, policy: str) -> None:
    joint, inputs, expected = case(name)
    order = schedule(plan.schedule, plan.pp, plan.microbatches)
    mesh = mesh_of(plan.dp, plan.tp, plan.pp)
    program = laid_out(joint, mesh, order, policy)
    assert_same_step(joint, program, inputs, expected)
    flat, plain = program.to_function(steady=True), laid_out(joint, mesh, order).to_function(steady=True)
    sends = [sum(op.op_type == "Send" for op in each.ops) for each in (flat, plain)]
    assert sends[0] == sends[1], "what is recomputed is never sent"
    peaks = peak_memory(flat)
    for device, use in program_memory(program).devices.items():
        assert use.peak == peaks[device].peak


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_choice_of_saved_values_computes_the_same(data: st.DataObject) -> None:
    """And backward reads nothing of forward but what is saved."""
    make = Maker("random")
    values = [make.data("x", 4, 4), make.parameter("w", 4, 4)]
    for _ in range(data.draw(st.integers(2, 9))):
        kind = data.draw(st.sampled_from(["Tanh", "Sin", "Mul", "Add", "MatMul", "Split"]))
        read = [values[data.draw(st.integers(0, len(values) - 1))] for _ in range(2)]
        if kind == "Split":
            parts = make.add("Split", read[:1], {"axis": 1, "num_outputs": 2})
            values.append(make("Concat", *reversed(parts), axis=1))
        else:
            values.append(make(kind, *(read if kind in ("Mul", "Add", "MatMul") else read[:1])))
    used = make("Add", make("Tanh", make("MatMul", values[-1], values[1])), values[-2])
    joint = differentiate(make.end(make("Loss", used, values[0], N=4)), None)
    parts = Joint.of(joint)
    saved = {value for value in parts.made if data.draw(st.booleans())}
    again = recompute(parts, saved)
    verify(again.function)
    behind = [op for op in again.function.ops if again.behind(op)]
    copies = {v for op in behind for v in op.outputs}
    assert all(v in saved or v in copies or v not in parts.made for op in behind for v in op.inputs)
    inputs = random_inputs(joint, 1)
    one, other = (SequentialExecutor().compute(each, inputs) for each in (joint, again.function))
    for made, array in zip(other, one, strict=True):
        np.testing.assert_array_equal(made, array)
    split = split_joint(again)
    held = dict(zip(split.forward.inputs, inputs, strict=True))
    held |= dict(zip(split.forward.outputs, SequentialExecutor().compute(split.forward, inputs), strict=True))
    grads = SequentialExecutor().compute(split.backward, [held[v] for v in split.backward.inputs])
    np.testing.assert_array_equal(grads[0], one[1])


# --- how much -----------------------------------------------------------------------------------------


def test_a_block_saves_its_input_and_runs_again() -> None:
    """Closed forms for an MLP of blocks of MatMul, Relu, MatMul, Relu: backward reads both products."""
    layers, width, batch = 6, 8, 8
    joint, _, _ = case("mlp")
    activation = batch * width * F64.itemsize
    blocks = layers // 2
    assert split_joint(rematerialize(joint, "full")).nbytes == blocks * activation  # one enters the loss
    assert split_joint(rematerialize(joint, "matmuls")).nbytes == (layers + blocks) * activation

    def again(policy: str) -> float:
        return count_flops(rematerialize(joint, policy)) - count_flops(joint)

    block = 2 * (2 * batch * width * width + batch * width)
    assert again("full") == blocks * block and again("every:2") == block
    assert again("full_early") == blocks * (block - batch * width) == blocks * again("every_early:2")


@pytest.mark.parametrize("pp", [1, 2, 3])  # three stages cut within layers
@pytest.mark.parametrize(("name", "build"), [("gpt", small_gpt), ("llama", small_llama)])
def test_full_runs_every_op_of_a_block_again_and_early_stops(name: str, build, pp: int) -> None:
    """With tp=2 a layer reduces twice forward, twice again and twice backward, as Megatron runs it."""
    layers = 4
    joint = differentiate(build(layers=layers), SGD(lr=0.1))
    topology = cluster(2 * pp, 100)

    def simulated(policy: str, tp: int) -> tuple[float, list[int]]:
        program = parallelize(joint, Plan(tp=tp, pp=pp, remat=policy), topology)
        simulation = Simulator(CostModel(topology)).simulate(program)
        written = [op for op in program.to_function(steady=True).ops if op.is_call]
        passes = [[op for op in written if op.name.startswith(letter)] for letter in "FB"]
        return simulation.flops, [
            sum(inner.op_type == "MPIAllreduce" for op in calls for inner in all_ops(op.callee))
            for calls in passes
        ]

    _, (ahead, behind) = simulated("none", 2)
    assert ahead + behind == 4 * layers + 5  # one for the embedding and the head each, three for the loss
    for policy, count in (("full", 2), ("full_early", 1), ("every:2", 1), ("every_early:2", 0.5)):
        assert simulated(policy, 2)[1] == [ahead, behind + layers * count]
    again = simulated("full", 1)[0] - simulated("none", 1)[0]
    layer = next(op.callee for op in joint.ops if op.is_call)
    assert again == layers * count_flops(layer)


def test_saved_bytes_fall_with_the_budget_and_flops_rise() -> None:
    joint, _, _ = case("llama")
    made = [rematerialize(joint, f"budget:{share}") for share in ("1", "0.8", "0.5", "0.2", "0")]
    saved = [split_joint(each).nbytes for each in made]
    assert saved == sorted(saved, reverse=True) and saved[0] > saved[-1]
    assert saved[0] == split_joint(rematerialize(joint, "min_cut")).nbytes
    flops = [count_flops(each) for each in made]
    assert flops == sorted(flops) and flops[0] < flops[-1]


@pytest.mark.parametrize("policy", ["min_cut", "budget:1", "budget:0.5"])
@pytest.mark.parametrize("name", MODELS)
def test_what_saves_no_byte_is_left_as_it_is(name: str, policy: str) -> None:
    """The minimum cut of a GPT block is as many bytes as backward reads: nothing to recompute for."""
    joint, _, _ = case(name)
    again = rematerialize(joint, policy)
    saved, read = (split_joint(each).nbytes for each in (again, joint))
    assert saved < read or again is joint
    assert (again is joint) == (name != "llama" and policy != "budget:0.5")


def test_sums_of_a_block_that_is_written_out_keep_no_gradients_waiting() -> None:
    """A flat step of eight layers in three stages: what is saved is less, and so is the most in use."""
    joint, order = flat_mlp(layers=8, optimizer=True), schedule("gpipe", 3, 2)
    peaks = [
        program_memory(laid_out(joint, mesh_of(2, 1, 3), order, remat)).peaks
        for remat in ("none", "min_cut", "budget:0.5")
    ]
    for more, less in pairwise(peaks):
        assert all(one >= other for one, other in zip(more, less, strict=True))
    assert max(peaks[2]) < max(peaks[0])


def test_hfu_counts_what_is_recomputed() -> None:
    joint, _, _ = case("gpt")
    topology = cluster(4, 100)
    simulator = Simulator(CostModel(topology))
    plan = Plan(2, 1, 2, 2)
    plain, full = (
        simulator.simulate(parallelize(joint, replace(plan, remat=remat), topology))
        for remat in ("none", "full")
    )
    extra = count_flops(rematerialize(joint, "full")) - count_flops(joint)
    assert full.flops - plain.flops == pytest.approx(extra)
    assert full.step_time > plain.step_time


@pytest.mark.parametrize("policy", ["full", "min_cut"])
def test_recomputation_waits_for_the_gradient(policy: str) -> None:
    """Behind a slow link: no op of a backward block starts before what the block received has arrived."""
    joint, _, _ = case("mlp")
    topology = cluster(3, 0.01)
    program = parallelize(joint, Plan(pp=3, microbatches=2, remat=policy), topology)
    simulation = Simulator(CostModel(topology)).simulate(program)
    spans = list(simulation.spans())
    first = [s for s in spans if s.stream.rank_class == 0 and s.stream.name == "compute"]
    arrivals = sorted(s.end for s in spans if s.op.op_type == "Send" and s.stream.rank_class == 0 and s.place)
    for microbatch, arrival in enumerate(arrivals):
        starts = [s.start for s in first if s.path.startswith(f"B{microbatch}@0")]
        assert starts and min(starts) >= arrival
