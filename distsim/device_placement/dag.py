"""What every part takes and hands on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distsim.device_placement.problem import Problem


@dataclass(frozen=True, slots=True)
class DagNode:
    """A part as one step, by numbers of items.

    ``inputs`` are the items of other parts and from outside that it reads, in the order in which it does;
    ``outputs`` those of its ops that others read, in the order in which they first do, then what the whole
    returns besides.
    """

    part: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def dag_of(problem: Problem, part_of: Sequence[int], order: Sequence[int]) -> tuple[DagNode, ...]:
    """Return a node for every part, in the order given; ``part_of`` is -1 for outside inputs."""
    inputs: dict[int, dict[int, None]] = {part: {} for part in order}
    outputs: dict[int, dict[int, None]] = {part: {} for part in order}
    for op in problem.ops:
        for read in problem.items[op].inputs:
            if part_of[read] != part_of[op]:
                inputs[part_of[op]][read] = None
                if part_of[read] >= 0:
                    outputs[part_of[read]][read] = None
    for item in problem.outputs:
        if part_of[item] >= 0:
            outputs[part_of[item]][item] = None
    return tuple(DagNode(part, tuple(inputs[part]), tuple(outputs[part])) for part in order)
