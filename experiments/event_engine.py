"""How many ops per second the event engine handles, without contention and with shared links.

``python experiments/event_engine.py`` writes ``results/event_engine.csv`` and ``.png``. Without contention:
flat MLPs on one device, and a training step (dp=4, tp=2, pp=4) device by device. With contention: the same
step on a cluster in which two devices share a NIC. Three trials each; the engine's whole run is timed, setup
included, from the lowered tasks to the arrays of starts and ends. ``--small``: done in seconds.
"""

from __future__ import annotations

import statistics
from typing import Any

import common

from distsim.executor import CostModel
from distsim.ir import Device, Topology
from distsim.ir.link import Link
from distsim.ir.topology import Level
from distsim.simulation.events.engine import run
from distsim.simulation.events.network import Network
from distsim.simulation.tasks.task_table import Tasks, lower

TRIALS = 3
WIDTH = 1024


def main() -> None:
    """Time every size, write the table and the figure, print the rates at the largest size."""
    given = common.options(__doc__)
    layers = [2**i for i in range(8, 11 if given.small else 17, 2)]
    microbatches = [2**i for i in range(1, 3 if given.small else 6)]
    rows: list[dict[str, Any]] = []
    topology = Topology()
    device = topology.add_device("gpu")
    for count in common.progress(layers):
        function = common.joint_mlp(count, 64, 64, device)
        rows += time_all("one device", lower(function, CostModel(topology)), None)
    topology = cluster(nodes=4)
    network = Network(topology)
    for count in common.progress(microbatches):
        tasks = training_step(topology, count)
        rows += time_all("training step", tasks, None)
        rows += time_all("training step, shared links", tasks, network)
    common.write_csv(given.out / "event_engine.csv", rows)
    common.save(draw(rows), given.out / "event_engine.png")
    for case, points in medians(rows).items():
        ops = max(points)
        print(f"{case}: {ops} ops in {points[ops]:.3f} CPU seconds, {ops / points[ops]:,.0f} ops/s")
    for case, step in {row["case"]: row["step_time_s"] for row in rows}.items():
        print(f"{case}: a step of {step * 1e3:.2f} ms at the largest size")


def cluster(nodes: int) -> Topology:
    """Return nodes of eight devices, two to a NIC."""
    device = Device(0, "gpu", throughput=1e14, dram_bandwidth=1.5e12, kernel_launch_overhead=4e-6)
    levels = [
        Level("nvlink", Link(300e9, 5e-6), 8),
        Level("nic", Link(25e9, 1e-5), devices_per_port=2),
    ]
    return Topology.hierarchical(device, 8 * nodes, levels)


def training_step(topology: Topology, microbatches: int) -> Tasks:
    """Return the tasks of a step in steady state, each device on its own."""
    layout = common.Layout(dp=4, hp=2, pp=4, microbatches=microbatches)
    batch = 4 * 32 * microbatches
    joint = common.joint_mlp(16, WIDTH, batch, topology.devices[0], learning_rate=0.01)
    step = common.steady_step(joint, layout, topology.devices)
    return lower(step, CostModel(topology), lockstep=False)


def time_all(case: str, tasks: Tasks, network: Network | None) -> list[dict[str, Any]]:
    """Time the engine a few times; rows of the table."""
    rows: list[dict[str, Any]] = []
    for trial in range(TRIALS):
        (_, end), seconds = common.cpu_seconds(lambda: run(tasks, network))
        rows.append(
            {
                "case": case,
                "ops": len(tasks),
                "trial": trial,
                "cpu_s": seconds,
                "ops_per_s": len(tasks) / seconds,
                "step_time_s": float(end.max()),
            }
        )
    return rows


def medians(rows: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Per case: number of ops -> median CPU seconds."""
    cases = dict.fromkeys(row["case"] for row in rows)
    return {
        case: {
            ops: statistics.median(row["cpu_s"] for row in rows if (row["case"], row["ops"]) == (case, ops))
            for ops in sorted({row["ops"] for row in rows if row["case"] == case})
        }
        for case in cases
    }


def draw(rows: list[dict[str, Any]]) -> Any:
    """Ops per second over the number of ops, one line per case."""
    figure, (axis,) = common.panels(1, 6, 3.8)
    for index, (case, points) in enumerate(medians(rows).items()):
        rates = [ops / seconds for ops, seconds in points.items()]
        axis.semilogx(list(points), rates, marker="oDv"[index], color=f"C{index}", label=case)
    axis.set(xlabel="ops", ylabel="ops simulated per CPU second")
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False)
    return figure


if __name__ == "__main__":
    main()
