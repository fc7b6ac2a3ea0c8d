"""Actions of a pipeline: what a stage does with a microbatch."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass


@functools.total_ordering
class Kind(enum.Enum):
    """What a stage does with a microbatch, by torch's letters; kinds sort in the order of this list.

    ``BACKWARD`` is the whole backward pass; ``BACKWARD_INPUT`` what the stage before waits for, and
    ``BACKWARD_WEIGHT`` the rest of it (Qi et al. 2023, "Zero bubble pipeline parallelism").

    >>> [kind.value for kind in Kind]
    ['F', 'B', 'I', 'W']
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"

    @functools.cached_property
    def code(self) -> int:
        """Its place in this list, 0 to 3: the kind in the integers of a schedule."""
        return "FBIW".index(self.value)

    def __lt__(self, other: Kind) -> bool:
        return self.code < other.code


@dataclass(frozen=True, order=True)
class Action:
    """One kind of work of one stage on one microbatch, printed as `F3@1`: forward of microbatch 3 on stage 1.

    >>> print(Action(Kind.BACKWARD, stage=0, microbatch=2))
    B2@0
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}@{self.stage}"


Cell = tuple[Action, ...]
"""What a rank does at one place of its order: one action, or two that overlap and end together."""


def cell_text(cell: Cell) -> str:
    """Return a cell as text, a pair as `(F3@2;B4@1)`."""
    names = ";".join(map(str, cell))
    return names if len(cell) == 1 else f"({names})"
