"""Passes over all gradients before the update: their norm, the mean over ranks, the loss scale, clipping."""

from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from training_models import (
    assert_same_step,
    computed_over_ranks,
    mesh_of,
    random_inputs,
    small_gpt,
    topology_of,
)

from distsim.compose import build_program, parallelize
from distsim.cost import CostModel
from distsim.errors import TypeRuleError
from distsim.hardware import load_cluster
from distsim.interpret import SequentialExecutor
from distsim.ir import Attributes, Float16, Float32, Role, Tensor, all_ops
from distsim.ops import op_label, operator, signature_of, work
from distsim.plan import Plan
from distsim.plan.stacks import STACKS
from distsim.simulation import Simulator
from distsim.transforms import Adam, differentiate
from distsim.transforms.autodiff.precision import precision_named
from distsim.transforms.data_parallel.gradient_buckets import REDUCTIONS
from distsim.transforms.kernels import KERNELS

TWICE = ("fused", "fused_2021", "fused_2022", "eager", "eager_waiting", "compiled")
ONCE = ("eager_deepspeed", "fused_deepspeed")


@cache
def training(precision="mixed_fp16", clip=1.0, batch=4):
    return differentiate(small_gpt(batch=batch), Adam(), precision=precision_named(precision), clip=clip)


def passes(program):
    """Launches that multiply gradients, and the bytes that these move by element of the parameters."""
    found, moved = Counter(), Counter()
    for op in all_ops(program.to_function()):
        demand = work(signature_of(op))
        if op_label(op) in ("ScaleGradient", "SquareSum"):
            found[op_label(op)] += 1
            moved[op_label(op)] += demand.bytes_read + demand.bytes_written - 4  # the factor, or the sum
    inputs = [each.source for each in program.parts.inputs]
    elements = sum(value.type.size for value in inputs if value.role is Role.PARAMETER)
    return found["ScaleGradient"], moved["ScaleGradient"] / elements


@pytest.mark.parametrize(
    ("kernels", "precision", "clip", "count"),
    [
        *[(name, "mixed_fp16", 1.0, 2) for name in TWICE],
        *[(name, "mixed_fp16", 1.0, 1) for name in ONCE],
        *[(name, "mixed_fp16", None, 1) for name in ("fused_2021", "eager", "eager_deepspeed")],
        *[(name, "mixed", 1.0, 1) for name in ("fused", "eager", "eager_deepspeed")],
        ("fused", "mixed", None, 0),
    ],
)
def test_gradients_are_multiplied_as_often_as_the_framework_does(kernels, precision, clip, count):
    """Each pass is one launch, which reads and writes four bytes of each element."""
    joint, plan = training(precision, clip), Plan.parse("microbatches=2")
    program = parallelize(joint, plan, topology_of(1), kernels=KERNELS[kernels])
    launches, moved = passes(program)
    assert launches == count
    assert moved == pytest.approx(8 * count, abs=0.01)


@pytest.mark.parametrize(
    "text",
    ["dp=2,tp=2,pp=2,microbatches=2", "dp=2,zero=1,microbatches=2", "dp=2,zero=3", "tp=2,sp=on,remat=full"],
)
def test_every_rank_computes_the_same_step(text):
    """That of the joint function, which unscales and clips at once."""
    computed_over_ranks(training("fp32:loss_scale=1024", 1e-3), Plan.parse(text), "fused_2021")


