"""torchtitan's automatic pipeline partition on four RTX 3090: predicted against published speed-ups.

``python experiments/autopartition_table.py`` writes ``results/autopartition_table.csv`` and ``.png``: for
each of the ten published rows (``tests/data/autopipe``) the step simulated under the default split, under
the automatic one of the original and under our own; and ``results/autopartition_figures.csv``: the mean
error when a figure of the hardware is another. ``--small``: four rows.

Everything is given: the configurations are those of the pull request (1F1B, sequences of 2048 tokens, one a
microbatch, vocabulary 2048, 16 heads, AdamW; every second layer of a stage checkpointed in Llama, none in
DeepSeek: ``selective_ac_option`` 2 and 64), the figures of the GPU those of the preset ``rtx-3090``, and the
element type is float32: torchtitan has no mixed precision under a pipeline alone (``maybe_enable_amp``). No
figure is fitted to the rows. 8192/16 is left out of the mean: its published throughput repeats another's.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import common

from distsim.executor import CostModel, Simulation, Simulator
from distsim.hardware import load_cluster
from distsim.hardware.rank_axes import logical_mesh
from distsim.ir import Function, Mesh, Topology
from distsim.models import deepseek, llama
from distsim.schedule import schedule
from distsim.stage_balance import auto_split, default_split, mesh_communication
from distsim.transforms import Adam, differentiate
from distsim.transforms.pipelining.model_blocks import costs_of, model_blocks
from distsim.transforms.pipelining.pipeline import cut_stages
from distsim.transforms.recompute import rematerialize
from distsim.transforms.recompute.policies import Policy, Rule, Run, checkpoint
from distsim.transforms.sharding.shard import Sharded, shard

STAGES, SEQ, VOCAB, HEADS = 4, 2048, 2048, 16
CHECKPOINTED = {"llama": 2, "dsv3": 64}
"""Every how manieth layer of a stage is recomputed."""

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """A published row: the model, the original's split, its speed-up, and tokens/s/GPU by default."""

    family: str
    dim: int
    layers: int
    ffn: int
    microbatches: int
    automatic: Sizes
    speedup: float
    default_tps: float

    @property
    def counted(self) -> bool:
        """Whether it counts: the throughput of 8192/16 repeats that of another row."""
        return (self.dim, self.layers) != (8192, 16)

    def __str__(self) -> str:
        return f"{self.family} {self.dim}/{self.layers}"


def main() -> None:
    """Simulate every row, write tables and figure, print the mean error."""
    given = common.options(__doc__)
    chosen = published()[2:6] if given.small else published()
    topology = load_cluster("rtx-3090")
    rows, seconds = common.cpu_seconds(lambda: [predict(row, topology) for row in common.progress(chosen)])
    common.write_csv(given.out / "autopartition_table.csv", rows)
    common.save(draw(rows), given.out / "autopartition_table.png")
    print(f"mean absolute error {mean_error(rows):.2f} percentage points, {seconds:.1f} CPU seconds")
    common.write_csv(given.out / "autopartition_figures.csv", other_figures(chosen))


def published() -> list[Row]:
    """Return the ten rows."""
    table = json.loads((common.DATA / "autopipe" / "table.json").read_text(encoding="utf-8"))
    sizes = ("family", "dim", "layers", "ffn", "microbatches")
    return [
        Row(
            *[row[key] for key in sizes],
            tuple(row["automatic_sizes"]),
            row["measured_speedup"],
            row["measured_tps"][1],
        )
        for row in table["rows"]
    ]


@functools.lru_cache(16)
def joint(row: Row) -> Function:
    """Return the training function of a row, in float32."""
    sizes = {"layers": row.layers, "hidden": row.dim, "heads": HEADS, "ffn": row.ffn}
    data = {"seq": SEQ, "batch": row.microbatches, "vocab": VOCAB}
    made = llama(**sizes, **data, kv_heads=HEADS) if row.family == "llama" else deepseek(**sizes, **data)
    return differentiate(made, Adam())


@dataclass(frozen=True)
class Chosen(Policy):
    """Checkpoints these layers."""

    layers: frozenset[int] = frozenset()

    def rule(self, block: int, place: int) -> Rule | None:
        """Return the rule for a block by its number, wherever it is in its stage."""
        return self.blocks if block in self.layers else None


