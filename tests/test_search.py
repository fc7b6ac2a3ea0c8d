"""The best plans of a space: those of trying every one of them, with less work."""

import random
from functools import cache

import pytest
from decoder_models import small
from training_models import small_gpt, topology_of

from distsim.models import mlp
from distsim.search import SearchRun, parse_sets
from distsim.search.evaluation import PlanEvaluator, SearchProblem, Standing
from distsim.search.run import FixedModel
from distsim.search.space import PlanSpace
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
    plans = sorted(rng.sample(plans, min(len(plans), 10)), key=str)
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