@pytest.mark.parametrize(
    ("kernels", "text", "buckets", "times"),
    [
        ("fused", "dp=2,microbatches=2,bucket=megatron,overlap_grads=off", 1, 1),
        ("fused_2021", "dp=2,pp=2,zero=1,microbatches=2,bucket=megatron,overlap_grads=off", 2, 1),
        ("fused", "dp=2,microbatches=2,bucket=1000B,overlap_grads=on", None, 1),
        ("eager_deepspeed", "dp=2,zero=2,microbatches=4,bucket=deepspeed,overlap_grads=off", 4, 4),
        ("fused_deepspeed", "dp=2,zero=1,bucket=nanotron,overlap_grads=off", 1, 1),
        ("fused", "dp=2,zero=3", 0, 0),
        ("eager_waiting", "dp=2,zero=1,bucket=nanotron,overlap_grads=off", 0, 0),
        ("eager", "dp=2,microbatches=2", 0, 0),
        ("fused", "microbatches=2", 0, 0),
    ],
)
def test_a_kernel_a_bucket_divides_it_by_the_ranks(kernels, text, buckets, times):
    """It reads and writes each element as it is sent, in its place, and the ranks compute the same step."""
    joint = differentiate(small_gpt(batch=8), Adam())
    program = computed_over_ranks(joint, Plan.parse(text), kernels)
    ops = list(all_ops(program.to_function()))
    found = [op for op in ops if op.op_type == "AverageGradients"]
    assert len(found) == buckets or (buckets is None and len(found) > 2)
    whole = sum(value.type.nbytes for value in joint.inputs if value.role is Role.PARAMETER)
    read = sum(work(signature_of(op)).bytes_read for op in found)
    assert read == sum(work(signature_of(op)).bytes_written for op in found) == whole * times
    sums = [op for op in ops if op.op_type in REDUCTIONS]
    made = {value for op in found for value in op.outputs}
    assert len(found) == sum(made.issuperset(op.inputs) for op in sums)


@pytest.mark.parametrize("kernels", ["fused", "eager_deepspeed"])
def test_a_step_takes_as_much_longer_as_the_pass_over_its_buffer(kernels):
    topology = load_cluster("dgx-a100")
    plan, policy = Plan.parse("dp=2,bucket=megatron,overlap_grads=off"), KERNELS[kernels]
    policy = replace(policy, checks_buckets=False)  # a kernel that the division stands after
    joint, times = training("fp32", None), []
    costs, passes = CostModel(topology), list[float]()
    for each in (policy, replace(policy, averages=False)):
        program = parallelize(joint, plan, topology, costs, kernels=each)
        times.append(Simulator(costs).simulate(program).step_time)
        ops = [op for op in all_ops(program.to_function()) if op.op_type == "AverageGradients"]
        passes += [costs.seconds(signature_of(op), topology.devices[:1]) for op in ops]
    averaged, plain = times
    (one,) = passes
    assert one > 0 and averaged == pytest.approx(plain + one, rel=1e-9)


@pytest.mark.parametrize("name", ["AverageGradients", "GradientNorm"])
def test_a_buffer_that_is_passed_over_is_of_one_type(name):
    wide, narrow = (Tensor(dtype, (4,)) for dtype in (Float32(), Float16()))
    operator(name).types(Attributes(), (wide, wide))
    for inputs, said in (((), "none given"), ((wide, narrow), "one element type")):
        with pytest.raises(TypeRuleError, match=said):
            operator(name).types(Attributes(), inputs)


def test_the_norm_of_a_buffer_is_that_of_all_its_gradients():
    arrays = [np.array([[3.0, 0.0]], np.float32), np.array([4.0], np.float32)]
    (norm,) = operator("GradientNorm").compute(Attributes(), arrays)
    assert norm.dtype == np.float32 and norm == 5.0
    (norm,) = operator("GradientNorm").compute(Attributes(), [*arrays, np.array([np.nan], np.float32)])
    assert np.isnan(norm)


