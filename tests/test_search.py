"""The best plans of a space: those of trying every one of them, with less work."""

import importlib
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from decoder_models import small
from training_models import topology_of

from distsim.cache import MemoryLimit
from distsim.compose.division import _MEMORIES
from distsim.errors import PlanError, SimulationError
from distsim.hardware import load_cluster
from distsim.importer import load_model
from distsim.ir import Topology
from distsim.models import gpt, mlp
from distsim.plan import Plan
from distsim.plan_search import SearchRun, describe, parse_sets, search
from distsim.plan_search.evaluation import PlanEvaluator, SearchProblem, Standing
from distsim.plan_search.run import FixedModel
from distsim.plan_search.space import ModelTraits, PlanSpace
from distsim.plan_search.trial import TOO_LARGE
from distsim.report.figures import StepFigures
from distsim.simulation.quantities import bytes_label
from distsim.transforms import SGD, Adam, add_loss, differentiate
from distsim.transforms.autodiff.precision import precision_named
from distsim.transforms.kernels.policies import KERNELS

with pytest.MonkeyPatch.context() as patch:
    # The experiments are scripts: each finds the others next to itself.
    patch.syspath_prepend(str(Path(__file__).parents[1] / "experiments"))
    exhaustive = importlib.import_module("search_exhaustive")


WIDE = "llama:layers=4,hidden=64,heads=4,kv_heads=2,vocab=32,seq=256"


@cache
def model(name):
    if name == "mlp":
        return differentiate(mlp(layers=4, width=256, batch=16), Adam())
    return differentiate(add_loss(small(name, batch=8)), Adam())


@cache
def wide():
    return differentiate(add_loss(load_model(WIDE, 16)), Adam())


SEEDS = (23, 34, 36, 50, 43, 39, 24)
"""Of a problem of each model, one with stages that begin between two products that are one kernel's else; the
experiment has more problems, and larger ones."""


def test_the_problems_are_of_every_model():
    assert {exhaustive.Random(seed).choice([*exhaustive.MODELS]) for seed in SEEDS} == {*exhaustive.MODELS}


@pytest.mark.usefixtures("collect")  # which makes it cheap to collect often
def test_what_is_kept_of_plans_is_forgotten_when_it_takes_too_much():
    problem = SearchProblem(FixedModel(model("mlp")), topology_of(4), KERNELS["eager"])
    plans = [Plan.parse(text) for text in ("dp=4", "tp=4", "dp=2,tp=2,remat=full", "tp=2,pp=2")]
    expected = [PlanEvaluator(problem).trial(plan) for plan in plans]
    for limit, times in ((MemoryLimit(), 1), (MemoryLimit(-(10**12)), len(plans))):
        evaluator, made = PlanEvaluator(problem, limit), list[object]()
        for plan, trial in zip(plans, expected, strict=True):
            assert evaluator.trial(plan) == trial
            made.append(_MEMORIES.find(problem.model(plan), None))
        assert len(set(map(id, made))) == times


