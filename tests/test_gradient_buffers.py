"""Buffers that hold gradients all step: what is in them, what is beside them, and what is sent of norms."""

import pytest
from training_models import laid_out, mesh_of

import distsim
from distsim.models import gpt
from distsim.program.program import Program
from distsim.schedule import schedule
from distsim.simulation.memory.program_memory import program_memory
from distsim.transforms import Adam, differentiate
from distsim.transforms.autodiff.precision import POLICIES

LLAMA = "llama:layers=4,hidden=64,heads=4,kv_heads=4,ffn=128,seq=32,vocab=64"


def heavy_gpt(precision: str, pp: int, microbatches: int, fields: str, clip: float | None = None) -> Program:
    """A GPT whose weights take more than its activations, over two ranks of data and stages."""
    joint = differentiate(gpt(4, 64, 4, 4, 8, 16), Adam(), clip=clip, precision=POLICIES[precision])
    return laid_out(joint, mesh_of(2, 1, pp), schedule("1f1b", pp, microbatches), zero=fields)


@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("pp", [1, 2])
def test_gradients_of_one_microbatch_are_in_their_buffers_alone(overlap, clip, pp):
    """They are scattered from there, also where backward does so, and where the update waits for a norm."""
    fields = f"zero=1,bucket=megatron,overlap_grads={overlap}"
    for use in program_memory(heavy_gpt("mixed", pp, 1, fields, clip)).ranks:
        weights = use.by_kind["parameters"] / 2
        assert use.by_kind["gradients"] == 4 * weights
        assert use.peak < (2 + 4 + 6 + 2) * weights  # 12 a weight, state halved, and less than 2 of others


@pytest.mark.parametrize("bucket", ["torch", "megatron"])
@pytest.mark.parametrize("pp", [1, 2])
def test_copies_for_the_update_are_beside_the_buffers(bucket, pp):
    """20 bytes a weight with sums in float16: 2, 2, 12, and 4 of copies (Megatron-LM's dist_optimizer.md)."""
    for use in program_memory(heavy_gpt("mixed_fp16", pp, 2, f"zero=0,bucket={bucket}", 1.0)).ranks:
        assert use.peak == pytest.approx(20 * use.by_kind["parameters"] / 2, rel=0.01)


@pytest.mark.parametrize(("precision", "each"), [("fp32", 8), ("mixed", 6), ("mixed_bf16_grads", 4)])
def test_nanotron_has_them_in_buckets_of_torch_too(precision, each):
    program = heavy_gpt(precision, 1, 2, "zero=0,bucket=nanotron")
    (use,) = program_memory(program).ranks
    assert use.by_kind["gradients"] == each * use.by_kind["parameters"] / (4 if precision == "fp32" else 2)


@pytest.mark.parametrize("zero", [0, 1])
def test_norms_are_summed_over_tp_once_a_stage_where_they_are(zero):
    """As Megatron-LM's finalize_model_grads does: two of each of two layers, and one before the head; nothing
    of them goes to another stage."""
    plan = f"dp=2,tp=2,pp=2,microbatches=4,sp=on,zero={zero}"
    counts = distsim.simulate(LLAMA, "dgx-h100", plan, 16, stack="megatron").timeline.op_runs
    sums = [
        (rank, len(op.inputs), times)
        for op, rank, times, _ in counts
        if op.op_type == "MPIAllreduce" and op.attributes["axis"] == "tp" and op.inputs[0].type.rank == 1
    ]
    assert sorted(sums) == [(0, 4, 1), (1, 5, 1)]
    assert {op.inputs[0].type.rank for op, *_ in counts if op.op_type == "Send"} == {0, 3}


def test_a_table_of_positions_is_whole_beside_sequence_parallelism():
    """On each rank of tp, as Megatron-LM has it; what it is added to is scattered after that."""
    joint, order = differentiate(gpt(2, 64, 4, 4, 16, 32), Adam()), schedule("1f1b", 1, 1)
    off, on = (
        program_memory(laid_out(joint, mesh_of(1, 2, 1), order, sp=sp)).ranks[0] for sp in ("off", "on")
    )
    assert (off.by_kind["parameters"], off.by_kind["state"]) == (
        on.by_kind["parameters"],
        on.by_kind["state"],
    )