class Pipeline:
    """A row on a topology, under any split of its blocks: embedding, layers, last norm and output head."""

    def __init__(self, row: Row, topology: Topology) -> None:
        self.row, self.topology = row, topology
        self.cost_model = CostModel(topology)
        self.mesh = Mesh(topology.devices[:STAGES], pp=STAGES, dp=1, tp=1)
        self.schedule = schedule("1f1b", STAGES, row.microbatches)
        self.costs = self.cost_model.on(topology.devices[0])
        self.local = shard(joint(row), logical_mesh(topology.devices[0], 1, 1), row.microbatches, 1)

    @property
    def default(self) -> Sizes:
        """The blocks of each stage as torchtitan counts layers."""
        first, *between, last = default_split(self.row.layers, STAGES)
        return (first + 1, *between, last + 2)

    def own_local(self, sizes: Sizes) -> Sharded:
        """Return what the ranks run when each stage recomputes every so-many-th of its own layers."""
        every, layers = CHECKPOINTED[self.row.family], set[int]()
        for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False):
            own = [block - 1 for block in range(start, start + size) if 1 <= block <= self.row.layers]
            layers.update(own[every - 1 :: every])
        if not layers:
            return self.local
        policy = Chosen("chosen", checkpoint, run=Run.EARLY, layers=frozenset(layers))
        return replace(self.local, function=rematerialize(self.local.function, policy, costs=self.costs))

    def simulate(self, sizes: Sizes, overlap: bool = True) -> Simulation:
        """Simulate a step."""
        local = self.own_local(sizes)
        blocks = model_blocks(local, self.costs)
        firsts = tuple(accumulate(sizes[:-1], initial=0))
        cut = cut_stages(local, STAGES, self.costs, blocks.stages(firsts))
        program = cut.program(self.mesh, self.schedule)
        return Simulator(self.cost_model, overlap=overlap).simulate(program)

    def fastest(self) -> Sizes:
        """Return the split of least step time; what is recomputed follows from it, so search on."""
        tried: dict[Sizes, float] = {}
        sizes = self.default
        memory = self.topology.devices[0].usable
        while sizes not in tried:
            tried[sizes] = self.simulate(sizes).step_time
            local = self.own_local(sizes)
            costs = costs_of(local, model_blocks(local, self.costs), self.mesh.at(pp=0), self.cost_model)
            links = mesh_communication(self.mesh, self.cost_model)
            count = self.row.microbatches
            sizes = auto_split(costs, STAGES, count, self.schedule, links, memory).sizes
        return min(tried, key=lambda each: tried[each])


def predict(row: Row, topology: Topology) -> dict[str, Any]:
    """Return a row of the table."""
    pipeline = Pipeline(row, topology)
    ours = pipeline.fastest()
    default, automatic, own = map(pipeline.simulate, (pipeline.default, row.automatic, ours))
    at_once = Pipeline(row, with_figures(topology, kernel_launch_overhead=0.0)).simulate(pipeline.default)
    speedup = default.step_time / automatic.step_time - 1
    return {
        "family": row.family,
        "dim": row.dim,
        "layers": row.layers,
        "default": _text(pipeline.default),
        "automatic": _text(row.automatic),
        "ours": _text(ours),
        "published_pct": 100 * row.speedup,
        "predicted_pct": 100 * speedup,
        "error_pp": 100 * (speedup - row.speedup),
        "ours_pct": 100 * (default.step_time / own.step_time - 1),
        "published_default_tps": row.default_tps,
        "predicted_default_tps": row.microbatches * SEQ / STAGES / default.step_time,
        "launch_share": 1 - at_once.step_time / default.step_time,
        "memory_gib": max(automatic.peak_memory.values()) / 2**30,
        "counted": row.counted,
    }


def _text(sizes: Sequence[int]) -> str:
    return "-".join(map(str, sizes))


def mean_error(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the mean absolute error of the predicted speed-ups, in percentage points."""
    errors = [abs(row["error_pp"]) for row in rows if row["counted"]]
    return sum(errors) / len(errors)


def with_figures(topology: Topology, efficiency: float | None = None, **device: float) -> Topology:
    """Return a topology of devices with other figures, or a link of another efficiency."""
    levels = topology.levels
    if efficiency is not None:
        levels = tuple([replace(level, link=replace(level.link, efficiency=efficiency)) for level in levels])
    return Topology.hierarchical(replace(topology.devices[0], **device), len(topology.devices), levels)


def other_figures(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the mean error with one figure of the preset changed at a time: none was chosen for it."""
    topology = load_cluster("rtx-3090")
    changes: dict[str, tuple[Topology, bool]] = {
        "as the preset has it": (topology, True),
        "matrix products at 50 % of the peak": (with_figures(topology, flops_efficiency=0.5), True),
        "matrix products at 70 % of the peak": (with_figures(topology, flops_efficiency=0.7), True),
        "5 us a launch": (with_figures(topology, kernel_launch_overhead=5e-6), True),
        "20 us a launch": (with_figures(topology, kernel_launch_overhead=20e-6), True),
        "half the link": (with_figures(topology, efficiency=0.2), True),
        "sends do not overlap compute": (topology, False),
    }
    return [
        {"changed": name, "mean_error_pp": mean_error([error_of(row, *with_) for row in rows])}
        for name, with_ in changes.items()
    ]


def error_of(row: Row, topology: Topology, overlap: bool = True) -> dict[str, Any]:
    """Return the error of a row in percentage points, and whether it counts."""
    pipeline = Pipeline(row, topology)
    default, automatic = (
        pipeline.simulate(sizes, overlap).step_time for sizes in (pipeline.default, row.automatic)
    )
    return {"error_pp": 100 * (default / automatic - 1 - row.speedup), "counted": row.counted}


def draw(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Speed-ups over the default split: published, predicted for the split of the original, and ours."""
    figure, (axis,) = common.panels(1, 9, 4)
    kinds = {
        "published_pct": "published",
        "predicted_pct": "predicted for the split of the original",
        "ours_pct": "ours",
    }
    for place, (key, label) in enumerate(kinds.items()):
        where = [index + 0.27 * (place - 1) for index in range(len(rows))]
        axis.bar(where, [row[key] for row in rows], 0.25, label=label, color=f"C{place}")
    labels = [
        f"{row['family']}\n{row['dim']}/{row['layers']}{'' if row['counted'] else ' *'}" for row in rows
    ]
    axis.set_xticks(range(len(rows)), labels)
    axis.set_ylabel("faster than the default split (%)")
    axis.set_title("4 x RTX 3090, pp=4, 1F1B (* published throughput repeats another row's)", fontsize=10)
    axis.legend(frameon=False)
    return figure


if __name__ == "__main__":
    main()
