"""Actions of a pipeline: what a stage does with a microbatch."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from distsim.errors import ScheduleError
from distsim.schedule.codes import CODES, NO_KIND, kind_of, number_of

UPDATE_LETTER = "U"
"""The letter of updates of weights, which are no actions of a schedule: no kind has it."""


class WaitsFor(NamedTuple):
    """The kinds, by letters, that an action waits for, of its microbatch, as far as there are such.

    ``own``: of its stage; ``before`` and ``after``: of the stage before it in the chain, and after it. The
    kinds that ``holds`` names, of its stage, wait for it in turn: so it comes between two others.
    """

    own: str = ""
    before: str = ""
    after: str = ""
    holds: str = ""


class InFlight(NamedTuple):
    """What an action adds to the activations that are held ``until_i``, that is until B or I, and to what is
    held from I until W (``pending_w``). What the kinds added that ``frees`` names, by letters, of its
    microbatch, it makes again: of that nothing is held from the end of these until it runs."""

    until_i: int = 0
    pending_w: int = 0
    frees: str = ""


class Runs(NamedTuple):
    """What an action runs: what ``made_by``, a function of a module in ``distsim/program/passes``, makes of
    the passes of the stages, ``""`` these themselves; on which ``stream``: ``""`` that of computation, or one
    beside it, the ``host_stream`` of its operators."""

    made_by: str = ""
    stream: str = ""


HALVES = Runs("backward_halves.stage_halves")
_BACK = WaitsFor(own="F", after="BI")


@functools.total_ordering
class Kind(enum.Enum):
    """What a stage does with a microbatch, by torch's letters; kinds sort in the order of this list.

    ``BACKWARD`` is the whole backward pass; ``BACKWARD_INPUT`` what the stage before waits for, and
    ``BACKWARD_WEIGHT`` the rest of it (Qi et al. 2023, "Zero bubble pipeline parallelism").

    A line is all that is known of a kind without a model: its letter, its phase in words, its colour in
    pictures (of Okabe and Ito's palette, "Color universal design", 2008), what it holds, what it waits for,
    what it runs, and to the sums over microbatches of which earlier kind it adds, by letter (its own). Which
    kinds go together is in :data:`WAYS`.

    >>> [kind.value for kind in Kind][:4]
    ['F', 'B', 'I', 'W']
    >>> [kind.code for kind in Kind][:4], Kind("W").phase, Kind("W").waits.own
    ([0, 1, 2, 3], 'backward of weights', 'I')
    >>> [kind.sums for kind in Kind][:4]  # W adds to the sums of B
    [0, 1, 2, 1]
    """

    FORWARD = "F", "forward", "#0072b2", InFlight(1), WaitsFor(before="F")
    BACKWARD = "B", "backward", "#d55e00", InFlight(-1), _BACK
    BACKWARD_INPUT = "I", "backward of inputs", "#f0e442", InFlight(-1, 1), _BACK, HALVES
    BACKWARD_WEIGHT = "W", "backward of weights", "#009e73", InFlight(0, -1), WaitsFor(own="I"), HALVES, "B"

    _value_: str
    code: int
    """Its place in this list: the kind in the integers of a schedule."""
    phase: str
    colour: str
    in_flight: InFlight
    waits: WaitsFor
    """With what the kinds that hold it up say of it."""
    runs: Runs
    place: int
    """Its place among the kinds that run what the same function makes."""
    sums: int
    """The number of the sums that it adds to: kinds that add to the same have the same."""

    def __new__(
        cls,
        letter: str,
        phase: str,
        colour: str,
        in_flight: InFlight,
        waits: WaitsFor,
        runs: Runs = Runs(),  # noqa: B008
        sums: str = "",
    ) -> Kind:
        """Make a kind; raises :class:`ScheduleError` for a letter that it cannot have, and for a kind more
        than integers tell apart."""
        made, before = object.__new__(cls), list(cls.__members__.values())
        cls._check_letter(letter, phase, before)
        made._value_, made.code, made.phase, made.colour = letter, len(before), phase, colour
        made.in_flight, made.waits, made.runs = in_flight, waits, runs
        made.place = [kind.runs.made_by for kind in before].count(runs.made_by)
        made.sums = next((kind.code for kind in before if kind.value == sums), made.code)
        for kind in before:
            if kind.value in waits.holds:
                kind.waits = kind.waits._replace(own=kind.waits.own + letter)
        if made.code >= NO_KIND:
            raise ScheduleError(
                f"kind {letter!r} is number {made.code}, and the integers of a schedule tell {NO_KIND} kinds "
                "apart; give them another bit (BITS in schedule/codes.py)"
            )
        return made

    @staticmethod
    def _check_letter(letter: str, phase: str, before: Sequence[Kind]) -> None:
        other = next((kind.phase for kind in before if kind.value == letter), None)
        other = "updates of weights" if letter == UPDATE_LETTER else other
        if other is not None:
            taken = {UPDATE_LETTER, *[kind.value for kind in before]}
            free = [each for each in ascii_uppercase if each not in taken]
            raise ScheduleError(
                f"the kind {letter!r} ({phase}) has the letter of another, {other}; choose from "
                f"{', '.join(free)}"
            )
        if len(letter) != 1 or letter not in ascii_uppercase:
            raise ScheduleError(f"the kind {letter!r} ({phase}) has no letter; choose one, A to Z")

    @property
    def bit(self) -> int:
        """The kind in a sum of kinds: see :func:`way_of`."""
        return 1 << self.code

    def __lt__(self, other: Kind) -> bool:
        return self.code < other.code


def by_code(figure: Callable[[Kind], int]) -> npt.NDArray[np.int64]:
    """Return a figure of each kind by its code, and 0 for the codes of none, which no action has.

    >>> by_code(lambda kind: kind.in_flight.until_i)[[0, 1, 2, 3, -1]].tolist()
    [1, -1, -1, 0, 0]
    """
    found = np.zeros(CODES, np.int64)
    for kind in Kind:
        found[kind.code] = figure(kind)
    return found


def are_of(letters: str) -> npt.NDArray[np.bool_]:
    """Return of each kind, by its code, whether it is one of those with these letters."""
    return by_code(lambda kind: kind.value in letters) > 0


SUMS_GRADIENTS = by_code(lambda kind: kind.sums == Kind.BACKWARD.sums) > 0
"""Which kinds, by code, add to the gradients that an update reads: B and W."""
SENDS_BACK = are_of(Kind.BACKWARD.waits.after)
"""Which kinds, by code, the backward of the stage before waits for: B and I."""

WAYS = ("FB", "FIW")
"""The kinds, by letters, that a stage may run of a microbatch: all of one of these, and no other. Which of
them comes first tells nothing."""


HELD = np.array(
    [by_code(lambda kind: kind.in_flight.until_i), by_code(lambda kind: kind.in_flight.pending_w)]
)
"""[2, codes]: what each kind adds to what is held until I, and pending W."""
_MADE_AGAIN = [(kind.code, are_of(kind.in_flight.frees)) for kind in Kind if kind.in_flight.frees]


def freed_at_once(codes: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_] | None:
    """Return of which actions what they add is gone when they end, as others make it again; None: of none.

    ``codes`` are all of some stages.
    """
    if not _MADE_AGAIN:
        return None
    kinds, numbers, found = kind_of(codes), number_of(codes), None
    for code, frees in _MADE_AGAIN:
        again = numbers[kinds == code]
        if again.size:
            freed = frees[kinds] & np.isin(numbers, again)
            found = freed if found is None else found | freed
    return found


def sum_of(letters: str) -> int:
    """Return the kinds with these letters as a sum of :attr:`Kind.bit`."""
    return sum([Kind(letter).bit for letter in letters])


def way_of(kinds: int) -> tuple[Kind, ...]:
    """Return the shortest of :data:`WAYS` with all of a sum of :attr:`Kind.bit`, of equally short ones the
    first; nothing if none has them.

    >>> [kind.value for kind in way_of(Kind.FORWARD.bit + Kind.BACKWARD_WEIGHT.bit)]
    ['F', 'I', 'W']
    """
    return _WAY_OF.get(kinds, ())


def ways_by_sum(ways: Sequence[str]) -> dict[int, tuple[Kind, ...]]:
    """Return the shortest of some ways, of equally short ones the first, by each sum of kinds that it has."""
    found: dict[int, tuple[Kind, ...]] = {}
    for letters in sorted(ways, key=len):
        sums = [0]
        for letter in letters:
            sums += [several + Kind(letter).bit for several in sums]
        for several in sums:
            found.setdefault(several, tuple(map(Kind, letters)))
    return found


_WAY_OF = ways_by_sum(WAYS)


LETTERS = "".join([kind.value for kind in Kind])
"""The letters of all kinds, in their order."""


def check_ways(ways: Sequence[str]) -> None:
    """Check that in each of some ways a microbatch leaves nothing in flight; raise :class:`ScheduleError`."""
    for letters in ways:
        codes = np.array([Kind(letter).code for letter in letters], np.int64)
        freed = freed_at_once(codes)
        left: list[int] = HELD[:, codes if freed is None else codes[~freed]].sum(axis=1).tolist()
        if any(left):
            raise ScheduleError(
                f"what runs {', '.join(letters)} leaves {left[0]} in flight until I and {left[1]} pending W; "
                "say in the lines of its kinds what each adds, and whose that frees which it makes again "
                "(InFlight)"
            )


check_ways(WAYS)


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
