"""What saving and recomputing cost: Llama 3 8B's gathered weights under FSDP, and a Pareto curve.

``python experiments/remat_pareto.py`` writes ``results/remat_figures.csv``: the gathered matrices of four
layers (4096 wide, feed-forwards of 14336, 8 key and value heads, bfloat16) on a mesh of 128, held at the end
of the forward pass, read off the simulated memory timeline, and the step time, when

- all are gathered again for backward (the layers recomputed up to what backward needs);
- those that the recomputed products read are saved: AutoParallel's pull request 485 tells of about 1.2 GB for
  four layers, since backward recomputes 6 of 7 products (all but the last of the feed-forward);
- all that backward reads are saved, with the output head (vocabulary 128,256).

``results/remat_pareto.csv`` and ``.png``: step time and peak memory of 32 layers on 64 H100 under FSDP for
each policy, with weights gathered again and with weights kept. ``--small``: fewer devices, narrow layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import common

from distsim.compose import parallelize
from distsim.executor import CostModel, Simulation, Simulator, count_flops
from distsim.hardware import load_cluster
from distsim.hardware.rank_axes import logical_mesh
from distsim.ir import Function, Mesh, Topology, Value
from distsim.ir.type import BFloat16, as_tensor
from distsim.models import llama
from distsim.plan import Plan
from distsim.program.program import Program
from distsim.schedule import schedule
from distsim.simulation.memory.program_memory import program_memory
from distsim.simulation.memory.timeline import memory_timeline
from distsim.simulation.memory.walk import KINDS
from distsim.transforms import Adam, differentiate, gathered, pipeline, rematerialize, shard, zero
from distsim.transforms.data_parallel.gathers import chains
from distsim.transforms.recompute.saves import Tag

MIB = 2**20
LAYERS = 4
LLAMA3 = {"hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256}
NARROW = {"hidden": 256, "heads": 8, "kv_heads": 2, "ffn": 896, "vocab": 8192}
WHOLE = ("every:2", "every_early:2", "full", "full_early")
POLICIES = ("none", "matmuls", *WHOLE, "min_cut", *(f"budget:{i / 10:.1f}" for i in range(10)))

Tags = Mapping[Value, Tag]


def main() -> None:
    """Write both tables and the figure, print the tables."""
    given = common.options(__doc__)
    sizes, devices = (NARROW, 8) if given.small else (LLAMA3, 128)
    figures = [figure(each) for each in common.progress(cases(sizes, devices, given.small))]
    for row in figures:
        extra = row["step_s"] - figures[0]["step_s"]
        print(f"{row['case']:34} {row['gathered_mib']:8,.1f} MiB held, {extra * 1e3:+9.3f} ms a step")
    common.write_csv(given.out / "remat_figures.csv", figures)
    rows = pareto(sizes, given.small)
    common.write_csv(given.out / "remat_pareto.csv", rows)
    common.save(draw(rows), given.out / "remat_pareto.png")


# --- the exact figures -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A step on a 1D mesh: what is recomputed, and which gathered weights are saved."""

    name: str
    function: Function
    topology: Topology
    remat: str
    tags: Callable[[Function], Tags]

    def __str__(self) -> str:
        return self.name


def cases(sizes: Mapping[str, int], devices: int, small: bool) -> list[Case]:
    """Return the cases of the table."""
    topology = load_cluster(f"dgx-h100:{devices // 8}")
    model = llama(LAYERS, **sizes, seq=128 if small else 2048, batch=devices, dtype=BFloat16())
    joint = differentiate(model, Adam())
    return [
        Case("full_early, gathered again", joint, topology, "full_early", gathered),
        Case("full_early, kept for recomputed products", joint, topology, "full_early", kept_for_products),
        Case("nothing recomputed, gathered again", joint, topology, "none", gathered),
        Case("nothing recomputed, all kept", joint, topology, "none", kept),
    ]


def kept(function: Function) -> Tags:
    """Save all gathered weights that backward reads."""
    return gathered(function, reshard=False)


def kept_for_products(function: Function) -> Tags:
    """Save the gathered weights that recomputed matrix products read, gather the others again."""
    names = weights_of_products(rematerialize(function, "full_early", gathered(function)))
    saved = {op.outputs[0]: Tag.MUST_SAVE for chain in chains(function) for op in chain[-1:]}
    return {**gathered(function), **{value: tag for value, tag in saved.items() if value.name in names}}


def weights_of_products(function: Function) -> set[str]:
    """Return the names of the parameters that matrix products recomputed in backward Calls read."""
    found: set[str] = set()
    for op in function.ops:
        if op.is_call and any(part.op_type == "MatMulGrad" for part in op.callee.ops):
            read = {v for part in op.callee.ops if part.op_type == "MatMul" for v in part.inputs}
            found |= {v.name for formal, v in zip(op.callee.inputs, op.inputs, strict=True) if formal in read}
    return found & {value.name for value in function.parameters}


