"""sp=dtensor: rows copied where they are gathered and scattered, gathered once a pass and before casts."""

from collections import Counter

import pytest
from training_models import (
    computed_over_ranks,
    small_gpt,
    small_llama,
    topology_of,
)

from distsim.compose import parallelize
from distsim.errors import PlanError
from distsim.ir import Float, all_ops
from distsim.models import llama
from distsim.ops import work
from distsim.ops.operator import signature_of
from distsim.plan import Plan
from distsim.transforms import Adam, differentiate, precision_named
from distsim.transforms.kernels.policies import KERNELS


def ops_of(joint, text, kernels="eager"):
    plan = Plan.parse(text)
    program = parallelize(joint, plan, topology_of(plan.devices), kernels=KERNELS[kernels])
    return [
        op
        for op in all_ops(program.to_function(steady=True))
        if op.attributes.get("axis") == "tp" or op.op_type.startswith("Copy")
    ]


def small_in_float32():
    return llama(layers=2, hidden=8, heads=4, kv_heads=2, seq=8, batch=4, vocab=16, ffn=16, dtype=Float())


@pytest.mark.parametrize(
    ("build", "text", "kernels"),
    [
        (small_llama, "tp=4,tp_overlap=off", "eager"),
        (small_llama, "dp=2,tp=2,microbatches=2,remat=full,tp_overlap=split", "compiled"),
        (small_gpt, "tp=2,pp=2,microbatches=4,schedule=zb_h1,tp_overlap=off", "compiled"),
        (small_gpt, "dp=2,tp=2,zero=3,remat=ops:MatMul,tp_overlap=split", "eager"),
    ],
)
def test_every_rank_computes_the_same_step(build, text, kernels):
    joint = differentiate(build(batch=4, seq=8), Adam())
    program = computed_over_ranks(joint, Plan.parse(f"{text},sp=dtensor"), kernels)
    assert "CopyOut" in {op.op_type for op in all_ops(program.to_function(steady=True))}


def test_each_gather_and_scatter_has_a_copy_that_reads_and_writes_all_rows():
    joint = differentiate(small_llama(batch=4, seq=8), Adam())
    plain, copied = (ops_of(joint, f"tp=2,tp_overlap=off,sp={sp}") for sp in ("on", "dtensor"))
    counted = Counter(op.op_type for op in copied)
    moved = [op for op in copied if op.op_type in ("MPIAllgather", "MPIReduceScatter")]
    assert all(op.attributes["dim"] == 1 for op in moved)
    assert counted["CopyOut"] == counted["MPIAllgather"] == sum(op.op_type == "MPIAllgather" for op in plain)
    assert counted["CopyIn"] == counted["MPIReduceScatter"] > 0
    for op in copied:
        if op.op_type in ("CopyOut", "CopyIn"):
            demand = work(signature_of(op))
            rows = 4 * 8 * 16 * 8  # of 16 numbers in float64
            assert (demand.bytes_read, demand.bytes_written) == (rows, rows)


def test_a_pass_that_computes_again_gathers_no_row_twice():
    """Of a layer's rows, before attention and before its feed-forward: computed again, they are at hand."""
    joint = differentiate(small_llama(layers=3, batch=4, seq=8), Adam())
    gathers = {
        sp: sum(
            op.op_type == "MPIAllgather" for op in ops_of(joint, f"tp=2,tp_overlap=off,remat=full,sp={sp}")
        )
        for sp in ("on", "dtensor")
    }
    assert gathers["on"] - gathers["dtensor"] == 3 * 2


def test_operands_scaled_by_rows_are_gathered_before_they_are_cast():
    sent = {}
    for scaling in ("rowwise", "tensorwise"):
        policy = precision_named(f"fp8:scaling={scaling}")
        joint = differentiate(small_in_float32(), Adam(), precision=policy)
        for sp in ("on", "dtensor"):
            ops = ops_of(joint, f"tp=2,tp_overlap=off,remat=full,sp={sp}")
            sent[scaling, sp] = {
                op.inputs[0].type.dtype.itemsize for op in ops if op.op_type == "MPIAllgather"
            }
    assert 1 not in sent["rowwise", "dtensor"]
    assert 1 in sent["tensorwise", "dtensor"] and 1 in sent["rowwise", "on"] and 1 in sent["tensorwise", "on"]


def test_products_that_wait_for_a_cast_do_not_run_in_chunks():
    joint = differentiate(small_in_float32(), Adam(), precision=precision_named("fp8:scaling=rowwise"))
    rings = {
        sp: sum(op.op_type == "MPIShift" for op in ops_of(joint, f"tp=2,tp_overlap=split,sp={sp},remat=full"))
        for sp in ("on", "dtensor")
    }
    assert rings["on"] > rings["dtensor"]


def test_what_dtensor_does_not_do_is_refused():
    with pytest.raises(PlanError, match="tp_overlap=on .* use tp_overlap=off or split, or sp=on"):
        Plan.parse("tp=2,sp=dtensor")
    with pytest.raises(PlanError, match="sp=dtensor divides activations over tp ranks, and tp=1"):
        Plan.parse("sp=dtensor,tp_overlap=on")
