"""The rows of a few microbatches on a rank, written as a function.

Microbatches that run the same calls in the same order take and free the same memory, but for the first and
the last ones of a call, between which sums are made. So the rows of one microbatch of each sort, and of those
that are unlike any other, say what all rows do, if no memory passes between microbatches but in sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from distsim.ir import Function, Op, Role, Type, Value
from distsim.program.table import CONCAT, FIRST, LATEST, ONCE, SEND
from distsim.schedule import LAST, LATER, Kind
from distsim.schedule.codes import code_of, kind_of, number_of
from distsim.simulation.memory.rank_calls import BEGINS, Places, RankCalls, SlotCall, TailCall

STEP = -1
"""The label of what there is once a step."""
TAIL = -1
"""Instead of a family, with the place in the tail: what names a call after the last action."""
CallKey = tuple[int, int]
"""Which of the calls of a rank: its family, and what it does to sums."""
Origin = tuple[CallKey | None, int]
"""Where the bytes of a value are from: an output of a call, or a slot, of no call."""
SUMMED_BY = tuple([kind.sums for kind in Kind])
"""Of the kinds: those that add to the same sums have the same number."""


Cells = tuple[tuple[tuple[int, int, int], ...], ...]
"""Cells of a rank, each of one action or two: (family, label, partner).

