"""Passes over all gradients before the update: unscaled, and clipped."""

from collections import Counter

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
from distsim.interpret import SequentialExecutor
from distsim.ir import Role, all_ops
from distsim.ops import op_label, signature_of, work
from distsim.plan import Plan
from distsim.plan.stacks import STACKS
from distsim.transforms import Adam, differentiate
from distsim.transforms.autodiff.precision import precision_named
from distsim.transforms.kernels import KERNELS

TWICE = ("fused", "fused_2021", "fused_2022", "eager", "eager_waiting", "compiled")
ONCE = ("eager_deepspeed", "fused_deepspeed")


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
