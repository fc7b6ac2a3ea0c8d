"""What the engine's time grows with, and what it does not: microbatches, replicas, equal layers, flat ops.

``python experiments/engine_scaling.py`` writes ``results/engine_scaling.csv``, ``engine_flat.csv`` and
``engine_scaling.png``. Layers of GPT-3 175B (12288 wide, 2048 tokens, bfloat16, Adam) on DGX A100, pp=16,
1F1B, 512 microbatches of one sequence:

- ``step``: 96 layers, tp=8, dp=8.
- ``replicas``: 96 layers, tp=1, dp=1, 64 and 1024 (16,384 devices); each replica has 512 sequences.
- ``depth``: 12 and 96 equal layers per stage, tp=8, dp=8.

``cold``: a new function and a new cost model, so that all is derived: ``parallelize``, then ``simulate``
(the model's building and the topology's are apart, ``build_s``). ``warm``: the plan and the pieces are known,
the Program is made and simulated again; best and median of many. ``ops`` counts the ops of the whole step
once per rank class (devices in lockstep are one); op-equivalents a second are those over the seconds.

- ``flat``: an MLP's forward and backward pass op by op, 1,000,002 ops on one device: the engine on lowered
  tasks, and from the Function to its step time (types, costs, lowering, engine) with a new cost model.

CPU seconds (``process_time``), without imports and Numba's compilation. ``--small``: narrow layers, pp=4.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import common

from distsim.compose import parallelize
from distsim.executor import CostModel, Simulation, Simulator
from distsim.hardware import load_cluster
from distsim.ir import Function, Topology
from distsim.ir.type import BFloat16
from distsim.models import gpt
from distsim.plan import Plan
from distsim.simulation.tasks import recurrence
from distsim.simulation.tasks.task_table import lower
from distsim.transforms import Adam, differentiate

COLD_TRIALS, WARM_TRIALS, FLAT_TRIALS = 3, 200, 3


@dataclass(frozen=True)
class Sizes:
    """The layers' sizes, the pipeline, and what is varied."""

    hidden: int
    heads: int
    seq: int
    vocab: int
    cluster: str
    pp: int
    tp: int
    dp: int
    microbatches: int
    replicas: tuple[int, ...]
    depths: tuple[int, ...]
    layers_per_stage: int
    flat_layers: int

    def cases(self) -> list[tuple[str, int, Plan]]:
        """Return (experiment, layers, plan) for each measurement."""
        layers = self.layers_per_stage * self.pp
        own = [("step", layers, self._plan(self.dp, self.tp))]
        own += [("replicas", layers, self._plan(dp, 1)) for dp in self.replicas]
        own += [("depth", depth * self.pp, self._plan(self.dp, self.tp)) for depth in self.depths]
        return own

    def _plan(self, dp: int, tp: int) -> Plan:
        return Plan(dp, tp, self.pp, self.microbatches)

    def function(self, layers: int, plan: Plan) -> Function:
        """The training step, with one sequence per microbatch."""
        sizes = (layers, self.hidden, self.heads, self.seq, plan.dp * plan.microbatches, self.vocab)
        return differentiate(gpt(*sizes, dtype=BFloat16()), Adam())


GPT3 = Sizes(12288, 96, 2048, 51200, "dgx-a100:2048", 16, 8, 8, 512, (1, 64, 1024), (12, 96), 6, 250_000)
SMALL = Sizes(256, 8, 128, 1024, "dgx-a100:8", 4, 2, 2, 64, (1, 4, 16), (2, 8), 2, 2_500)


def main() -> None:
    """Measure, write the tables and the figure, print the figures that the issue asks for."""
    given = common.options(__doc__)
    sizes = SMALL if given.small else GPT3
    topology = load_cluster(sizes.cluster)
    common.warm_up(topology)
    rows = [measure(sizes, *case, topology) for case in common.progress(sizes.cases())]
    flat = measure_flat(sizes.flat_layers)
    common.write_csv(given.out / "engine_scaling.csv", rows)
    common.write_csv(given.out / "engine_flat.csv", [flat])
    common.save(draw(rows), given.out / "engine_scaling.png")
    for row in rows:
        print(
            f"{row['experiment']:8} {row['layers']:4} layers, {row['devices']:5} devices, "
            f"{row['ops']:,} ops: warm {row['warm_s'] * 1e3:.2f} ms ({row['warm_ops_per_s']:.2e} ops/s), "
            f"cold {row['cold_s']:.3f} s ({row['cold_ops_per_s']:.2e} ops/s)"
        )
    for name in ("replicas", "depth"):
        own = [row for row in rows if row["experiment"] == name]
        for kind in ("warm_s", "cold_s"):
            print(f"{name}, {kind}: the slowest takes {_spread(own, kind):.2f} x the fastest")
    print(
        f"flat: {flat['ops']:,} ops, engine {flat['engine_ops_per_s']:,.0f} ops/s, "
        f"Function to result {flat['function_ops_per_s']:,.0f} ops/s"
    )


