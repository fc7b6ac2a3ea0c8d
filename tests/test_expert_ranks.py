"""Which ranks have experts each: Megatron-LM's, for every ep that divides them; and what is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_models import topology_of

from distsim.compose import parallelize
from distsim.errors import PlanError
from distsim.hardware.plan_mesh import plan_mesh, rank_axes
from distsim.hardware.rank_axes import RankAxes
from distsim.importer import load_model
from distsim.plan import Plan
from distsim.plan.rank_layout import ExpertRanks
from distsim.transforms import differentiate


def test_ranks_of_experts_lie_next_to_each_other_within_dp():
    axes = RankAxes.of(dp=8, tp=2, cp=2, ep=ExpertRanks(dp=4))
    assert axes.sizes == {"edp": 2, "ep": 4, "cp": 2, "tp": 2}
    assert axes.views == {
        "dp": ("edp", "ep"),
        "edp+cp": ("edp", "cp"),
        "ep+cp": ("ep", "cp"),
        "dp+cp": ("edp", "ep", "cp"),
    }


@pytest.mark.parametrize(
    ("text", "own"),
    [
        ("dp=8,tp=2,cp=2,pp=2,ep=4", (2, 2, 1)),
        ("dp=4,tp=2,cp=2,pp=2,ep=2", (1, 2, 1)),
        ("dp=4,tp=2,cp=2,pp=2,ep=8,etp=1,sp=on", (2, 2, 2)),
        ("dp=2,tp=4,cp=2,ep=8,etp=1,sp=on", (1, 2, 4)),
        ("dp=8,tp=4,ep=4,etp=1,sp=on", (1, 1, 4)),
        ("dp=2,cp=2,tp=2,ep=4", (2, 2, 1)),
        ("dp=2,cp=4,tp=2,pp=2,ep=2", (1, 2, 1)),
        ("cp=8,tp=2,ep=4,cp_kind=usp:2", (1, 4, 1)),
        ("dp=4,tp=4,pp=2,ep=4,etp=2,sp=on", (2, 1, 2)),
        ("dp=2,cp=4,tp=4,ep=4,etp=2,sp=on", (1, 2, 2)),
    ],
)
def test_ranks_of_experts_are_those_of_megatron(text, own):
    """Its expert_decoder_rank_generator: ranks as (pp, edp, ep, etp), the last changes fastest."""
    plan = Plan.parse(text)
    assert plan.expert_ranks == own
    etp = plan.etp or plan.tp
    ranks = np.arange(plan.devices).reshape(plan.pp, -1, plan.ep, etp)
    mesh = plan_mesh(plan, topology_of(plan.devices))
    found = {tuple([device.id for device in group]) for group in mesh.groups("ep")}
    assert found == {tuple(group) for group in ranks.swapaxes(2, 3).reshape(-1, plan.ep).tolist()}


def test_ranks_of_dp_have_experts_where_they_change_faster_or_those_of_cp_do_not_divide_them():
    assert Plan.parse("dp=4,cp=2,ep=2,order=tp-ep-dp-cp-pp").expert_ranks == (2, 1, 1)
    assert Plan.parse("dp=4,cp=3,ep=2").expert_ranks == (2, 1, 1)
    assert Plan.parse("dp=3,cp=4,ep=6").expert_ranks == (3, 2, 1)
    assert Plan.parse("dp=2,cp=2,ep=4,order=tp-ep-dp-cp-pp").expert_ranks == (2, 2, 1)


@given(
    *[st.sampled_from((1, 2, 3, 4, 6, 8)) for _ in range(3)],
    st.sampled_from(("tp-cp-ep-dp-pp", "ep-dp-pp-cp-tp", "cp-tp-dp-ep-pp")),
)
def test_every_ep_that_divides_the_ranks_of_dp_and_cp_has_a_place(dp, cp, ep, order):
    """And divides them as often as the plan says: a mesh of them has groups of so many ranks."""
    if dp * cp % ep:
        with pytest.raises(PlanError, match=f"ep={ep} does not divide dp={dp}"):
            Plan(dp=dp, cp=cp, ep=ep, order=order)
        return
    plan = Plan(dp=dp, cp=cp, ep=ep, order=order)
    assert plan.expert_ranks.ranks == ep
    axes = rank_axes(plan)
    mesh = axes.mesh(topology_of(dp * cp).devices)
    assert ep == 1 or {len(group) for group in mesh.groups("ep")} == {ep}
    assert (mesh.axis_size("dp"), cp == 1 or mesh.axis_size("cp") == cp) == (dp, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp=2,cp=4,ep=3", "ep=3 does not divide dp=2 times cp=4, .*choose one of 1, 2, 4, 8$"),
        (
            "dp=12,ep=8",
            "ep=8 does not divide dp=12, .*choose one of 1, 2, 4$",
        ),
        ("dp=2,tp=4,ep=3,etp=2,sp=on", "tp have 2 different .*ep that is a multiple of 2, or etp=4"),
        ("dp=2,tp=4,ep=8,etp=2,sp=on", "dp=2, with 2 of tp=4, .*choose one of 2, 4$"),
        ("tp=4,ep=2,etp=3,sp=on", "etp=3 does not divide tp=4, .*choose one of 1, 2, 4"),
        ("tp=4,ep=2,etp=2", "etp=2 with tp=4: .*use sp=on, as Megatron-LM does, or etp=4"),
        ("dp=2,cp=12,ep=4,cp_kind=usp:6", "over 4 neighbouring ranks of cp=12: .*a U of 1, 2, 4, 12"),
    ],
)
def test_ranks_that_no_experts_can_be_divided_over_are_refused(text, message):
    with pytest.raises(PlanError, match=message):
        Plan.parse(text)


def test_ranks_that_do_not_divide_experts_are_given_those_that_divide_both():
    small = "mixtral-8x7b:layers=1,hidden=16,heads=4,kv_heads=2,vocab=16,seq=8,experts=4,expert_ffn=8"
    joint = differentiate(load_model(small, 6), None)
    with pytest.raises(PlanError, match="ep=3 does not divide the 4 experts of .*choose one of 1, 2$"):
        parallelize(joint, Plan(dp=6, ep=3), topology_of(6))
