"""One kind of parallelism at a time: how an MLP's throughput grows with the number of devices.

``python experiments/isolated_scaling.py`` writes ``results/isolated_scaling.csv`` and ``.png``: data
parallelism on 2 to 128 devices, horizontal and pipeline parallelism on 2 to 64, in the sizes of DistIR's
notebook. ``--small``: 8 layers of width 512 on up to 8 devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import common

from distsim.executor.cost_model import CostModel

KINDS = {"dp": "data parallel", "hp": "horizontal (tensor) parallel", "pp": "pipeline parallel"}


@dataclass(frozen=True)
class Curve:
    """One line of the figure: a kind of parallelism, a model and the numbers of devices."""

    kind: str
    layers: int
    width: int
    batch: int
    microbatches: int
    devices: tuple[int, ...]

    @property
    def label(self) -> str:
        """What tells this curve from the others of its kind."""
        return f"width {self.width}" if self.kind == "hp" else f"batch {self.batch}"


def curves(small: bool) -> list[Curve]:
    """Return the curves of the notebook, or smaller ones."""
    if small:
        sizes = (2, 4, 8)
        return [
            *(Curve("dp", 8, 512, batch, 1, sizes) for batch in (64, 128)),
            *(Curve("hp", 8, width, 64, 1, sizes) for width in (256, 512)),
            *(Curve("pp", 8, 512, batch, 4, sizes) for batch in (64, 128)),
        ]
    batches, sizes = (512, 1024, 2048, 4096), (2, 4, 8, 16, 32, 64)
    return [
        *(Curve("dp", 64, 8192, batch, 1, (*sizes, 128)) for batch in batches),
        *(Curve("hp", 128, width, 8192, 1, sizes) for width in (1024, 2048, 4096, 8192)),
        *(Curve("pp", 64, 8192, batch, 8, sizes) for batch in batches),
    ]


def main() -> None:
    """Simulate every point, write the table and the figure."""
    given = common.options(__doc__)
    rows, seconds = common.cpu_seconds(
        lambda: [row for curve in common.progress(curves(given.small)) for row in points(curve)]
    )
    common.write_csv(given.out / "isolated_scaling.csv", rows)
    common.save(draw(rows), given.out / "isolated_scaling.png")
    print(f"{len(rows)} points: {seconds:.2f} CPU seconds")


def points(curve: Curve) -> list[dict[str, Any]]:
    """Simulate one curve: samples/s with overlap and without, and what each device holds at most."""
    topology = common.uniform_topology(max(curve.devices))
    cost_model = CostModel(topology)
    holder = topology.devices[0]
    function = common.joint_mlp(curve.layers, curve.width, curve.batch, holder, learning_rate=0.01)
    rows: list[dict[str, Any]] = []
    for count in curve.devices:
        degrees = {"dp": 1, "hp": 1, "pp": 1, curve.kind: count}
        layout = common.Layout(**degrees, microbatches=curve.microbatches)
        step = common.steady_step(function, layout, topology.devices)
        overlapped = common.simulate(step, cost_model, overlap=True)
        in_turn = common.simulate(step, cost_model, overlap=False)
        rows.append(
            {
                "kind": curve.kind,
                "curve": curve.label,
                "devices": count,
                "throughput": overlapped.throughput(curve.batch),
                "throughput_no_overlap": in_turn.throughput(curve.batch),
                "peak_memory_bytes": int(max(overlapped.peak_memory.values())),
            }
        )
    return rows


def draw(rows: list[dict[str, Any]]) -> Any:
    """One panel per kind; solid with overlap, dotted without."""
    figure, axes = common.panels(len(KINDS), 13, 3.8)
    for axis, (kind, title) in zip(axes, KINDS.items(), strict=True):
        labels = list(dict.fromkeys(row["curve"] for row in rows if row["kind"] == kind))
        for index, label in enumerate(labels):
            line = [row for row in rows if (row["kind"], row["curve"]) == (kind, label)]
            counts = [row["devices"] for row in line]
            style = {"marker": "oDvs"[index % 4], "color": f"C{index}", "markersize": 4}
            axis.plot(counts, [row["throughput"] for row in line], label=label, **style)
            axis.plot(counts, [row["throughput_no_overlap"] for row in line], linestyle=":", **style)
        ticks = sorted({row["devices"] for row in rows if row["kind"] == kind})
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, ticks)
        axis.set_ylim(0, 1.3 * axis.get_ylim()[1])
        axis.set(title=title, xlabel="devices")
        axis.legend(loc="upper left", ncols=2, frameon=False, fontsize=9)
    axes[0].set_ylabel("throughput (samples/s)\ndotted: nothing overlaps")
    return figure


if __name__ == "__main__":
    main()
