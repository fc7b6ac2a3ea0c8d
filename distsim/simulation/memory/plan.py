"""Which values of a function share memory, when each piece of it is free, and which hold gradients."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple
from weakref import WeakKeyDictionary

from distsim.ir import Function, Op, Value, substitute
from distsim.ops import operator
from distsim.ops.coalescing import moved_values
from distsim.ops.replaced import replaced_by
from distsim.ops.training import AVERAGE
from distsim.resizing import likeness_of
from distsim.simulation.tasks.rank_classes import place_of


class _Taken(NamedTuple):
    """A result that is to be where a value is. One that is ``handed`` on is no part of it; None: both are of
    one type."""

    owner: Value
    result: Value
    handed: bool | None

    def fits(self) -> bool:
        """Whether it can be there."""
        one, two = self.owner, self.result
        if self.handed is None:
            return one.type == two.type
        left = one.type.nbytes - two.type.nbytes  # what a view leaves out
        return place_of(one) == place_of(two) and left >= 0 and not (left and self.handed)


@dataclass(frozen=True, eq=False, slots=True)
class MemoryPlan:
    """Which values of a function share memory, and when each piece is last used.

    ``home`` maps a value to the value whose memory it has. ``dying`` lists, per op, the homes that are
    free after it, ``never`` those inputs that no op reads; function outputs never die. ``sources`` says
    of each output which input's memory it has, if any, and ``twins`` which earlier output's;
    ``overwritten`` are the inputs whose memory an in-place op took over. ``held`` tells of Calls which
    arguments are read after them, so that the callee does not overwrite them as it otherwise would.
    ``taken`` is what sizes decide, ``called`` how callees are called. ``like`` is the plan of a function that
    differs in sizes alone, if that is no other.
    """

    home: Mapping[Value, Value]
    dying: tuple[tuple[Value, ...], ...]
    never: tuple[Value, ...]
    sources: tuple[int | None, ...]
    twins: tuple[int | None, ...]
    overwritten: frozenset[int]
    held: Mapping[Op, tuple[int, ...]]
    taken: tuple[_Taken, ...] = ()
    called: tuple[tuple[Function, Places, Places], ...] = ()
    like: MemoryPlan | None = None


Places = tuple[int, ...]
"""Places among the inputs of a function."""

_PLANS: WeakKeyDictionary[Function, dict[tuple[Places, Places], MemoryPlan]] = WeakKeyDictionary()
_GRADIENTS: WeakKeyDictionary[Function, dict[Places, Places]] = WeakKeyDictionary()
_COPIES: WeakKeyDictionary[Function, dict[Places, Places]] = WeakKeyDictionary()

_OF_GRADIENTS = frozenset(("Add", AVERAGE, "Pad", "CopyIn", "GradientCast", "GradientCopy", "ScaleGradient"))
"""What makes a gradient, besides views and collectives, makes it of gradients."""
_WHERE_IT_LIES = frozenset((AVERAGE, "Pad", "ScaleGradient"))


class _All(Container[Value]):
    """Has every value."""

    def __contains__(self, value: object) -> bool:
        return True


_ALL = _All()


def plan_of(function: Function, same: Places, held: Places = ()) -> MemoryPlan:
    """Return the plan of a function whose input i is in the memory of its input ``same[i]``.

    The inputs ``held`` are read after it: an in-place op puts its result elsewhere. Kept for as long as the
    function is.
    """
    plans = _PLANS.get(function)
    if plans is None:
        plans = _PLANS[function] = {}
    found = plans.get((same, held))
    if found is None:
        found = _resized(function, same, held) or _Planner(function, same, held).plan()
        plans[same, held] = found
    return found


def _resized(function: Function, same: Places, held: Places) -> MemoryPlan | None:
    """Return the plan of a function that differs in sizes alone from another one, if both have the same."""
    likeness = likeness_of(function)
    if likeness is None:
        return None
    plan, values = plan_of(likeness.like, same, held), likeness.values
    for owner, result, handed in plan.taken:
        if owner in values or result in values:
            own = _Taken(values.get(owner, owner), values.get(result, result), handed)
            if own.fits() != _Taken(owner, result, handed).fits():
                return None
    callees = {a.callee: b.callee for a, b in likeness.ops.items() if a.is_call}
    for callee, *how in plan.called:
        own = callees.get(callee, callee)
        if own is not callee and plan_of(own, *how).like is not plan_of(callee, *how):
            return None
    home = {**plan.home}  # most stay: those of the other function are left beside, which nobody asks for
    for value, owner in plan.home.items():
        if value in values or owner in values:
            home[values.get(value, value)] = values.get(owner, owner)
    return MemoryPlan(
        home,
        tuple([o if values.keys().isdisjoint(o) else substitute(o, values) for o in plan.dying]),
        substitute(plan.never, values),
        plan.sources,
        plan.twins,
        plan.overwritten,
        {likeness.ops.get(op, op): places for op, places in plan.held.items()},
        like=plan,
    )


def first_places(homes: Sequence[Value]) -> tuple[int, ...]:
    """Return for each place the first one with the same value."""
    first: dict[Value, int] = {}
    return tuple([first.setdefault(home, place) for place, home in enumerate(homes)])


def gradient_values(function: Function, returned: Iterable[Value] = ()) -> set[Value]:
    """Return the values that in-place ops read, directly or through collectives, views, Pad,
    AverageGradients, CopyIn, GradientCast, GradientCopy, ScaleGradient and additions.

    In-place ops are the optimizers and the sum over microbatches: but for what they overwrite,
    parameters and optimizer state, these values are gradients. So are those that lead to ``returned``.
    """
    found = set(returned)
    for op in reversed(function.ops):
        if op.subfunctions:  # a Call, or a kernel of several ops
            made = tuple([i for i, value in enumerate(op.outputs) if value in found])
            found.update([op.inputs[i] for i in gradient_inputs(op.callee, made)])
            continue
        if operator(op.op_type).in_place:
            found.update(op.inputs)
        elif not found.isdisjoint(op.outputs):
            found.update(op.inputs if op.op_type in _OF_GRADIENTS else _passed_on(op, found))
    return found


def _passed_on(op: Op, made: Container[Value]) -> list[Value]:
    """Return what a view is of, or what a collective moves of which it makes one of ``made``."""
    meaning = operator(op.op_type)
    if meaning.view:
        return list(op.inputs[:1])
    if meaning.communication is None or meaning.communication.transfers:
        return []
    pairs = zip(moved_values(op), op.outputs, strict=False)  # half a transfer has one
    return [value for value, own in pairs if own in made]


def gradient_inputs(function: Function, returned: Places = ()) -> Places:
    """Return the places of the inputs of a callee that are gradients, as are these of its outputs: see
    :func:`gradient_values`."""
    known = _GRADIENTS.setdefault(function, {})
    if returned not in known:
        values = gradient_values(function, [function.outputs[place] for place in returned])
        known[returned] = tuple([i for i, value in enumerate(function.inputs) if value in values])
    return known[returned]


def gradient_copies(
    function: Function, gradients: Container[Value], given: Iterable[Value] = ()
) -> set[Value]:
    """Return those of the gradients of a function that GradientCopy makes, or that are made of such copies,
    as ``given`` ones are: no buffer of gradients has them."""
    found = set(given)
    for op in function.ops:
        if op.subfunctions:
            places = tuple([i for i, value in enumerate(op.inputs) if value in found])
            found.update([op.outputs[i] for i in _copied_outputs(op.callee, places)])
        elif op.op_type == "GradientCopy" or (
            not operator(op.op_type).in_place and not found.isdisjoint(op.inputs)
        ):
            found.update(op.outputs)
    return {value for value in found if value in gradients}


def _copied_outputs(function: Function, given: Places) -> Places:
    """Return the places of the outputs of a callee that are copies, or made of those of its inputs."""
    known = _COPIES.setdefault(function, {})
    if given not in known:
        values = gradient_copies(function, _ALL, [function.inputs[place] for place in given])
        known[given] = tuple([i for i, value in enumerate(function.outputs) if value in values])
    return known[given]


def buffered_gradients(function: Function, returned: Iterable[Value]) -> set[Value]:
    """Return what a function makes that becomes the gradients that it returns where it lies: before they are
    summed over ranks, scaled, or seen under another shape."""
    found = set(returned)
    for op in reversed(function.ops):
        if not op.subfunctions and not found.isdisjoint(op.outputs):
            found.update(op.inputs[:1] if op.op_type in _WHERE_IT_LIES else _passed_on(op, found))
    return found


def _kept_by(op: Op) -> Sequence[Value]:
    """Return what an op reads, or the kernel's part that it is, that stays until its function ends."""
    if op.is_call:
        return ()
    if not op.subfunctions:
        return op.inputs if operator(op.op_type).holds else ()
    kept = {value for part in op.callee.ops for value in _kept_by(part)}
    return [v for v, own in zip(op.inputs, op.callee.inputs, strict=True) if own in kept]


