"""Experts in 8 bits: the products, the bytes that are sent for them, the same step whatever the plan."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from expert_models import BATCH, SENT, SEQ, distinct_inputs, sent
from precision_models import rounded
from training_models import assemble, assert_all_readers_agree, random_inputs, topology_of

from distsim.compose import parallelize
from distsim.errors import TypeRuleError
from distsim.executor import SequentialExecutor
from distsim.interpret import count_flops
from distsim.ir import (
    Attributes,
    BFloat16,
    Float8E4M3FN,
    Float8E5M2,
    Float32,
    Function,
    Int64,
    Tensor,
    all_ops,
)
from distsim.ir.registry import output_types
from distsim.models.decoder import decoder
from distsim.models.decoder_sizes import Positions
from distsim.models.mixture import Mixture
from distsim.ops import float8
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


def step_of(plan: Plan, precision: str, batch: int) -> Function:
    """A step whose tokens are in groups as ranks have parts of sequences."""
    experts = Mixture(4, 2, 16, groups=plan.sequence_parts)
    sizes = replace(SENT, experts=experts, positions=Positions(2 * SEQ))
    model = decoder(sizes, batch, 2 * SEQ, Float32())
    return differentiate(model, None, precision=precision_named(precision))


@pytest.mark.parametrize(
    ("text", "scaling"),
    [
        ("ep=2,cp=2,cp_kind=ring,tp=2,sp=on", "delayed"),  # rows of 8 bits are put in order
        ("ep=2,cp=4,cp_kind=ring,tp=2,sp=on", "rowwise"),
        ("dp=2,ep=4,cp=2,cp_kind=ring,tp=2,sp=on", "tensorwise"),  # scaled where they are sent
        ("dp=2,ep=4,tp=2,etp=1,sp=on", "tensorwise"),
        ("dp=2,tp=4,ep=4,etp=2,sp=on", "tensorwise"),
        ("dp=4,ep=4", "tensorwise"),
    ],
)
def test_ranks_of_sequences_with_experts_compute_the_same_gradients_in_8_bits(text, scaling, monkeypatch):
    """All but the operands in float32, by scales that are powers of two: whatever part a rank scales, it has
    the same digits, but for few that lie in the middle of two."""
    exact = float8._factor
    monkeypatch.setattr(float8, "_factor", lambda *given: np.exp2(np.floor(np.log2(exact(*given)))))
    plan = Plan.parse(text)
    joint = step_of(plan, f"fp32:linear=float8e4m3fn,scaling={scaling}", 4)
    inputs = rounded(joint, [a if a.dtype.kind == "i" else 0.3 * a for a in random_inputs(joint, 2)])
    expected = SequentialExecutor().compute(joint, inputs)
    program = parallelize(joint, plan, topology_of(plan.devices))
    made = assemble(program, SequentialExecutor().compute(program.to_function(), inputs))
    for placed, array in zip(made, expected, strict=True):
        assert np.linalg.norm(placed.array - array) <= 0.03 * np.linalg.norm(array), placed.name
    assert_all_readers_agree(program)


@pytest.mark.parametrize(
    ("text", "axis"), [("dp=2,ep=2", "ep"), ("dp=4,ep=4", "ep"), ("dp=2,ep=4,tp=2,etp=1,sp=on", "ep_dp")]
)
def test_of_tensorwise_scaling_rows_do_not_leave_their_experts_to_be_scaled(text, axis):
    """Transformer Engine's GroupedLinear has a quantizer for each expert, none of which asks other ranks: a
    rank takes the largest elements of its own rows. Those of what it sends go with it, four bytes a sample:
    in each of two layers of what experts read, and of the gradient of what they make."""
    plan = Plan.parse(text)
    found, plain = (
        sent(parallelize(step_of(plan, f"fp8:scaling={scaling}", BATCH), plan, topology_of(plan.devices)))
        for scaling in ("tensorwise", "delayed")
    )
    of_sequences = ("all_reduce", "tp", 4 * BATCH // plan.dp)  # what attention reads, say
    more = {key: n for key, n in (found - plain).items() if key != of_sequences}
    assert more == {("all_gather", axis, 4 * BATCH): 2 * 2}
    assert not (plain - found).keys() & {key for key in plain if key[0] != "all_reduce"}


def test_ranks_of_tp_agree_once_on_a_scale_whatever_part_of_them_an_expert_is_on():
    plans = [Plan.parse(f"dp=2,tp=4,sp=on,{text}") for text in ("ep=2", "ep=4,etp=2")]
    found = [
        sent(parallelize(step_of(plan, "fp8:scaling=tensorwise", BATCH), plan, topology_of(plan.devices)))
        for plan in plans
    ]
    agreed = "all_reduce", "tp", 4 * BATCH // 2
    assert found[0][agreed] == found[1][agreed] > 0


def test_an_error_about_rows_of_many_experts_is_short():
    rows = Tensor(BFloat16(), (2, 500, 8))
    sizes = (128,) * 128
    for op_type, inputs in (
        ("RowCounts", (rows,)),
        ("GroupedMatMul", (rows, Tensor(BFloat16(), (128, 8, 4)), Tensor(Int64(), (128,)))),
    ):
        with pytest.raises(TypeRuleError, match=r"128, \.\.\., 128: 128 that sum to 16384") as caught:
            output_types(op_type, Attributes({"sizes": sizes}), inputs, (), None)
        assert len(str(caught.value)) < 200
