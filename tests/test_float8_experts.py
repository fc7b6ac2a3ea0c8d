"""Experts in 8 bits: the products, the bytes that are sent for them, the same step whatever the plan."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from expert_models import BATCH, SENT, SEQ, distinct_inputs
from precision_models import rounded
from training_models import assert_all_readers_agree, topology_of

from distsim.compose import parallelize
from distsim.executor import SequentialExecutor
from distsim.interpret import count_flops
from distsim.ir import Attributes, BFloat16, Float8E4M3FN, Float8E5M2, Float32, all_ops
from distsim.models.decoder import decoder
from distsim.ops import compute
from distsim.plan import Plan
from distsim.transforms import SGD, differentiate, precision_named
from distsim.transforms.autodiff.set_precision import cast_number


def test_experts_multiply_in_8_bits_and_rows_are_sent_to_them_so():
    """Operands and results as of linear layers, by Transformer Engine's GroupedLinear; of T k h numbers a
    rank sends a byte each to the experts, in both passes, and two each back (DeepSeek-V3, section 3.3)."""
    model = decoder(replace(SENT, experts=replace(SENT.experts, dispatcher="deepep")), BATCH, SEQ, Float32())
    joint = differentiate(model, SGD(), precision=precision_named("fp8"))
    whole = differentiate(model, SGD(), precision=precision_named("fp8:grouped=none"))
    kinds, sixteen = (Counter(op.op_type for op in all_ops(each)) for each in (joint, whole))
    names = ("GroupedMatMul", "GroupedMatMulGradA", "GroupedMatMulGradB")
    assert [kinds[f"Float8{name}"] for name in names] == [sixteen[name] for name in names] == [6, 6, 6]
    assert not any(kinds[name] or sixteen[f"Float8{name}"] for name in names)
    assert count_flops(joint) == pytest.approx(count_flops(whole), rel=0.1)
    program = parallelize(joint, Plan(dp=2, ep=2), topology_of(2))
    moved = [op.inputs[0].type for op in all_ops(program.to_function()) if op.op_type == "MPIAlltoall"]
    rows = BATCH * SEQ // 2 * SENT.experts.top_k * SENT.hidden
    sent = Counter([(each.dtype, each.nbytes) for each in moved])
    assert sent == {(Float8E4M3FN(), rows): 2, (Float8E5M2(), rows): 2, (BFloat16(), 2 * rows): 4}


@pytest.mark.parametrize("name", ["GroupedMatMul", "GroupedMatMulGradA", "GroupedMatMulGradB"])
def test_products_of_8_bit_rows_are_those_of_the_numbers_that_these_are(name):
    rng, rows, to = np.random.default_rng(0), np.array([3, 0, 5]), cast_number(BFloat16())
    x, w, dy = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((2, 8, 4), (3, 4, 6), (2, 8, 6)))
    given = {"": [x, w, rows], "A": [w, rows, dy], "B": [x, rows, dy]}[name.partition("Grad")[2]]
    eight = [a if a is rows else a.astype(Float8E5M2().np if a is dy else Float8E4M3FN().np) for a in given]
    (expected,) = compute(name, Attributes({}), None, given, 1)
    scaled = Attributes({"to": to, "scale": 4.0})
    (made,) = compute(f"Float8{name}", scaled, None, eight, 1)
    np.testing.assert_array_equal(made.astype(np.float32), expected.astype(made.dtype).astype(np.float32) / 4)


@pytest.mark.parametrize("text", ["dp=2,ep=2", "dp=4,ep=2,microbatches=2,zero=1", "dp=2,ep=2,remat=full"])
def test_ranks_with_experts_compute_8_bits_to_their_tolerance(text):
    plan = Plan.parse(text)
    joint = differentiate(decoder(SENT, BATCH, SEQ, Float32()), SGD(), precision=precision_named("fp8"))
    inputs = rounded(joint, distinct_inputs(joint))
    expected = SequentialExecutor().compute(joint, inputs)
    program = parallelize(joint, plan, topology_of(plan.devices))
    made = SequentialExecutor().compute(program.to_function(), inputs)
    assert float(made[0][0]) == pytest.approx(float(expected[0]), rel=2e-2)
    assert_all_readers_agree(program)
