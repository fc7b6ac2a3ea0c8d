"""Rows that experts multiply by their gates, as one kernel each way: what it saves, reads and writes."""

from dataclasses import replace

import pytest
from expert_models import BATCH, MIXTRAL, PADDED, SEQ, SKEWED, computed_over_ranks
from training_models import F64

from distsim import simulate
from distsim.ir import Op, all_ops
from distsim.models.decoder import decoder
from distsim.ops import op_label, signature_of, work
from distsim.plan import Plan
from distsim.transforms import Adam, differentiate

H, F, LAYERS, RANKS = 512, 1024, 2, 4
ROWS = 2 * 1024  # of two choices each of a rank's sequence of as many tokens
MODEL = f"moe:layers={LAYERS},hidden={H},heads=8,seq=1024,vocab=64,ffn={F},experts=8,top_k=2"


def saved(weighted: str, remat: str = "none", kernels: str = "fused") -> int:
    """The bytes that one layer more has its experts save."""
    plan, found = f"dp={RANKS},ep={RANKS},remat={remat}", list[int]()
    for layers in (LAYERS, LAYERS + 1):
        model = f"{MODEL},weighted={weighted}".replace(f"layers={LAYERS}", f"layers={layers}")
        step = simulate(model, "dgx-a100", plan, batch=RANKS, stack="megatron", kernels=kernels)
        found.append(step.saved_by_module(next(iter(step.memory)))["h.experts"])
    return found[1] - found[0]


def test_a_row_saves_what_its_expert_reads_and_what_two_products_do():
    """h + 3f numbers (Megatron-LM: input, output of fc1, input of fc2), beside what the router makes; h more
    to weigh what comes back. Eager kernels save what is activated, and gated, too.
    """
    router = saved("experts") - 2 * ROWS * (H + 3 * F)
    assert 0 < router < 2 * ROWS * 64
    assert saved("tokens") - router == 2 * ROWS * (2 * H + 3 * F)
    assert saved("experts", "parts:activations") - router == 2 * ROWS * (H + 2 * F)
    assert saved("experts", kernels="eager") - router == pytest.approx(2 * ROWS * (H + 5 * F), abs=512)


@pytest.mark.parametrize("option", ["", ",weighted=experts"])
def test_one_kernel_weighs_gated_rows_and_one_makes_their_gradients(option):
    """Forward reads two numbers and writes one of each element; backward reads three and writes two."""
    step = simulate(MODEL + option, "dgx-a100", f"dp={RANKS},ep={RANKS}", batch=RANKS, stack="megatron")
    blocks = {row.kind: row.function for row in step.simulated.table().blocks}

    def moved(op: Op) -> tuple[float, float]:
        demand = work(signature_of(op))
        return demand.bytes_read, demand.bytes_written

    element, gates = 2 * ROWS * F, 2 * ROWS
    forward = [op for op in all_ops(blocks["F"]) if "Swish" in op_label(op)]
    backward = [op for op in all_ops(blocks["B"]) if "Swish" in op_label(op)]
    assert [op_label(op) for op in forward] == ["Swish+Mul+Mul"] * LAYERS
    assert [op_label(op) for op in backward] == ["Mul+Swish+ReduceSum+SwishGrad"] * LAYERS
    assert {moved(op) for op in forward} == {(2 * element + gates, element)}
    assert {moved(op) for op in backward} == {(3 * element + gates, 2 * element + gates)}


def test_rows_that_come_back_are_weighed_by_kernels_of_their_own():
    """As Megatron-LM's until core 0.11: a product forward; two, and a sum, backward."""
    model = f"{MODEL},weighted=tokens"
    step = simulate(model, "dgx-a100", f"dp={RANKS},ep={RANKS}", batch=RANKS, stack="megatron")
    blocks = {row.kind: row.function for row in step.simulated.table().blocks}
    wide = (1, ROWS, H)
    own = {
        kind: [op.op_type for op in all_ops(blocks[kind]) if op.inputs and shape(op) == wide] for kind in "FB"
    }
    assert (own["F"].count("Mul"), own["B"].count("Mul")) == (LAYERS, 2 * LAYERS)
    assert own["B"].count("ReduceSum") == LAYERS


def shape(op: Op) -> tuple[int, ...]:
    return getattr(op.inputs[0].type, "shape", ())


@pytest.mark.parametrize(
    ("text", "loads"),
    [
        ("dp=4,ep=4,tp=2,sp=on,zero=1", PADDED),
        ("dp=2,ep=2,pp=2,microbatches=2,remat=parts:activations", SKEWED),
        ("dp=2,ep=2,remat=full", SKEWED),
    ],
)
def test_every_rank_computes_the_same_step(text, loads):
    experts = replace(MIXTRAL.experts, weighted="experts", groups=2)
    joint = differentiate(decoder(replace(MIXTRAL, experts=experts), BATCH, SEQ, F64, loads), Adam())
    computed_over_ranks(joint, Plan.parse(text), "fused")


def test_stacks_say_where_rows_are_weighed():
    """Megatron-LM's in the experts; a model's own word goes before it."""

    def rows(option: str, stack: str) -> bool:
        step = simulate(MODEL + option, "dgx-a100", "dp=2", batch=2, stack=stack, kernels="fused").simulated
        functions = [row.function for row in step.table().blocks if row.kind == "F"]
        return any("Swish+Mul+Mul" in op_label(op) for op in all_ops(functions[0]))

    assert rows("", "megatron") and rows(",weighted=experts", "torchtitan")
    assert not rows(",weighted=tokens", "megatron") and not rows("", "torchtitan")
