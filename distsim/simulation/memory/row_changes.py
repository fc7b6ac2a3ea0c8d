"""What rows do to the memory of the rank on which they are: told by an excerpt, for all rows like its own."""

from __future__ import annotations

from copy import copy
from typing import NamedTuple

from distsim.ir import Function, Op, Role, Value
from distsim.ops.replaced import replaced_inputs
from distsim.program.table import CONCAT
from distsim.simulation.memory.excerpt import STEP, TAIL, CallKey, Excerpt, Sample
from distsim.simulation.memory.peak import whole
from distsim.simulation.memory.plan import gradient_inputs, plan_of
from distsim.simulation.memory.rank_calls import Irregular, RankCalls
from distsim.simulation.memory.walk import (
    GRADIENTS,
    KIND_OF_ROLE,
    KINDS,
    Argument,
    CallPlan,
    Frame,
    OneRank,
    Walk,
    plan_for,
)

Amounts = tuple[int, ...]
"""Bytes: in all, then by kind."""

NOTHING: Amounts = (0,) * (1 + len(KINDS))

_WALKS = {held: Walk(OneRank(), held=held) for held in (False, True)}


class Change(NamedTuple):
    """What a row does to the memory of a rank: in the end, and at its own peak, with the ops of the peak.

    ``each`` comes on top of ``net`` for every microbatch of a label.
    """

    net: Amounts
    peak: Amounts
    at: tuple[Op, ...] = ()
    each: tuple[tuple[int, Amounts], ...] = ()


class _RowCall(NamedTuple):
    """Which call a row is, and how it is called."""

    key: CallKey
    arguments: tuple[Argument, ...]
    results: tuple[int, ...]


class _ExcerptRow(NamedTuple):
    """What an op of an excerpt makes, (number of the value, kind), and what is free after it, (number, kind,
    label); of a call what is free after, but not in it."""

    what: tuple[str, int, int]
    op: Op | None
    made: tuple[tuple[int, int], ...]
    free: tuple[tuple[int, int, int], ...]
    call: _RowCall | None = None


class _Call(NamedTuple):
    """A call of a function: how, the labels of the homes of its inputs, and what is free after it."""

    function: Function
    plan: CallPlan
    labels: tuple[int, ...]
    after: Amounts


