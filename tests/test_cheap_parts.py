"""Parts of a layer that run again: norms, activations, up-projections of latent attention, core attention."""

from collections import Counter
from dataclasses import replace

import pytest
from expert_models import BATCH, DEEPSEEK, SEQ, SKEWED, computed_over_ranks
from training_models import F64, small_llama, topology_of

from distsim.compose import parallelize
from distsim.errors import PlanError
from distsim.ir import all_ops
from distsim.models.decoder import decoder
from distsim.models.parts.attention import Latent
from distsim.plan import Plan
from distsim.program.program import Program
from distsim.transforms import SGD, Adam, differentiate

LATENT = replace(DEEPSEEK, layers=3, attention=Latent(4, 4, 4, 4, 2, 4))


def again(program: Program, plain: Program) -> Counter[str]:
    """The ops that one program runs more often than another."""
    own, other = (Counter(op.op_type for op in all_ops(p.to_function(steady=True))) for p in (program, plain))
    return own - other


@pytest.mark.parametrize(
    "text",
    [
        "remat=parts:norms+up_projections",
        "dp=2,ep=2,pp=2,microbatches=2,remat=parts:norms+activations+up_projections+attention",
        "dp=2,tp=2,sp=on,zero=3,remat=parts:up_projections+activations",
    ],
)
def test_every_rank_computes_the_same_step(text):
    groups = 2 if "sp=on" in text else 1
    sizes = replace(LATENT, experts=replace(LATENT.experts, groups=groups))
    joint = differentiate(decoder(sizes, BATCH, SEQ, F64, SKEWED), Adam())
    computed_over_ranks(joint, Plan.parse(text))


def test_what_runs_again():
    """Of three layers: two products from latents, three activations of experts and feed-forwards and one of
    shared experts each, four norms, one of them behind the layers."""
    joint = differentiate(decoder(LATENT, BATCH, SEQ, F64, SKEWED), SGD())
    plain, *ways = (
        parallelize(joint, Plan(remat=remat), topology_of(1))
        for remat in ("none", "parts:up_projections", "parts:norms", "parts:activations", "parts:attention")
    )
    ups, norms, activations, attention = (again(program, plain) for program in ways)
    assert (ups["MatMul"], ups["Concat"] > 0, ups["RMSNormalization"], ups["Attention"]) == (6, True, 0, 0)
    assert norms == {"RMSNormalization": 13, "OptimizationBarrier": 13, "Constant": 2}
    assert (activations["Swish"], activations["Mul"], activations["MatMul"]) == (5, 5, 0)
    assert (attention["Attention"], attention["MatMul"]) == (3, 0)


def test_parts_that_are_none():
    joint = differentiate(small_llama(), SGD())
    with pytest.raises(PlanError, match="remat=parts:up_projections: llama_training has no up projections"):
        parallelize(joint, Plan.parse("remat=parts:up_projections"), topology_of(1))
    with pytest.raises(PlanError, match="'norm' is no part; choose from norms, activations"):
        Plan.parse("remat=parts:norm")
    with pytest.raises(PlanError, match="names norms twice"):
        Plan.parse("remat=parts:norms+norms")