@pytest.mark.parametrize("seed", SEEDS)
def test_the_best_are_those_of_trying_all(seed):
    problem = exhaustive.invent(seed, most=12, top=(10, 3)[seed % 2])
    evaluator = PlanEvaluator(problem.search)
    found = SearchRun(problem.search, tuple(problem.plans)).run()
    assert not exhaustive.differs(problem, found)
    # Nothing falls below its bounds, also not below those that all other plans teach.
    for trial in problem.trials:
        standing = Standing()
        for other in problem.trials:
            if other is not trial:
                evaluator.learn(other, standing)
        if not trial.simulated:
            continue
        bounds, plan = evaluator.bounds(trial.plan), trial.plan
        known = evaluator.known(plan, standing)
        assert bounds.step_seconds(plan) <= trial.seconds * (1 + 1e-9)
        assert bounds.step_seconds(plan, known) <= trial.seconds * (1 + 1e-9)
        assert bounds.device_bytes(plan) <= trial.peak
        assert evaluator.least_bytes(plan, standing) <= trial.peak
        assert evaluator.bound(plan, standing) <= evaluator.objective(trial)
        if known.layers is not None and trial.layers is not None:  # else of whole backward passes
            assert known.layers.seconds == pytest.approx(trial.layers.seconds, rel=1e-9)
        if known.saved and trial.layers is not None and trial.layers.layers:
            assert known.saved == trial.layers.saved
        if known.stages:
            assert known.stages == trial.layers.stages
        if plan.remat != "full":
            keys = evaluator.keys(plan)  # a cut may lie between two products that are one kernel else
            own = keys.work if keys.whole else keys.own_work
            assert own not in standing.work or known.products == pytest.approx(trial.work)
        # What a plan that saves all teaches of one that recomputes all is no more than what that one does.
        assert max(known.products, known.busy) <= max(
            trial.work, trial.layers.seconds if trial.layers else 0
        ) * (1 + 1e-9)
        # Few layers tell what all of them do.
        probed = Standing()
        told = evaluator.probed(plan, probed)
        assert evaluator.bound(plan, probed) <= evaluator.objective(trial)
        assert evaluator.least_bytes(plan, probed) <= trial.peak
        if told is not None and trial.layers is not None:
            assert told.seconds == pytest.approx(trial.layers.seconds, rel=1e-9)
    assert [trial.text for trial in found.trials] == [str(plan) for plan in problem.plans]
    assert sum(found.counts.values()) == len(problem.plans)


FIELDS = ("dp=2,tp=2", "dp=2,pp=2,microbatches=4", "pp=4,stages=layers,microbatches=8")
REMATS = ("none", "attention", "full")
POLICIES = ("eager", "fused", "compiled")


@pytest.mark.parametrize(  # any two of the three are there together
    ("fields", "remat", "kernels"),
    [(FIELDS[i], REMATS[j], POLICIES[(i + j) % 3]) for i in range(3) for j in range(3)],
)
def test_most_of_what_layers_save_is_known_before_a_plan_is_built(fields, remat, kernels):
    problem = SearchProblem(FixedModel(wide()), topology_of(4), KERNELS[kernels])
    evaluator, plan = PlanEvaluator(problem), Plan.parse(f"{fields},remat={remat}")
    bounds, trial = evaluator.bounds(plan), evaluator.trial(plan)
    ranks = plan.dp * plan.tp * plan.cp * plan.microbatches
    saved = bounds.saved_in_layers(remat) / ranks
    # What the first of four layers takes in is made by none; each rank of tp has all that they take in.
    known = {"none": 0.85, "attention": 0.85, "full": 0.74 / plan.tp}[remat]
    assert known * trial.layers.saved < saved <= trial.layers.saved or not trial.layers.saved
    assert (0.1 if remat == "full" else 0.5) * trial.peak < bounds.device_bytes(plan) <= trial.peak


@pytest.mark.parametrize("zero", [0, 1])
def test_gradients_of_a_single_microbatch_need_not_all_be_held_at_a_time(zero):
    step = differentiate(gpt(2, 256, 4, 64, 8, 512), SGD(), precision=precision_named("amp"))
    problem = SearchProblem(FixedModel(step), topology_of(8), KERNELS["eager"])
    evaluator, standing = PlanEvaluator(problem), Standing()
    trial = evaluator.trial(Plan(dp=8, zero=zero))
    evaluator.learn(trial, standing)
    assert trial.layers.saved
    assert 0.5 * trial.peak < evaluator.least_bytes(trial.plan, standing) <= trial.peak