class RankUse:
    """What the rows of a sample do to the memory of a rank.

    ``start`` is what is there before the first row, ``start_each`` what is for each microbatch of a label.
    Raises :class:`Irregular` where the sample does not speak for what it stands for.
    """

    def __init__(self, calls: RankCalls, sample: Sample) -> None:
        excerpt = Excerpt(calls, sample)
        self.calls, self.origins, self.sizes = calls, excerpt.origins, list(excerpt.sizes.values())
        self.held = calls.held > 0
        self._number = {value: number for number, value in enumerate(excerpt.places)}
        labels = [excerpt.places[value][1] for value in excerpt.inputs]
        self._labels = tuple(range(len(sample.ordinary)))
        self._inputs = [
            (self._number[value], KIND_OF_ROLE[value.role], label)
            for value, label in zip(excerpt.inputs, labels, strict=True)
        ]
        self.start, self.start_each = self._started()
        self._changes: dict[tuple[object, ...], Change] = {}
        self._calls: dict[tuple[int, int], _Call] = {}  # for pairs
        self._rows: dict[tuple[str, int, int], _ExcerptRow] = {}
        self._tell(excerpt)
        del self._number

    def resized(self, calls: RankCalls) -> RankUse:
        """Return the same for a rank whose calls differ in sizes alone.

        Raises :class:`Irregular` where sizes decide what is in whose memory.
        """
        if calls.pairs:
            raise Irregular
        found, functions = copy(self), _functions(calls)
        before = _functions(self.calls)
        slots = [slot.nbytes for slot in calls.slots]
        sizes = {key: made for key, (_, made) in functions.items()}
        found.calls = calls
        found.sizes = [slots[place] if key is None else sizes[key][place] for key, place in self.origins]
        found.start, found.start_each = found._started()
        pairs = enumerate(zip(self.sizes, found.sizes, strict=True))
        same = {number for number, (a, b) in pairs if a == b}
        found._changes = dict(self._changes)
        for row in self._rows.values():
            touched = not {number for number, *_ in (*row.made, *row.free)} <= same
            if row.call is None:
                if touched:
                    found._changes[row.what] = found._moved(row)
                continue
            one, two = before[row.call.key][0], functions[row.call.key][0]
            if one is not two:
                _verify_alike(one, two, row.call)
            if touched or one is not two:
                found._changes[row.what] = found._called(row, two)
        return found

    def _started(self) -> tuple[Amounts, dict[int, Amounts]]:
        """Return what is there before the first row, and for each microbatch of a label."""
        found = {label: [0] * len(NOTHING) for label in (STEP, *self._labels)}
        for number, kind, label in self._inputs:
            amounts = found[label]
            amounts[0] += self.sizes[number]
            amounts[1 + kind] += self.sizes[number]
        start = found.pop(STEP)
        buffers = round(self.calls.held * start[1 + KIND_OF_ROLE[Role.PARAMETER]])
        start[0] += buffers
        start[1 + GRADIENTS] += buffers
        return tuple(start), {label: tuple(amounts) for label, amounts in found.items()}

    # --- what rows do ---------------------------------------------------------------------------------

    def call(self, family: int, label: int) -> Change:
        """Return what an action does."""
        return self._changes["call", family, label]

    def pair(self, one: tuple[int, int], two: tuple[int, int], function: Function, same: bool) -> Change:
        """Return what two actions (family, label) do that overlap, of the same microbatch or of two."""
        known = self._changes.get((one, two, same))
        if known is None:
            apart = two[1] if one[1] == two[1] and not same else STEP
            known = _pair(self._calls[one], self._calls[two], function, apart, self.held)
            self._changes[one, two, same] = known
        return known

    def sent(self, number: int, label: int) -> Change:
        """Return what a transfer does on the rank that sends."""
        return self._changes["sent", number, label]

    def brought(self, slot: int, label: int) -> Change:
        """Return what a transfer does on the rank to which it brings a slot."""
        return self._changes["brought", slot, label]

    def tail(self, place: int, label: int) -> Change:
        """Return what a row after the last action does; ``label`` is -1 but for transfers of each."""
        return self._changes["tail", place, label]

    # --- reading the function -------------------------------------------------------------------------

    def _tell(self, excerpt: Excerpt) -> None:
        function, number = excerpt.function, self._number
        frame = whole(function)
        frame.known = {**frame.known, **{frame.plan.home[v]: GRADIENTS for v in excerpt.gradients}}
        for op, dying, what in zip(function.ops, frame.plan.dying, excerpt.what, strict=True):
            free = [value for value in dying if value not in frame.kept]
            if not op.is_call:
                made = tuple([(number[value], frame.made(op, value)) for value in op.outputs])
                gone = tuple([(number[v], frame.kinds[v], excerpt.places[v][1]) for v in free])
                row = _ExcerptRow(what, op, made, gone)
                self._rows[what] = row
                self._changes[what] = self._moved(row)
                continue
            plan = frame.call(op, free)
            left = tuple([(number[v], frame.kinds[v], STEP) for v in plan.left])
            row = _ExcerptRow(what, op, (), left, _RowCall(excerpt.called[op], plan.arguments, plan.results))
            self._rows[what] = row._replace(op=None)
            self._changes[what] = self._called(row, op.callee)
            if excerpt.calls.pairs and what[0] == "call":
                labels = tuple([excerpt.places[home][1] for home in plan.homes])
                self._calls[what[1], what[2]] = _Call(op.callee, plan, labels, self._left(row))
        (_verify_plain if excerpt.sample.plain else _verify)(frame, excerpt)

    def _moved(self, row: _ExcerptRow) -> Change:
        """Return what an op does that moves something."""
        peak = NOTHING
        for number, kind in row.made:
            peak = _sum(peak, self._amounts(self.sizes[number], kind))
        net, each = peak, dict[int, Amounts]()
        for number, kind, label in row.free:
            gone = self._amounts(-self.sizes[number], kind)
            if row.op is not None and row.op.op_type == CONCAT and label != STEP:
                each[label] = _sum(each.get(label, NOTHING), gone)
            else:
                net = _sum(net, gone)
        return Change(net, peak, () if row.op is None else (row.op,), tuple(each.items()))

    def _left(self, row: _ExcerptRow) -> Amounts:
        """Return what is free after a call, but not in it."""
        after = [0] * len(NOTHING)
        for number, kind, _ in row.free:
            if not (self.held and kind == GRADIENTS):
                after[0] -= self.sizes[number]
                after[1 + kind] -= self.sizes[number]
        return tuple(after)

    def _amounts(self, nbytes: int, kind: int) -> Amounts:
        """Return bytes of a kind; none of gradients where buffers hold them."""
        if self.held and kind == GRADIENTS:
            return NOTHING
        amounts = [0] * len(NOTHING)
        amounts[0] = amounts[1 + kind] = nbytes
        return tuple(amounts)

    def _called(self, row: _ExcerptRow, function: Function) -> Change:
        """Return what a call does."""
        if row.call is None:
            return Change(NOTHING, NOTHING)
        return _change(function, row.call.arguments, row.call.results, self._left(row), self.held)


