"""Tasks of a pipeline: what a stage does with a microbatch."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass


@functools.total_ordering
class Phase(enum.Enum):
    """What a stage does with a microbatch; phases compare in the order in which they happen."""

    FORWARD = "F"
    BACKWARD = "B"

    def __lt__(self, other: Phase) -> bool:
        return self is Phase.FORWARD and other is Phase.BACKWARD


@dataclass(frozen=True, order=True)
class Task:
    """One phase of one stage on one microbatch, printed as `F3@1`: forward of microbatch 3 on stage 1.

    >>> print(Task(Phase.BACKWARD, stage=0, microbatch=2))
    B2@0
    """

    phase: Phase
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.phase.value}{self.microbatch}@{self.stage}"
