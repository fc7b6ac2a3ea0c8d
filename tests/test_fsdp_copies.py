"""Copies of torch's FSDP2 out of what it gathers and into what it scatters: bytes, time, order and memory."""

from collections import Counter

import numpy as np
import pytest
from mixed_step import assert_same_mixed_step, computed, joint_of
from test_buckets import laid_out_by, sent, step_on, trained
from training_models import (
    F64,
    assert_all_readers_agree,
    assert_same_step,
    laid_out,
    mesh_of,
    random_inputs,
    small_mlp,
    tied,
    topology_of,
)

from distsim.compose import parallelize
from distsim.errors import PlanError, TypeRuleError
from distsim.executor import CostModel, SequentialExecutor, Simulator
from distsim.hardware.rank_axes import RankAxes
from distsim.ir import Attributes, BFloat16, Float32, FunctionMaker, Tensor, all_ops
from distsim.ops import operator, signature_of
from distsim.plan import Plan
from distsim.plan.stacks import STACKS
from distsim.program.program import Program
from distsim.schedule import schedule
from distsim.simulation.memory.program_memory import program_memory
from distsim.study.choices import Choices
from distsim.transforms import SGD, Adam, differentiate
from distsim.transforms.kernels import KERNELS

COPIES = "zero=3,bucket=fsdp2"


# --- the same numbers on every rank ----------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fsdp2", "fp32"])
@pytest.mark.parametrize(
    ("model", "plan", "remat", "reshard"),
    [
        ("gpt", Plan(2, 1, 1, 1), "none", "always"),
        ("llama", Plan(2, 2, 1, 2), "full", "always"),
        ("odd gpt", Plan(4, 1, 1, 3), "none", "auto"),
        ("tied", Plan(3, 1, 2, 2), "full", "never"),
        ("tied", Plan(2, 1, 2, 1), "full", "always"),  # a gradient that is summed once a step
        ("llama", Plan(2, 1, 3, 2), "every_early:2", "always"),
        ("mlp", Plan(2, 1, 1, 2), "none", "blocking"),
    ],
    ids=str,
)
def test_every_rank_computes_the_same_step(policy, model, plan, remat, reshard):
    order = schedule(plan.schedule, plan.pp, plan.microbatches)
    mesh = mesh_of(plan.dp, plan.tp, plan.pp)
    program = laid_out(joint_of(model, policy), mesh, order, remat, f"{COPIES},reshard={reshard}")
    assert_same_mixed_step(program, *computed(model, policy))
    assert_all_readers_agree(program)


@pytest.mark.parametrize("name", ["zb_h1", "interleaved", "dualpipe_v"])
def test_under_schedules_that_split_passes(name):
    joint = differentiate(tied(layers=4, batch=16, hidden=6), Adam())
    inputs = random_inputs(joint, 2)
    order = schedule(name, 2, 4, *(() if name == "zb_h1" else (2,)))
    program = laid_out_by(joint, order, name, COPIES)
    assert_same_step(joint, program, inputs, SequentialExecutor().compute(joint, inputs))
    assert_all_readers_agree(program)


def test_in_groups_of_ranks():
    text = f"dp=4,zero_ranks=2,microbatches=3,{COPIES}"
    program = parallelize(joint_of("gpt", "fsdp2"), Plan.parse(text), topology_of(4), kernels=KERNELS["ops"])
    assert_same_mixed_step(program, *computed("gpt", "fsdp2"))
    assert_all_readers_agree(program)


# --- bytes and time -------------------------------------------------------------------------------------


def copies(program: Program) -> dict[str, tuple[int, float, float]]:
    """How many copies of each kind a step has on a rank, and the bytes that they read and write."""
    found: dict[str, tuple[int, float, float]] = {}
    for op in all_ops(program.to_function()):
        if op.op_type in ("CopyOut", "CopyIn"):
            work = operator(op.op_type).work(signature_of(op))
            count, read, written = found.get(op.op_type, (0, 0.0, 0.0))
            found[op.op_type] = count + 1, read + work.bytes_read, written + work.bytes_written
    return found


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize(("reshard", "gathers"), [("always", 9), ("never", 5), ("auto", 8)])
def test_each_message_is_copied_once(reshard, gathers, microbatches):
    """Units: embedding, three layers, norm and output. 2 bytes are read and written of a parameter that was
    gathered in bfloat16; of a gradient 2 are read, and 4 written, as which it is summed: no other cast is."""
    size = sum(v.type.size for v in trained("fsdp2").parameters)
    program = step_on("fsdp2", f"{COPIES},reshard={reshard}", microbatches)
    plain = step_on("fsdp2", f"zero=3,reshard={reshard}", microbatches)
    assert sent(program) == sent(plain)
    times = 1 if reshard == "never" else microbatches
    gathered = sent(program)["all_gather"][1]
    assert copies(program) == {
        "CopyOut": (gathers * times, gathered, gathered),
        "CopyIn": (5 * microbatches, 2 * size * microbatches, 4 * size * microbatches),
    }
    assert copies(plain) == {}
    casts = [sum(op.op_type == "GradientCast" for op in all_ops(p.to_function())) for p in (program, plain)]
    assert casts[0] == 0 < casts[1]