@pytest.mark.parametrize("fields", ["dp=4,microbatches=8", "dp=2,pp=2,microbatches=8,stages=layers"])
def test_sums_of_the_gradients_of_layers_are_part_of_the_least_seconds(fields):
    step = differentiate(add_loss(load_model(WIDE, 64)), Adam(), precision=precision_named("mixed"))
    evaluator = PlanEvaluator(SearchProblem(FixedModel(step), topology_of(4), KERNELS["eager"]))
    standing, plan = Standing(), Plan.parse(fields)
    trial = evaluator.trial(plan)
    evaluator.learn(trial, standing)
    known, bounds = evaluator.known(plan, standing), evaluator.bounds(plan)
    added = 7 * 4 * known.sums / plan.pp  # of four layers; the first microbatch adds nothing
    without = bounds.step_seconds(plan, known._replace(sums=0.0))
    assert without < bounds.step_seconds(plan, known) == pytest.approx(without + added)
    assert 0.84 * trial.seconds < bounds.step_seconds(plan, known) <= trial.seconds
    # Of gradients that are divided at once, parts are summed, which are less.
    parts = evaluator.known(Plan.parse(f"{fields},zero={2 if plan.pp == 1 else 3}"), standing)
    assert (parts.sums > 0) == (plan.pp > 1)  # torch's stages reduce after the last backward pass


LARGE_VOCABULARY = "llama:layers=16,hidden=16,heads=4,kv_heads=2,vocab=100000,seq=16"
HALVES = "pp=4,microbatches=16,remat=attention"


@pytest.mark.parametrize(
    ("named", "batch", "teacher", "other"),
    [
        # Sums of an embedding's gradient are no layer's.
        (LARGE_VOCABULARY, 64, "dp=4,microbatches=16", "pp=4,microbatches=64,stages=1-13-1-1"),
        # Without a flush nothing is summed, or not all of it; some have the head on two ranks.
        (WIDE, 64, "pp=2,microbatches=16", "pp=2,microbatches=16,schedule=pipedream"),
        (WIDE, 64, "pp=2,microbatches=16", "pp=2,microbatches=16,schedule=pipedream_2bw:2"),
        ("gpt2:layers=8,hidden=64,heads=4,vocab=16384,seq=16", 64, HALVES, f"{HALVES},schedule=dualpipe"),
        # Of a table of positions that is longer than the sequence a part has gradients.
        (
            "gpt2:layers=4,hidden=64,heads=4,vocab=256,seq=16",
            16,
            "dp=4,microbatches=4",
            "dp=4,microbatches=4,zero=1",
        ),
    ],
)
def test_what_one_plan_teaches_holds_of_another(named, batch, teacher, other):
    step = differentiate(add_loss(load_model(named, batch)), Adam())
    evaluator = PlanEvaluator(SearchProblem(FixedModel(step), topology_of(4), KERNELS["eager"]))
    standing = Standing()
    evaluator.learn(evaluator.trial(Plan.parse(teacher)), standing)
    for plan in map(Plan.parse, (teacher, other)):
        trial = evaluator.trial(plan)
        assert not trial.refused
        assert evaluator.bounds(plan).step_seconds(plan, evaluator.known(plan, standing)) <= trial.seconds
        assert evaluator.least_bytes(plan, standing) <= trial.peak


def test_what_a_plan_teaches_holds_of_others_that_put_more_on_faster_devices():
    topology = Topology()
    slow, fast = (topology.add_device("gpu", throughput=rate) for rate in (1e9, 1e10))
    topology.set_bandwidth(slow, fast, gbps=100.0)
    evaluator = PlanEvaluator(SearchProblem(FixedModel(model("mlp")), topology, KERNELS["eager"]))
    standing = Standing()
    evaluator.learn(evaluator.trial(Plan(dp=2, microbatches=2)), standing)
    other = Plan(pp=2, microbatches=4, stages="1-3")
    assert evaluator.keys(other).work in standing.work
    assert evaluator.bound(other, standing) <= evaluator.trial(other).seconds


