"""The best plans of a space: those of trying every one of them, with less work."""

import random
from functools import cache

import pytest
from decoder_models import small
from training_models import small_gpt, topology_of

from distsim.errors import PlanError, SimulationError
from distsim.models import mlp
from distsim.plan import Plan
from distsim.plan_search import SearchRun, describe, parse_sets, search
from distsim.plan_search.evaluation import PlanEvaluator, SearchProblem, Standing
from distsim.plan_search.run import FixedModel
from distsim.plan_search.space import PlanSpace
from distsim.transforms import SGD, Adam, add_loss, differentiate
from distsim.transforms.kernels.policies import KERNELS


@cache
def model(name):
    if name == "mlp":
        return differentiate(mlp(layers=4, width=256, batch=16), Adam())
    if name == "gpt":
        return differentiate(small_gpt(layers=4, batch=16), SGD())
    return differentiate(add_loss(small(name, batch=8)), Adam())


SETS = {
    "mlp": "tp=1|2,remat=none|full,zero=*,schedule=1f1b|gpipe",
    "gpt": "tp=1|2,remat=none|full,pp=1|2|4,zero=0|1,schedule=1f1b|zb_h1|interleaved,microbatch_size=1|4",
    "llama": "tp=1|2,cp=1|2,pp=1|2,sp=*,remat=none|full,zero=0|3,microbatch_size=1|2",
    "mixtral": "tp=1|2,pp=1|2,ep=1|2,zero=0|1,sp=off,remat=none,microbatch_size=1|2",
}


def random_problem(seed):
    rng = random.Random(seed)
    name = rng.choice([*SETS])
    figures = {
        "throughput": 10 ** rng.uniform(8, 11),
        "dram_bandwidth": 10 ** rng.uniform(8, 11),
        "kernel_launch_overhead": rng.choice([0.0, 1e-6]),
    }
    most = topology_of(4, gbps=10 ** rng.uniform(-1, 2), **figures)
    problem = SearchProblem(FixedModel(model(name)), most, KERNELS[rng.choice(["ops", "eager"])], "time", 10)
    plans = list(PlanSpace.of(model(name), most, parse_sets(SETS[name])).plans)
    plans = sorted(rng.sample(plans, min(len(plans), 8)), key=str)
    evaluator = PlanEvaluator(problem)
    trials = [evaluator.trial(plan) for plan in plans]
    peaks = sorted(trial.peak for trial in trials if trial.simulated)
    # So much memory that some plans fit, and others do not.
    memory = float(rng.choice(peaks)) if rng.random() < 0.7 else float("inf")
    topology = topology_of(4, gbps=most.link(*most.devices[:2]).bandwidth * 8e-9, memory=memory, **figures)
    top = rng.choice([1, 3, 5])
    objective = rng.choice(["time", "time", "memory"])
    return SearchProblem(problem.model, topology, problem.kernels, objective, top), plans


@pytest.mark.parametrize("seed", range(30))
def test_the_best_are_those_of_trying_all(seed):
    problem, plans = random_problem(seed)
    evaluator = PlanEvaluator(problem)
    every = [evaluator.trial(plan) for plan in plans]
    found = SearchRun(problem, tuple(plans)).run()
    fit = sorted([trial for trial in every if trial.fits], key=lambda t: (evaluator.objective(t), t.text))
    best = sorted(found.winners, key=lambda t: (evaluator.objective(t), t.text))
    values = [evaluator.objective(trial) for trial in fit[: problem.top]]
    assert [evaluator.objective(trial) for trial in best] == values
    certain = [trial.text for trial in fit if evaluator.objective(trial) < (values or [0])[-1]]
    assert [trial.text for trial in best][: len(certain)] == certain[: problem.top]
    # Nothing falls below its bounds, also not below those that other plans teach.
    standing = Standing(work={evaluator.key(t.plan): t.work for t in every if t.work})
    for trial in every:
        if trial.simulated:
            assert evaluator.bounds(trial.plan).step_seconds(trial.plan) <= trial.seconds * (1 + 1e-9)
            assert evaluator.bounds(trial.plan).device_bytes(trial.plan) <= trial.peak
            assert trial.work == pytest.approx(standing.work[evaluator.key(trial.plan)], rel=1e-9)
            known = evaluator.bounds(trial.plan).step_seconds(trial.plan, trial.work)
            assert known <= trial.seconds * (1 + 1e-9)
    assert [trial.text for trial in found.trials] == [str(plan) for plan in plans]
    assert sum(found.counts.values()) == len(plans)


