"""DistIR's grid: an MLP under every data, horizontal and pipeline parallel layout of 16 devices.

``python experiments/grid_search.py`` writes ``results/grid_search.csv`` and ``.png``: 64 layers of width
8192, batch 8192, 200 Gbit/s between all pairs, 52 layouts. ``--small``: 4 layers of width 512.

``grid_search_cost.csv`` has what the whole grid costs from cold, building model and topology, transforming
and simulating each layout, in CPU seconds without imports and Numba's compilation, by three ways that must
agree on every step time: ``parallelize`` (Plan -> Program -> step time), ``notebook`` (the calls of DistIR's
notebook: ``parallel_transform_3d``, ``steady_state_transform``, ``infer_types``, ``interpret``) and
``notebook with trace`` (and ``.trace`` read for the share of communication). Each trial has a process of
its own, in which nothing but tiny models was simulated before; best and median of the trials.
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import common

from distsim.compose import parallelize
from distsim.executor import CostModel, Simulator
from distsim.ir import Function, Topology
from distsim.plan import Plan

DEVICES = 16
TRIALS = 5


def main() -> None:
    """Run the grid, write its table and figure, print the fastest layouts."""
    given = common.options(__doc__)
    layers, width, batch = (4, 512, 512) if given.small else (64, 8192, 8192)
    costs = measure_costs(layers, width, batch, TRIALS)
    (rows, figure), seconds = common.cpu_seconds(lambda: run(layers, width, batch))
    common.write_csv(given.out / "grid_search.csv", rows)
    common.write_csv(given.out / "grid_search_cost.csv", costs)
    common.save(figure, given.out / "grid_search.png")
    print(" dp  hp  pp microbatches  samples/s no overlap  peak GB")
    for row in sorted(rows, key=lambda row: -row["throughput"])[:5]:
        print(
            f"{row['dp']:3} {row['hp']:3} {row['pp']:3} {row['microbatches']:12} {row['throughput']:10.0f} "
            f"{row['throughput_no_overlap']:10.0f} {row['peak_memory_bytes'] / 1e9:8.1f}"
        )
    simulated = sum(row["cpu_s"] for row in rows)
    print(f"{len(rows)} layouts: {simulated:.2f} CPU seconds, {seconds:.2f} with the figure and the topology")
    for cost in costs:
        print(f"{cost['way']}: {cost['layouts']} layouts from cold in {cost['cpu_s']:.2f} CPU seconds")


# --- what the grid costs ------------------------------------------------------------------------------


def by_parallelize(function: Function, layout: common.Layout, topology: Topology, costs: CostModel) -> float:
    """Seconds of a step, through a Program; gradients are reduced as DistIR does, each after the backward
    pass."""
    degrees = layout.dp, layout.hp, layout.pp, layout.microbatches
    plan = Plan(*degrees, bucket="1B", overlap_grads="off")
    return Simulator(costs).simulate(parallelize(function, plan, topology)).step_time


def by_notebook(function: Function, layout: common.Layout, topology: Topology, costs: CostModel) -> float:
    """Seconds of a step, through the notebook's own calls."""
    return common.simulate(common.steady_step(function, layout, topology.devices), costs, True).step_time


def by_notebook_with_trace(
    function: Function, layout: common.Layout, topology: Topology, costs: CostModel
) -> float:
    """Seconds of a step, with its trace read as the notebook does."""
    simulation = common.simulate(common.steady_step(function, layout, topology.devices), costs, True)
    common.communication_share(simulation)
    return simulation.step_time


WAYS: Mapping[str, Callable[[Function, common.Layout, Topology, CostModel], float]] = {
    "parallelize": by_parallelize,
    "notebook": by_notebook,
    "notebook with trace": by_notebook_with_trace,
}


def measure_costs(layers: int, width: int, batch: int, trials: int) -> list[dict[str, Any]]:
    """Return a row per way; raise if two ways disagree on a step time."""
    fresh = multiprocessing.get_context("spawn")
    rows: list[dict[str, Any]] = []
    expected: list[float] = []
    for way in WAYS:
        seconds: list[float] = []
        for _ in range(trials):
            with ProcessPoolExecutor(1, fresh) as one:
                times, took = one.submit(run_from_cold, way, layers, width, batch).result()
            expected = expected or times
            if any(abs(a - b) > 1e-9 * b for a, b in zip(times, expected, strict=True)):
                raise RuntimeError(f"{way} gives other step times than {next(iter(WAYS))}")
            seconds.append(took)
        best, median = min(seconds), statistics.median(seconds)
        rows.append({"way": way, "layouts": len(expected), "cpu_s": best, "cpu_s_median": median})
    return rows


