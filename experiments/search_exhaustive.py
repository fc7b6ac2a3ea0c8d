"""Is the best that a search finds the best there is? Random small problems, every plan tried.

``python experiments/search_exhaustive.py`` writes ``results/search_exhaustive.csv``: per problem its model,
plans, how many fit, how many the search tried and how many bounds discarded, whether its best and its ten
best are those of trying all, and CPU seconds of both. Models, figures of devices and links, memory (so much
that some plans fit, and others do not), kernels and objective are drawn from the seed. ``--small``: 5 of the
30 problems.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any

import common

from distsim.importer import load_model
from distsim.ir import Device, Function, Link, Topology
from distsim.ir.topology import Level
from distsim.plan import Plan
from distsim.plan_search.evaluation import PlanEvaluator, SearchProblem
from distsim.plan_search.results import SearchResult
from distsim.plan_search.run import FixedModel, SearchRun
from distsim.plan_search.space import PlanSpace, parse_sets
from distsim.plan_search.trial import PlanTrial
from distsim.transforms import Adam, add_loss, differentiate
from distsim.transforms.kernels.policies import KERNELS

PROBLEMS, PLANS, TOP = 30, 80, 10

MODELS = {
    "mlp:layers=4,width=256": "tp=1|2,remat=none|full,zero=*,schedule=1f1b|gpipe",
    "gpt:layers=6,hidden=32,heads=4,vocab=32,seq=8": "tp=1|2,remat=none|full|attention|min_cut,pp=1|2,"
    "zero=0|1|3,stages=layers|even,schedule=1f1b|zb_h1|interleaved,chunks=1|3,microbatch_size=1|2|4",
    # Fewer layers than stages: these begin within layers, whose parts then run beside each other.
    "gpt:layers=2,hidden=32,heads=4,vocab=32,seq=16": "tp=1|2,remat=none|full,pp=1|2|4,zero=0|1|3,"
    "schedule=1f1b|gpipe|looped_bfs|1f1b_v,chunks=1|2,microbatches=1|2|4",
    "llama:layers=3,hidden=32,heads=4,kv_heads=2,vocab=32,seq=16": "tp=1|2,pp=2|4,zero=0|2,"
    "remat=none|full|full_early,schedule=1f1b|interleaved|looped_bfs,chunks=1|2,microbatches=1|2|8",
    # Stages of whole layers, which are a chain: what ranks wait for is known.
    "llama:layers=8,hidden=64,heads=4,kv_heads=2,vocab=64,seq=16": "tp=1|2,pp=1|2|4,cp=1|2,sp=*,zero=0|1|3,"
    "stages=layers|default|even,remat=none|full,schedule=1f1b|gpipe|interleaved|looped_bfs|1f1b_v,chunks=1|2,"
    "microbatches=1|2|4|8",
    "llama:layers=2,hidden=32,heads=4,kv_heads=2,vocab=32,seq=16": "tp=1|2,cp=1|2,pp=1|2,sp=*,"
    "remat=none|full,zero=0|1|3,microbatch_size=1|2",
    "mixtral-8x7b:layers=2,seq=16": "tp=1|2,pp=1|2,ep=1|2,zero=0|1,sp=off,"
    "remat=none|full,microbatch_size=1|2",
}
"""Models, and the sets of fields from whose plans some are drawn."""


@cache
def model(name: str) -> Function:
    """Return a training step of a model with 16 samples."""
    return differentiate(add_loss(load_model(name, 16)), Adam())


@dataclass(frozen=True)
class Problem:
    """A search with some plans, and what becomes of each of them."""

    name: str
    search: SearchProblem
    plans: list[Plan]
    trials: list[PlanTrial]

    @property
    def best(self) -> list[PlanTrial]:
        """The plans that fit, the best first."""
        value = PlanEvaluator(self.search).objective
        return sorted([trial for trial in self.trials if trial.fits], key=lambda t: (value(t), t.text))


def invent(seed: int, most: int = PLANS, top: int = TOP) -> Problem:
    """Return a random problem of at most so many plans, each of them tried."""
    rng = Random(seed)
    name = rng.choice([*MODELS])
    plain = cluster(rng)
    kernels, objective = (
        KERNELS[rng.choice(["ops", "eager", "fused", "compiled"])],
        rng.choice(["time", "time", "memory"]),
    )
    plans = list(PlanSpace.of(model(name), plain, parse_sets(MODELS[name])).plans)
    plans = sorted(rng.sample(plans, min(len(plans), most)), key=str)
    search = SearchProblem(FixedModel(model(name)), plain, kernels, objective, top)
    evaluator = PlanEvaluator(search)
    trials = [evaluator.trial(plan) for plan in plans]
    peaks = sorted(trial.peak for trial in trials if trial.simulated)
    # So much memory that some plans fit, and others do not.
    memory = float(rng.choice(peaks)) if rng.random() < 0.7 else float("inf")
    devices = [replace(device, memory=memory) for device in plain.devices]
    topology = Topology.of_devices(devices, plain.levels)
    usable = devices[0].usable
    trials = [replace(trial, usable=usable, missing=max(0.0, trial.peak - usable)) for trial in trials]
    return Problem(name, replace(search, topology=topology), plans, trials)


def cluster(rng: Random) -> Topology:
    """Return four devices whose figures are drawn, with all the memory that they want."""
    device = Device(
        0,
        "gpu",
        throughput=10 ** rng.uniform(8, 11),
        dram_bandwidth=10 ** rng.uniform(8, 11),
        kernel_launch_overhead=rng.choice([0.0, 1e-6]),
        memory=float("inf"),
    )
    return Topology.hierarchical(device, 4, [Level("link", Link(10 ** rng.uniform(7, 10)))])


def differs(problem: Problem, found: SearchResult) -> str:
    """Return in what the best plans of a search are not those of trying all; "" if in nothing.

    Plans that are equally good as the last that is wanted may stand for each other.
    """
    value = PlanEvaluator(problem.search).objective
    top = problem.search.top
    every, best = problem.best, sorted(found.winners, key=lambda t: (value(t), t.text))
    values = [value(trial) for trial in every[:top]]
    if [value(trial) for trial in best] != values:
        return f"the best {top} are of {[value(trial) for trial in best]}, not {values}"
    certain = {trial.text for trial in every if value(trial) < (values or [0])[-1]}
    missing = certain - {trial.text for trial in best}
    return f"{', '.join(sorted(missing))}: not among the best {top}" if missing else ""


def compare(seed: int) -> dict[str, Any]:
    """Return the row of a problem."""
    problem, all_seconds = common.cpu_seconds(lambda: invent(seed))
    found, seconds = common.cpu_seconds(lambda: SearchRun(problem.search, tuple(problem.plans)).run())
    counts = found.counts
    best, value = problem.best, PlanEvaluator(problem.search).objective
    return {
        "seed": seed,
        "model": problem.name.partition(":")[0],
        "objective": problem.search.objective,
        "plans": len(problem.plans),
        "fit": len(problem.best),
        "tried": counts["simulated"] + counts["too large"],
        "discarded": counts["discarded: slower"] + counts["discarded: too large"],
        "best_same": not best or value(found.best) == value(best[0]),
        "top_10_same": not differs(problem, found),
        "all_cpu_s": all_seconds,
        "search_cpu_s": seconds,
    }


def main() -> None:
    """Try all, search, compare."""
    given = common.options(__doc__)
    rows = [compare(seed) for seed in common.progress(range(5 if given.small else PROBLEMS))]
    common.write_csv(given.out / "search_exhaustive.csv", rows)
    same, plans = sum(row["top_10_same"] for row in rows), sum(row["plans"] for row in rows)
    print(
        f"best and top {TOP} those of trying all in {same} of {len(rows)} problems; "
        f"{sum(row['discarded'] for row in rows)} of {plans} plans discarded by proof"
    )


if __name__ == "__main__":
    main()
