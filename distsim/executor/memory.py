"""Peak memory: what is alive when, in the order of the function.

Parameters, state and constants among the inputs are there all the time; any other input from the start,
and every result from its op, until after its last use; outputs of the function stay. Views and in-place
results take no memory of their own (an in-place result does when its input is read again later). What is
on no device takes none. A callee is walked once per way in which it is called (which arguments die with
the call), and its (net change, peak) composes: of two in order it is (n1 + n2, max(p1, n1 + p2)).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distsim.executor.classes import RankClasses, communicates, place_of, placement_classes
from distsim.ir import Device, Function, Op, Role, Value
from distsim.ops import operator

KINDS = ("parameters", "state", "constants", "inputs", "activations", "communication")
"""What memory is for; ``activations`` are all results of compute ops, gradients too, ``communication``
the results of communication ops."""

_KIND_OF_ROLE = {Role.PARAMETER: 0, Role.STATE: 1, Role.CONSTANT: 2, Role.INPUT: 3}
_ACTIVATIONS, _COMMUNICATION = 4, 5
_RESIDENT = (Role.PARAMETER, Role.STATE, Role.CONSTANT)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes in use on a device: at the peak, by kind at the peak, and after the step.

    ``at`` is the op during which the peak is reached first, after the calls that lead to it; empty when
    it is reached before the first op.
    """

    peak: int
    by_kind: Mapping[str, int]
    at: tuple[Op, ...]
    end: int


def peak_memory(function: Function) -> dict[Device, MemoryUse]:
    """Return the memory in use on each device of the function.

    >>> from distsim.ir import Float, FunctionMaker, Tensor
    >>> gpu = Device(0, "gpu")
    >>> maker = FunctionMaker("f")
    >>> w = maker.add_input_value("w", Tensor(Float(), (100,), gpu), Role.PARAMETER)
    >>> x = maker.add_input_value("x", Tensor(Float(), (100,), gpu))
    >>> y = maker.add_op("LossGrad", inputs=[w, x], attributes={"N": 1})
    >>> peak_memory(maker.finalize())[gpu].peak
    1200
    """
    classes = placement_classes(function)
    walk = _Walk(classes)
    first = _Use(classes)
    arguments: list[_Argument] = []
    for value in function.inputs:
        resident = value.role in _RESIDENT
        kind = _KIND_OF_ROLE[value.role]
        first.change(value, kind, +1, ())
        arguments.append(_Argument(kind, dies=not resident, same=len(arguments)))
    first.append(walk.use(function, tuple(arguments)).use, ())
    found: dict[Device, MemoryUse] = {}
    for rank_class, group in enumerate(classes.members):
        by_kind: dict[str, int] = dict(zip(KINDS, first.peak_by_kind[rank_class], strict=True))
        peak, end = first.peak[rank_class], first.total[rank_class]
        use = MemoryUse(peak, by_kind, first.at[rank_class], end)
        found.update(dict.fromkeys(group, use))
    return dict(sorted(found.items(), key=lambda item: item[0].id))


@dataclass(frozen=True, slots=True)
class _Argument:
    """How an input is held: what kind of memory it is, whether it dies in this call, and which input is
    the first in the same memory (itself, as a rule)."""

    kind: int
    dies: bool
    same: int


class _Use:
    """Bytes in use per rank class, relative to the start: now and at the peak."""

    def __init__(self, classes: RankClasses) -> None:
        count = len(classes.members)
        self.classes = classes
        self.total = [0] * count
        self.by_kind = [[0] * len(KINDS) for _ in range(count)]
        self.peak = [0] * count
        self.peak_by_kind = [[0] * len(KINDS) for _ in range(count)]
        self.at: list[tuple[Op, ...]] = [()] * count
        self.touched: dict[int, None] = {}  # the classes on which anything happened

    def change(self, value: Value, kind: int, sign: int, at: tuple[Op, ...]) -> None:
        """Take (+1) or give back (-1) the memory of a value."""
        place = place_of(value)
        if place is None:
            return
        nbytes = sign * value.type.nbytes
        for rank_class in self.classes.at(place):
            self.touched[rank_class] = None
            self.total[rank_class] += nbytes
            self.by_kind[rank_class][kind] += nbytes
            if self.total[rank_class] > self.peak[rank_class]:
                self.peak[rank_class] = self.total[rank_class]
                self.peak_by_kind[rank_class] = self.by_kind[rank_class].copy()
                self.at[rank_class] = at

    def append(self, other: _Use, at: tuple[Op, ...]) -> None:
        """Let what ``other`` stands for happen next."""
        self.touched.update(other.touched)
        for c in other.touched:
            own = self.by_kind[c]
            if self.total[c] + other.peak[c] > self.peak[c]:
                self.peak[c] = self.total[c] + other.peak[c]
                self.peak_by_kind[c] = [a + b for a, b in zip(own, other.peak_by_kind[c], strict=True)]
                self.at[c] = (*at, *other.at[c])
            self.total[c] += other.total[c]
            self.by_kind[c] = [a + b for a, b in zip(own, other.by_kind[c], strict=True)]