def measure(sizes: Sizes, experiment: str, layers: int, plan: Plan, topology: Topology) -> dict[str, Any]:
    """A row of the table: one plan, cold and warm."""
    cold: list[tuple[float, float, float]] = []
    for _ in range(COLD_TRIALS):
        function, built = common.cpu_seconds(lambda: sizes.function(layers, plan))
        simulator = Simulator(CostModel(topology))
        program, made = common.cpu_seconds(lambda f=function: parallelize(f, plan, topology))
        simulation, took = common.cpu_seconds(lambda s=simulator, p=program: _simulated(s.simulate(p)))
        cold.append((made + took, took, built))

    def again() -> Simulation:
        return _simulated(simulator.simulate(parallelize(function, plan, topology)))

    warm = _trials(again, WARM_TRIALS)
    best, ops = min(cold), len(simulation.timeline)
    return {
        "experiment": experiment,
        "layers": layers,
        "dp": plan.dp,
        "tp": plan.tp,
        "pp": plan.pp,
        "devices": plan.devices,
        "microbatches": plan.microbatches,
        "ops": ops,
        "step_time_s": simulation.step_time,
        "build_s": min(built for *_, built in cold),
        "cold_s": best[0],
        "cold_s_median": statistics.median(total for total, *_ in cold),
        "cold_simulate_s": best[1],
        "cold_ops_per_s": ops / best[0],
        "warm_s": min(warm),
        "warm_s_median": statistics.median(warm),
        "warm_ops_per_s": ops / min(warm),
    }


def measure_flat(layers: int) -> dict[str, Any]:
    """The row of the table of the flat function."""
    topology = Topology()
    function = common.joint_mlp(layers, 64, 64, topology.add_device("gpu"))
    engine = _engine_trials(function, topology)
    whole = _trials(
        lambda: _simulated(Simulator(CostModel(topology)).interpret(function, function.inputs)), FLAT_TRIALS
    )
    ops = len(function.ops)
    return {
        "ops": ops,
        "engine_s": min(engine),
        "engine_s_median": statistics.median(engine),
        "engine_ops_per_s": ops / min(engine),
        "function_s": min(whole),
        "function_s_median": statistics.median(whole),
        "function_ops_per_s": ops / min(whole),
    }


def _engine_trials(function: Function, topology: Topology) -> list[float]:
    """Return the seconds of the engine alone, on tasks that are there."""
    tasks = lower(function, CostModel(topology), overlap=True, lockstep=True)
    return _trials(lambda: recurrence.run(tasks), FLAT_TRIALS)


def _simulated(simulation: Simulation) -> Simulation:
    """Read the step time, which is worked out when it is read."""
    if not simulation.step_time > 0:
        raise RuntimeError(f"{simulation.name} takes no time")
    return simulation


def _trials(work: Callable[[], Any], count: int) -> list[float]:
    return [common.cpu_seconds(work)[1] for _ in range(count)]


def _spread(rows: list[dict[str, Any]], key: str) -> float:
    return max(row[key] for row in rows) / min(row[key] for row in rows)


def draw(rows: list[dict[str, Any]]) -> Any:
    """Seconds to simulate over the devices on the left and over the layers on the right, cold and warm."""
    figure, (left, right) = common.panels(2, 9, 3.6, sharey=True)
    for axis, name, key in ((left, "replicas", "devices"), (right, "depth", "layers")):
        own = [row for row in rows if row["experiment"] == name]
        for kind, marker in (("cold", "o"), ("warm", "D")):
            axis.loglog([r[key] for r in own], [r[f"{kind}_s"] for r in own], marker=marker, label=kind)
        axis.set_xticks([r[key] for r in own], [f"{r[key]:,}" for r in own])
        axis.minorticks_off()
    left.set(xlabel="devices (replicas of one pipeline)", ylabel="CPU seconds to simulate a step")
    right.set(xlabel="layers, in the same number of stages")
    left.legend(frameon=False)
    return figure


if __name__ == "__main__":
    main()