def run_from_cold(way: str, layers: int, width: int, batch: int) -> tuple[list[float], float]:
    """Return the step times of the grid and the CPU seconds that they took in this process."""
    tiny = common.uniform_topology(DEVICES)
    common.warm_up(tiny)
    WAYS[way](
        common.joint_mlp(2, 4, 16, tiny.devices[0], 0.01), common.Layout(2, 1, 2, 4), tiny, CostModel(tiny)
    )

    def work() -> list[float]:
        topology = common.uniform_topology(DEVICES)
        costs = CostModel(topology)
        function = common.joint_mlp(layers, width, batch, topology.devices[0], learning_rate=0.01)
        grid = common.layouts(DEVICES, layers, batch)
        return [WAYS[way](function, layout, topology, costs) for layout in grid]

    return common.cpu_seconds(work)


# --- what the grid says -------------------------------------------------------------------------------


def run(layers: int, width: int, batch: int) -> tuple[list[dict[str, Any]], Any]:
    """Return the rows of the table and the figure."""
    topology = common.uniform_topology(DEVICES)
    cost_model = CostModel(topology)
    function = common.joint_mlp(layers, width, batch, topology.devices[0], learning_rate=0.01)
    grid = common.layouts(DEVICES, layers, batch)
    rows = [evaluate(function, layout, topology, cost_model, batch) for layout in common.progress(grid)]
    return rows, draw(rows)


def evaluate(
    function: Function, layout: common.Layout, topology: Topology, cost_model: CostModel, batch: int
) -> dict[str, Any]:
    """Simulate one layout with and without overlap. Seconds, samples/s, bytes of the fullest device."""

    def work() -> dict[str, Any]:
        step = common.steady_step(function, layout, topology.devices)
        with_overlap = common.simulate(step, cost_model, overlap=True)
        in_turn = common.simulate(step, cost_model, overlap=False)
        return {
            **vars(layout),
            "step_time_s": with_overlap.step_time,
            "throughput": with_overlap.throughput(batch),
            "step_time_no_overlap_s": in_turn.step_time,
            "throughput_no_overlap": in_turn.throughput(batch),
            "communication_share": common.communication_share(with_overlap),
            "peak_memory_bytes": int(max(with_overlap.peak_memory.values())),
        }

    row, seconds = common.cpu_seconds(work)
    return {**row, "cpu_s": seconds}


def draw(rows: list[dict[str, Any]]) -> Any:
    """One panel per data-parallel degree, one line per number of microbatches, over horizontal degrees."""
    degrees = sorted({row["dp"] for row in rows})
    figure, axes = common.panels(len(degrees), 3.2 * len(degrees), 3.4, sharex=True, sharey=True)
    counts = sorted({row["microbatches"] for row in rows})
    for axis, dp in zip(axes, degrees, strict=True):
        for index, count in enumerate(counts):
            line = sorted(
                (row["hp"], row["throughput"])
                for row in rows
                if (row["dp"], row["microbatches"]) == (dp, count)
            )
            if line:
                label = "no pipeline" if count == 1 else f"{count} microbatches"
                marker = "oDvs<x^"[index % 7]
                axis.plot(*zip(*line, strict=True), marker=marker, color=f"C{index}", label=label)
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted({row["hp"] for row in rows}), sorted({row["hp"] for row in rows}))
        axis.set_title("no data parallelism" if dp == 1 else f"{dp} data-parallel replicas", fontsize=11)
    axes[0].set_ylabel("throughput (samples/s)")
    axes[0].set_ylim(bottom=0)
    label = f"horizontal (tensor) parallel degree; the pipeline takes the rest of the {DEVICES} devices"
    figure.supxlabel(label, fontsize=11)
    pairs = [zip(*axis.get_legend_handles_labels(), strict=True) for axis in axes]
    lines = {label: line for pair in pairs for line, label in pair}
    figure.legend(lines.values(), lines.keys(), loc="outside upper center", ncols=len(lines), frameon=False)
    return figure


if __name__ == "__main__":
    main()