@dataclass(frozen=True, slots=True)
class _Summary:
    """A function called in one way: its use of memory, and the kind of memory of each output."""

    use: _Use
    kinds: tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class _Plan:
    """Which values of a function share memory, and when each piece is last used.

    ``home`` maps a value to the value whose memory it has. ``dying`` lists, per op, the homes that are
    free after it, ``never`` those inputs that no op reads; function outputs never die. ``sources`` says
    of each output which input's memory it has, if any, and ``twins`` which earlier output's;
    ``overwritten`` are the inputs whose memory an in-place op took over.
    """

    home: Mapping[Value, Value]
    dying: tuple[tuple[Value, ...], ...]
    never: tuple[Value, ...]
    sources: tuple[int | None, ...]
    twins: tuple[int | None, ...]
    overwritten: frozenset[int]


class _Walk:
    """Walks each function once per way of calling it."""

    def __init__(self, classes: RankClasses) -> None:
        self.classes = classes
        self._plans: dict[tuple[int, tuple[int, ...]], _Plan] = {}
        self._summaries: dict[tuple[int, tuple[_Argument, ...]], _Summary] = {}

    def plan(self, function: Function, same: tuple[int, ...]) -> _Plan:
        """Return the plan of a function whose input i is in the memory of its input ``same[i]``."""
        key = (id(function), same)
        found = self._plans.get(key)
        if found is None:
            found = self._plans[key] = _Planner(function, self, same).plan()
        return found

    def use(self, function: Function, arguments: tuple[_Argument, ...]) -> _Summary:
        key = (id(function), arguments)
        found = self._summaries.get(key)
        if found is None:
            found = self._summaries[key] = self._walk(function, arguments)
        return found

    def _walk(self, function: Function, arguments: tuple[_Argument, ...]) -> _Summary:
        plan = self.plan(function, tuple([argument.same for argument in arguments]))
        use = _Use(self.classes)
        given = dict(zip(function.inputs, arguments, strict=True))
        kinds = {value: argument.kind for value, argument in given.items()}
        kept = {value for value, argument in given.items() if not argument.dies}
        for value in plan.never:
            if value not in kept:
                use.change(value, kinds[value], -1, ())
        for op, dying in zip(function.ops, plan.dying, strict=True):
            free = [value for value in dying if value not in kept]
            if op.op_type == "Call":
                free = self._call(op, plan, kinds, free, use)
            else:
                kind = _kind_of_results(op)
                for value in op.outputs:
                    if plan.home[value] is value:
                        kinds[value] = kind
                        use.change(value, kind, +1, (op,))
            for value in free:
                use.change(value, kinds[value], -1, (op,))
        return _Summary(use, tuple([kinds[plan.home[value]] for value in function.outputs]))

    def _call(
        self, op: Op, plan: _Plan, kinds: dict[Value, int], free: list[Value], use: _Use
    ) -> list[Value]:
        """Run a call; return what is left to free after it."""
        homes = [plan.home[value] for value in op.inputs]
        same = _first_places(homes)
        callee = self.plan(op.callee, same)
        copies: dict[int, Value] = {}  # arguments that the callee overwrites, but that are read later
        for value, source in zip(op.outputs, callee.sources, strict=True):
            if source is not None and plan.home[value] is value:
                copies[source] = value
                kinds[value] = kinds[homes[source]]
                use.change(value, kinds[value], +1, (op,))
        ends = set(free)
        arguments = tuple(
            [
                _Argument(kinds[home], dies=home in ends and i not in copies, same=i)
                for i, home in zip(same, homes, strict=True)
            ]
        )
        summary = self.use(op.callee, arguments)
        use.append(summary.use, (op,))
        for value, kind in zip(op.outputs, summary.kinds, strict=True):
            if plan.home[value] is value:
                kinds[value] = kind
        gone = {home for home, argument in zip(homes, arguments, strict=True) if argument.dies}
        return [value for value in free if value not in gone]


