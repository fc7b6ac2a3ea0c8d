"""Pipeline stages: how often the best split is found, how far simpler rules are from it, and what it takes.

``python experiments/stage_search.py`` writes ``results/stage_search.csv``, ``stage_search_scaling.csv`` and
``stage_search.png``.

- ``stage_search.csv``: random blocks, up to 16 (equal, whole or any times; with sends, sums, updates and
  collectives or without), 1F1B and GPipe. Every split is simulated; how much longer than the best of all
  takes what ``auto_split`` finds, what evens out the work (the least bottleneck, by dynamic programming), and
  what torchtitan's counting does (the blocks but the first and the last are layers; where it refuses, none).
- ``stage_search_scaling.csv``: a language model (light embedding, equal layers, heavy head) and blocks of any
  time, 16 to 128 blocks on 4 to 32 stages: seconds of CPU, how many splits were simulated whole or in part,
  and the gap that is left after 200,000.

CPU seconds, without compilation. ``--small``: a tenth of the cases, up to 34 blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, combinations, pairwise
from random import Random
from typing import Any

import common

from distsim.errors import PartitionError
from distsim.schedule import schedule
from distsim.stage_balance import (
    BlockCost,
    Communication,
    Split,
    StageProblem,
    auto_split,
    default_split,
    linear_communication,
)

CASES, EFFORT = 1000, 200_000
RULES = ("auto", "even work", "default")
SCALES = [(16, 4), (34, 4), (34, 8), (34, 16), (64, 8), (98, 8), (98, 16), (128, 16), (128, 32)]


def main() -> None:
    """Compare with brute force, time the search, draw both."""
    given = common.options(__doc__)
    auto_split([BlockCost("layer", 1.0, 2.0)] * 4, 2, 4)  # compiles
    cases = [compare(seed) for seed in range(CASES // 10 if given.small else CASES)]
    scales = [scale for scale in SCALES if not given.small or scale[0] <= 34]
    rows = [row for scale in common.progress(scales) for row in measure(*scale)]
    common.write_csv(given.out / "stage_search.csv", cases)
    common.write_csv(given.out / "stage_search_scaling.csv", rows)
    common.save(draw(cases, rows), given.out / "stage_search.png")
    for rule in RULES:
        over = [case[rule] for case in cases if case[rule] != ""]
        best = sum(1 for share in over if share <= 1e-9)
        print(
            f"{rule:10}: best in {best} of {len(over)}; {sum(over) / len(over):.2%} longer on average, "
            f"{max(over):.2%} at most"
        )
    proven = [row for row in rows if row["gap"] == 0]
    print(f"proven: {len(proven)} of {len(rows)}, the slowest in {max(r['cpu_s'] for r in proven):.2f} s")
    for row in rows:
        if row["gap"]:
            print(f"{row['model']}, {row['blocks']} blocks, {row['stages']} stages: gap {row['gap']:.2%}")


# --- against brute force -------------------------------------------------------------------------------


def compare(seed: int) -> dict[str, Any]:
    """A row of the table: one case, and how much longer than the best split those of each rule take."""
    rng = Random(seed)
    count = rng.randint(2, 16)
    stages, microbatches = rng.randint(2, min(count, 7)), rng.choice([1, 2, 4, 8, 16])
    order = schedule(rng.choice(["1f1b", "gpipe"]), stages, microbatches)
    blocks, links = random_blocks(rng, count), random_links(rng)
    problem = StageProblem(blocks, order, links)
    every = list(splits(count, stages))
    best = min(map(problem.time, every))
    found: dict[str, tuple[int, ...] | None] = {
        "auto": problem.best().sizes,
        "even work": even_work([block.work for block in blocks], stages),
        "default": counted(count, stages),
    }
    return {
        "blocks": count,
        "stages": stages,
        "microbatches": microbatches,
        "schedule": order.name,
        "splits": len(every),
        "best_s": best,
        **{rule: problem.time(sizes) / best - 1 if sizes else "" for rule, sizes in found.items()},
    }


def random_blocks(rng: Random, count: int) -> list[BlockCost]:
    """Blocks of equal, whole or any times, with or without what comes beside the work."""
    kind, rich = rng.choice(["equal", "whole", "any"]), rng.random() < 0.6
    blocks: list[BlockCost] = []
    for number in range(count):
        work = {"equal": 1.0, "whole": float(rng.randint(1, 3)), "any": rng.uniform(0.2, 3)}[kind]
        beside = {
            name: rng.uniform(0, 0.3) if rich else 0.0
            for name in ("accumulate", "shared", "recompute", "reduce", "update")
        }
        blocks.append(BlockCost(f"b{number}", work, 2 * work, sent=rng.uniform(0, 2), **beside))
    return blocks


def random_links(rng: Random) -> Communication:
    """Sends of a unit in 0.02 to 0.5 of a unit of time, with a latency."""
    return linear_communication(rng.uniform(2, 50), rng.uniform(0, 0.1))


def splits(count: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Every way to cut blocks into contiguous, non-empty stages."""
    for cuts in combinations(range(1, count), stages - 1):
        yield tuple([b - a for a, b in pairwise((0, *cuts, count))])