@pytest.mark.parametrize(
    ("kernels", "text", "precision", "buckets"),
    [
        ("fused", "dp=2,microbatches=2,bucket=megatron,overlap_grads=off", "mixed", 1),
        ("fused_loss", "dp=2,pp=2,zero=1,microbatches=2,bucket=megatron,overlap_grads=off", "", 2),
        ("fused", "dp=2,microbatches=2,bucket=1000B,overlap_grads=on", "", None),
        ("fused", "dp=2,microbatches=2,bucket=megatron,overlap_grads=off", "mixed_fp16", 0),
        ("fused", "dp=2,microbatches=2,bucket=megatron,overlap_grads=off", "fp32:loss_scale=1024", 0),
        ("fused_waiting", "dp=2,bucket=megatron,overlap_grads=off", "", 0),
        ("fused_2021", "dp=2,bucket=megatron,overlap_grads=off", "", 0),
        ("eager_deepspeed", "dp=2,bucket=deepspeed,overlap_grads=off", "", 0),
        ("fused", "dp=2,zero=3", "", 0),
    ],
)
def test_the_norm_of_each_bucket_is_waited_for_before_it_is_sent(kernels, text, precision, buckets):
    """It reads each element as it is sent, once; a loss that is scaled looks for NaNs itself."""
    plan = Plan.parse(text)
    if precision:
        joint = training(precision, batch=8)
        program = parallelize(joint, plan, topology_of(2), kernels=KERNELS[kernels])
    else:
        program = computed_over_ranks(differentiate(small_gpt(batch=8), Adam()), plan, kernels)
    ops = list(all_ops(program.to_function()))
    found = [op for op in ops if op.op_type == "GradientNorm"]
    assert len(found) == buckets or (buckets is None and len(found) > 2)
    if found:
        wide = 4 if precision else 8  # bytes of an element as it is summed; the model is of float64
        parameters = [each.source for each in program.parts.inputs if each.source.role is Role.PARAMETER]
        demands = [work(signature_of(op)) for op in found]
        assert sum(each.bytes_read for each in demands) == wide * sum(v.type.size for v in parameters)
        assert sum(each.bytes_written for each in demands) == wide * len(found)
    norms = {value for op in found for value in op.outputs}
    waited = {op.outputs[0] for op in ops if op.op_type == "Await" and not norms.isdisjoint(op.inputs)}
    divided = [op for op in ops if op.op_type == "AverageGradients"]
    assert len(found) == len(waited) == sum(not waited.isdisjoint(op.inputs) for op in divided)


def test_a_step_takes_as_much_longer_as_the_norm_and_the_launches_after_it():
    """The host issues nothing until the norm is there; without its launches a step has the kernel more."""
    topology, plan = load_cluster("dgx-a100"), Plan.parse("dp=2,bucket=megatron,overlap_grads=off")
    joint, policy = training("fp32", None), KERNELS["fused"]

    def steps(costs):
        times, norms = list[float](), list[float]()
        for each in (policy, replace(policy, checks_buckets=False)):
            program = parallelize(joint, plan, topology, costs, kernels=each)
            times.append(Simulator(costs).simulate(program).step_time)
            ops = [op for op in all_ops(program.to_function()) if op.op_type == "GradientNorm"]
            norms += [costs.seconds(signature_of(op), topology.devices[:1]) for op in ops]
        (norm,) = norms
        return times[0] - times[1], norm

    longer, norm = steps(CostModel(topology))
    assert norm > 0 and longer == pytest.approx(norm, rel=1e-6)
    longer, norm = steps(CostModel(topology, kernels="fused"))
    assert longer > norm


def test_a_step_that_overflows_moves_no_weight_by_its_gradient():
    """Momentum that was nothing stays nothing where every gradient, scaled, is beyond float32."""
    joint = training("fp32:loss_scale=3e38")
    inputs = random_inputs(joint)
    with np.errstate(all="ignore"):
        expected = SequentialExecutor().compute(joint, inputs)
        program = build_program(joint, mesh_of(1, 1, 1), Plan(), kernels=KERNELS["fused_2021"])
        assert passes(program)[0] == 2
        assert_same_step(joint, program, inputs, expected)
    assert all(np.isfinite(value).all() for value in expected)


def test_stacks_of_deepspeed_unscale_and_clip_at_once():
    once = {name for name, stack in STACKS.items() if not KERNELS[stack.kernels].unscales_first}
    assert once == {name for name in STACKS if name.startswith("deepspeed")}
