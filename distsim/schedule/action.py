"""Actions of a pipeline: what a stage does with a microbatch."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from distsim.errors import ScheduleError
from distsim.schedule.codes import CODES, NO_KIND


@functools.total_ordering
class Kind(enum.Enum):
    """What a stage does with a microbatch, by torch's letters; kinds sort in the order of this list.

    ``BACKWARD`` is the whole backward pass; ``BACKWARD_INPUT`` what the stage before waits for, and
    ``BACKWARD_WEIGHT`` the rest of it (Qi et al. 2023, "Zero bubble pipeline parallelism").

    A line is all that is known of a kind without a model: its letter, its phase in words, the number of the
    sums that it adds to (kinds that add to the same have the same), and what it adds to the activations that
    are held until B or I, and to what is held from I until W.

    >>> [kind.value for kind in Kind]
    ['F', 'B', 'I', 'W']
    >>> [kind.code for kind in Kind], Kind("W").phase
    ([0, 1, 2, 3], 'backward of weights')
    """

    FORWARD = "F", "forward", 0, 1, 0
    BACKWARD = "B", "backward", 1, -1, 0
    BACKWARD_INPUT = "I", "backward of inputs", 2, -1, 1
    BACKWARD_WEIGHT = "W", "backward of weights", 1, 0, -1

    _value_: str
    code: int
    """Its place in this list: the kind in the integers of a schedule."""
    phase: str
    sums: int
    until_i: int
    pending_w: int

    def __new__(cls, letter: str, phase: str, sums: int, until_i: int, pending_w: int) -> Kind:
        """Make a kind; raises :class:`ScheduleError` for one more than integers tell apart."""
        made = object.__new__(cls)
        made._value_, made.code, made.phase = letter, len(cls.__members__), phase
        made.sums, made.until_i, made.pending_w = sums, until_i, pending_w
        if made.code >= NO_KIND:
            raise ScheduleError(
                f"kind {letter!r} is number {made.code}, and the integers of a schedule tell {NO_KIND} kinds "
                "apart; give them another bit (BITS in schedule/codes.py)"
            )
        return made

    def __lt__(self, other: Kind) -> bool:
        return self.code < other.code


def by_code(figure: Callable[[Kind], int]) -> npt.NDArray[np.int64]:
    """Return a figure of each kind by its code, and 0 for the codes of none, which no action has.

    >>> by_code(lambda kind: kind.until_i).tolist()
    [1, -1, -1, 0, 0, 0, 0, 0]
    """
    found = np.zeros(CODES, np.int64)
    for kind in Kind:
        found[kind.code] = figure(kind)
    return found


LETTERS = "".join([kind.value for kind in Kind])
"""The letters of all kinds, in their order."""


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
