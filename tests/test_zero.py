"""ZeRO stages 1 and 2: state, then gradients, divided over dp; the step, bytes and traffic of layouts.md."""

import math
from collections import Counter
from functools import cache

import pytest
from mixed_step import assert_same_mixed_step, computed, joint_of
from training_models import (
    assert_all_readers_agree,
    laid_out,
    mesh_of,
    random_inputs,
    small_gpt,
    tied,
    topology_of,
)

from distsim.compose import build_program
from distsim.cost.demand import collective_of
from distsim.errors import PlanError, TypeRuleError
from distsim.executor import CostModel, SequentialExecutor
from distsim.hardware.rank_axes import logical_mesh
from distsim.ir import Float32, Function, FunctionMaker, Role, Tensor, all_ops
from distsim.models import gpt
from distsim.ops import operator, signature_of
from distsim.ops.parts import flat_part
from distsim.plan import Plan
from distsim.program.program import Program
from distsim.schedule import SCHEDULES, schedule
from distsim.simulation.memory.program_memory import program_memory
from distsim.transforms import SGD, Adam, differentiate, precision_named, shard, zero

# --- the same numbers on every rank ----------------------------------------------------------------------

CASES = [
    ("mlp", "fp32", Plan(2), "none", None),
    ("odd gpt", "mixed", Plan(4, 1, 1, 3), "none", None),
    ("odd gpt", "fsdp2", Plan(12), "full", 0.05),  # some ranks have only padding of a bias
    ("gpt", "mixed_fp16", Plan(2, 2, 1, 2), "min_cut", 0.05),
    ("gpt", "mixed", Plan(2, 2, 2, 3, sp="on"), "full", 0.05),
    ("llama", "mixed_bf16_grads", Plan(3, 2, 1, 2, sp="on"), "none", None),
    ("llama", "amp", Plan(2, 1, 3, 2, "gpipe"), "every:2", 0.05),
    ("tied", "mixed", Plan(3, 1, 2, 2), "none", 0.05),
    ("tied, even", "mixed_fp16", Plan(2, 2, 2, 3), "matmuls", None),
]


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("model", "policy", "plan", "remat", "clip"), CASES, ids=str)
def test_every_rank_computes_the_same_step(model, policy, plan, remat, clip, stage):
    order = schedule(plan.schedule, plan.pp, plan.microbatches)
    mesh = mesh_of(plan.dp, plan.tp, plan.pp)
    program = laid_out(joint_of(model, policy, clip), mesh, order, remat, f"zero={stage}", sp=plan.sp)
    assert_same_mixed_step(program, *computed(model, policy, clip))
    assert_all_readers_agree(program)
    for given in program.inputs:
        flat = given.source.role is Role.STATE
        assert ((None, "dp") in [division[:2] for division in given.shards]) == flat


FLUSHED = [name for name, known in SCHEDULES.items() if name not in ("pipedream", "pipedream_2bw")]


@cache
def pipelined():
    joint = differentiate(tied(layers=4, batch=16, hidden=6), Adam())
    inputs = random_inputs(joint, 2)
    return joint, inputs, SequentialExecutor().compute(joint, inputs)


@pytest.mark.parametrize("name", FLUSHED)
def test_in_every_schedule_with_a_flush(name):
    """The first and the third stage: with buckets, in test_buckets.py."""
    joint, inputs, expected = pipelined()
    copies = 2 if SCHEDULES[name].placement == "two copies" else 1
    options = () if copies == 2 else (SCHEDULES[name].chunks or 2,)
    order = schedule(name, 2, 4, *options)
    count = order.num_microbatches * order.copies
    plan = Plan(2, 1, 2, count, chunks=order.stages_a_rank, schedule=name, zero=2)
    program = build_program(joint, mesh_of(2, 1, 2), plan, None, order)
    assert_same_mixed_step(program, inputs, expected)
    assert_all_readers_agree(program)


# --- bytes a parameter -----------------------------------------------------------------------------------