# --- spaces -------------------------------------------------------------------------------------------


def space(sets="", devices=8, **options):
    return PlanSpace.of(model("mixtral"), topology_of(devices), parse_sets(sets), **options)


def test_a_space_has_every_layout_once_and_in_one_order():
    plans = space("zero=0|1").plans
    assert plans == space("zero=0|1").plans and len({*map(str, plans)}) == len(plans)
    assert {plan.devices for plan in plans} == {8}
    degrees = {(plan.dp, plan.tp, plan.pp) for plan in plans}
    # Two layers are two stages at most, and a batch of 8 is a sample a rank at least.
    assert degrees == {(8 // t // p, t, p) for t in (1, 2, 4, 8) for p in (1, 2) if t * p <= 8}
    assert {plan.ep for plan in plans if plan.dp == 8} == {1, 2, 4}
    assert {plan.sp for plan in plans if plan.tp == 2} == {"on"}
    assert {plan.sp for plan in plans if plan.tp == 1} == {"off"}
    assert all(plan.zero == 0 or plan.dp * plan.cp > 1 for plan in plans)


def test_what_is_given_goes_before_what_is_sensible():
    assert {plan.tp for plan in space(most_tp=2).plans} == {1, 2}
    assert {plan.remat for plan in space("remat=every:2|none").plans} == {"every:2", "none"}
    assert {plan.schedule for plan in space("schedule=*,pp=2").plans} > {"zb_h1", "dualpipe", "gpipe"}
    assert {8 // plan.dp // plan.microbatches for plan in space("microbatch_size=2").plans} == {2}
    assert {plan.microbatches for plan in space("microbatches=4,dp=1|2").plans} == {4}


@pytest.mark.parametrize("sets", ["tp=16", "remat=all", "sp=on,tp=1", "ep=3", "zero=7", "dp=16"])
def test_a_value_that_no_plan_has_is_refused(sets):
    with pytest.raises(PlanError, match="no plan of 8 devices"):
        _ = space(sets).plans


# --- results ------------------------------------------------------------------------------------------


def test_what_is_said_of_a_result():
    topology = topology_of(4, memory=3e6)
    found = search(model("mlp"), topology, "remat=none|full,tp=1|2,pp=1,zero=0|1|3", top=4)
    seconds = [trial.seconds for trial in found.top(4)]
    assert found.best is found.top(1)[0] and seconds == sorted(seconds)
    assert [trial.peak for trial in found.pareto] == sorted({t.peak for t in found.pareto}, reverse=True)
    assert all(trial.fits for trial in found.fitting) and all(trial.parts for trial in found.winners)
    assert all(0 < trial.missing <= 0.1 * trial.usable for trial in found.nearly)
    text = describe(found)
    assert (
        "all of them with " in text
        and f"{len(found.trials)} plans: {found.counts['simulated']} simulated" in text
    )
    assert found.to_dict()["counts"] == dict(found.counts) and len(found.rows()) == len(found.trials)
    with pytest.raises(SimulationError, match="search with top=9"):
        found.top(9)


def test_refused_plans_are_counted_by_reason():
    plans = [Plan(dp=4), Plan(dp=4, ep=2), Plan(dp=2, tp=2, ep=2), Plan(tp=4)]
    found = search(model("mlp"), topology_of(4), plans)
    assert found.counts["refused"] == sum(count for count, _ in found.refusals.values()) >= 2
    assert f"refused: {found.counts['refused']} as " in describe(found)


def test_nothing_fits():
    found = search(model("mlp"), topology_of(2, memory=1e4), "remat=none")
    assert not found.fitting and "none of" in describe(found) and "none fits" in repr(found)
    with pytest.raises(SimulationError, match="fits in memory"):
        _ = found.best


def test_no_plans_and_unknown_objectives_are_refused():
    with pytest.raises(PlanError, match="0 plans"):
        search(model("mlp"), topology_of(2), [])
    with pytest.raises(PlanError, match="choose time or memory"):
        search(model("mlp"), topology_of(2), objective="speed")