def _first_places(homes: Sequence[Value]) -> tuple[int, ...]:
    """Return for each place the first one with the same value."""
    first: dict[Value, int] = {}
    return tuple([first.setdefault(home, place) for place, home in enumerate(homes)])


def _kind_of_results(op: Op) -> int:
    if op.op_type == "Constant":
        return _KIND_OF_ROLE[Role.CONSTANT]
    return _COMMUNICATION if communicates(op) else _ACTIVATIONS


class _Planner:
    """Makes the plan of one function."""

    def __init__(self, function: Function, walk: _Walk, same: tuple[int, ...]) -> None:
        self.function = function
        self.walk = walk
        self.same = same
        self.home: dict[Value, Value] = {}
        self.until: dict[Value, int] = {}  # home -> the last op that reads what it holds so far
        self.overwritten: set[Value] = set()
        self.last_read: dict[Value, int] = {}
        for number, op in enumerate(function.ops):
            self.last_read.update(dict.fromkeys(op.inputs, number))
        self.last_read.update(dict.fromkeys(function.outputs, len(function.ops)))

    def plan(self) -> _Plan:
        function = self.function
        for value, first in zip(function.inputs, self.same, strict=True):
            self._put(value, function.inputs[first], -1)
        for number, op in enumerate(function.ops):
            callee = None
            if op.op_type == "Call":
                callee = self.walk.plan(op.callee, _first_places([self.home[v] for v in op.inputs]))
            for index, value in enumerate(op.outputs):
                shared = self._shared_with(op, callee, index, number)
                # What nothing reads is free once it is made.
                self._put(value, value if shared is None else self.home[shared], number)
        dying: list[list[Value]] = [[] for _ in function.ops]
        for owner, number in self.until.items():
            if 0 <= number < len(function.ops):
                dying[number].append(owner)
        number_of = {value: index for index, value in enumerate(function.inputs)}
        homes = [self.home[value] for value in function.outputs]
        return _Plan(
            self.home,
            tuple(map(tuple, dying)),
            tuple([owner for owner, number in self.until.items() if number < 0]),
            tuple([number_of.get(owner) for owner in homes]),
            tuple([homes.index(owner) if owner in homes[:i] else None for i, owner in enumerate(homes)]),
            frozenset([number_of[value] for value in self.overwritten if value in number_of]),
        )

    def _put(self, value: Value, owner: Value, number: int) -> None:
        self.home[value] = owner
        self.until[owner] = max(self.until.get(owner, -1), self.last_read.get(value, -1), number)

    def _shared_with(self, op: Op, callee: _Plan | None, index: int, number: int) -> Value | None:
        """Return the value whose memory an output takes over, or shows under another shape."""
        if callee is not None:
            source, twin = callee.sources[index], callee.twins[index]
            if source is None:
                return None if twin is None else op.outputs[twin]
            overwrites = source in callee.overwritten
            return self._take(op.inputs[source], op.outputs[index], number, overwrites)
        meaning = operator(op.op_type)
        if meaning.view and index == 0 and op.inputs:
            return self._take(op.inputs[0], op.outputs[0], number, overwrites=False)
        if index in meaning.in_place:
            operand = op.inputs[meaning.in_place[index]]
            return self._take(operand, op.outputs[index], number, overwrites=True)
        return None

    def _take(self, operand: Value, result: Value, number: int, overwrites: bool) -> Value | None:
        owner = self.home[operand]
        if place_of(owner) != place_of(result) or owner.type.nbytes != result.type.nbytes:
            return None
        if overwrites:
            if self.until[owner] > number:
                return None
            self.overwritten.add(owner)
        return operand
