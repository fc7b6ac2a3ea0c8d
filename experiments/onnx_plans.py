"""GPT-2, as exported to ONNX, under every (dp, tp, pp) of the 16 GPUs of two DGX A100.

``python experiments/onnx_plans.py`` writes ``results/onnx_plans.csv`` and ``.png``: 128 sequences of 1024
tokens in bfloat16, Adam, 1F1B, with few and with many microbatches. ``--small``: 32 sequences of 128
tokens and a quarter of the plans.
"""

from __future__ import annotations

from typing import Any

import common

from distsim.compose import parallelize
from distsim.executor.cost_model import CostModel
from distsim.hardware import load_cluster
from distsim.importer import load_model
from distsim.ir import Function, Topology
from distsim.ir.type import BFloat16
from distsim.plan import Plan
from distsim.transforms import Adam, add_loss, differentiate, set_precision, steady_state_transform

CLUSTER = "dgx-a100:2"
DEVICES = 16


def main() -> None:
    """Simulate every plan, write the table and the figure, print the fastest that fit."""
    given = common.options(__doc__)
    batch, sequence = (32, 128) if given.small else (128, 1024)
    chosen = plans(batch)[:: 4 if given.small else 1]
    (function, rows), seconds = common.cpu_seconds(lambda: run(batch, sequence, chosen))
    common.write_csv(given.out / "onnx_plans.csv", rows)
    common.save(draw(rows), given.out / "onnx_plans.png")
    for row in sorted((row for row in rows if row["fits"]), key=lambda row: -row["throughput"])[:5]:
        print(f"{row['plan']}: {row['throughput']:.1f} samples/s, {row['peak_memory_bytes'] / 2**30:.1f} GiB")
    print(f"{function.name}: {len(rows)} plans, {seconds:.2f} CPU seconds")


def plans(batch: int) -> list[Plan]:
    """Return the plans: all degrees with dp * tp * pp = 16, with 1, 4 and 16 microbatches where they fit.

    A pipeline gets at least one microbatch per stage.
    """
    degrees = [2**i for i in range(5)]
    return [
        Plan(dp, tp, DEVICES // (dp * tp), microbatches)
        for dp in degrees
        for tp in degrees
        if DEVICES % (dp * tp) == 0
        for microbatches in (1, 4, 16)
        if microbatches >= DEVICES // (dp * tp) and batch % (dp * microbatches) == 0
    ]


def run(batch: int, sequence: int, chosen: list[Plan]) -> tuple[Function, list[dict[str, Any]]]:
    """Return the training function and the rows of the table."""
    topology = load_cluster(CLUSTER)
    cost_model = CostModel(topology)
    forward = set_precision(load_model("gpt2-onnx", batch, f"seq={sequence}"), BFloat16())
    function = differentiate(add_loss(forward, "auto"), Adam())
    rows = [evaluate(function, plan, topology, cost_model, batch) for plan in common.progress(chosen)]
    return function, rows


def evaluate(
    function: Function, plan: Plan, topology: Topology, cost_model: CostModel, batch: int
) -> dict[str, Any]:
    """Simulate one plan. Seconds, samples/s, bytes of the fullest device."""

    def work() -> dict[str, Any]:
        step = steady_state_transform(parallelize(function, plan, topology).to_function())[0]
        simulation = common.simulate(step, cost_model, overlap=True)
        peak = max(simulation.peak_memory.values())
        return {
            "step_time_s": simulation.step_time,
            "throughput": simulation.throughput(batch),
            "peak_memory_bytes": int(peak),
            "fits": peak <= topology.devices[0].usable,
            "communication_share": common.communication_share(simulation),
        }

    row, seconds = common.cpu_seconds(work)
    degrees = {"dp": plan.dp, "tp": plan.tp, "pp": plan.pp, "microbatches": plan.microbatches}
    return {"plan": str(plan), **degrees, **row, "cpu_s": seconds}


def draw(rows: list[dict[str, Any]]) -> Any:
    """Throughput and peak memory of every plan, one row per degrees, one marker per microbatches."""
    figure, (left, right) = common.panels(2, 11, 5.2, sharey=True)
    names = list(dict.fromkeys(_degrees(row) for row in rows))
    for index, count in enumerate(sorted({row["microbatches"] for row in rows})):
        own = [row for row in rows if row["microbatches"] == count]
        places = [names.index(_degrees(row)) for row in own]
        style = {"marker": "oDv"[index % 3], "edgecolors": f"C{index}", "s": 42}
        colors = [f"C{index}" if row["fits"] else "none" for row in own]
        label = f"{count} microbatch{'es' if count > 1 else ''}"
        left.scatter([row["throughput"] for row in own], places, color=colors, label=label, **style)
        right.scatter([row["peak_memory_bytes"] / 2**30 for row in own], places, color=colors, **style)
    capacity = load_cluster(CLUSTER).devices[0].usable / 2**30
    right.axvline(capacity, color="0.4", linestyle="--", label=f"{capacity:.0f} GiB of one GPU")
    left.set_yticks(range(len(names)), names)
    left.invert_yaxis()
    left.set_xlim(left=0)
    right.set_xscale("log")
    left.set(xlabel="throughput (samples/s); hollow: does not fit")
    right.set(xlabel="peak memory of the fullest GPU (GiB)")
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    return figure


def _degrees(row: dict[str, Any]) -> str:
    return f"dp {row['dp']}, tp {row['tp']}, pp {row['pp']}"


if __name__ == "__main__":
    main()