def _functions(calls: RankCalls) -> dict[CallKey, tuple[Function, tuple[int, ...]]]:
    """Return the functions that a rank calls, with the bytes of what they make."""
    found = {key: (call.function, call.sizes) for key, call in calls.calls}
    tail = enumerate(calls.tail)
    return found | {(TAIL, n): (row.function, row.sizes) for n, row in tail if row.function is not None}


def _verify_alike(one: Function, two: Function, call: _RowCall) -> None:
    """Raise :class:`Irregular` if a function has what it returns elsewhere in memory than another one, or
    other gradients and new values: what it has within is counted anew."""
    same = tuple([argument.same for argument in call.arguments])
    held = tuple([place for place, argument in enumerate(call.arguments) if argument.held])
    for how in dict.fromkeys(((same, ()), (same, held))):
        own, other = plan_of(two, *how), plan_of(one, *how)
        if own.like is other:
            continue
        if (own.sources, own.twins, own.overwritten) != (other.sources, other.twins, other.overwritten):
            raise Irregular
        if gradient_inputs(one) != gradient_inputs(two) or replaced_inputs(one) != replaced_inputs(two):
            raise Irregular


def _pair(one: _Call, two: _Call, function: Function, apart: int, held: bool) -> Change:
    """Return what two calls do; homes of the label ``apart`` are not the same in both."""
    first, second = one.plan, two.plan
    homes: list[object] = [*first.homes]
    for home, label in zip(second.homes, two.labels, strict=True):
        homes.append(("second", home) if label == apart != STEP else home)
    given = [*first.arguments, *second.arguments]
    of_second = set(homes[len(first.homes) :])
    if any(a.held and home in of_second for home, a in zip(first.homes, first.arguments, strict=True)):
        raise Irregular  # held for the other one of the pair, perhaps, not for what follows
    dying = {home for home, argument in zip(homes, given, strict=True) if argument.dies}
    number: dict[object, int] = {}
    places = [number.setdefault(home, place) for place, home in enumerate(homes)]
    arguments = tuple(
        [
            Argument(argument.kind, home in dying, place, argument.held)
            for home, argument, place in zip(homes, given, places, strict=True)
        ]
    )
    _verify_pair(function, arguments, (one, two))
    plan = CallPlan((), arguments, (*first.results, *second.results), [])
    return _change(function, plan.arguments, plan.results, _sum(one.after, two.after), held)


def _sum(one: Amounts, two: Amounts) -> Amounts:
    return tuple([a + b for a, b in zip(one, two, strict=True)]) if two is not NOTHING else one


def _change(
    function: Function, arguments: tuple[Argument, ...], results: tuple[int, ...], after: Amounts, held: bool
) -> Change:
    """Return what a call of a function does, after which so much is free."""
    use = _WALKS[held].callee(function, arguments, results)
    net = _sum((use.total[0], *use.by_kind[0]), after)
    return Change(net, (use.peak[0], *use.peak_by_kind[0]), use.at[0])