def even_work(work: list[float], stages: int) -> tuple[int, ...]:
    """The split of least bottleneck: the one that knows of no schedule."""
    done = [0.0, *accumulate(work)]
    count = len(work)
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(stages):
        reached: dict[int, tuple[float, tuple[int, ...]]] = {}
        for end in range(stage + 1, count - (stages - stage - 1) + 1):
            reached[end] = min(
                (max(most, done[end] - done[start]), (*sizes, end - start))
                for start, (most, sizes) in best.items()
                if start < end
            )
        best = reached
    return best[count][1]


def counted(count: int, stages: int) -> tuple[int, ...] | None:
    """The split by torchtitan's rule, with an embedding first and a head last; None where it refuses."""
    try:
        layers = default_split(count - 2, stages)
    except PartitionError:
        return None
    return (layers[0] + 1, *layers[1:-1], layers[-1] + 1)


# --- what it takes -------------------------------------------------------------------------------------


def measure(count: int, stages: int) -> Iterator[dict[str, Any]]:
    """Rows of the second table: both models and schedules, few and many microbatches."""
    rng = Random(count * stages)
    layers = [BlockCost("layer", 1.0, 2.0, sent=1.0)] * (count - 2)
    language = [BlockCost("embedding", 0.1, 0.1, sent=1.0), *layers, BlockCost("head", 1.7, 3.4)]
    times = [rng.uniform(0.5, 2) for _ in range(count)]
    varied = [BlockCost("block", time, 2 * time, sent=rng.uniform(0, 2)) for time in times]
    for model, blocks in (("language model", language), ("any blocks", varied)):
        for name in ("1f1b", "gpipe"):
            for microbatches in (stages, 4 * stages):
                split, seconds = common.cpu_seconds(lambda a=(blocks, stages, microbatches, name): search(*a))
                yield {
                    "model": model,
                    "blocks": count,
                    "stages": stages,
                    "microbatches": microbatches,
                    "schedule": name,
                    "cpu_s": seconds,
                    "simulations": split.simulations,
                    "gap": split.gap,
                    "step_s": split.step_time,
                }


def search(blocks: list[BlockCost], stages: int, microbatches: int, name: str) -> Split:
    """One search on links that send a unit in a tenth of a unit of time."""
    return auto_split(blocks, stages, microbatches, name, linear_communication(10.0), effort=EFFORT)


def draw(cases: list[dict[str, Any]], rows: list[dict[str, Any]]) -> Any:
    """How far each rule is from the best split; what the search takes, and what gap it leaves."""
    figure, (left, right) = common.panels(2, 10, 3.8)
    for rule in RULES:
        over = sorted(100 * case[rule] for case in cases if case[rule] != "")
        left.plot(over, [(i + 1) / len(over) for i in range(len(over))], label=rule)
    left.set(xlabel="longer than the best split [%]", ylabel="share of cases", xlim=(-1, 60))
    left.set_title("up to 16 blocks, against all splits", fontsize=10)
    left.legend(frameon=False)
    for proven, marker in ((True, "o"), (False, "x")):
        own = [row for row in rows if (row["gap"] == 0) == proven]
        label = "proven" if proven else f"gap left after {EFFORT:,}"
        right.scatter(
            [row["blocks"] for row in own], [row["cpu_s"] for row in own], marker=marker, label=label
        )
    right.set(xlabel="blocks", ylabel="CPU seconds", yscale="log")
    right.set_title("4 to 32 stages", fontsize=10)
    right.legend(frameon=False)
    return figure


if __name__ == "__main__":
    main()