The family is the code of i and kind for the i-th stage of the rank. The partner is -1, or that of a pair:
2 * its family, + 1 if it comes first.
"""


def summing(family: int) -> int:
    """Return what calls have in common that add to the same sums."""
    return code_of(number_of(family), SUMMED_BY[kind_of(family)])


class Sample(NamedTuple):
    """Which microbatches are in an excerpt, by labels from 0, and in which order they run.

    ``ordinary`` tells of each label whether it may stand for other microbatches too, ``copies`` which copy of
    the model is its. ``latest`` gives the label that is read of slots of which the end of the step reads the
    latest. A ``plain`` sample runs the microbatches in an order that need not be theirs, without the second
    ones of calls: it says enough if no memory passes between microbatches but in sums that have their own.
    """

    cells: Cells
    ordinary: tuple[bool, ...]
    copies: tuple[int, ...]
    latest: tuple[tuple[int, int], ...]
    plain: bool


class Excerpt:
    """The rows of a sample as ops, of which ``what`` notes what each is.

    ``places`` are the slot and the label of each value, ``sizes`` its bytes and ``origins`` where they are
    from; ``called`` says of each op that calls
    which call it is. ``sums`` what each call made of
    the sums, by slot, ``read_so_far`` the slots of those that others read before the end, ``gradients`` what
    pairs read as gradients.
    """

    def __init__(self, calls: RankCalls, sample: Sample) -> None:
        self.calls, self.sample = calls, sample
        self.blocks, self.pairs = dict(calls.calls), dict(calls.pairs)
        self.latest = dict(sample.latest)
        self.frame: dict[tuple[int, int], Value] = {}
        self.places: dict[Value, tuple[int, int]] = {}
        self.sizes: dict[Value, int] = {}
        self.origins: list[Origin] = []
        self.called: dict[Op, CallKey] = {}
        self.inputs: list[Value] = []
        self.ops: list[Op] = []
        self.what: list[tuple[str, int, int]] = []
        self.sums: dict[int, list[Value]] = {}
        self.read_so_far: set[int] = set()
        makes = [each.makes for (_, how), each in calls.calls if not how & (BEGINS | LAST)]
        self.summed = {slot for places in makes for slot, which in places if which == ONCE}
        self.own_sums: dict[int, set[int]] = {}  # that calls of a stage and kind add to
        self.gradients: list[Value] = []
        self._write_cells()
        self._bring_the_rest()
        for place, row in enumerate(calls.tail):
            self._write_tail(place, row)
        outputs = tuple([self._read(slot, which, STEP) for slot, which in calls.outputs])
        self.function = Function("excerpt", tuple(self.inputs), tuple(self.ops), outputs)

    # --- values ---------------------------------------------------------------------------------------

    def _label(self, slot: int, which: int, label: int) -> int:
        return STEP if which == ONCE else self.latest[slot] if which == LATEST else label

    def _value(
        self, slot: int, label: int, made: tuple[Origin, int] | None, role: Role = Role.INPUT
    ) -> Value:
        """Return a new value; ``made``: by which output of a call, and its bytes."""
        origin, size = made or ((None, slot), self.calls.slots[slot].nbytes)
        # What a value takes is in ``sizes``: its type matters inside of callees only, which have their own.
        value = self.frame[slot, label] = Value("", Type(), role)
        self.places[value], self.sizes[value] = (slot, label), size
        self.origins.append(origin)
        return value

    def _read(self, slot: int, which: int, label: int) -> Value:
        """Return a value that a row reads: what is first read of an input, or of what arrives, is there."""
        label = self._label(slot, which, label)
        value = self.frame.get((slot, label))
        if value is None:
            role = self.calls.slots[slot].role
            if role is None:
                return self._bring(slot, label)
            value = self._value(slot, label, None, role)
            self.inputs.append(value)
        return value

    def _bring(self, slot: int, label: int) -> Value:
        value = self._value(slot, label, None)
        self._add(Op(SEND, (), (value,)), ("brought", slot, label))
        return value

    def _add(self, op: Op, what: tuple[str, int, int]) -> None:
        self.ops.append(op)
        self.what.append(what)

    # --- rows -----------------------------------------------------------------------------------------

    def _write_cells(self) -> None:
        groups = [summing(family) for cell in self.sample.cells for family, _, _ in cell]
        started, left = set[int](), Counter(groups)
        for cell in self.sample.cells:
            sends: list[tuple[int, int]] = []
            for family, label, partner in cell:
                group = summing(family)
                left[group] -= 1
                # The first call that adds is the one after that which makes the sums, the last one goes on.
                wanted = LATER * (group in started) + LAST * (not left[group])
                ways = (wanted if group in started else BEGINS, wanted, wanted & LATER, wanted & LAST, 0)
                how = next((each for each in ways if (family, each) in self.blocks), 0)
                call = self.blocks.get((family, how))
                started.add(group)
                if call is not None:
                    self._write_call((family, how), label, call)
                    sends += [(number, label) for number in call.sends]
                    read = self.ops[-1].inputs
                    self.gradients += [read[i] for i in self.pairs.get((family, how, partner), ())]
            for number, label in sends:
                value = self.frame[self.calls.sent[number], label]
                self._add(Op(SEND, (value,), ()), ("sent", number, label))

    def _write_call(self, key: CallKey, label: int, call: SlotCall) -> None:
        family, ends = key[0], bool(key[1] & LAST)
        adding = {slot for slot, which in call.makes if which == ONCE and slot in self.summed}
        own = self.own_sums.setdefault(summing(family), set())
        own |= adding
        own = own if ends else adding
        reads = [self._read(slot, which, label) for slot, which in call.reads]
        self.read_so_far |= {slot for slot, _ in call.reads if slot in self.sums} - own
        makes = self._make(key, call.makes, call.sizes, label)
        for slot in adding:
            self.sums.setdefault(slot, []).append(self.frame[slot, STEP])
        op = Op("Call", tuple(reads), tuple(makes), subfunctions=(call.function,))
        self.called[op] = key
        self._add(op, ("call", family, label))

    def _make(self, key: CallKey, places: Places, sizes: Sequence[int], label: int) -> list[Value]:
        return [
            self._value(slot, self._label(slot, which, label), ((key, place), size))
            for place, ((slot, which), size) in enumerate(zip(places, sizes, strict=True))
        ]

    def _bring_the_rest(self) -> None:
        """Bring what no call of a microbatch reads, or none that is there before the end."""
        for slot in self.calls.brought:
            for label in range(len(self.sample.ordinary)):
                if (slot, label) not in self.frame:
                    self._bring(slot, label)

    def _write_tail(self, place: int, row: TailCall) -> None:
        labels = range(len(self.sample.ordinary))
        if row.kind == SEND:
            each = [label for label in labels if self.sample.copies[label] == row.copy]
            for label in each if row.copy >= 0 else (STEP,):
                reads = tuple([self._read(slot, which, label) for slot, which in row.reads])
                makes = tuple([self._brought(slot, which, label) for slot, which in row.makes])
                self._add(Op(SEND, reads, makes), ("tail", place, label))
        elif row.kind == CONCAT:
            parts = [self._read(slot, FIRST, label) for slot, _ in row.reads for label in labels]
            makes = tuple([self._brought(slot, which, STEP) for slot, which in row.makes])
            self._add(Op(CONCAT, tuple(parts), makes), ("tail", place, STEP))
        elif row.function is not None:
            reads = tuple([self._read(slot, which, STEP) for slot, which in row.reads])
            makes = tuple(self._make((TAIL, place), row.makes, row.sizes, STEP))
            op = Op("Call", reads, makes, subfunctions=(row.function,))
            self.called[op] = TAIL, place
            self._add(op, ("tail", place, STEP))

    def _brought(self, slot: int, which: int, label: int) -> Value:
        return self._value(slot, self._label(slot, which, label), None)
