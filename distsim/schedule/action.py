"""Actions of a pipeline: what a stage does with a microbatch."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from distsim.errors import ScheduleError
from distsim.schedule.codes import CODES, NO_KIND


class WaitsFor(NamedTuple):
    """The kinds, by letters, that an action waits for, of its microbatch, as far as there are such.

    ``own``: of its stage; ``before`` and ``after``: of the stage before it in the chain, and after it.
    """

    own: str = ""
    before: str = ""
    after: str = ""


@functools.total_ordering
class Kind(enum.Enum):
    """What a stage does with a microbatch, by torch's letters; kinds sort in the order of this list.

    ``BACKWARD`` is the whole backward pass; ``BACKWARD_INPUT`` what the stage before waits for, and
    ``BACKWARD_WEIGHT`` the rest of it (Qi et al. 2023, "Zero bubble pipeline parallelism").

    A line is all that is known of a kind without a model: its letter, its phase in words, its colour in
    pictures (of Okabe and Ito's palette, "Color universal design", 2008), the number of the sums that it adds
    to (kinds that add to the same have the same), what it adds to the activations that are held until B or I,
    and to what is held from I until W, and what it waits for. Which kinds go together is in :data:`WAYS`.

    >>> [kind.value for kind in Kind]
    ['F', 'B', 'I', 'W']
    >>> [kind.code for kind in Kind], Kind("W").phase, Kind("W").waits.own
    ([0, 1, 2, 3], 'backward of weights', 'I')
    """

    FORWARD = "F", "forward", "#0072b2", 0, 1, 0, WaitsFor(before="F")
    BACKWARD = "B", "backward", "#d55e00", 1, -1, 0, WaitsFor(own="F", after="BI")
    BACKWARD_INPUT = "I", "backward of inputs", "#f0e442", 2, -1, 1, WaitsFor(own="F", after="BI")
    BACKWARD_WEIGHT = "W", "backward of weights", "#009e73", 1, 0, -1, WaitsFor(own="I")

    _value_: str
    code: int
    """Its place in this list: the kind in the integers of a schedule."""
    phase: str
    colour: str
    sums: int
    until_i: int
    pending_w: int
    waits: WaitsFor

    def __new__(
        cls, letter: str, phase: str, colour: str, sums: int, until_i: int, pending_w: int, waits: WaitsFor
    ) -> Kind:
        """Make a kind; raises :class:`ScheduleError` for one more than integers tell apart."""
        made = object.__new__(cls)
        made._value_, made.code, made.phase, made.colour = letter, len(cls.__members__), phase, colour
        made.sums, made.until_i, made.pending_w, made.waits = sums, until_i, pending_w, waits
        if made.code >= NO_KIND:
            raise ScheduleError(
                f"kind {letter!r} is number {made.code}, and the integers of a schedule tell {NO_KIND} kinds "
                "apart; give them another bit (BITS in schedule/codes.py)"
            )
        return made

    @property
    def bit(self) -> int:
        """The kind in a sum of kinds: see :func:`way_of`."""
        return 1 << self.code

    def __lt__(self, other: Kind) -> bool:
        return self.code < other.code


def by_code(figure: Callable[[Kind], int]) -> npt.NDArray[np.int64]:
    """Return a figure of each kind by its code, and 0 for the codes of none, which no action has.

    >>> by_code(lambda kind: kind.until_i)[[0, 1, 2, 3, -1]].tolist()
    [1, -1, -1, 0, 0]
    """
    found = np.zeros(CODES, np.int64)
    for kind in Kind:
        found[kind.code] = figure(kind)
    return found


WAYS = ("FB", "FIW")
"""The kinds, by letters, that a stage may run of a microbatch: all of one of these, and no other."""


def way_of(kinds: int) -> tuple[Kind, ...]:
    """Return the first of :data:`WAYS` with all of a sum of :attr:`Kind.bit`; nothing if none has them.

    >>> [kind.value for kind in way_of(Kind.FORWARD.bit + Kind.BACKWARD_WEIGHT.bit)]
    ['F', 'I', 'W']
    """
    return _WAY_OF[kinds]


_WAYS = [tuple(map(Kind, letters)) for letters in WAYS]
_WAY_OF = [
    next((way for way in _WAYS if kinds & ~sum([kind.bit for kind in way]) == 0), ())
    for kinds in range(1 << CODES)
]

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
