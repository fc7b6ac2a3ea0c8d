"""How many ops per second the simulator handles, beside DistIR's own simulator.

``python experiments/simulator_scaling.py`` writes ``results/simulator_scaling.csv`` and ``.png``: flat MLPs
of 32 to 4096 layers on one device, five trials each, from the typed function to the trace, with a
fresh simulator and cost model each time as in DistIR's notebook. ``--small``: up to 128 layers.
"""

from __future__ import annotations

import statistics
from typing import Any

import common

from distsim.executor import Simulator
from distsim.executor.cost_model import CostModel
from distsim.ir import Function, Topology

TRIALS = 5
SIZE = 64


def main() -> None:
    """Time every size, write the table and the figure, print the rates at the largest size."""
    given = common.options(__doc__)
    layers = [2**i for i in range(5, 8 if given.small else 13)]
    topology = Topology()
    device = topology.add_device("gpu")
    rows: list[dict[str, Any]] = []
    for count in common.progress(layers):
        function = common.joint_mlp(count, SIZE, SIZE, device)
        for trial in range(TRIALS):
            seconds = time_once(function, topology)
            rows.append(row("distsim", count, len(function.ops), trial, seconds))
    reference = [
        row(f"DistIR {old['version']}", int(old["layers"]), int(old["ops"]), int(old["trial"]), old["cpu_s"])
        for old in common.read_csv(common.DATA / "distir_scaling.csv")
        if old["layers"] in layers
    ]
    common.write_csv(given.out / "simulator_scaling.csv", [*rows, *reference])
    common.save(draw([*rows, *reference]), given.out / "simulator_scaling.png")
    for name, points in medians([*rows, *reference]).items():
        ops = max(points)
        print(f"{name}: {ops} ops in {points[ops]:.3f} CPU seconds, {ops / points[ops]:,.0f} ops/s")


def row(simulator: str, layers: int, ops: int, trial: int, seconds: Any) -> dict[str, Any]:
    """A row of the table."""
    rate = ops / seconds
    return {
        "simulator": simulator,
        "layers": layers,
        "ops": ops,
        "trial": trial,
        "cpu_s": seconds,
        "ops_per_s": rate,
    }


def time_once(function: Function, topology: Topology) -> float:
    """CPU seconds of one simulation, from a typed function to its trace, with nothing cached."""
    simulator = Simulator(CostModel(topology))
    types = [value.type for value in function.inputs]
    trace, seconds = common.cpu_seconds(lambda: simulator.interpret(function, types).trace)
    if len(trace) != len(function.ops):
        raise RuntimeError(f"{len(trace)} events for {len(function.ops)} ops")
    return seconds


def medians(rows: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Per simulator: number of ops -> median CPU seconds."""
    names = dict.fromkeys(row["simulator"] for row in rows)
    return {
        name: {
            ops: statistics.median(r["cpu_s"] for r in rows if (r["simulator"], r["ops"]) == (name, ops))
            for ops in sorted({r["ops"] for r in rows if r["simulator"] == name})
        }
        for name in names
    }


def draw(rows: list[dict[str, Any]]) -> Any:
    """Seconds on the left and ops per second on the right, over the number of ops."""
    figure, (left, right) = common.panels(2, 9, 3.6)
    for index, (name, points) in enumerate(medians(rows).items()):
        style = {"marker": "oDv"[index % 3], "color": f"C{index}", "label": name}
        left.loglog(list(points), list(points.values()), **style)
        right.loglog(list(points), [ops / seconds for ops, seconds in points.items()], **style)
    left.set(xlabel="ops", ylabel="CPU seconds of one simulation")
    right.set(xlabel="ops", ylabel="ops simulated per CPU second")
    left.legend(frameon=False)
    return figure


if __name__ == "__main__":
    main()
