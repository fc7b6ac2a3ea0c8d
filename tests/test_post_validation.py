"""Updates that wait for no other stage: what they compute, how soon steps follow, where that is refused."""

import pytest
from training_models import computed_over_ranks, small_gpt, tied
from truth_rows import GPT as ROW

import distsim
from distsim.errors import PlanError
from distsim.ir import all_ops
from distsim.plan import Plan
from distsim.plan_search.space import ModelTraits, PlanSpace, parse_sets
from distsim.transforms import Adam, differentiate
from distsim.truth.case import case_of

GPT = "gpt:layers=16,hidden=4096,heads=32,seq=2048,vocab=128"


def simulated(schedule, clip=1.0, more="", **options):
    """The step of a small model of which each op is a kernel."""
    settings = {"optimizer": "sgd", "kernels": "ops", "clip": clip} | options
    plan = f"pp=4,microbatches=8,stages=layers,schedule={schedule}{more}"
    return distsim.simulate(GPT, "dgx-h100", plan, 8, **settings)


@pytest.mark.parametrize("model", [small_gpt, tied])
@pytest.mark.parametrize(
    "plan",
    [
        "pp=2,microbatches=2",
        "dp=2,tp=2,pp=2,microbatches=2,schedule=zb_h2",
        "dp=2,pp=2,microbatches=4,zero=1,schedule=zb_v,chunks=2",
        "dp=2,tp=2,pp=2,microbatches=4,zero=2,remat=full",
    ],
)
def test_what_is_not_clipped_is_updated_as_ever(model, plan):
    joint = differentiate(model(batch=8), Adam(), clip=1e6)
    plan = Plan.parse(f"{plan},post_validation=on")
    program = computed_over_ranks(joint, plan)
    ops = list(all_ops(program.to_function(steady=True)))
    factors = sum(op.op_type == "GradientFactor" for op in ops)
    assert factors == plan.num_stages or model is tied  # a stage may have no parameter that it updates
    sent = [op for op in ops if op.op_type == "Send"]
    assert not [op for op in sent if op.inputs[0].name in ("squares", "factor")]


@pytest.mark.parametrize("schedule", ["zb_h2", "zb_v,chunks=2"])
def test_steps_follow_after_what_a_rank_does_with_its_update(schedule):
    bare, held = simulated(schedule, clip=0), simulated(schedule)
    free = simulated(schedule, more=",post_validation=on")
    clipping = {"SquareSum", "Add", "GradientFactor", "ScaleGradient"}
    own = [
        sum(event["dur"] for event in free.trace if event["device"] == device and event["name"] in clipping)
        - sum(event["dur"] for event in bare.trace if event["device"] == device and event["name"] in clipping)
        for device in free.timestamps
    ]
    assert min(own) <= free.step_period - bare.step_period <= max(own) + 1e-9
    assert free.step_period < held.step_period == pytest.approx(held.step_time, rel=2e-3)


def test_a_step_whose_first_rank_ends_last_gains_nothing():
    held, free = simulated("1f1b"), simulated("1f1b", more=",post_validation=on")
    assert free.step_period == pytest.approx(held.step_period, rel=0.01)


def test_a_scale_of_the_loss_is_waited_for_as_a_norm_is():
    asked = {"clip": 0, "precision": "mixed_fp16"}
    held, free = simulated("zb_h2", **asked), simulated("zb_h2", more=",post_validation=on", **asked)
    assert free.step_period < held.step_period


def test_where_nothing_is_waited_for_it_is_refused():
    with pytest.raises(PlanError, match=r"post_validation=on.* pp=1 has no others"):
        Plan(dp=2, post_validation="on")
    with pytest.raises(PlanError, match=r"post_validation=.maybe. is not one of off, on"):
        Plan(pp=2, post_validation="maybe")
    with pytest.raises(PlanError, match="neither clipped nor is the loss scaled"):
        simulated("zb_h2", clip=0, more=",post_validation=on")
    with pytest.raises(PlanError, match="without a flush no step of pipedream"):
        simulated("pipedream", clip=0, more=",post_validation=on")


def test_a_search_has_it_where_there_is_a_pipeline():
    traits, sets = ModelTraits(8, layers=16), parse_sets("tp=1,schedule=zb_h2,post_validation=*")
    plans = PlanSpace(traits, 4, 4, sets).plans
    found = {(plan.pp, plan.post_validation) for plan in plans}
    assert found == {(1, "off"), (2, "off"), (2, "on"), (4, "off"), (4, "on")}


@pytest.mark.parametrize(
    ("framework", "schedule", "found"),
    [
        ("Megatron-LM fork (zero-bubble)", "zero-bubble ZB-2p (auto-scheduled)", "on"),
        ("Megatron-LM fork (zero-bubble)", "1f1b", "off"),
        ("Megatron-LM", "zero-bubble ZB-H1", "off"),
    ],
)
def test_rows_of_the_fork_have_it_under_its_schedules(framework, schedule, found):
    row = ROW | {"framework": framework, "schedule": schedule}
    case = case_of(row)
    assert case.plan.post_validation == found and ("post_validation on" in case.assumed) == (found == "on")