SIZES = {"layers": 2, "hidden": 16, "heads": 2, "seq": 4, "batch": 16, "vocab": 32}
"""Whose parameters 2 and 4 ranks divide."""
BYTES = [
    # layouts.md, "Bytes a parameter kept (Adam)"
    ("mixed", 1, 6, 12),  # Megatron-LM, bf16, distributed optimizer
    ("mixed_fp16", 1, 4, 16),  # the same in fp16, a float32 copy of the gradient among it
    ("fp32", 1, 8, 8),  # the same in float32
    ("mixed_bf16_grads", 1, 4, 12),  # the ZeRO paper's stages
    ("mixed_bf16_grads", 2, 2, 14),
    ("mixed_bf16_grads", 3, 0, 16),
    ("fsdp2", 3, 0, 16),  # torchtitan
]


@cache
def trained(policy: str, clip: float | None = None) -> Function:
    return differentiate(gpt(**SIZES), Adam(), precision=precision_named(policy), clip=clip)


def step_on(policy: str, dp: int, stage: int, microbatches: int, tp: int = 1) -> Program:
    order = schedule("1f1b", 1, microbatches)
    bucket = "" if stage == 3 else ",bucket=1B"  # each parameter is a bucket
    return laid_out(trained(policy), mesh_of(dp, tp, 1), order, "none", f"zero={stage}{bucket}")


@pytest.mark.parametrize("dp", [2, 4])
@pytest.mark.parametrize(("policy", "stage", "whole", "divided"), BYTES, ids=str)
def test_bytes_a_parameter_are_those_of_the_frameworks(policy, stage, whole, divided, dp):
    """At the peak of a step of many microbatches all gradients are there, and the sum of the losses."""
    joint = trained(policy)
    program = step_on(policy, dp, stage, 4)
    (memory,) = program_memory(program).ranks
    kept = sum(memory.by_kind[kind] for kind in ("parameters", "state", "gradients"))
    size = sum(v.type.size for v in joint.parameters)
    copies = 0
    for op in all_ops(program.to_function()):
        if op.op_type == "GradientCopy":  # made by the update, after the peak
            copies += op.outputs[0].type.nbytes
    sums = joint.outputs[0].type.nbytes
    assert kept + copies - sums == pytest.approx((whole + divided / dp) * size, abs=0)


def test_what_the_step_begins_with_is_what_it_ends_with():
    """New parameters lie where the old ones lay: no gather leaves a second copy."""
    for stage in (1, 2):
        program = step_on("mixed", 4, stage, 1)
        (memory,) = program_memory(program).ranks
        size = sum(v.type.size for v in trained("mixed").parameters)
        assert memory.end == (2 + 12 / 4) * size + 4
        flat = program.to_function()
        (most,) = {max(op.outputs[0].type.nbytes for op in all_ops(flat) if op.op_type == "LocalPart")}
        assert most == max(v.type.nbytes for v in trained("mixed").parameters) / 4


# --- what is sent ----------------------------------------------------------------------------------------


def sent(program: Program) -> dict[str, tuple[int, int]]:
    """How many collectives of tensors a step has over dp, and the bytes of all together, by kind."""
    count, total = Counter[str](), Counter[str]()
    for op in all_ops(program.to_function()):
        if operator(op.op_type).moves and op.attributes.get("axis") == "dp" and op.inputs[0].type.rank:
            kind, nbytes = collective_of(signature_of(op), program.mesh.groups("dp")[0])
            count[kind] += 1
            total[kind] += int(nbytes)
    return {kind: (count[kind], total[kind]) for kind in count}


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize(
    ("policy", "scattered", "gathered"), [("mixed", 4, 2), ("mixed_bf16_grads", 2, 2), ("fp32", 4, 4)]
)
def test_gradients_are_scattered_and_parameters_gathered_once(policy, scattered, gathered, microbatches):
    """Megatron-LM: 4P or 2P bytes of gradients and 2P of parameters a step; stage 2 a microbatch."""
    count = len(trained(policy).parameters)
    size = sum(v.type.size for v in trained(policy).parameters)
    plain = sent(step_on(policy, 2, 0, microbatches))
    assert plain == {"all_reduce": (count, scattered * size)}
    for stage, times in ((1, 1), (2, microbatches)):
        assert sent(step_on(policy, 2, stage, microbatches)) == {
            "reduce_scatter": (times * count, times * scattered * size),
            "all_gather": (count, gathered * size),
        }


