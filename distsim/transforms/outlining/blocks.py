"""Which stretches of a function are repetitions of one block: choice of repeats, of unit and of phase."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from distsim.ir import Tensor
from distsim.transforms.outlining.wiring import CallWiring, Integers

Blocks = dict[tuple[int, bytes], list[int]]
"""(number of ops, what they are and how they are wired inside) -> where the repetitions start."""

MULTIPLES = 4
"""How many times its length a unit is tried at, where its repetitions are wired differently inside."""

TIES = 8
"""Phases with equally few values crossing that are compared further."""


def find_blocks(wiring: CallWiring, products: int) -> Blocks:
    """Return stretches of ops that are isomorphic, at least two of each kind, none overlapping.

    Repeats that save most ops come first. Units with products are grown until they have ``products``
    of them; those without are grouped into as many repetitions as some unit with products has.
    """
    return _Cover(wiring, products).run()


class _Cover:
    def __init__(self, wiring: CallWiring, products: int) -> None:
        self.wiring, self.products = wiring, products
        self.used = np.zeros(len(wiring.ops), np.bool_)
        # Which repetition an op belongs to; an op outside of all is its own.
        self.owner = np.arange(len(wiring.ops)) + len(wiring.ops)
        self.first_read = np.zeros(len(wiring.values), np.int64)
        self.first_read[wiring.operands[::-1]] = wiring.readers[::-1]
        self.blocks: Blocks = {}
        self.placed = 0

    def run(self) -> Blocks:
        found = tandem_repeats(self.wiring.labels)
        repeats = [repeat for repeat in found if not self.is_call(repeat) and not self.is_scalar(repeat)]
        self.place([repeat for repeat in repeats if self.weight(repeat)])
        counts = self.counts()
        self.place([repeat for repeat in repeats if not self.weight(repeat)], counts)
        self.find_more()
        return self.blocks

    def is_call(self, repeat: Repeat) -> bool:
        """Whether the unit is one Call: outlined already."""
        return repeat.period == 1 and self.wiring.ops[repeat.start].is_call

    def is_scalar(self, repeat: Repeat) -> bool:
        """Whether the unit makes scalars only, as what follows losses does.

        There is no work in it, and a sum over microbatches of one of its values may lie between its ops.
        """
        unit = self.wiring.ops[repeat.start : repeat.start + repeat.period]
        values = [value for op in unit for value in op.outputs]
        return all(isinstance(value.type, Tensor) and value.type.rank == 0 for value in values)

    def weight(self, repeat: Repeat) -> int:
        """The products in one unit of a repeat."""
        products = self.wiring.products
        return int(products[repeat.start + repeat.period] - products[repeat.start])

    def counts(self) -> tuple[int, ...]:
        """How often the blocks with products, and the callees with products of before, are repeated."""
        wiring = self.wiring
        calls = Counter(
            op.callee
            for index, op in enumerate(wiring.ops)
            if op.is_call and not self.used[index] and wiring.products[index + 1] > wiring.products[index]
        )
        found = {len(starts) for starts in self.blocks.values()} | {n for n in calls.values() if n > 1}
        return tuple(sorted(found, reverse=True))

    def place(self, repeats: Iterable[Repeat], counts: tuple[int, ...] | None = None) -> None:
        """Turn repeats into blocks; what is left beside them may be part of another repeat."""
        failed: set[Repeat] = set()
        while chosen := self.select(repeats, failed, counts):
            # In the order of the ops: a backward block is aligned with the forward ones that it reads.
            for repeat in sorted(chosen, key=lambda r: r.start):
                if not self.fit(repeat, self.multiples(repeat, counts)):
                    failed.add(repeat)

    def select(
        self, repeats: Iterable[Repeat], failed: set[Repeat], counts: tuple[int, ...] | None
    ) -> list[Repeat]:
        """Return repeats that do not overlap, those that save most first, clipped to ops not yet used."""
        taken = self.used.copy()
        heap: list[tuple[int, int, int, Repeat]] = []

        def push(repeat: Repeat) -> None:
            long = repeat.stop - repeat.start >= 2 * repeat.period
            if long and repeat not in failed and self.multiples(repeat, counts):
                heapq.heappush(heap, (-repeat.saved, repeat.period, repeat.start, repeat))

        for repeat in repeats:
            push(repeat)
        chosen: list[Repeat] = []
        while heap:
            repeat = heapq.heappop(heap)[-1]
            if not taken[repeat.start : repeat.stop].any():
                taken[repeat.start : repeat.stop] = True
                chosen.append(repeat)
                continue
            for start, stop in _free(taken, repeat):
                push(Repeat(start, stop, repeat.period))
        return chosen

    def multiples(self, repeat: Repeat, counts: tuple[int, ...] | None) -> list[int]:
        """Return how many units may make one block that occurs twice, in order of preference."""
        units = (repeat.stop - repeat.start) // repeat.period
        weight = self.weight(repeat)
        if weight:
            grown = -(-self.products // weight)
            found = [grown * i for i in range(1, MULTIPLES + 1)]
        elif counts:
            # One more than there are blocks, where the first or the last of those differs.
            found = [units // n for n in counts if units >= n and units // (units // n) <= n + 1]
        else:
            found = list(range(1, MULTIPLES + 1)) if repeat.period > 1 else []
        return [n for n in found if 2 * n <= units and n * repeat.period > 1]

    def fit(self, repeat: Repeat, multiples: list[int]) -> bool:
        """Make blocks of a repeat: the first multiple of its unit that saves most."""
        best: tuple[tuple[int, int], int, Blocks] | None = None
        for multiple in multiples:
            length = multiple * repeat.period
            starts = self.starts(repeat, length)
            kinds = self.kinds(starts, length)
            saved = (sum(len(s) - 1 for s in kinds.values()) * length, -len(kinds))
            if kinds and (best is None or saved > best[0]):
                best = (saved, length, kinds)
            if sum(map(len, kinds.values())) == len(starts):
                break
        if best is None:
            return False
        for key, starts in best[2].items():
            self.blocks.setdefault(key, []).extend(starts)
        for start in sorted(start for starts in best[2].values() for start in starts):
            self.take(start, best[1])
        return True

    def take(self, start: int, length: int) -> None:
        self.used[start : start + length] = True
        self.owner[start : start + length] = self.placed
        self.placed += 1

    def kinds(self, starts: Integers, length: int) -> Blocks:
        """Group the repetitions by their inner wiring; labels agree."""
        inner = self.wiring.inner(starts, length)
        labels = self.wiring.labels[starts[0] : starts[0] + length].tobytes()
        found: Blocks = {}
        if (inner == inner[0]).all():
            return {(length, labels + inner[0].tobytes()): starts.tolist()}
        for start, row in zip(starts.tolist(), inner, strict=True):
            found.setdefault((length, labels + row.tobytes()), []).append(start)
        return {key: where for key, where in found.items() if len(where) > 1}

    def starts(self, repeat: Repeat, length: int) -> Integers:
        """Return where repetitions start: few values cross, aligned, many repetitions, branches start."""
        crossing, reads = self.crossing(repeat, length)
        size = repeat.stop - repeat.start
        offsets = range(min(length, size - 2 * length + 1))
        least = int(crossing[length : length + len(offsets)].min())
        ties = [
            (-((size - offset) // length), -int(reads[length + offset]), offset)
            for offset in offsets
            if crossing[length + offset] == least
        ]
        counts = sorted({key[0] for key in ties})
        few = [key for count in counts for key in sorted(k for k in ties if k[0] == count)[:TIES]]
        choices = [(key, repeat.start + key[2] + length * np.arange(-key[0])) for key in few]
        if len(choices) == 1:
            return choices[0][1]

        def rank(choice: tuple[tuple[int, int, int], Integers]) -> tuple[int, int, int, int, int]:
            (count, fan, offset), starts = choice
            shared, sources = self.sources(starts, length)
            return round(shared / -count), count, sources, fan, offset

        return min(choices, key=rank)[1]

    def crossing(self, repeat: Repeat, length: int) -> tuple[Integers, Integers]:
        """Return, per cut of a repeat, the values that go on to the next repetition, and their reads."""
        wiring, size = self.wiring, repeat.stop - repeat.start
        part = slice(wiring.reads[repeat.start], wiring.reads[repeat.stop])
        values, readers = wiring.operands[part], wiring.readers[part]
        made = wiring.made[values]
        near = (made >= repeat.start) & (readers - made <= length)
        values, readers, made = values[near], readers[near], made[near]
        base = int(wiring.first[repeat.start])
        last = np.zeros(int(wiring.first[repeat.stop]) - base, np.int64)
        np.maximum.at(last, values - base, readers)
        alive = np.flatnonzero(last)
        return (
            _covered(size, wiring.made[alive + base] - repeat.start, last[alive] - repeat.start),
            _covered(size, made - repeat.start, readers - repeat.start),
        )

    def sources(self, starts: Integers, length: int) -> tuple[int, int]:
        """Count, over all repetitions, the blocks and ops that each shares inputs with, and reads from.

        An input belongs to the op that reads it first: weights of one forward block that are read by one
        backward block, and by one block of updates, are the alignment that keeps them together.
        """
        wiring, many = self.wiring, len(self.wiring.ops)
        operands = wiring.block_operands(starts, length)
        rows = np.broadcast_to(np.arange(len(starts))[:, None], operands.shape)
        outside = operands < wiring.first[starts][:, None]
        operands, rows = operands[outside], rows[outside]
        given = wiring.made[operands] < 0
        origin = np.where(given, self.first_read[operands], wiring.made[operands])
        # Earlier repetitions of this choice have no number yet.
        own = (origin >= starts[0]) & (origin < starts[-1] + length)
        owner = np.where(own, (origin - starts[0]) // length + 3 * many, self.owner[origin])
        pairs = rows * (8 * many) + owner
        return len(np.unique(pairs[given])), len(np.unique(pairs[~given]))

    def find_more(self) -> None:
        """Add occurrences of blocks with products elsewhere: a repetition apart from the others."""
        labels, products = self.wiring.labels, self.wiring.products
        text = labels.tobytes()
        for (length, what), starts in self.blocks.items():
            if products[starts[0]] == products[starts[0] + length]:
                continue
            word = labels[starts[0] : starts[0] + length].tobytes()
            byte = text.find(word)
            while byte >= 0:
                at, odd = divmod(byte, labels.itemsize)
                free = not odd and not self.used[at : at + length].any()
                inner = self.wiring.inner(np.array([at]), length) if free else None
                if inner is not None and what == word + inner.tobytes():
                    starts.append(at)
                    self.take(at, length)
                byte = text.find(word, byte + 1)
            starts.sort()


def _covered(size: int, begin: Integers, end: Integers) -> Integers:
    """Return for each cut (before op i) how many intervals from op ``begin`` to op ``end`` cross it."""
    change = np.bincount(begin + 1, minlength=size + 2) - np.bincount(end + 1, minlength=size + 2)
    return np.cumsum(change)


def _free(taken: Integers, repeat: Repeat) -> Iterator[tuple[int, int]]:
    """Yield the stretches of a repeat that are not taken."""
    change = np.diff(taken[repeat.start : repeat.stop], prepend=True, append=True)
    edges = (repeat.start + np.flatnonzero(change)).tolist()
    yield from zip(edges[::2], edges[1::2], strict=True)


# --- tandem repeats: where a word is followed by itself, again and again -----------------------------

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
