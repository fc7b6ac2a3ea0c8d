"""Seconds of the minimum cut that min-cut rematerialisation solves: distsim's and networkx's, side by side.

``python experiments/min_cut_speed.py`` builds joint graphs of residual blocks with 250 to 8,000 values,
turns each into the flow network of ``save_min_cut``, and cuts it with both, best of three; both must
find the same capacity and the same saved values. It writes ``results/min_cut_speed.csv`` and ``.png``.
``--small``: up to 500 values. networkx is the extra ``bench``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, TypeVar

import common

from distsim.transforms.recompute.saves import (
    JointGraph,
    JointNode,
    MinCutOptions,
    NodeRole,
    Phase,
    Trait,
    needs,
)
from distsim.transforms.recompute.saves.flow import Edge, minimum_cut
from distsim.transforms.recompute.saves.mincut import cut_network

SIZES, SMALL = (250, 500, 1000, 2000, 4000, 8000), (250, 500)
REPEATS = 3
T = TypeVar("T")


def main() -> int:
    """Time both on every size, write the table and the figure."""
    given = common.options(__doc__)
    try:
        networkx: Any = import_module("networkx")
    except ImportError:
        print("networkx is not installed; pip install networkx, or distsim[bench]", file=sys.stderr)
        return 1
    minimum_cut([(0, 1, 1)], 2, 0, 1)  # compiled once
    rows: list[dict[str, Any]] = []
    for values in common.progress(SMALL if given.small else SIZES):
        graph = residual_blocks(values)
        network = cut_network(needs(graph), MinCutOptions())
        edges, nodes, source, sink = network.edges, network.nodes, network.source, network.sink
        build, _ = best(lambda graph=graph: cut_network(needs(graph), MinCutOptions()))
        ours, cut = best(lambda e=edges, n=nodes, s=source, t=sink: minimum_cut(e, n, s, t))
        directed = to_networkx(networkx, edges)
        theirs, (capacity, (_, far)) = best(
            lambda g=directed, s=source, t=sink: networkx.minimum_cut(g, s, t)
        )
        same = cut is not None and cut.capacity == capacity and set(cut.at_sink.nonzero()[0].tolist()) == far
        rows.append(
            {
                "values": len(graph),
                "edges": len(edges),
                "capacity": capacity,
                "same_cut": same,
                "rules_s": build,
                "distsim_s": ours,
                "networkx_s": theirs,
                "ratio": theirs / ours,
            }
        )
    common.write_csv(given.out / "min_cut_speed.csv", rows)
    common.save(draw(rows), given.out / "min_cut_speed.png")
    for row in rows:
        print(
            f"{row['values']} values: {row['distsim_s'] * 1e3:.2f} ms, networkx "
            f"{row['networkx_s'] * 1e3:.0f} ms, {row['ratio']:.0f} times; same cut: {row['same_cut']}"
        )
    return 0 if all(row["same_cut"] for row in rows) else 1


def best(work: Callable[[], T]) -> tuple[float, T]:
    """Return the least of a few wall-clock times of ``work``, and its result."""
    times: list[float] = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        result = work()
        times.append(time.perf_counter() - start)
    return min(times), result


def residual_blocks(values: int) -> JointGraph:
    """Return a joint graph of about ``values`` values: blocks of norm, matmul, activation, matmul and a sum.

    Sizes differ from block to block, so that the cut has to look for the cheapest place in each.
    """
    blocks = max(1, (values - 2) // 14)
    cheap = Trait.ALLOWED | Trait.FUSIBLE
    nodes = [
        JointNode("x", role=NodeRole.PRIMAL, nbytes=4096),
        JointNode("dy", role=NodeRole.TANGENT, nbytes=4096),
    ]

    def add(name: str, inputs: Sequence[int], nbytes: int, traits: Trait, phase: Phase) -> int:
        nodes.append(JointNode(name, tuple(inputs), nbytes, phase=phase, traits=traits))
        return len(nodes) - 1

    forward, backward = Phase.FORWARD, Phase.BACKWARD
    stream, kept = 0, []
    for block in range(blocks):
        wide = 4096 * (1 + block * 7 % 5)
        scale = add(f"scale{block}", [stream], 64, cheap, forward)
        norm = add(f"norm{block}", [stream, scale], 4096, cheap, forward)
        first = add(f"first{block}", [norm], wide, Trait.COMPUTE_INTENSIVE, forward)
        gate = add(f"gate{block}", [first], wide, cheap, forward)
        active = add(f"active{block}", [first, gate], wide, cheap, forward)
        second = add(f"second{block}", [active], 4096, Trait.COMPUTE_INTENSIVE, forward)
        kept.append((stream, scale, norm, first, gate, active))
        stream = add(f"sum{block}", [stream, second], 4096, cheap, forward)
    gradient, gradients = 1, list[int]()
    for block, (before, scale, norm, first, gate, active) in reversed(list(enumerate(kept))):
        wide = nodes[first].nbytes
        gradients.append(add(f"dsecond{block}", [gradient, active], 4096, Trait.COMPUTE_INTENSIVE, backward))
        inner = add(f"dactive{block}", [gradient], wide, Trait.COMPUTE_INTENSIVE, backward)
        inner = add(f"dgate{block}", [inner, gate, first], wide, cheap, backward)
        gradients.append(add(f"dfirst{block}", [inner, norm], 4096, Trait.COMPUTE_INTENSIVE, backward))
        inner = add(f"dnorm{block}", [inner], 4096, Trait.COMPUTE_INTENSIVE, backward)
        inner = add(f"dscale{block}", [inner, scale, before], 4096, cheap, backward)
        gradient = add(f"dsum{block}", [gradient, inner], 4096, cheap, backward)
    return JointGraph(tuple(nodes), (stream, gradient, *gradients), 1)


def to_networkx(networkx: Any, edges: Sequence[Edge]) -> Any:
    """Return the network as networkx takes it: an infinite edge is one without a capacity."""
    graph = networkx.DiGraph()
    for tail, head, capacity in edges:
        graph.add_edge(tail, head, **({} if capacity is None else {"capacity": capacity}))
    return graph


def draw(rows: Sequence[dict[str, Any]]) -> Any:
    """Return the figure: seconds over values."""
    figure, (axis,) = common.panels(1, 6.4, 4)
    values = [row["values"] for row in rows]
    for key, label in (("networkx_s", "networkx"), ("distsim_s", "distsim")):
        axis.loglog(values, [row[key] for row in rows], marker="o", label=label)
    axis.set(xlabel="values of the joint graph", ylabel="seconds for one minimum cut")
    axis.set_xticks(SIZES, [str(size) for size in SIZES])
    axis.set_xticks([], minor=True)
    axis.legend(frameon=False)
    return figure


if __name__ == "__main__":
    sys.exit(main())
