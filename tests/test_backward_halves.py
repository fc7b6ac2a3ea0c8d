"""The backward pass in halves: I, then W, is the block; what is waited for, and no more, is in I."""

from dataclasses import replace
from functools import cache
from random import Random
from weakref import ref

import numpy as np
import pytest
from halves_models import assert_halves, block_of, flops, needs_a_sum, random_blocks
from test_moe import distinct_inputs, small_deepseek, small_moe
from training_models import (
    Maker,
    assert_same_step,
    fused_attention,
    random_inputs,
    small_gpt,
    small_llama,
    small_mlp,
    tied,
    topology_of,
)

from distsim.compose import parallelize
from distsim.cost import CostModel
from distsim.errors import IRError
from distsim.executor import SequentialExecutor
from distsim.hardware.rank_axes import logical_mesh
from distsim.ir import Device, Function, FunctionMaker, Literal, Topology, Value, needed_ops
from distsim.models import gpt
from distsim.plan import Plan
from distsim.program.block import Block
from distsim.program.passes.backward_halves import split_backward, stage_halves
from distsim.program.program import Program
from distsim.transforms import SGD, differentiate
from distsim.transforms.pipelining.pipeline import cut_stages
from distsim.transforms.sharding.shard import shard

DEVICE = Device(0, "gpu")
COSTS = CostModel(Topology()).on(DEVICE)


def blocks_of(program: Program) -> list[tuple[Block, Block, tuple]]:
    return [(stage.forward, stage.backward, stage.updates) for stage in program.stages]


# --- I, then W ------------------------------------------------------------------------------------------


MODELS = {
    "gpt": lambda: small_gpt(layers=4),
    "llama": small_llama,
    "mlp": lambda: small_mlp(layers=8),
    "tied": lambda: tied(batch=8),
    "moe": small_moe,
    "deepseek": small_deepseek,
    "attention": fused_attention,
}
CASES = [
    ("gpt", "pp=2,microbatches=2"),
    ("gpt", "pp=2,tp=2,microbatches=2"),
    ("gpt", "pp=4,microbatches=2,remat=full"),
    ("gpt", "pp=3,microbatches=2,remat=matmuls"),
    ("gpt", "pp=2,dp=2,microbatches=2,zero=3"),
    ("gpt", "pp=2,dp=2,microbatches=2,zero=3,remat=full"),
    ("gpt", "pp=3,tp=2,microbatches=2,remat=min_cut"),
    ("llama", "pp=2,tp=2,microbatches=2,remat=full"),
    ("mlp", "pp=4,microbatches=4"),
    ("mlp", "pp=2,dp=2,microbatches=2,zero=3,reshard=never,remat=matmuls"),
    ("tied", "pp=2,microbatches=4,remat=full"),
    ("tied", "pp=3,dp=2,microbatches=2,zero=3"),
    ("moe", "pp=2,tp=2,microbatches=2"),
    ("moe", "pp=2,dp=2,microbatches=2,zero=3,remat=full"),
    ("deepseek", "pp=3,microbatches=2,remat=matmuls"),
    ("attention", "pp=2,microbatches=2"),
]


@cache
def trained(model: str) -> Function:
    return differentiate(MODELS[model](), SGD(lr=0.1))


@pytest.mark.parametrize(("model", "plan"), CASES)
def test_a_step_with_halves_computes_what_one_device_computes(model, plan):
    joint = trained(model)
    plan = Plan.parse(plan)
    program = parallelize(joint, plan, topology_of(plan.dp * plan.tp * plan.pp))
    stages, readers = [], reads(program)
    for stage, halves in zip(program.stages, stage_halves(blocks_of(program)), strict=True):
        waited = [key for key in stage.backward.outputs if any(s is not stage for s in readers.get(key, ()))]
        stages.append(replace(stage, backward=assert_halves(stage.backward, halves, waited)))
    inputs = distinct_inputs(joint) if model in ("moe", "deepseek") else random_inputs(joint)
    expected = SequentialExecutor().compute(joint, inputs)
    assert_same_step(joint, replace(program, stages=tuple(stages), shared_parts=None), inputs, expected)


def reads(program: Program) -> dict[Value, list]:
    found: dict[Value, list] = {}
    for stage in program.stages:
        for key in (*stage.forward.inputs, *stage.backward.inputs):
            found.setdefault(key, []).append(stage)
    return found


# --- random blocks, split anywhere ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(120))
def test_random_blocks_come_apart_anywhere(seed):
    rng = Random(seed)
    for block in random_blocks(seed):
        own = [key for key in block.outputs if key not in block.accumulated]
        waited = [key for key in own if rng.random() < rng.choice((0.3, 0.8))]
        if needs_a_sum(block, waited):
            with pytest.raises(IRError, match=f"{waited[0].name}|needs the sum over microbatches"):
                split_backward(block, waited)
        else:
            assert_halves(block, split_backward(block, waited), waited)


