"""Every plan of GPT-3 175B on 1024 A100, each simulated op by op with its peak memory.

``python experiments/plan_search.py`` writes ``results/plan_search.csv``, ``plan_search_rates.csv`` and
``plan_search.png``: 96 layers, 12288 wide, 2048 tokens, batch 1536, bfloat16, Adam, on 128 DGX A100, under
every (dp, tp, pp, microbatch size, 1F1B or GPipe) that divides. ``--small``: 8 layers
of width 256 on 16 GPUs. A plan goes all the way each time: Plan -> ``parallelize`` ->
``Simulator.simulate`` -> step time, and ``program_memory`` -> peak of the fullest device. One process, one
core, CPU seconds (``process_time``) without imports and Numba's compilation, in three passes:

- ``cold``: the 1F1B plans. Everything is derived for the first time: how the function is divided, its
  stages, their blocks' costs and matrices, their memory. Plans that share a division find it.
- ``new``: the GPipe plans. No plan was seen before; pieces that a 1F1B plan made are there. For each plan
  the schedule is made and folded into rounds, and the loops of engine and memory run.
- ``warm``: all plans again, five times; best and median. What plans share is there, and so are the schedules.
  Done again for each plan: the Program, the engine's loop over its rounds, the memory's loop. No result
  is kept.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from time import process_time
from typing import Any

import common

from distsim.compose import parallelize
from distsim.errors import PlanError
from distsim.executor import CostModel, Simulator
from distsim.hardware import load_cluster
from distsim.ir import Function, Topology
from distsim.ir.type import BFloat16
from distsim.models import gpt
from distsim.plan import Plan
from distsim.simulation.memory.program_memory import program_memory
from distsim.transforms import Adam, differentiate

TRIALS = 5
SCHEDULES = ("1f1b", "gpipe")
PARTS = ("parallelize", "simulate", "memory")


@dataclass(frozen=True)
class Task:
    """What is searched: a model, a cluster, and the largest tensor-parallel degree."""

    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    batch: int
    cluster: str
    devices: int
    most_tp: int

    def function(self) -> Function:
        """The training step in bfloat16 under Adam."""
        sizes = (self.layers, self.hidden, self.heads, self.seq, self.batch, self.vocab)
        return differentiate(gpt(*sizes, dtype=BFloat16()), Adam())

    def plans(self, schedule: str) -> list[Plan]:
        """Return every plan that uses all devices: degrees are powers of two that divide."""
        powers = [2**i for i in range(self.devices.bit_length())]
        return [
            Plan(dp, tp, pp, self.batch // dp // size, schedule)
            for tp in powers
            if tp <= self.most_tp and self.heads % tp == 0
            for pp in powers
            if self.layers % pp == 0 and self.devices % (tp * pp) == 0
            for dp in [self.devices // (tp * pp)]
            if self.batch % dp == 0
            for size in range(1, self.batch // dp + 1)
            if self.batch // dp % size == 0
        ]


GPT3 = Task(96, 12288, 96, 2048, 51200, 1536, "dgx-a100:128", 1024, most_tp=32)
SMALL = Task(8, 256, 8, 128, 1024, 96, "dgx-a100:2", 16, most_tp=8)


@dataclass(frozen=True)
class Outcome:
    """What a plan gave, and the CPU seconds of its parts; ``refused`` says why it gave nothing."""

    step_time: float
    peak: int
    seconds: tuple[float, ...]
    refused: str = ""


def main() -> None:
    """Search, write the tables and the figure, print the rates and the best plans."""
    given = common.options(__doc__)
    task = SMALL if given.small else GPT3
    topology = load_cluster(task.cluster)
    common.warm_up(topology)
    found, rates = search(task, topology)
    memory = min(device.usable for device in topology.devices)
    rows = [row(task, plan, outcome, memory) for plan, outcome in found.items()]
    common.write_csv(given.out / "plan_search.csv", rows)
    common.write_csv(given.out / "plan_search_rates.csv", rates)
    common.save(draw(rows, memory), given.out / "plan_search.png")
    print_outcome(rows, rates)


def search(task: Task, topology: Topology) -> tuple[dict[Plan, Outcome], list[dict[str, Any]]]:
    """Return the outcome of every plan, and a row per pass."""
    first, second = (task.plans(schedule) for schedule in SCHEDULES)
    function = task.function()
    simulator = Simulator(CostModel(topology))

    def evaluated(plans: Iterable[Plan]) -> dict[Plan, Outcome]:
        return {plan: evaluate(function, plan, topology, simulator) for plan in plans}

    cold = evaluated(common.progress(first))
    new = evaluated(second)
    trials = [evaluated([*first, *second]) for _ in range(TRIALS)]
    found = {**cold, **new}
    for trial in trials:
        same = [(o.step_time, o.peak) == (found[p].step_time, found[p].peak) for p, o in trial.items()]
        if not all(same):
            raise RuntimeError("a plan gave another result when it was simulated again")
    rates = [rate("cold", [cold]), rate("new", [new]), rate("warm", trials)]
    return found, rates


def evaluate(function: Function, plan: Plan, topology: Topology, simulator: Simulator) -> Outcome:
    """Simulate one plan, all the way."""
    begin = process_time()
    try:
        program = parallelize(function, plan, topology)
    except PlanError as error:
        return Outcome(0.0, 0, (process_time() - begin, 0.0, 0.0), str(error))
    made = process_time()
    step_time = simulator.simulate(program).step_time
    simulated = process_time()
    peak = max(program_memory(program).peaks)
    done = process_time()
    return Outcome(step_time, peak, (made - begin, simulated - made, done - simulated))


def rate(name: str, trials: list[dict[Plan, Outcome]]) -> dict[str, Any]:
    """A row of the table of passes: CPU seconds of the best and the median trial, and of the best's parts."""

    def seconds(trial: dict[Plan, Outcome]) -> float:
        return sum(sum(outcome.seconds) for outcome in trial.values())

    best = min(trials, key=seconds)
    simulated = sum(not outcome.refused for outcome in best.values())
    parts = [sum(outcome.seconds[i] for outcome in best.values()) for i in range(len(PARTS))]
    return {
        "pass": name,
        "plans": simulated,
        "refused": len(best) - simulated,
        "cpu_s": seconds(best),
        "cpu_s_median": statistics.median(map(seconds, trials)),
        "plans_per_s": simulated / seconds(best),
        "plans_per_s_median": simulated / statistics.median(map(seconds, trials)),
        **{f"{part}_s": took for part, took in zip(PARTS, parts, strict=True)},
    }