def test_gradients_of_the_type_of_their_sum_are_copied_too():
    size = sum(v.type.size for v in trained("fp32").parameters)
    assert copies(step_on("fp32", COPIES, 2))["CopyIn"] == (5 * 2, 2 * 4 * size, 2 * 4 * size)


def test_copies_take_the_time_of_their_bytes_where_computation_is():
    """On that stream, one kernel each; a gradient is copied once the reduction before is done."""
    topology = topology_of(2, gbps=1.0, dram_bandwidth=1e9, kernel_launch_overhead=0.0)
    mesh = RankAxes.of(2, 1).mesh(topology.devices, 1)
    program = laid_out(trained("fsdp2"), mesh, schedule("1f1b", 1, 1), "none", COPIES)
    spans = Simulator(CostModel(topology)).simulate(program).spans()
    own = [*spans]  # both ranks do the same at the same time
    kinds = {"CopyOut": 9, "CopyIn": 5}
    assert Counter(span.op.op_type for span in own if span.op.op_type in kinds) == kinds
    for span in own:
        if span.op.op_type in kinds:
            nbytes = sum(v.type.nbytes for v in (*span.op.inputs, *span.op.outputs))
            assert span.end - span.start == pytest.approx(nbytes / 1e9)
            assert span.stream.name == "compute"
    scatters = [span for span in own if span.op.op_type == "MPIReduceScatter"]
    arrivals = [span for span in own if span.op.op_type == "CopyIn"]
    for before, copy in zip(scatters, arrivals[1:], strict=False):
        assert copy.start >= before.end
    gathers = [span for span in own if span.op.op_type == "MPIAllgather"]
    outs = [span for span in own if span.op.op_type == "CopyOut"]
    assert all(copy.start >= gather.end for gather, copy in zip(gathers, outs, strict=True))
    # In backward, which begins with the sixth, the next is gathered when this one is copied.
    assert all(gather.start >= copy.end for gather, copy in zip(gathers[6:], outs[5:], strict=False))


# --- memory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reshard", "more"), [("always", 0), ("never", 4)])
def test_buffer_and_copy_are_held_for_a_moment(reshard, more):
    """Two layers of two matrices each of W bytes, one sample a rank, x and z of w. Parts of all: 4 W / 2.

    When the first layer is copied there are its buffer, the copy, and the buffer of the second: 2 W each.
    Kept weights are copied again beside the copy of the first layer: 2 W each with the buffer, and four
    activations of w.
    """
    joint = differentiate(small_mlp(layers=4, width=128, batch=2), SGD())
    order = schedule("1f1b", 1, 1)
    program = laid_out(joint, mesh_of(2, 1, 1), order, "none", f"{COPIES},reshard={reshard}")
    (use,) = program_memory(program).ranks
    matrix, row = 128 * 128 * 8, 128 * 8
    assert use.peak == 4 * matrix // 2 + 3 * (2 * matrix) + (2 + more) * row
    assert use.by_kind["communication"] == (2 if reshard == "never" else 4) * matrix


# --- who copies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stack", "text", "bucket"),
    [
        ("torchtitan", "dp=2,zero=3", "fsdp2"),
        ("torchtitan", "dp=2,zero=3,reshard=always", "fsdp2"),
        ("torchtitan", "dp=2,zero=3,bucket=auto", "auto"),
        ("torchtitan", "dp=2", "fsdp2"),
        ("torchtitan", "dp=2,zero=0", "auto"),
        ("composer", "dp=2,zero=3", "auto"),
        ("plain", "dp=2,zero=3,bucket=fsdp2", "fsdp2"),
    ],
)
def test_the_stack_says_and_the_plan_before_it(stack, text, bucket):
    chosen = Choices(None, None, KERNELS["eager"], Adam(), None, STACKS[stack], ()).plan(text)
    assert chosen.bucket == bucket and Plan.parse(str(chosen)) == chosen


def test_what_gathers_nothing_has_no_copies():
    for zero in (0, 1, 2):
        with pytest.raises(PlanError, match=f"bucket=fsdp2 .* zero={zero} gathers none; use zero=3"):
            Plan(2, zero=zero, bucket="fsdp2")


def test_a_copy_is_of_tensors_of_one_type():
    maker, mesh = FunctionMaker("two"), mesh_of(2)
    one = maker.add_input_value("one", Tensor(BFloat16(), (4,), mesh))
    two = maker.add_input_value("two", Tensor(F64, (4,), mesh))
    (made,) = maker.add("CopyIn", [one], {"to": 1})
    assert made.type == Tensor(Float32(), (4,), mesh)
    with pytest.raises(TypeRuleError, match="CopyOut copies tensors of one element type"):
        maker.add("CopyOut", [one, two])
    with pytest.raises(TypeRuleError, match="CopyIn copies at least one tensor"):
        maker.add("CopyIn", [])
    (array,) = operator("CopyIn").compute(Attributes({"to": 1}), [np.ones(4)])
    assert array.dtype == np.float32