# --- what is of which half ---------------------------------------------------------------------------------


def linear_stack(kind: str, layers: int = 4) -> Function:
    make = Maker(kind)
    x = make.data("x", 4, 4, 5, 5) if kind == "Conv" else make.data("x", 8, 4)
    target = make.data("target", *x.type.shape)
    for index in range(layers):
        w = make.parameter(f"w{index}", *((4, 4, 3, 3) if kind == "Conv" else (4, 4)))
        options = {"Conv": {"pads": (1, 1, 1, 1)}, "Gemm": {"transB": index % 2}, "MatMul": {}}[kind]
        x = make("Tanh", make(kind, x, w, **options))
    return make.end(make("Loss", x, target, N=8))


@pytest.mark.parametrize("kind", ["MatMul", "Gemm", "Conv"])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_the_weight_gradients_of_a_linear_stack_are_in_w(kind, stages):
    """Each weight's is one product of W; I has the others, those of inputs, where somebody waits."""
    cut = cut_stages(shard(differentiate(linear_stack(kind)), logical_mesh(DEVICE, 1, 1), 2), stages, COSTS)
    one, found = flops(cut.stages[0][0].function, products=True) * stages / 4, 0
    for (_, backward, _), (first, second) in zip(cut.stages, cut.parts.halves, strict=True):
        weights = len(backward.accumulated)
        whole = flops(backward.function, products=True)
        waits = len(backward.outputs) > weights
        assert flops(second.function, products=True) == (weights * one if waits else whole)
        assert flops(first.function, products=True) == (whole - weights * one if waits else 0)
        found += weights
    assert found == 4


def test_the_products_of_transformer_layers_are_where_the_papers_put_them():
    """I has one product for each of a weight's and both of attention's, W the other one of a weight's.

    Of [batch, s, h] a layer multiplies by 12 h^2 weights, and twice [s, h / heads] by its transpose a head.
    """
    layers, batch, s, h = 8, 2, 16, 32
    joint = differentiate(gpt(layers, h, 4, s, batch, 16), SGD())
    program = parallelize(joint, Plan.parse("pp=4,microbatches=2"), topology_of(4))
    halves = stage_halves(blocks_of(program))
    weights, attention = 2 * s * 12 * h**2, 2 * 2 * s**2 * h  # of one microbatch of one sample
    for first, second in halves[1:3]:
        assert flops(first.function, products=True) == 2 * (weights + 2 * attention)
        assert flops(second.function, products=True) == 2 * weights


def test_stages_that_do_the_same_share_their_halves():
    joint = differentiate(small_gpt(layers=12), SGD())
    cut = cut_stages(shard(joint, logical_mesh(DEVICE, 1, 1), 2), 6, COSTS)
    halves = cut.parts.halves
    assert halves is cut.parts.halves
    same = [i for i, (_, block, _) in enumerate(cut.stages) if block.function is cut.stages[2][1].function]
    assert len(same) > 1
    for first, second in [halves[i] for i in same]:
        assert first.function is halves[2][0].function
        assert second.function is halves[2][1].function
        assert second.accumulating is halves[2][1].accumulating
    callees = {op.callee for i in same for op in halves[i][1].function.ops if op.is_call}
    assert len(callees) == 1, "one half of the layer, however many layers and stages call it"
    keys = [key for half in halves for key in half[0].outputs]
    assert len(keys) == len({*keys})


def test_halves_are_forgotten_with_the_block(collect):
    block, waited = random_blocks(5)[0], []
    halves = split_backward(block, block.outputs[:1])
    known = ref(halves[0].function)
    del halves, block, waited
    collect()
    assert known() is None


def test_if_nobody_waits_all_is_in_w_and_if_everybody_does_in_i():
    block = next(b for seed in range(9) for b in random_blocks(seed) if b.outputs and not b.accumulated)
    first, second = split_backward(block, [])
    assert second is block
    assert not first.function.ops and not first.inputs and not first.outputs
    plain = replace(block, function=needed_only(block.function))
    first, second = split_backward(plain, plain.outputs)
    assert first is plain
    assert not second.function.ops and not second.inputs and not second.outputs


def needed_only(function: Function) -> Function:
    return replace(function, ops=tuple(needed_ops(function.ops, function.outputs)))


def test_what_cannot_be_waited_for_is_refused():
    joint = differentiate(small_mlp())
    program = parallelize(joint, Plan.parse("pp=2,microbatches=2"), topology_of(2))
    block = program.stages[1].backward
    with pytest.raises(IRError, match=f"does not make {joint.inputs[0].name!r}.* it makes "):
        split_backward(block, [joint.inputs[0]])
    with pytest.raises(IRError, match="is summed over microbatches, so no stage can wait"):
        split_backward(block, block.accumulated[:1])
    other = FunctionMaker("other")
    other.adopt_inputs([Value(v.name, v.type) for v in block.accumulating.inputs])
    other.set_outputs([next(u for u in other.inputs if u.type == v.type) for v in block.function.outputs])
    with pytest.raises(IRError, match="do not come apart alike"):
        waited = [key for key in block.outputs if key not in block.accumulated]
        split_backward(replace(block, accumulating=other.finalize(), accumulating_names=()), waited)


