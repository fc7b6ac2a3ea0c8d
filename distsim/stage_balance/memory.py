"""What a stage keeps in memory, and what to say when nothing fits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distsim.errors import PartitionError
from distsim.stage_balance.cost import BlockCost


def stage_memory(costs: Sequence[BlockCost], in_flight: Sequence[int]) -> np.ndarray:
    """Return [stage, i, j]: the bytes that blocks i up to j need on a stage with so many microbatches.

    Their states, what is saved of every microbatch in flight, and the largest workspace.

    >>> blocks = [BlockCost("a", 1, 2, state=100, saved=10, workspace=5)] * 2
    >>> float(stage_memory(blocks, [3])[0, 0, 2])
    265.0
    """
    state = np.concatenate([[0.0], np.cumsum([cost.state for cost in costs])])
    saved = np.concatenate([[0.0], np.cumsum([cost.saved for cost in costs])])
    held = state[None, :] - state[:, None] + most_of([cost.workspace for cost in costs])
    kept = saved[None, :] - saved[:, None]
    return held[None] + np.array(in_flight, float)[:, None, None] * kept[None]


def most_of(figures: Sequence[float]) -> np.ndarray:
    """Return [i, j]: the largest of the figures i up to j, 0 where there is none."""
    count = len(figures)
    most = np.zeros((count + 1, count + 1))
    for i in range(count):
        most[i, i + 1 :] = np.maximum.accumulate(figures[i:])
    return most


def memory_limits(memory: float | Sequence[float] | None, ranks: int) -> list[float] | None:
    """Return the bytes of each rank's device; raise :class:`PartitionError` if they are not as many."""
    if memory is None:
        return None
    limits = [float(memory)] * ranks if isinstance(memory, (int, float)) else [float(m) for m in memory]
    if len(limits) != ranks:
        raise PartitionError(f"memory of {len(limits)} ranks is given for {ranks}; give one for each")
    for rank, limit in enumerate(limits):
        if not limit > 0:
            raise PartitionError(f"memory of rank {rank} is {limit} bytes; give a positive size")
    return limits


def nothing_fits(memory: np.ndarray, limits: Sequence[float]) -> PartitionError:
    """Return the error for blocks of which no split fits: the least that would be over, and where.

    ``memory`` is that of :func:`stage_memory`. Named is a split whose largest excess is the least there is.
    """
    stages, count = memory.shape[0], memory.shape[1] - 1
    excess = memory - np.array(limits)[:, None, None]
    best = np.full((stages + 1, count + 1), np.inf)
    best[stages, count] = -np.inf
    choice = np.zeros((stages, count + 1), np.int64)
    for stage in range(stages - 1, -1, -1):
        for i in range(count - (stages - stage), -1, -1):
            worst = np.maximum(excess[stage, i, i + 1 :], best[stage + 1, i + 1 :])
            choice[stage, i] = i + 1 + int(np.argmin(worst))
            best[stage, i] = worst.min()
    sizes: list[int] = []
    at, found = 0, (-np.inf, 0)
    for stage in range(stages):
        end = int(choice[stage, at])
        found = max(found, (float(excess[stage, at, end]), -stage))
        sizes.append(end - at)
        at = end
    over, worst_stage = found[0], -found[1]
    return PartitionError(
        f"no split of {count} blocks into {stages} stages fits in memory: at best some stage is over by "
        f"{over / 2**20:,.1f} MiB, stage {worst_stage} of sizes {', '.join(map(str, sizes))}, which needs "
        f"{(over + limits[worst_stage]) / 2**20:,.1f} of {limits[worst_stage] / 2**20:,.1f} MiB; use more "
        "stages, smaller microbatches, or recompute more"
    )