def figure(case: Case) -> dict[str, Any]:
    """The row of a case: gathered matrices in memory when forward ends, and the step time.

    Parameters lie sharded and are counted as such; what else is held, beyond what the step whose parameters
    are whole on every rank holds at that time, are gathered weights.
    """
    program = laid_out(case)
    simulator = Simulator(CostModel(case.topology))
    simulation, whole = simulator.simulate(program), simulator.simulate(laid_out(case, divided=False))
    return {
        "case": case.name,
        "layers": LAYERS,
        "devices": len(program.mesh),
        "gathered_mib": (held_after_forward(simulation) - held_after_forward(whole)) / MIB,
        "step_s": simulation.step_time,
        "peak_gib": max(program_memory(program).peaks) / 2**30,
    }


def laid_out(case: Case, divided: bool = True) -> Program:
    """The program of a case; vectors, the scales of norms, stay whole on every rank, or all parameters do."""
    devices = case.topology.devices
    local = shard(case.function, logical_mesh(devices[0], len(devices), 1))
    if divided:
        local = zero(local, smallest=widest_vector(case.function) + 1)
    tags = case.tags(local.function) if divided else {}
    function = rematerialize(local.function, case.remat, tags)
    mesh = Mesh(devices, pp=1, dp=len(devices), tp=1)
    return pipeline(replace(local, function=function), mesh, schedule("1f1b", 1, 1))


def widest_vector(function: Function) -> int:
    """Return the elements of the largest parameter that is no matrix."""
    types = [as_tensor(value.type, value.name) for value in function.parameters]
    return max(type_.size for type_ in types if type_.rank < 2)


def held_after_forward(simulation: Simulation) -> int:
    """Return the bytes in use on a device when the loss is computed, without parameters and their state."""
    starts = [span.start for span in simulation.spans() if span.op.op_type == "CrossEntropyLoss"]
    (timeline, *_) = memory_timeline(simulation)
    place = int(timeline.times.searchsorted(starts[-1], side="right")) - 1
    amounts = dict(zip(KINDS, timeline.by_kind[place].tolist(), strict=True))
    return sum(amounts.values()) - amounts["parameters"] - amounts["state"]


# --- the curve -------------------------------------------------------------------------------------------


def pareto(sizes: Mapping[str, int], small: bool) -> list[dict[str, Any]]:
    """Step time and peak memory of each policy, with weights gathered again and kept."""
    nodes, layers, seq = (1, 4, 128) if small else (8, 32, 2048)
    topology = load_cluster(f"dgx-h100:{nodes}")
    plan = Plan(dp=len(topology.devices))
    model = llama(layers, **sizes, seq=seq, batch=2 * plan.dp, dtype=BFloat16())
    joint = differentiate(model, Adam())
    own, simulator = count_flops(joint), Simulator(CostModel(topology))
    rows: list[dict[str, Any]] = []
    for weights in ("always", "never"):
        for policy in common.progress(POLICIES):
            program = parallelize(joint, replace(plan, remat=policy, zero=3, reshard=weights), topology)
            simulation = simulator.simulate(program)
            rows.append(
                {
                    "policy": policy,
                    "weights": weights,
                    "step_s": simulation.step_time,
                    "peak_gib": max(program_memory(program).peaks) / 2**30,
                    "flops_of_model": simulation.flops / own,
                }
            )
    best = frontier(rows)
    return [{**row, "pareto": row in best} for row in rows]


def frontier(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows than which no other is both faster and smaller, fastest first."""
    found: list[dict[str, Any]] = []
    for row in sorted(rows, key=lambda row: (row["step_s"], row["peak_gib"])):
        if not found or row["peak_gib"] < found[-1]["peak_gib"]:
            found.append(row)
    return found


def draw(rows: Sequence[dict[str, Any]]) -> Any:
    """Step time over peak memory, a point a policy, the frontier as a line."""
    drawing, (axis,) = common.panels(1, 7.5, 4.5)
    best = frontier(rows)
    axis.plot(
        [r["peak_gib"] for r in best], [r["step_s"] for r in best], color="0.6", linewidth=1, label="frontier"
    )
    for weights, marker in (("always", "o"), ("never", "s")):
        own = [row for row in rows if row["weights"] == weights]
        label = "gathered again" if weights == "always" else "kept"
        x, y = [row["peak_gib"] for row in own], [row["step_s"] for row in own]
        axis.scatter(x, y, marker=marker, s=22, label=f"weights {label}", zorder=3)
        for row in own:
            if not row["policy"].startswith("budget"):
                at = (row["peak_gib"], row["step_s"])
                axis.annotate(row["policy"], at, xytext=(4, 3), textcoords="offset points", fontsize=7)
    axis.set_xlabel("peak memory (GiB)")
    axis.set_ylabel("step time (s)")
    axis.legend(fontsize=8)
    return drawing


if __name__ == "__main__":
    main()
