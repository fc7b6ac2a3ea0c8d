"""Updates: gradients clipped to their norm, losses scaled, optimizers and the types of their states."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from precision_models import (
    PLANS,
    SIZES,
    in_float64,
    rounded,
    small_gpt,
    updates,
)
from training_models import F64, assemble, laid_out, mesh_of, random_inputs

from distsim.errors import PlanError
from distsim.executor import SequentialExecutor
from distsim.ir import (
    BFloat16,
    Float16,
    Float32,
    Function,
    FunctionMaker,
    Role,
    Tensor,
    all_ops,
)
from distsim.models import gpt
from distsim.ops import operator
from distsim.plan import Plan
from distsim.schedule import schedule
from distsim.transforms import SGD, Adam, AdamW, differentiate, precision_named, shard

# --- clipping and loss scaling ---------------------------------------------------------------------------


def clipped(clip: float, policy: str = "fp32") -> Function:
    return differentiate(small_gpt(), SGD(lr=1.0), precision=precision_named(policy), clip=clip)


def test_gradients_are_clipped_to_their_norm_over_all_parameters():
    plain = in_float64(differentiate(small_gpt(), None))
    inputs = random_inputs(plain, 3)
    grads = SequentialExecutor().compute(plain, inputs)[1:]
    norm = math.sqrt(sum(float(np.square(g).sum()) for g in grads))
    for clip in (norm / 3, 3 * norm):
        joint = in_float64(clipped(clip))
        made = SequentialExecutor().compute(joint, inputs)[1:]
        old = dict(zip([f"{v.name}.new" for v in joint.inputs], inputs, strict=True))
        for value, new, grad in zip(joint.outputs[1:], made, grads, strict=True):
            wanted = grad * min(1, clip / (norm + 1e-6))
            np.testing.assert_allclose(old[value.name] - new, wanted, rtol=1e-7, atol=1e-10)


@cache
def clipped_alone(policy: str):
    """A joint function, inputs, and what one device makes of them."""
    joint = clipped(0.05, policy)
    inputs = random_inputs(joint, 1)
    return joint, inputs, SequentialExecutor().compute(in_float64(joint), inputs)


@pytest.mark.parametrize("policy", ["fp32", "mixed", "mixed_fp16"])
@pytest.mark.parametrize(("plan", "remat", "zero"), [*PLANS, (Plan(1, 1, 4, 1), "none", "zero=0")], ids=str)
def test_every_plan_clips_alike(policy, plan, remat, zero):
    """Replicated parameters are counted once, divided ones over their ranks, stages one after the other."""
    joint, inputs, expected = clipped_alone(policy)
    order = schedule(plan.schedule, plan.pp, plan.microbatches)
    program = laid_out(joint, mesh_of(plan.dp, plan.tp, plan.pp), order, remat, zero)
    flat = program.to_function()
    made = assemble(program, SequentialExecutor().compute(in_float64(flat), inputs))
    for placed, array in zip(made, expected, strict=True):
        np.testing.assert_allclose(placed.array, array, rtol=1e-9, atol=1e-11, err_msg=placed.name)
    sent = [op for op in all_ops(flat) if op.op_type == "Send" and not op.inputs[0].type.shape]
    assert len(sent) <= 3 * (plan.pp - 1) * plan.dp * plan.tp + 2  # to the stage before, and to all
    if zero != "zero=0":
        norms = [op for op in all_ops(flat) if op.op_type == "MPIAllreduce" and not op.inputs[0].type.shape]
        assert len([op for op in norms if "squares" in op.outputs[0].name]) <= 3 * plan.pp
        assert not [
            op for op in all_ops(flat) if op.op_type == "LocalSlice" and op.attributes["axis"] == "dp"
        ]


def test_a_loss_that_is_scaled_loses_no_small_gradient():
    """Float16 has no numbers below 6e-8; what overflows moves no weight."""
    policy = replace(precision_named("mixed_fp16"), loss_scale=64.0)
    function = differentiate(small_gpt(), SGD(lr=1.0), precision=policy)
    joint = differentiate(small_gpt(), SGD(lr=1.0), precision=replace(policy, loss_scale=2.0**40))
    inputs = random_inputs(function, 4)
    for each, moves in ((function, True), (joint, False)):
        with np.errstate(all="ignore"):
            results = SequentialExecutor().compute(each, rounded(each, inputs))
        made = dict(zip([v.name for v in each.outputs], results, strict=True))
        masters = [(v.name, a) for v, a in zip(each.inputs, inputs, strict=True) if v.name.endswith("master")]
        moved = [name for name, a in masters if (made[f"{name}.new"] != a.astype(np.float32)).any()]
        assert bool(moved) == moves


def test_what_cannot_be_clipped_to_is_refused():
    for clip in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(PlanError, match="must be a finite norm over 0"):
            clipped(clip)


# --- optimizers -----------------------------------------------------------------------------------------


def stepped(optimizer, weight, grad, *states):
    """What the op of an optimizer makes of one weight."""
    maker = FunctionMaker("update")
    w = maker.add_input_value("w", Tensor(F64, weight.shape), Role.PARAMETER)
    g = maker.add_input_value("g", Tensor(F64, weight.shape))
    maker.set_outputs(optimizer.update(maker, w, g))
    return SequentialExecutor().compute(maker.finalize(), [weight, grad, *states])


def test_momentum_and_decoupled_decay_as_published():
    rng = np.random.default_rng(0)
    w, g, m, v = (rng.standard_normal((3, 2)) for _ in range(4))
    v = np.abs(v)
    new, velocity = stepped(SGD(0.1, momentum=0.9, weight_decay=0.2), w, g, m)
    np.testing.assert_allclose(velocity, 0.9 * m + g + 0.2 * w)
    np.testing.assert_allclose(new, w - 0.1 * velocity)
    plain, *moments = stepped(Adam(0.1), w, g, m, v)
    decayed, *same = stepped(AdamW(0.1, weight_decay=0.2), w, g, m, v)
    np.testing.assert_allclose(decayed, plain - 0.1 * 0.2 * w)
    np.testing.assert_allclose(same, moments)
    coupled = stepped(Adam(0.1, weight_decay=0.2), w, g, m, v)
    np.testing.assert_allclose(coupled, stepped(Adam(0.1), w, g + 0.2 * w, m, v))


def test_states_are_of_the_types_that_are_asked_for():
    joint = differentiate(
        small_gpt(), AdamW(mean=BFloat16(), square=Float16()), precision=precision_named("mixed")
    )
    op = updates(joint)[0]
    types = [v.type.dtype for v in op.inputs]
    assert types == [BFloat16(), Float32(), BFloat16(), Float16(), Float32()]
    assert [v.type.dtype for v in op.outputs] == [BFloat16(), BFloat16(), Float16(), Float32()]


def test_the_weight_is_what_remains_of_the_master():
    """Small steps, which a bfloat16 weight alone would lose."""
    w = np.ones((4,), BFloat16().np)
    g, master = np.full((4,), 1e-4, np.float32), np.ones((4,), np.float32)
    rule = operator("SGDOptimizer").compute
    for _ in range(100):
        w, master = rule({"lr": 1.0}, [w, g, master])
    assert master == pytest.approx(0.99, rel=1e-5) and w.dtype == BFloat16().np
    assert w.astype(float) == pytest.approx(0.99, rel=4e-3)
    (alone,) = rule({"lr": 1.0}, [np.ones((4,), BFloat16().np), g])
    assert (alone == 1).all()


@pytest.mark.parametrize("sp", [False, True])
def test_clipping_divides_no_product_in_another_way(sp):
    """The squares of all gradients are summed: that must not tie the choices of all of them together."""
    model = gpt(**{**SIZES, "layers": 6, "hidden": 64, "seq": 16})
    placed = []
    for clip in (None, 1.0):
        joint = differentiate(model, Adam(), precision=precision_named("mixed"), clip=clip)
        sharded = shard(joint, mesh_of(2, 2), 2, sp=sp)
        placed.append([str(state) for value, state in zip(joint.inputs, sharded.inputs, strict=True)])
        assert sharded.decisions["tp"].proven
    assert placed[0] == placed[1]
