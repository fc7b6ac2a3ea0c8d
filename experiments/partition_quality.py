"""How good partitions are: simulated makespans of every mode beside the optimal one, and what proofs take.

``python experiments/partition_quality.py`` writes ``results/partition_quality.csv``, ``partition_proofs.csv``
and ``partition_quality.png``. Quality: random graphs over 3 devices of which each holds two thirds of the
whole; a mode's makespan (each device runs one op at a time, in the order of the graph) over the least one
(for 7 ops proven, for more the lower bound, so that ratios are at most that). Proofs: 80 ops in layers on 4
devices, where an op reads one or two (``full``: all; ``skip``: also the layer before that) ops of the layer
before, runs 1 to 10 units (``whole``: whole numbers, ``real``: uniform) and sends what takes 0 to twice
``delay`` times the mean; 10 seconds each, to a tolerance of 1e-4. ``--small``: a tenth of it.
"""

from __future__ import annotations

import random
import time
from typing import Any

import common

from distsim.device_placement import Item, PartitionDevice, Problem, partition
from distsim.device_placement.optimal import OptimalPartition, compile_search, optimal_partition
from distsim.device_placement.optimal.timetable import timetable

MODES = ("size_based", "cost_aware", "kernighan_lin", "optimal")
SIZES = ((7, 60), (20, 20), (60, 5))
SHAPES = ((20, 4), (16, 5), (10, 8), (8, 10), (5, 16))
DELAYS = (0.0, 0.1, 0.5, 1.0)


def main() -> None:
    """Measure, write the tables and the figure."""
    given = common.options(__doc__)
    compile_search()
    quality = [row for size in common.progress(SIZES) for row in ratios(*size, given.small)]
    common.write_csv(given.out / "partition_quality.csv", quality)
    proofs = [prove(**case) for case in common.progress(cases(given.small))]
    common.write_csv(given.out / "partition_proofs.csv", proofs)
    common.save(draw(quality, proofs), given.out / "partition_quality.png")
    for row in summary(quality):
        print("{ops} ops, {mode}: mean {mean:.3f}, worst {worst:.3f} ({graphs} graphs)".format(**row))
    done = [row for row in proofs if row["proven"]]
    print(f"80 ops in layers: {len(done)} of {len(proofs)} proven")


def random_graph(seed: int, count: int) -> Problem:
    """Ops of 1 to 10 units that hand on what travels for up to as long; each reads up to three before it."""
    source = random.Random(seed)
    items = list[Item]()
    for number in range(count):
        near = range(max(0, number - 6), number)
        reads = tuple(sorted(source.sample(near, min(len(near), source.randint(0, 3)))))
        sent, seconds = source.randint(1, 10), source.uniform(1, 10)
        items.append(
            Item(
                f"op{number}", reads, sent, sent + source.randint(1, 10), seconds, source.uniform(0, seconds)
            )
        )
    return Problem(tuple(items))


