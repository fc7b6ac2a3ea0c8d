"""Experts in 8 bits: the products, the bytes that are sent for them, the same step whatever the plan."""

from collections import Counter
from dataclasses import replace

import pytest
from expert_models import BATCH, SENT, SEQ, distinct_inputs
from precision_models import rounded
from training_models import assert_all_readers_agree, topology_of

from distsim.compose import parallelize
from distsim.executor import SequentialExecutor
from distsim.interpret import count_flops
from distsim.ir import BFloat16, Float8E4M3FN, Float8E5M2, Float32, all_ops
from distsim.models.decoder import decoder
from distsim.plan import Plan
from distsim.transforms import SGD, differentiate, precision_named


def test_experts_multiply_in_8_bits_and_rows_are_sent_to_them_so():
    """Operands and results as of linear layers, by Transformer Engine's GroupedLinear; of T k h numbers a
    rank sends a byte each to the experts, in both passes, and two each back (DeepSeek-V3, section 3.3)."""
    model = decoder(replace(SENT, experts=replace(SENT.experts, dispatcher="deepep")), BATCH, SEQ, Float32())
    joint = differentiate(model, SGD(), precision=precision_named("fp8"))
    whole = differentiate(model, SGD(), precision=precision_named("fp8:linear_ops=MatMul+Gemm"))
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
