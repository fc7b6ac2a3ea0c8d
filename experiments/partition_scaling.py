"""How long partitioning takes, beside torch.fx's partitioner, on residual graphs of 10 to 10,000 ops.

``python experiments/partition_scaling.py`` writes ``results/partition_scaling.csv`` and ``.png``: every mode
on graphs of residual blocks (a chain in which every third op also reads the one two before) over 8 devices
that hold 1.5 times the whole together, with latencies of 1 to 20 units and a rate of 100 bytes a unit; for
sparse_nn six ops are embeddings, each of about ten times the bytes of all other ops. Wall seconds, best of
three. The rows of torch.fx were measured once, with torch 2.13 on the same machine and graphs (sizes and
latencies set on the nodes of an fx graph, ``Partitioner().partition_graph``, which also cuts the graph into
submodules), with a limit of 300 seconds: at the first size that takes longer ``ended`` is 0, and larger ones
were not tried. ``--small``: up to 300 ops.
"""

from __future__ import annotations

import random
import time
from typing import Any

import common

from distsim.device_placement import Item, PartitionDevice, Problem, partition

DEVICES = 8
RATE = 100.0
SIZES = (10, 20, 30, 40, 50, 60, 100, 300, 1000, 3000, 10000)
HEURISTICS = ("size_based", "sparse_nn", "cost_aware", "kernighan_lin")

# Mode -> (ops, seconds, ended), measured as said above.
TORCH: dict[str, tuple[tuple[int, float, int], ...]] = {
    "size_based": (
        (10, 0.0151, 1),
        (20, 0.00783, 1),
        (30, 0.00825, 1),
        (40, 0.00938, 1),
        (50, 0.00867, 1),
        (60, 0.00964, 1),
        (100, 0.0135, 1),
        (300, 0.0377, 1),
        (1000, 0.155, 1),
        (3000, 0.814, 1),
        (10000, 13.9, 1),
    ),
    "sparse_nn": (
        (10, 0.0151, 1),
        (20, 0.0249, 1),
        (30, 0.0398, 1),
        (40, 0.0249, 1),
        (50, 0.0555, 1),
        (60, 0.0911, 1),
        (100, 0.104, 1),
        (300, 0.222, 1),
        (1000, 1.48, 1),
        (3000, 3.90, 1),
        (10000, 67.4, 1),
    ),
    "cost_aware": (
        (10, 0.0311, 1),
        (20, 0.283, 1),
        (30, 1.09, 1),
        (40, 10.9, 1),
        (50, 187.0, 1),
        (60, 300.0, 0),
    ),
    "kernighan_lin": (
        (10, 0.0848, 1),
        (20, 0.234, 1),
        (30, 0.506, 1),
        (40, 1.46, 1),
        (50, 2.59, 1),
        (60, 4.37, 1),
        (100, 26.1, 1),
        (300, 300.0, 0),
    ),
}


def main() -> None:
    """Time every size and mode, write the table and the figure."""
    given = common.options(__doc__)
    sizes = [size for size in SIZES if size <= 300] if given.small else list(SIZES)
    rows: list[dict[str, Any]] = []
    for size in common.progress(sizes):
        for mode in HEURISTICS:
            problem = residual(size, mode == "sparse_nn")
            rows.append(row("distsim", mode, size, *time_mode(problem, mode)))
    for mode, measured in TORCH.items():
        rows += [row("torch.fx 2.13", mode, ops, s, ended) for ops, s, ended in measured if ops in sizes]
    common.write_csv(given.out / "partition_scaling.csv", rows)
    common.save(draw(rows), given.out / "partition_scaling.png")
    for mode in HEURISTICS:
        seconds = next(r["seconds"] for r in reversed(rows) if (r["system"], r["mode"]) == ("distsim", mode))
        print(f"{mode}: {sizes[-1]} ops in {seconds:.3f} s")


def residual(ops: int, sparse: bool = False, seed: int = 0) -> Problem:
    """Return a chain in which every third op also reads the op two before the last.

    If ``sparse``, six ops at even distances are embeddings of ``3600 * ops`` bytes.
    """
    chance = random.Random(seed)
    items = [Item("x", (), 64, 64, is_op=False)]
    for number in range(ops):
        inputs = (number, number - 2) if number % 3 == 2 else (number,)
        embedding = sparse and number % (ops // 6) == 0 and number < ops // 6 * 6
        held, memory, compute = chance.randint(64, 640), chance.randint(1, 20), chance.randint(1, 20)
        items.append(
            Item(
                f"op{number}",
                inputs,
                64,
                3600 * ops if embedding else held,
                float(memory),
                float(compute),
                True,
                embedding,
            )
        )
    return Problem(tuple(items), (ops,))


def time_mode(problem: Problem, mode: str) -> tuple[float, int]:
    """Seconds of one partition, best of three, and 1 for having ended."""
    memory = int(problem.total_bytes / DEVICES * 1.5)
    devices = [PartitionDevice(f"dev_{i}", memory, i) for i in range(DEVICES)]
    taken: list[float] = []
    for _ in range(3):
        start = time.perf_counter()
        partition(problem, devices, mode, RATE)
        taken.append(time.perf_counter() - start)
    return min(taken), 1


def row(system: str, mode: str, ops: int, seconds: float, ended: int) -> dict[str, Any]:
    """A row of the table."""
    return {"system": system, "mode": mode, "ops": ops, "seconds": seconds, "ended": ended}


def draw(rows: list[dict[str, Any]]) -> Any:
    """Seconds over ops, a panel per mode; a triangle is a run of the original that was stopped."""
    figure, axes = common.panels(len(HEURISTICS), 13, 3.4, sharey=True)
    for axis, mode in zip(axes, HEURISTICS, strict=True):
        for index, system in enumerate(("distsim", "torch.fx 2.13")):
            mine = [r for r in rows if (r["system"], r["mode"]) == (system, mode)]
            done = [r for r in mine if r["ended"]]
            axis.loglog(
                [r["ops"] for r in done],
                [r["seconds"] for r in done],
                "oD"[index] + "-",
                color=f"C{index}",
                label=system,
            )
            stopped = [r for r in mine if not r["ended"]]
            axis.loglog([r["ops"] for r in stopped], [r["seconds"] for r in stopped], "^", color=f"C{index}")
        axis.set(title=mode, xlabel="ops")
    axes[0].set(ylabel="seconds")
    axes[0].legend(frameon=False)
    return figure


if __name__ == "__main__":
    main()