def ratios(count: int, graphs: int, small: bool) -> list[dict[str, Any]]:
    """Return makespan over the least one, for each graph and mode."""
    rows: list[dict[str, Any]] = []
    for seed in range(graphs // 10 if small else graphs):
        problem = random_graph(seed, count)
        memory = problem.total_bytes * 2 // 3
        devices = [PartitionDevice(f"dev_{i}", memory, i) for i in range(3)]
        for mode in reversed(MODES):
            found = partition(problem, devices, mode, 1.0, time_limit=1.0 if small else 10.0)
            if isinstance(found, OptimalPartition):
                least = found.lower_bound
            makespan = timetable(found).makespan
            rows.append(
                {"ops": count, "seed": seed, "mode": mode, "makespan": makespan, "ratio": makespan / least}
            )
    return rows


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return mean and worst ratio of each mode."""
    keys = dict.fromkeys((row["ops"], row["mode"]) for row in rows)
    found: list[dict[str, Any]] = []
    for ops, mode in sorted(keys, key=lambda key: (key[0], MODES.index(key[1]))):
        own = [row["ratio"] for row in rows if (row["ops"], row["mode"]) == (ops, mode)]
        mean = sum(own) / len(own)
        found.append({"ops": ops, "mode": mode, "mean": mean, "worst": max(own), "graphs": len(own)})
    return found


def cases(small: bool) -> list[dict[str, Any]]:
    """Return the layered graphs to prove."""
    shapes, delays = (SHAPES[::4], DELAYS[:2]) if small else (SHAPES, DELAYS)
    found: list[dict[str, Any]] = [
        {"layers": layers, "width": width, "delay": delay, "numbers": numbers, "seed": 0}
        for layers, width in shapes
        for delay in delays
        for numbers in ("whole", "real")
    ]
    more = [] if small else [(edges, numbers) for edges in ("skip", "full") for numbers in ("whole", "real")]
    for edges, numbers in more:
        found.append({"layers": 20, "width": 4, "delay": 0.5, "numbers": numbers, "seed": 0, "edges": edges})
    return found


def layered(layers: int, width: int, delay: float, numbers: str, seed: int, edges: str = "some") -> Problem:
    """Return a graph of layers."""
    source = random.Random(seed)
    items = list[Item]()
    for number in range(layers * width):
        layer = number // width
        reads: set[int] = set()
        if layer:
            before = range((layer - 1) * width, layer * width)
            reads = set(before) if edges == "full" else set(source.choices(before, k=source.randint(1, 2)))
        if layer > 1 and edges == "skip":
            reads.add(source.randrange((layer - 2) * width, (layer - 1) * width))
        seconds = float(source.randint(1, 10)) if numbers == "whole" else source.uniform(1, 10)
        sent = source.randint(0, round(11 * delay))
        items.append(Item(f"op{number}", tuple(sorted(reads)), sent, sent, seconds, 0.0))
    return Problem(tuple(items))


def prove(**case: Any) -> dict[str, Any]:
    """Search one layered graph; say what is proven and how long it took."""
    problem = layered(**case)
    devices = [PartitionDevice(f"dev_{i}", 10**9, i) for i in range(4)]
    begin, busy = time.perf_counter(), time.process_time()
    found = optimal_partition(problem, devices, 1.0, time_limit=10.0)
    wall, busy = time.perf_counter() - begin, time.process_time() - busy
    return {
        "edges": "some",
        **case,
        "makespan": found.makespan,
        "lower_bound": found.lower_bound,
        "gap": found.gap,
        "proven": int(found.proven),
        "wall_seconds": wall,
        "cpu_seconds": busy,
    }


def draw(quality: list[dict[str, Any]], proofs: list[dict[str, Any]]) -> Any:
    """Ratios per mode on the left; gap over time of the proofs on the right."""
    figure, (left, right) = common.panels(2, 11, 4.2)
    for index, mode in enumerate(MODES):
        for place, (ops, _) in enumerate(SIZES):
            own = sorted(row["ratio"] for row in quality if (row["ops"], row["mode"]) == (ops, mode))
            at = [place + 0.18 * (index - 1.5)] * len(own)
            label = mode if place == 0 else None
            left.plot(at, own, ".", color=f"C{index}", alpha=0.6, label=label)
    left.set_xticks(range(len(SIZES)), [f"{ops} ops" for ops, _ in SIZES])
    left.set(ylabel="makespan / least makespan (or its bound)")
    left.legend(frameon=False, fontsize=9)
    for index, shape in enumerate(SHAPES):
        own = [row for row in proofs if (row["layers"], row["width"]) == shape]
        right.plot(
            [row["wall_seconds"] for row in own],
            [100 * row["gap"] for row in own],
            "oDvs^"[index],
            color=f"C{index}",
            markersize=4,
            label=f"{shape[0]} layers of {shape[1]}",
        )
    right.set(
        xlabel="seconds until the proof, or the limit", ylabel="gap left (%)", title="80 ops, 4 devices"
    )
    right.legend(frameon=False, fontsize=9)
    return figure


if __name__ == "__main__":
    main()
