"""DistIR's grid: an MLP under every data, horizontal and pipeline parallel layout of 16 devices.

``python experiments/grid_search.py`` writes ``results/grid_search.csv`` and ``.png``: 64 layers of width
8192, batch 8192, 200 Gbit/s between all pairs, 52 layouts. ``--small``: 4 layers of width 512.
"""

from __future__ import annotations

from typing import Any

import common

from distsim.executor.cost_model import CostModel
from distsim.ir import Function, Topology

DEVICES = 16


def main() -> None:
    """Run the grid, write its table and figure, print the fastest layouts."""
    given = common.options(__doc__)
    layers, width, batch = (4, 512, 512) if given.small else (64, 8192, 8192)
    (rows, figure), seconds = common.cpu_seconds(lambda: run(layers, width, batch))
    common.write_csv(given.out / "grid_search.csv", rows)
    common.save(figure, given.out / "grid_search.png")
    print(" dp  hp  pp microbatches  samples/s no overlap  peak GB")
    for row in sorted(rows, key=lambda row: -row["throughput"])[:5]:
        print(
            f"{row['dp']:3} {row['hp']:3} {row['pp']:3} {row['microbatches']:12} {row['throughput']:10.0f} "
            f"{row['throughput_no_overlap']:10.0f} {row['peak_memory_bytes'] / 1e9:8.1f}"
        )
    simulated = sum(row["cpu_s"] for row in rows)
    print(f"{len(rows)} layouts: {simulated:.2f} CPU seconds, {seconds:.2f} with the figure and the topology")


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
