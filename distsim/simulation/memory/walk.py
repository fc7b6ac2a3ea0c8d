"""Walking functions for their use of memory: each once per way in which it is called.

A callee's use of memory, (net change, peak), composes: of two in order it is (n1 + n2, max(p1, n1 + p2)).
How a callee is called is what kind of memory its arguments are in, which of them die with the call,
which share memory, and what its results are to the caller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from distsim.cache import cached
from distsim.hardware.rank_axes import over_tensor
from distsim.ir import Device, Function, Mesh, Op, Role, Value
from distsim.simulation.memory.plan import MemoryPlan, first_places, plan_of
from distsim.simulation.tasks.rank_classes import Classes, Placement, communicates, place_of

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
``gradients``: what optimizers and sums over microbatches read (:func:`gradient_values`).
``activations``: results that pass from one op or call of the function itself to later ones, as from a
forward block to its backward block. ``workspace``: results that are made and freed inside one call.
``communication``: results of communication ops, among them what a ``Send`` brings, as long as they are
not handed out of the call in which they are made.
"""

GRADIENTS, ACTIVATIONS, WORKSPACE, COMMUNICATION = 4, 5, 6, 7
KIND_OF_ROLE = {Role.PARAMETER: 0, Role.STATE: 1, Role.CONSTANT: 2, Role.INPUT: 3}
RESIDENT = (Role.PARAMETER, Role.STATE, Role.CONSTANT)


class MemoryRanks(Protocol):
    """Rank classes, as far as memory asks for them."""

    @property
    def members(self) -> Sequence[tuple[Device, ...]]:
        """The devices of each class."""
        ...

    def at(self, placement: Placement) -> Classes:
        """The classes that a placement consists of."""
        ...


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


class Walk:
    """Walks functions on these rank classes and remembers the callees, each for as long as it lives.

    ``kinds``: how many there are, if the frame of the outermost function has kinds beyond :data:`KINDS`;
    ``held``: see :class:`Use`.
    """

    def __init__(self, classes: MemoryRanks, kinds: int = len(KINDS), held: bool = False) -> None:
        self.classes, self.kinds, self.held = classes, kinds, held
        self._uses: WeakKeyDictionary[Function, dict[tuple[object, ...], Use]] = WeakKeyDictionary()

    def callee(self, function: Function, arguments: tuple[Argument, ...], results: tuple[int, ...]) -> Use:
        """Return the use of memory of a call; ``results`` are the kinds of the outputs that it makes."""
        known = self._uses.get(function)
        if known is None:
            known = self._uses[function] = {}
        found = known.get((arguments, results))
        if found is None:
            plan = plan_for(function, arguments)
            homes = [plan.home[value] for value in function.outputs]
            kinds = dict(reversed(list(zip(homes, results, strict=True))))  # of twins the first
            found = known[arguments, results] = self.walk(
                function, Frame(function, arguments, kinds, WORKSPACE, self.held)
            )
        return found

    def walk(self, function: Function, frame: Frame) -> Use:
        """Return the use of memory of a function from its first op to its last."""
        use = Use(self.classes, self.kinds, self.held)
        for value in frame.plan.never:
            if value not in frame.kept:
                use.change(value, frame.kinds[value], -1, ())
        for op, dying in zip(function.ops, frame.plan.dying, strict=True):
            self.step(frame, op, dying, use)
        return use

    def step(self, frame: Frame, op: Op, dying: Sequence[Value], use: Use) -> None:
        """Let one op happen, after which these homes are free."""
        free = [value for value in dying if value not in frame.kept]
        if op.is_call:
            free = self._call(frame, op, free, use)
        else:
            if op.attributes.get("in_place"):  # what it makes is where a part of its operands was
                read = {frame.plan.home[value] for value in op.inputs}
                for value in [value for value in free if value in read]:
                    use.change(value, frame.kinds[value], -1, (op,))
                free = [value for value in free if value not in read]
            for value in op.outputs:
                if frame.plan.home[value] is value:
                    use.change(value, frame.made(op, value), +1, (op,))
        for value in free:
            use.change(value, frame.kinds[value], -1, (op,))

    def _call(self, frame: Frame, op: Op, free: list[Value], use: Use) -> list[Value]:
        """Run a call; return what is left to free after it."""
        call = frame.call(op, free)
        use.append(self.callee(op.callee, call.arguments, call.results), (op,))
        return call.left