# --- is the sample enough -----------------------------------------------------------------------------


def _groups(frame: Frame, excerpt: Excerpt) -> dict[Value, list[Value]]:
    """Return the values that are in each home."""
    groups: dict[Value, list[Value]] = {}
    for value in excerpt.places:
        groups.setdefault(frame.plan.home[value], []).append(value)
    return groups


def _verify_plain(frame: Frame, excerpt: Excerpt) -> None:
    """Raise :class:`Irregular` if microbatches share memory but in inputs, or sums with anything else."""
    home, places, inputs = frame.plan.home, excerpt.places, set(excerpt.inputs)
    if excerpt.read_so_far:
        raise Irregular
    slot_of: dict[Value, int] = {}
    for slot, versions in excerpt.sums.items():
        if len({home[value] for value in versions}) not in (1, len(versions)):
            raise Irregular
        slot_of.update(dict.fromkeys(versions, slot))
    for owner, values in _groups(frame, excerpt).items():
        if len(values) == 1:
            continue
        labels = {places[value][1] for value in values}
        slots = {slot_of[value] for value in values if value in slot_of}
        if slots and (len(slots) > 1 or len(labels) > 1 or owner in inputs):
            raise Irregular
        if _shared(labels, excerpt) and not (owner in inputs and places[owner][1] == STEP):
            raise Irregular


def _shared(labels: set[int], excerpt: Excerpt) -> bool:
    """Whether a home of values of these labels is that of several microbatches."""
    ordinary = any(label != STEP and excerpt.sample.ordinary[label] for label in labels)
    return len(labels) > 1 and (ordinary or len(labels - {STEP}) > 1)


def _verify(frame: Frame, excerpt: Excerpt) -> None:
    """Raise :class:`Irregular` if what a microbatch does depends on which ones come before or after it.

    Where a sum is after its first two calls, it is after every other: all in one home, or each in its own.
    """
    home, places, inputs = frame.plan.home, excerpt.places, set(excerpt.inputs)
    ordinary = {label for label, stands in enumerate(excerpt.sample.ordinary) if stands}
    if not ordinary:
        return
    groups = _groups(frame, excerpt)
    order = {value: number for number, value in enumerate(places)}
    later: set[Value] = set()
    for slot, versions in excerpt.sums.items():
        homes = {home[value] for value in versions[1:]}
        later |= homes
        if len(homes) > 1 and any(len(groups[owner]) > 1 for owner in homes):
            raise Irregular
        views = [value for owner in homes for value in groups[owner] if places[value][1] != STEP]
        if any(order[value] > order[versions[1]] for value in views):
            raise Irregular
        if slot in excerpt.read_so_far and len({frame.kinds[home[value]] for value in versions}) > 1:
            raise Irregular
    for owner, values in groups.items():
        labels = {places[value][1] for value in values}
        lasting = owner in inputs and places[owner][1] == STEP and owner not in later
        if len(labels) > 1 and not labels.isdisjoint(ordinary) and not lasting:
            raise Irregular


def _verify_pair(function: Function, arguments: tuple[Argument, ...], calls: tuple[_Call, _Call]) -> None:
    """Raise :class:`Irregular` if a pair passes memory on in another way than its two calls would."""
    plan = plan_for(function, arguments)
    reads = makes = 0
    sources: list[int | None] = []
    twins: list[int | None] = []
    overwritten: set[int] = set()
    for call in calls:
        part = plan_for(call.function, call.plan.arguments)
        sources += [None if s is None else arguments[reads + s].same for s in part.sources]
        twins += [None if t is None else makes + t for t in part.twins]
        overwritten |= {arguments[reads + place].same for place in part.overwritten}
        reads, makes = reads + len(call.function.inputs), makes + len(call.function.outputs)
    # Of outputs in the memory of an input it does not matter which others are in it.
    twins = [None if source is not None else twin for source, twin in zip(sources, twins, strict=True)]
    shown = [None if s is not None else t for s, t in zip(plan.sources, plan.twins, strict=True)]
    if (tuple(sources), twins, overwritten) != (plan.sources, shown, plan.overwritten):
        raise Irregular
