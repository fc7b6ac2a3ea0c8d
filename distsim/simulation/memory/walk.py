"""Walking functions for their use of memory: each once per way in which it is called.

A callee's use of memory, (net change, peak), composes: of two in order it is (n1 + n2, max(p1, n1 + p2)).
How a callee is called is what kind of memory its arguments are in, which of them die with the call,
which share memory, and what its results are to the caller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from distsim.cache import cached
from distsim.hardware.rank_axes import over_tensor
from distsim.ir import Device, Function, Mesh, Op, Role, Value
from distsim.resizing import Likeness, likeness_of
from distsim.simulation.memory.plan import MemoryPlan, buffered_gradients, first_places, plan_of
from distsim.simulation.tasks.rank_classes import Classes, communicates, place_of
from distsim.simulation.tasks.streams import MemoryRanks

KINDS = (
    "parameters",
    "state",
    "constants",
    "inputs",
    "gradients",
    "activations",
    "workspace",
    "communication",
)
"""What memory is for; every byte is of exactly one kind.

``parameters``, ``state``, ``inputs``: what the function is given in these roles; also its new value,
where an optimizer writes in place. ``constants``: inputs in that role, and results of ``Constant``.
``gradients``: what optimizers and sums over microbatches read (:func:`gradient_values`), but for copies of
it in another type, which are ``workspace``.
``activations``: results that pass from one op or call of the function itself to later ones, as from a
forward block to its backward block. ``workspace``: results that are made and freed inside one call.
``communication``: results of communication ops, among them what a ``Send`` brings, as long as they are
not handed out of the call in which they are made.
"""

GRADIENTS, ACTIVATIONS, WORKSPACE, COMMUNICATION = 4, 5, 6, 7
KIND_OF_ROLE = {Role.PARAMETER: 0, Role.STATE: 1, Role.CONSTANT: 2, Role.INPUT: 3}
RESIDENT = (Role.PARAMETER, Role.STATE, Role.CONSTANT)


class OneRank:
    """The ranks of a block: whatever is on a device or mesh is on each of them."""

    members: Sequence[tuple[Device, ...]] = ((),)

    def at(self, placement: Device | Mesh) -> Classes:
        """The one class there is."""
        return (0,)


class Argument(NamedTuple):
    """How an input is held: what kind of memory it is, whether it dies in this call, which input is the
    first in the same memory (itself, as a rule), and whether it must not be overwritten in it."""

    kind: int
    dies: bool
    same: int
    held: bool = False


@cached("arguments, by how they are held", 65536)
def _argument(kind: int, dies: bool, same: int, held: bool) -> Argument:
    """Return an argument, the same object every time: calls of layers are alike."""
    return Argument(kind, dies, same, held)


class CallPlan(NamedTuple):
    """How a function is called: the homes of its inputs, how each is held, the kinds of the outputs that it
    makes (-1: in the memory of something else), and the homes that are free after it, but not in it."""

    homes: tuple[Value, ...]
    arguments: tuple[Argument, ...]
    results: tuple[int, ...]
    left: list[Value]


def plan_for(function: Function, arguments: Sequence[Argument]) -> MemoryPlan:
    """Return the plan of a function that is called like this."""
    same = tuple([argument.same for argument in arguments])
    return plan_of(function, same, tuple([i for i, argument in enumerate(arguments) if argument.held]))


class Use:
    """Bytes in use per rank class, relative to the start: now and at the peak; of so many ``kinds``.

    ``held``: gradients are in buffers that are there all the time, and take nothing themselves.
    """

    def __init__(self, classes: MemoryRanks, kinds: int = len(KINDS), held: bool = False) -> None:
        count = len(classes.members)
        self.classes, self.held = classes, held
        self.total = [0] * count
        self.by_kind = [[0] * kinds for _ in range(count)]
        self.peak = [0] * count
        self.peak_by_kind = [[0] * kinds for _ in range(count)]
        self.at: list[tuple[Op, ...]] = [()] * count
        self.touched: dict[int, None] = {}  # the classes on which anything happened

    def change(self, value: Value, kind: int, sign: int, at: tuple[Op, ...]) -> None:
        """Take (+1) or give back (-1) the memory of a value."""
        place = place_of(value)
        if place is None or (self.held and kind == GRADIENTS):
            return
        nbytes = sign * value.type.allocated
        for rank_class in self.classes.at(place):
            self.touched[rank_class] = None
            self.total[rank_class] += nbytes
            self.by_kind[rank_class][kind] += nbytes
            if self.total[rank_class] > self.peak[rank_class]:
                self.peak[rank_class] = self.total[rank_class]
                self.peak_by_kind[rank_class] = self.by_kind[rank_class].copy()
                self.at[rank_class] = at

    def hold(self, share: float) -> None:
        """Take the memory of buffers of gradients, so much of that of parameters, before anything happens."""
        for rank_class, by_kind in enumerate(self.by_kind):
            nbytes = round(share * by_kind[KIND_OF_ROLE[Role.PARAMETER]])
            by_kind[GRADIENTS] += nbytes
            self.total[rank_class] += nbytes
            self.peak[rank_class] = self.total[rank_class]
            self.peak_by_kind[rank_class] = by_kind.copy()

    def append(self, other: Use, at: tuple[Op, ...]) -> None:
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


class Frame:
    """A function that is being walked: its plan, and the kind of each home that is there.

    ``known`` gives the kind of some of the homes that it makes, ``other`` that of the remaining ones;
    ``kept`` are the inputs that do not die in it. ``held``: gradients are in buffers, where they are summed
    over ranks too.
    """

    def __init__(
        self,
        function: Function,
        arguments: Sequence[Argument],
        known: Mapping[Value, int],
        other: int,
        held: bool = False,
    ) -> None:
        self.held = held
        self.plan: MemoryPlan = plan_for(function, arguments)
        given = list(zip(function.inputs, arguments, strict=True))
        self.kinds: dict[Value, int] = {value: argument.kind for value, argument in given}
        self.kept = {value for value, argument in given if not argument.dies}
        self.known = known
        self.other = other

    def made(self, op: Op, home: Value) -> int:
        """Return, and remember, the kind of a home that an op makes."""
        kind = self.known.get(home)
        if kind is None:
            kind = self.other
            if op.op_type == "Constant":
                kind = KIND_OF_ROLE[Role.CONSTANT]
            elif not op.is_call and communicates(op):
                kind = GRADIENTS if self.held and _sums_gradients(op) else COMMUNICATION
        self.kinds[home] = kind
        return kind

    def call(self, op: Op, free: Sequence[Value]) -> CallPlan:
        """Return how an op calls its callee, and remember the kinds of what it makes.

        ``free`` are the homes that nothing needs after it.
        """
        home, kinds = self.plan.home, self.kinds
        homes = tuple([home[value] for value in op.inputs])
        results = tuple([self.made(op, value) if home[value] is value else -1 for value in op.outputs])
        ends = set(free).difference([home[value] for value in op.outputs])  # what it hands back stays
        held = self.plan.held.get(op, ())
        arguments = tuple(
            [
                _argument(kinds[h], h in ends, first, place in held)
                for place, (h, first) in enumerate(zip(homes, first_places(homes), strict=True))
            ]
        )
        gone = {h for h, argument in zip(homes, arguments, strict=True) if argument.dies}
        return CallPlan(homes, arguments, results, [value for value in free if value not in gone])


def _sums_gradients(op: Op) -> bool:
    """Whether an op sums over ranks with other parts of the data."""
    summed = (
        op.op_type in ("MPIAllreduce", "MPIReduceScatter") and op.attributes.get("reduce", "sum") == "sum"
    )
    return summed and not over_tensor(op.attributes["axis"])


class _Happening(NamedTuple):
    """The memory of a value is taken (+1) or given back (-1); ``op``: by which, None before the first."""

    op: Op | None
    value: Value
    kind: int
    sign: int


class _Called(NamedTuple):
    """An op calls its callee like this; the results are the kinds of the outputs that it makes."""

    op: Op
    arguments: tuple[Argument, ...]
    results: tuple[int, ...]


_Steps = list[_Happening | _Called]


class Walk:
    """Walks functions on these rank classes and remembers the callees, each for as long as it lives.

    ``kinds``: how many there are, if the frame of the outermost function has kinds beyond :data:`KINDS`;
    ``held``: see :class:`Use`.
    """

    def __init__(self, classes: MemoryRanks, kinds: int = len(KINDS), held: bool = False) -> None:
        self.classes, self.kinds, self.held = classes, kinds, held
        self._uses: WeakKeyDictionary[Function, dict[tuple[object, ...], Use]] = WeakKeyDictionary()
        # Of functions that others differ from in sizes alone: what happens in these is the same.
        self._steps: WeakKeyDictionary[Function, dict[tuple[object, ...], _Steps]] = WeakKeyDictionary()

    def callee(self, function: Function, arguments: tuple[Argument, ...], results: tuple[int, ...]) -> Use:
        """Return the use of memory of a call; ``results`` are the kinds of the outputs that it makes."""
        known = self._uses.get(function)
        if known is None:
            known = self._uses[function] = {}
        found = known.get((arguments, results))
        if found is None:
            found = known[arguments, results] = self._callee(function, arguments, results)
        return found

    def _callee(self, function: Function, arguments: tuple[Argument, ...], results: tuple[int, ...]) -> Use:
        likeness, plan = likeness_of(function), plan_for(function, arguments)
        alike = likeness is not None and plan.like is plan_for(likeness.like, arguments)
        use = Use(self.classes, self.kinds, self.held)
        if likeness is None or not alike:
            self._run(self._steps_of(function, arguments, results), use)
        else:
            self._run_alike(self._steps_of(likeness.like, arguments, results), use, likeness)
        return use

    def walk(self, function: Function, frame: Frame) -> Use:
        """Return the use of memory of a function from its first op to its last."""
        use = Use(self.classes, self.kinds, self.held)
        self._run(_steps(function, frame), use)
        return use

    def _steps_of(
        self, function: Function, arguments: tuple[Argument, ...], results: tuple[int, ...]
    ) -> _Steps:
        """Return what happens in a function that is called like this."""
        known = self._steps.get(function)
        if known is None:
            known = self._steps[function] = {}
        found = known.get((arguments, results))
        if found is None:
            home = plan_for(function, arguments).home
            homes = [home[value] for value in function.outputs]
            kinds = dict(reversed(list(zip(homes, results, strict=True))))  # of twins the first
            if self.held and GRADIENTS in results:
                made = [v for v, kind in zip(function.outputs, results, strict=True) if kind == GRADIENTS]
                buffered = buffered_gradients(function, made).difference(function.inputs)
                kinds = dict.fromkeys([home[value] for value in buffered], GRADIENTS) | kinds
            frame = Frame(function, arguments, kinds, WORKSPACE, self.held)
            found = known[arguments, results] = _steps(function, frame)
        return found

    def _run(self, steps: _Steps, use: Use) -> None:
        """Let steps happen."""
        for step in steps:
            if isinstance(step, _Called):
                use.append(self.callee(step.op.callee, step.arguments, step.results), (step.op,))
            else:
                use.change(step.value, step.kind, step.sign, () if step.op is None else (step.op,))

    def _run_alike(self, steps: _Steps, use: Use, likeness: Likeness) -> None:
        """Let steps happen to the values of a function that differs in sizes alone from that of the steps."""
        ops, values = likeness.ops, likeness.values
        for step in steps:
            if isinstance(step, _Called):
                op = ops.get(step.op, step.op)
                use.append(self.callee(op.callee, step.arguments, step.results), (op,))
            else:
                at = () if step.op is None else (ops.get(step.op, step.op),)
                use.change(values.get(step.value, step.value), step.kind, step.sign, at)


def _steps(function: Function, frame: Frame) -> _Steps:
    """Return what happens in a function, from its first op to its last."""
    given = [value for value in frame.plan.never if value not in frame.kept]
    found: _Steps = [_Happening(None, value, frame.kinds[value], -1) for value in given]
    for op, dying in zip(function.ops, frame.plan.dying, strict=True):
        free = [value for value in dying if value not in frame.kept]
        if op.is_call:
            call = frame.call(op, free)
            found.append(_Called(op, call.arguments, call.results))
            free = call.left
        else:
            if op.attributes.get("in_place"):  # what it makes is where a part of its operands was
                read = {frame.plan.home[value] for value in op.inputs}
                found += [_Happening(op, v, frame.kinds[v], -1) for v in free if v in read]
                free = [value for value in free if value not in read]
            for value in op.outputs:
                if frame.plan.home[value] is value:
                    found.append(_Happening(op, value, frame.made(op, value), +1))
        found += [_Happening(op, value, frame.kinds[value], -1) for value in free]
    return found