def row(task: Task, plan: Plan, outcome: Outcome, memory: float) -> dict[str, Any]:
    """A row of the table of plans. Seconds, samples/s, bytes of the fullest device."""
    degrees = {"dp": plan.dp, "tp": plan.tp, "pp": plan.pp}
    batch = {
        "microbatch_size": task.batch // plan.dp // plan.microbatches,
        "microbatches": plan.microbatches,
    }
    shown = {} if outcome.refused else {"step_time_s": outcome.step_time, "peak_memory_bytes": outcome.peak}
    return {
        **degrees,
        **batch,
        "schedule": plan.schedule,
        "step_time_s": "",
        "samples_per_s": "" if outcome.refused else task.batch / outcome.step_time,
        "peak_memory_bytes": "",
        "fits": not outcome.refused and outcome.peak <= memory,
        "refused": outcome.refused,
        **shown,
    }


def pareto(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows than which none is both faster and smaller, from the smallest to the fastest."""
    front: list[dict[str, Any]] = []
    for one in sorted(rows, key=lambda row: (row["peak_memory_bytes"], row["step_time_s"])):
        if not front or one["step_time_s"] < front[-1]["step_time_s"]:
            front.append(one)
    return front


def print_outcome(rows: list[dict[str, Any]], rates: list[dict[str, Any]]) -> None:
    """Print what was refused and why, the best plans that fit, and the plans per second of each pass."""
    for reason, count in Counter(row["refused"] for row in rows if row["refused"]).items():
        print(f"refused, {count} plans: {reason}")
    fitting = sorted((row for row in rows if row["fits"]), key=lambda row: row["step_time_s"])
    print(f"{len(fitting)} of {len(rows)} plans fit; the fastest:")
    for one in fitting[:5]:
        print(
            f"  dp={one['dp']} tp={one['tp']} pp={one['pp']} microbatches={one['microbatches']} of "
            f"{one['microbatch_size']} {one['schedule']}: {one['step_time_s']:.3f} s, "
            f"{one['peak_memory_bytes'] / 2**30:.1f} GiB"
        )
    for one in rates:
        parts = ", ".join(f"{part} {one[f'{part}_s'] / one['plans'] * 1e6:.0f} us" for part in PARTS)
        print(
            f"{one['pass']}: {one['plans']} plans in {one['cpu_s']:.3f} CPU s, "
            f"{one['plans_per_s']:,.0f} plans/s (median {one['plans_per_s_median']:,.0f}); per plan {parts}"
        )


def draw(rows: list[dict[str, Any]], memory: float) -> Any:
    """Step time over peak memory: a colour per pipeline degree, a marker per schedule, and the front."""
    figure, (axis,) = common.panels(1, 8.5, 5)
    shown = [row for row in rows if not row["refused"]]
    for index, pp in enumerate(sorted({row["pp"] for row in shown})):
        for name, marker in zip(SCHEDULES, "ox", strict=True):
            own = [row for row in shown if (row["pp"], row["schedule"]) == (pp, name)]
            places = [[r["peak_memory_bytes"] / 2**30 for r in own], [r["step_time_s"] for r in own]]
            style = {"s": 22, "marker": marker, "color": f"C{index}", "alpha": 0.7, "linewidths": 1}
            axis.scatter(*places, label=f"pp={pp}" if marker == "o" else None, **style)
    front = pareto(shown)
    line = [[r["peak_memory_bytes"] / 2**30 for r in front], [r["step_time_s"] for r in front]]
    axis.step(*line, where="post", color="black", linewidth=1.2, label="Pareto front")
    if fitting := [row for row in shown if row["fits"]]:
        best = min(fitting, key=lambda row: row["step_time_s"])
        place = [best["peak_memory_bytes"] / 2**30], [best["step_time_s"]]
        axis.plot(*place, "*", color="black", markersize=13, label="fastest that fits")
    axis.axvline(memory / 2**30, color="0.4", linestyle="--", label=f"{memory / 2**30:.0f} GiB of one GPU")
    axis.set(xscale="log", yscale="log", xlabel="peak memory of the fullest GPU (GiB)")
    axis.set(ylabel="step time (s); o 1F1B, x GPipe")
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    return figure


if __name__ == "__main__":
    main()
