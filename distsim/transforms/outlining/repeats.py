"""Tandem repeats in a sequence of integers: where a word is followed by itself, again and again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[Any]

CANDIDATES = 16
"""Periods that are tried per doubling of the window, those that most positions ask for."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """``sequence[i] == sequence[i + period]`` wherever both lie in [start, stop): at least two periods."""

    start: int
    stop: int
    period: int

    @property
    def saved(self) -> int:
        """Elements that need not be written when the word is written once."""
        return self.stop - self.start - self.period


def tandem_repeats(sequence: Integers) -> tuple[Repeat, ...]:
    """Return maximal tandem repeats of at least two periods, in order of start, then of period.

    Windows of length 1, 2, 4, ... are named by their content (Karp, Miller and Rosenberg 1972); the
    distance from a window of length k to its next occurrence, when it lies in [k, 2k), is a candidate
    for a period (as in Crochemore 1981), and each candidate is checked over the whole sequence. In
    O(n log n); of an irregular sequence not every accidental repeat is found.

    >>> tandem_repeats(np.array([9, 1, 2, 1, 2, 1, 7]))
    (Repeat(start=1, stop=6, period=2),)
    """
    names, window = sequence, 1
    found: dict[Repeat, None] = {}
    while 2 * window <= len(sequence):
        for period in _candidates(names, window):
            found.update(dict.fromkeys(_repeats_of(sequence, period)))
        count = len(sequence) - 2 * window + 1
        pairs = names[:count].astype(np.int64) * (int(names.max()) + 1) + names[window : window + count]
        kinds, names = np.unique(pairs, return_inverse=True)
        if len(kinds) == len(names):
            break  # no window of this length occurs twice, hence no longer one
        window *= 2
    return tuple(sorted(found, key=lambda repeat: (repeat.start, repeat.period)))


def _candidates(names: Integers, window: int) -> list[int]:
    order = np.argsort(names, kind="stable")
    ranked = names[order]
    gaps = np.diff(order)
    gaps = gaps[(ranked[1:] == ranked[:-1]) & (gaps >= window) & (gaps < 2 * window)]
    if not len(gaps):
        return []
    counts = np.bincount(gaps)
    periods = np.flatnonzero(counts)
    if len(periods) > CANDIDATES:
        periods = periods[np.argsort(-counts[periods], kind="stable")[:CANDIDATES]]
    return periods.tolist()


def _repeats_of(sequence: Integers, period: int) -> list[Repeat]:
    same = np.zeros(len(sequence) - period + 2, np.int8)
    same[1:-1] = sequence[:-period] == sequence[period:]
    change = np.diff(same)
    starts, stops = np.flatnonzero(change == 1), np.flatnonzero(change == -1)
    long = stops - starts >= period
    return [
        Repeat(start, stop + period, period)
        for start, stop in zip(starts[long].tolist(), stops[long].tolist(), strict=True)
    ]