# --- views, constants, barriers -----------------------------------------------------------------------------


def op_types(block: Block) -> list[str]:
    return [op.op_type for op in block.function.ops]


def test_of_a_value_and_its_views_one_passes():
    make = Maker("views")
    x = make.data("x", 4, 6)
    y = make("Tanh", x)
    flat, half = make("Reshape", y, shape=(24,)), make("Constant", value=Literal(np.full((4, 6), 0.5)))
    waited = make("Relu", make("Mul", make("Reshape", flat, shape=(4, 6)), half))
    rest = make("Exp", flat), make("Exp", make("Reshape", flat, shape=(6, 4))), make("Mul", y, half)
    block = block_of(make, waited, *rest)
    first, second = split_backward(block, block.outputs[:1])
    assert [key.name for key in first.outputs[1:]] == [y.name]
    assert second.inputs == first.outputs[1:]
    assert op_types(second).count("Reshape") == 2 and op_types(second).count("Constant") == 1
    assert_halves(block, (first, second), block.outputs[:1])


def test_a_barrier_has_waited_in_i():
    """What runs again for both halves is run in I; W waits for nothing that would pass for that alone."""
    make = Maker("barriers")
    saved, grad, w = make.data("saved", 4, 6), make.data("grad", 4, 6), make.data("w", 6, 6)
    again = make("Tanh", make("OptimizationBarrier", saved, grad))
    gone = make("MatMul", grad, w)
    waited = make("Mul", gone, again)
    product = make("MatMul", make("Transpose", again, perm=(1, 0)), grad)
    late = [make("Exp", make("OptimizationBarrier", w, *values)) for values in ((gone,), (gone, grad, again))]
    block = block_of(make, waited, product, *late)
    first, second = split_backward(block, block.outputs[:1])
    assert [key.name for key in first.outputs[1:]] == [again.name]
    assert {key.name for key in second.inputs} == {"grad", "w", again.name}
    assert op_types(first).count("Tanh") == 1 and "Tanh" not in op_types(second)
    assert waits(second) == [["w", again.name], ["w", "grad", again.name]]
    assert_halves(block, (first, second), block.outputs[:1])


def test_a_barrier_on_what_i_reads_keeps_i_back():
    """What W would wait for runs in I, before I's own ops that read the value."""
    make = Maker("kept_back")
    saved, grad = make.data("saved", 4, 6), make.data("grad", 4, 6)
    again = make("Tanh", saved)
    ready = make("OptimizationBarrier", grad, again)
    block = block_of(make, make("Mul", grad, saved), make("ReduceSum", ready, axes=(0,), keepdims=0))
    first, second = split_backward(block, block.outputs[:1])
    assert op_types(first) == ["Tanh", "OptimizationBarrier", "Mul"] and len(first.outputs) == 1
    assert first.function.ops[2].inputs[0] is first.function.ops[1].outputs[0]
    assert [key.name for key in second.inputs] == ["grad"] and waits(second) == [["grad"]]
    assert_halves(block, (first, second), block.outputs[:1])


@pytest.mark.parametrize("zero", ["zero=0", "zero=3"])
def test_what_a_checkpointed_block_runs_again_is_in_i(zero):
    """The whole block: W has the products of weight gradients and no others, and needs no weights."""
    joint = differentiate(small_gpt(layers=4), SGD())
    plans = [f"pp=2,dp=2,microbatches=2,{zero},remat={remat}" for remat in ("none", "full")]
    programs = [parallelize(joint, Plan.parse(plan), topology_of(4)) for plan in plans]
    (_, plain), (_, again) = [stage_halves(blocks_of(program))[1] for program in programs]
    assert flops(plain.function, products=True) == flops(again.function, products=True)
    assert {key.type.rank for key in again.inputs} <= {1, 3, 4}, "activations, vectors, no matrix"


def test_a_barrier_for_which_nothing_passes_waits_for_nothing():
    make = Maker("barrier")
    grad, early, w = (make.data(name, 4, 6) for name in ("grad", "early", "w"))
    waited = make("Tanh", grad)
    block = block_of(make, waited, make("Exp", make("OptimizationBarrier", w, waited, grad, early)))
    halves = split_backward(block, block.outputs[:1])
    assert waits(halves[1]) == [["w", "early"]]
    assert_halves(block, halves, block.outputs[:1])


def waits(block: Block) -> list[list[str]]:
    """The names of what each barrier reads."""
    ops = [op for op in block.function.ops if op.op_type == "OptimizationBarrier"]
    return [[value.name for value in op.inputs] for op in ops]