def test_a_search_that_leaves_a_best_plan_out_is_seen():
    problem = exhaustive.invent(14, most=12, top=3)
    worse = [str(trial.plan) for trial in problem.best[1:]]
    found = SearchRun(problem.search, tuple(plan for plan in problem.plans if str(plan) in worse)).run()
    assert exhaustive.differs(problem, found)


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
    pairs = {(p.schedule, p.chunks) for p in space("schedule=1f1b|interleaved,chunks=1|2,pp=2").plans}
    assert pairs == {("1f1b", 1), ("interleaved", 2)}, "interleaved with one chunk is 1f1b"
    assert {8 // plan.dp // plan.microbatches for plan in space("microbatch_size=2").plans} == {2}
    assert {plan.microbatches for plan in space("microbatches=4,dp=1|2").plans} == {4}


def test_what_may_nearly_fit_is_tried_though_bounds_discard_it():
    step, fields = wide(), "dp=2,pp=2,microbatches=4,stages=layers,remat="
    plans = [Plan.parse(f"{fields}{remat}") for remat in ("none", "full")]
    saving, _ = search(step, topology_of(4), plans).trials
    problem = SearchProblem(FixedModel(step), topology_of(4, memory=0.93 * saving.peak), KERNELS["eager"])
    evaluator, standing = PlanEvaluator(problem), Standing()
    evaluator.probed(plans[0], standing)
    assert evaluator.discarded(plans[0], standing) == TOO_LARGE
    found = search(step, problem.topology, plans, top=1)
    assert found.best.plan == plans[1] and [trial.plan for trial in found.nearly] == plans[:1]


@pytest.mark.parametrize("sets", ["tp=16", "remat=all", "sp=on,tp=1", "ep=3", "zero=7", "dp=16"])
def test_a_value_that_no_plan_has_is_refused(sets):
    with pytest.raises(PlanError, match="no plan of 8 devices"):
        _ = space(sets).plans


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ("tp=3", "it does not divide 8 devices; choose one of 1, 2, 4, 8"),
        ("dp=4,tp=4", "of which tp=4 leaves dp=1|2: leave tp open, or give one of these"),
        ("dp=4,tp=1,pp=1", "tp=1 and pp=1 leave dp=8: leave tp or pp open, or give one of these"),
        ("dp=8,tp=2", "tp=2 leaves dp=1|2|4: leave tp open, or give one of these"),
        ("pp=2,microbatches=3", "each of dp=4 ranks has 4 samples, which microbatches=3 does not divide"),
        (
            "dp=1,pp=8,microbatch_size=3",
            "each of dp=1 ranks has 16 samples, which microbatch_size=3 does not",
        ),
        ("dp=2,pp=4,schedule=interleaved", "pp * chunks = 4 * 2 = 8 stages or more, and there are 4 layers"),
        ("schedule=interleaved,pp=1", "it is of a pipeline, and no plan has pp of 2 or more"),
    ],
)
def test_the_numbers_that_do_not_go_together_are_said(sets, said):
    traits = ModelTraits(16, layers=4, every_layer=4)
    with pytest.raises(PlanError, match=re.escape(said)):
        _ = PlanSpace(traits, 8, 8, parse_sets(sets)).plans


def test_a_batch_that_does_not_fill_a_pipeline_is_said():
    with pytest.raises(
        PlanError, match="dp=2 ranks has 2 samples, fewer than the 8 .* give a batch of 16 or"
    ):
        _ = PlanSpace(ModelTraits(4, layers=8, every_layer=8), 16, 16, parse_sets("pp=8")).plans


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