class _Planner:
    """Makes the plan of one function."""

    def __init__(self, function: Function, same: Places, held: Places) -> None:
        self.function = function
        self.same = same
        self.home: dict[Value, Value] = {}
        self.until: dict[Value, int] = {}  # home -> the last op that reads what it holds so far
        self.overwritten: set[Value] = set()
        self.last_read: dict[Value, int] = {}
        for number, op in enumerate(function.ops):
            self.last_read.update(dict.fromkeys(op.inputs, number))
        kept = [value for op in function.ops for value in _kept_by(op)]
        self.last_read.update(dict.fromkeys(kept, len(function.ops) - 1))
        self.last_read.update(dict.fromkeys(function.outputs, len(function.ops)))
        self.last_read.update(dict.fromkeys([function.inputs[place] for place in held], len(function.ops)))
        self.held: dict[Op, Places] = {}
        self.taken: list[_Taken] = []
        self.called: dict[tuple[Function, Places, Places], None] = {}

    def plan(self) -> MemoryPlan:
        function = self.function
        inputs, last_read, until = function.inputs, self.last_read, self.until
        for place, (value, first) in enumerate(zip(inputs, self.same, strict=True)):
            if first == place:
                self.home[value], until[value] = value, last_read.get(value, -1)
            else:
                self._put(value, inputs[first], -1)
        for number, op in enumerate(function.ops):
            callee = self._callee(op, number) if op.is_call else None
            replaced: Mapping[int, int] = replaced_by(op) if callee is None else {}
            for index, value in enumerate(op.outputs):
                shared = self._shared_with(op, callee, replaced.get(index), index, number)
                # What nothing reads is free once it is made.
                self._put(value, value if shared is None else self.home[shared], number)
        dying: list[list[Value]] = [[] for _ in function.ops]
        for owner, number in self.until.items():
            if 0 <= number < len(function.ops):
                dying[number].append(owner)
        number_of = {value: index for index, value in enumerate(function.inputs)}
        homes = [self.home[value] for value in function.outputs]
        first = first_places(homes)
        return MemoryPlan(
            self.home,
            tuple(map(tuple, dying)),
            tuple([owner for owner, number in self.until.items() if number < 0]),
            tuple([number_of.get(owner) for owner in homes]),
            tuple([own if own < i else None for i, own in enumerate(first)]),
            frozenset([number_of[value] for value in self.overwritten if value in number_of]),
            self.held,
            tuple(self.taken),
            tuple(self.called),
        )

    @cached_property
    def handed(self) -> set[Value]:
        """The outputs, and what they are views of.

        A caller knows the memory of what it gets by its type, so none of these is a part of something larger.
        """
        found = set(self.function.outputs)
        for op in reversed(self.function.ops):
            if operator(op.op_type).view and op.inputs and not found.isdisjoint(op.outputs):
                found.add(op.inputs[0])
        return found

    def _callee(self, op: Op, number: int) -> MemoryPlan:
        """Return the plan of what a Call calls, with what it must not overwrite."""
        homes = [self.home[value] for value in op.inputs]
        same = first_places(homes)
        plan = plan_of(op.callee, same)
        self.called[op.callee, same, ()] = None
        held = tuple([place for place in sorted(plan.overwritten) if self.until[homes[place]] > number])
        self.overwritten.update([homes[place] for place in plan.overwritten.difference(held)])
        if not held:
            return plan
        self.held[op] = held
        self.called[op.callee, same, held] = None
        return plan_of(op.callee, same, held)

    def _put(self, value: Value, owner: Value, number: int) -> None:
        self.home[value] = owner
        last = self.last_read.get(value, number)
        if last < number:
            last = number
        if self.until.get(owner, -2) < last:
            self.until[owner] = last

    def _shared_with(
        self, op: Op, callee: MemoryPlan | None, taken: int | None, index: int, number: int
    ) -> Value | None:
        """Return the value whose memory an output takes over, that of input ``taken``, or shows under another
        shape."""
        if callee is not None:
            source, twin = callee.sources[index], callee.twins[index]
            if source is None:
                return None if twin is None else op.outputs[twin]
            return op.inputs[source]
        meaning, shown = operator(op.op_type), None
        if meaning.view and index == 0 and op.inputs:
            shown = self._take(op.inputs[0], op.outputs[0], number, overwrites=False)
        if shown is None and taken is not None:
            return self._take(op.inputs[taken], op.outputs[index], number, overwrites=True)
        return shown

    def _take(self, operand: Value, result: Value, number: int, overwrites: bool) -> Value | None:
        owner = self.home[operand]
        taken = _Taken(owner, result, None if owner.type is result.type else result in self.handed)
        self.taken.append(taken)
        if not taken.fits():
            return None
        if overwrites:
            if self.until[owner] > number:
                return None
            self.overwritten.add(owner)
        return operand