def test_a_ring_takes_as_long_as_the_all_reduce_that_it_replaces():
    """An all-reduce is a reduce-scatter and an all-gather: with all of one type the bytes are the same."""
    costs = CostModel(topology_of(4))

    def seconds(stage: int) -> float:
        program = step_on("fp32", 4, stage, 1)
        group = program.mesh.groups("dp")[0]
        ops = [op for op in all_ops(program.to_function()) if op.attributes.get("axis") == "dp"]
        moving = [op for op in ops if operator(op.op_type).moves and op.inputs[0].type.rank]
        return sum(costs.communication_seconds(signature_of(op), group) for op in moving)

    assert seconds(1) == seconds(2) == pytest.approx(seconds(0), rel=1e-9)


def test_what_is_sent_is_padded():
    """As in stage 3: the bytes of n ceil(size / n) elements."""
    ranks = 4
    program = laid_out(
        joint_of("odd gpt", "fp32"), mesh_of(ranks, 1, 1), schedule("1f1b", 1, 1), zero="zero=1,bucket=1B"
    )
    sizes = [v.type.size for v in joint_of("odd gpt", "fp32").parameters]
    padded = sum(4 * ranks * flat_part(size, ranks) for size in sizes)
    assert padded > 4 * sum(sizes)
    assert {total for _, total in sent(program).values()} == {padded}


def test_beside_tensor_parallelism_every_gradient_is_scattered():
    """Of what a rank has of it: half of the table, too, whose gradient is cast before it is summed."""
    for clip in (None, 1.0):
        joint = trained("mixed", clip)
        program = laid_out(joint, mesh_of(2, 2, 1), schedule("1f1b", 1, 2), "none", "zero=1,bucket=1B")
        own = sum(v.key.type.size for v in program.inputs if v.source.role is Role.PARAMETER)
        assert own < 0.6 * sum(v.type.size for v in joint.parameters)
        count = len(joint.parameters)
        assert sent(program) == {"reduce_scatter": (count, 4 * own), "all_gather": (count, 2 * own)}


def test_a_norm_is_summed_over_the_parts_once():
    joint = joint_of("gpt", "mixed", 0.05)
    for stage in (1, 2):
        flat = laid_out(joint, mesh_of(2, 1, 1), schedule("1f1b", 1, 2), zero=f"zero={stage}").to_function()
        sums = [op for op in all_ops(flat) if op.op_type == "MPIAllreduce"]
        assert Counter(op.outputs[0].name for op in sums) == {"squares": 1, "loss": 1}


# --- what does not go ------------------------------------------------------------------------------------


def test_an_update_that_needs_whole_operands_is_refused():
    class Watched(SGD):
        """Returns the largest element of the new state as well."""

        def update(self, maker, weight, grad, precision):
            new, state = super().update(maker, weight, grad, precision)
            return new, state, *maker.add("ReduceMax", [state], {"keepdims": 0})

    joint = differentiate(small_gpt(), Watched(momentum=0.9))
    with pytest.raises(PlanError, match="needs its operands whole.*use zero=0"):
        zero(shard(joint, logical_mesh(mesh_of().devices[0], 2, 1)), 1)


def test_without_an_optimizer_there_is_nothing_to_divide():
    joint = differentiate(small_gpt(), None)
    for stage in (1, 2):
        with pytest.raises(PlanError, match=f"zero={stage} divides what an optimizer.*use zero=0"):
            laid_out(joint, mesh_of(2, 1, 1), schedule("1f1b", 1, 1), zero=f"zero={stage}")


def test_parts_of_another_tensor_are_refused():
    mesh = mesh_of(2)
    maker = FunctionMaker("wrong")
    old = maker.add_input_value("old", Tensor(Float32(), (3, 3), mesh))
    part = maker.add_input_value("part", Tensor(Float32(), (4,), mesh))
    with pytest.raises(TypeRuleError, match="is no flat part of"):
        maker.add("MPIAllgatherInto", [part, old], {"axis": "dp", "shapes": ((3, 3),)})
    assert maker.add("LocalPart", [old], {"axis": "dp"})[0].type.shape == (math.ceil(9 / 2),)