def test_the_best_are_compared_with_a_plan_of_ones_own():
    topology, kernels = topology_of(4, memory=3e6), KERNELS["eager"]
    own = Plan(dp=2, tp=2, remat="full")
    found = search(model("mlp"), topology, "remat=none,tp=1|2,pp=1,zero=0|1", kernels, against=own)
    # As two steps are that are simulated by themselves: the same figures, the same parts.
    simulations = [PlanEvaluator(found.problem).simulate(plan) for plan in (found.best.plan, own)]
    counted = found.step.tokens, found.step.unit
    steps = [StepFigures.of(str(n), each, counted, found.step.flops) for n, each in enumerate(simulations)]
    compared = found.compare(found.best, found.own)
    unnamed = {"name": "", "cluster": "", "plan": ""}  # a search says where of all its plans together
    assert [replace(each, **unnamed) for each in compared.steps] == [replace(s, **unnamed) for s in steps]
    gap = steps[1].seconds - steps[0].seconds
    assert sum(part.seconds for part in compared.differences(1)) == pytest.approx(gap, abs=1e-12)
    said = found.to_dict()["against"]  # simulated for it, whatever the search needed
    assert "(yours)" in describe(found) and said["differences"][0]["difference_s"] == gap
    assert said["step_s"] == steps[1].seconds and said["mfu"] == steps[1].mfu
    assert found.simulation.step_time == simulations[0].step_time
    best = search(model("mlp"), topology, "remat=none,tp=1|2,pp=1,zero=0|1", against=found.best.plan)
    assert "(yours) is the best" in describe(best) and not best.to_dict()["against"]["differences"]
    with pytest.raises(PlanError, match=r"--against dp=3.* does not divide"):
        search(model("mlp"), topology, "remat=none", against=Plan(dp=3))
    large = search(model("mlp"), topology_of(4, memory=1e4), "tp=2,pp=1,remat=none", against=own)
    assert not large.fitting and re.search(r"\(yours\): .* too much", describe(large))
    assert large.own is not None and large.own.seconds == large.to_dict()["against"]["step_s"]


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
    assert found.nearest and f"{bytes_label(found.nearest.missing)} too much" in describe(found)
    assert "use" in describe(found).splitlines()[-1]
    closed = search(model("mlp"), topology_of(4, memory=2e6), "tp=1,pp=1,zero=0,remat=none")
    assert "not tried: zero=3, remat=full, tp, pp" in describe(closed)
    some = "tp=1,pp=1,zero=0|3,remat=none"
    least = min(trial.peak for trial in search(model("mlp"), topology_of(4), some).fitting)
    said = describe(search(model("mlp"), topology_of(4, memory=least), some))
    assert re.search(
        "^[0-9]+ plans? alone fits?; not tried: remat=full, tp, pp, offload ", said, re.MULTILINE
    )


def test_a_batch_that_no_ranks_divide_is_the_reason():
    """Not the first of the fields that are given."""
    with pytest.raises(PlanError, match=r"leave dp=4, which does not divide a batch of 6: leave tp or pp"):
        search(differentiate(mlp(layers=4, width=256, batch=6), SGD()), topology_of(4), "tp=1,pp=1")


def test_no_plans_and_unknown_objectives_are_refused():
    with pytest.raises(PlanError, match="0 plans"):
        search(model("mlp"), topology_of(2), [])
    with pytest.raises(PlanError, match="not one of time, memory"):
        search(model("mlp"), topology_of(2), objective="speed")


def test_stages_of_a_stack_are_of_all_layers_also_of_those_of_another_kind():
    step = differentiate(add_loss(load_model("deepseek-v2-lite:layers=3,seq=16", 12)), Adam())
    space = PlanSpace.of(step, topology_of(6), {}, complete=lambda plan: replace(plan, stages="layers"))
    assert {plan.pp for plan in space.plans} == {1, 3}


def test_plans_that_leave_devices_idle_wait_for_those_of_their_own():
    """Whatever else is searched: each takes what it takes in a search of as many devices, and simulated."""
    cluster, step = load_cluster("dgx-h100:2"), differentiate(mlp(layers=4, width=4096, batch=4096), Adam())
    plans = [Plan(16), Plan(2), Plan(8)]
    found = search(step, cluster, plans, top=2)
    assert [trial.text for trial in found.trials] == [str(plan) for plan in plans]
    for plan, trial in zip(plans, found.trials, strict=True):
        (alone,) = search(step, cluster, [plan]).trials
        assert trial.seconds == alone.seconds == found.simulate(plan).step_period
    assert len(found.fitting) == 3
