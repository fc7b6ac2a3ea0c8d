"""The life of one microbatch on one stage: what each block and transfer takes and gives back.

All microbatches of a stage live alike, but for those that are the first or the last of their phase and
the one after which the step ends. So the events of one microbatch, in each such position, say what the
stage does to its memory in any schedule. They are written down as a small function, with *slots* in place
of keys, and walked like any other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from distsim.ir import Function, Op, Type, Value
from distsim.simulate.memory.plan import gradient_inputs
from distsim.simulate.memory.walk import ACTIVATIONS, GRADIENTS, KINDS, Argument, Frame, OneRank, Use, Walk
from distsim.simulate.tasks.rank_classes import place_of

Slots = tuple[int, ...]
Amounts = tuple[int, ...]
"""Bytes: in all, then by kind."""

FORWARD, BACKWARD = 0, 1
NOTHING: Amounts = (0,) * (1 + len(KINDS))


class BlockCall(NamedTuple):
    """A block by the places of its functions in ``Life.functions``, and its slots.

    ``accumulating`` is -1 where there is none.
    """

    function: int
    accumulating: int
    inputs: Slots
    outputs: Slots
    sums: Slots


class StepOp(NamedTuple):
    """What happens once, after the last microbatch: a call (``function`` >= 0) or something moved.

    ``each``: it happens to the value of every microbatch.
    """

    op_type: str
    function: int
    inputs: Slots
    outputs: Slots
    each: bool


class Given(NamedTuple):
    """An input: what kind of memory it is, whether it is free after its last use, and whether every
    microbatch has its part of it."""

    slot: int
    kind: int
    dies: bool
    part: bool


class Life(NamedTuple):
    """What happens to a microbatch on a stage, and at the end of the step.

    ``received`` lists, per transfer from another stage, whether it comes before the forward block, and
    the slots that it brings; ``sent`` the slots sent off after each phase, once per target. ``step`` is
    what follows the last microbatch, ``outputs`` what stays then. ``each`` are the slots that every
    microbatch keeps until then, ``gradients`` those that what follows reads as gradients.
    """

    functions: tuple[Function, ...]
    types: tuple[Type, ...]
    given: tuple[Given, ...]
    blocks: tuple[BlockCall | None, BlockCall | None]
    received: tuple[tuple[bool, Slots], ...]
    sent: tuple[Slots, Slots]
    step: tuple[StepOp, ...]
    outputs: Slots
    each: Slots
    gradients: Slots


class Position(NamedTuple):
    """Which microbatch it is: for forward and backward, whether no other comes before, or after, on this
    stage; and whether the end of the step is told with it."""

    first: tuple[bool, bool]
    last: tuple[bool, bool]
    ends: bool


class Change(NamedTuple):
    """What one event does to the memory in use: in the end, and at its own peak, with the ops of the peak.

    ``net_each`` and ``peak_each`` come on top once per microbatch of the step.
    """

    net: Amounts
    peak: Amounts
    at: tuple[Op, ...] = ()
    net_each: Amounts = NOTHING
    peak_each: Amounts = NOTHING


class LifeUse(NamedTuple):
    """The changes of the events of a :class:`Life`; ``apart``: no microbatch shares memory with another."""

    received: tuple[Change, ...]
    called: tuple[Change, Change]
    sent: tuple[Change, Change]
    step: tuple[Change, ...]
    apart: bool


class Living:
    """Tells a life in the positions asked for; ``more``: there is more than one microbatch.

    ``walk`` remembers the callees, so lives that share their functions want the same.
    """

    def __init__(self, life: Life, more: bool, walk: Walk) -> None:
        self.life, self.more, self.walk = life, more, walk
        self.given = [Value("given", type_) for type_ in life.types]
        self.made = [Value("made", type_) for type_ in life.types]

    def use(self, position: Position) -> LifeUse:
        """Return what a microbatch in this position does."""
        return _Telling(self, position).use()


def lives() -> Walk:
    """Return what walks the lives of one program."""
    return Walk(OneRank())


Label = tuple[str, int]


class _Telling:
    """Writes a life down as a function and walks it event by event."""

    def __init__(self, living: Living, position: Position) -> None:
        self.living, self.life, self.position, self.more = living, living.life, position, living.more
        life = self.life
        self.walk = living.walk
        self.env: dict[int, Value] = {}
        self.inputs: list[Value] = []
        self.arguments: list[Argument] = []
        self.ops: list[Op] = []
        self.labels: list[Label] = []
        self.gradients: list[Value] = []
        self.sums: list[Value] = []  # as the blocks return them
        self.lasting: list[Value] = []  # inputs of the step that die in it
        self.slot_of: dict[Value, int] = {}  # before the end of the step
        self.here: set[Value] = set()  # inputs of the step
        self.sum_slots = {slot for block in life.blocks if block is not None for slot in block.sums}
        self.of_step = {g.slot for g in life.given if not g.part} | self.sum_slots

    def use(self) -> LifeUse:
        self._write()
        outputs = tuple([self.env[slot] for slot in self.life.outputs]) if self.position.ends else ()
        function = Function("life", tuple(self.inputs), tuple(self.ops), outputs)
        frame = Frame(function, self.arguments, {}, ACTIVATIONS)
        home = frame.plan.home
        frame.known = {home[value]: GRADIENTS for value in self.gradients}
        each = self._homes_of_each(frame)
        moved = set(each)  # and what becomes of them
        uses: dict[Label, Use] = {}
        folded: dict[Label, Change] = {}
        for op, dying, label in zip(self.ops, frame.plan.dying, self.labels, strict=True):
            if label[0] == "step" and op.op_type != "Call" and self.more:
                folded[label] = self._moved(frame, op, dying, label[1], moved)
            else:
                self.walk.step(frame, op, dying, uses.setdefault(label, Use(self.walk.classes)))
        step = range(len(self.life.step) if self.position.ends else 0)
        return LifeUse(
            tuple([_change(uses.get(("received", i))) for i in range(len(self.life.received))]),
            (_change(uses.get(("called", FORWARD))), _change(uses.get(("called", BACKWARD)))),
            (_change(uses.get(("sent", FORWARD))), _change(uses.get(("sent", BACKWARD)))),
            tuple([folded.get(("step", i)) or _change(uses.get(("step", i))) for i in step]),
            not self.more or self._apart(frame, each),
        )

    # --- writing ---------------------------------------------------------------------------------

    def _write(self) -> None:
        life, position = self.life, self.position
        for given in life.given:
            value = self._input(given.slot, given.kind, given.dies)
            if not given.part:
                self.here.add(value)
                if given.dies:
                    self.lasting.append(value)
        for phase in (FORWARD, BACKWARD):
            for number, (early, slots) in enumerate(life.received):
                if early == (phase == FORWARD):
                    for slot in slots:
                        self._add("Send", (), (slot,), ("received", number))
            block = life.blocks[phase]
            if block is not None:
                self._call(block, phase)
            for slot in life.sent[phase]:
                self._add("Send", (slot,), (), ("sent", phase))
            if block is not None and not position.last[phase]:
                again = [slot for slot in (*block.inputs, *block.sums) if slot in self.of_step]
                self._add("Send", again, (), ("later", phase))
        slots = (*life.gradients,) if position.ends else (s for s in life.gradients if s in self.of_step)
        self.early = dict(self.env)
        if position.ends:
            for number, op in enumerate(life.step):
                self._add(op.op_type, op.inputs, op.outputs, ("step", number), op.function)
        else:
            read = [slot for op in life.step for slot in op.inputs]
            kept = [slot for slot in (*read, *life.outputs) if slot in self.of_step]
            self._add("Send", [*kept, *life.each], (), ("later", 2))
        self.gradients += [self.env[slot] for slot in slots if slot in self.env]

    def _input(self, slot: int, kind: int, dies: bool) -> Value:
        value = self.env[slot] = self.living.given[slot]
        self.slot_of[value] = slot
        self.inputs.append(value)
        self.arguments.append(Argument(kind, dies, len(self.arguments)))
        return value

    def _add(
        self, op_type: str, reads: Iterable[int], makes: Iterable[int], label: Label, function: int = -1
    ) -> None:
        inputs = tuple([self.env[slot] for slot in reads])
        callees: tuple[Function, ...] = ()
        makes = tuple(makes)
        if function >= 0:
            callee = self.life.functions[function]
            callees = (callee,)
            self.gradients += [inputs[i] for i in gradient_inputs(callee)]
        if label[0] == "step":
            outputs = tuple([Value("made", self.life.types[slot]) for slot in makes])
        else:
            made = self.living.made
            outputs = tuple([made[slot] for slot in makes])
            self.slot_of.update(zip(outputs, makes, strict=True))
        self.env.update(zip(makes, outputs, strict=True))
        self.ops.append(Op(op_type, inputs, outputs, subfunctions=callees))
        self.labels.append(label)

    def _call(self, block: BlockCall, phase: int) -> None:
        reads, function = block.inputs, block.function
        if block.sums and self.more and block.accumulating >= 0:
            adds = gradient_inputs(self.life.functions[block.accumulating])
            marked = [s for i, s in enumerate(block.sums, start=len(reads)) if i in adds]
        else:
            marked = []
        if block.sums and not self.position.first[phase]:
            function = block.accumulating
            for slot in block.sums:
                kind = GRADIENTS if slot in marked or slot in self.life.gradients else ACTIVATIONS
                self._input(slot, kind, True)
            reads = (*reads, *block.sums)
        self._add("Call", reads, block.outputs, ("called", phase), function)
        self.gradients += [self.env[slot] for slot in marked]
        self.sums += [self.env[slot] for slot in block.sums]

    # --- walking ---------------------------------------------------------------------------------

    def _homes_of_each(self, frame: Frame) -> set[Value]:
        """Return the homes of which every microbatch has one until the end of the step."""
        homes = {frame.plan.home[self.early[slot]] for slot in self.life.each if slot in self.early}
        return homes - self.here

    def _moved(self, frame: Frame, op: Op, dying: Iterable[Value], number: int, each: set[Value]) -> Change:
        """Return what an op of the step that is no call does, once or for every microbatch."""
        once, every = [0] * len(NOTHING), [0] * len(NOTHING)
        fold = self.life.step[number].each
        for value in op.outputs:
            if fold:
                each.add(value)
            _put(every if fold else once, value, frame.made(op, value), +1)
        peak, peak_each = tuple(once), tuple(every)
        for value in dying:
            if value not in frame.kept:
                _put(every if value in each else once, value, frame.kinds[value], -1)
        return Change(tuple(once), peak, (), tuple(every), peak_each)

    def _apart(self, frame: Frame, each: set[Value]) -> bool:
        """Whether what passes from one microbatch to the next shares memory with nothing that lives on."""
        home = frame.plan.home
        values: dict[Value, list[Value]] = {}  # of the homes that several values have
        for value in self.slot_of:
            if home[value] is not value:
                values.setdefault(home[value], [home[value]]).append(value)
        if not values.keys().isdisjoint([home[value] for value in self.lasting]):
            return False
        if self.position.ends and not each <= self._put_together(frame):
            return False
        shared = [value for value in self.sums if home[value] in values]
        if not shared:
            return True
        given = {value for value in self.inputs if self.slot_of[value] not in self.sum_slots}
        made = {value: number for number, op in enumerate(self.ops) for value in op.outputs}
        read = {value: number for number, op in enumerate(self.ops) for value in op.inputs}
        return not any(
            home[value] in given
            or (self.slot_of[other] != self.slot_of[value] and read.get(other, -1) > made[value])
            for value in shared
            for other in values[home[value]]
        )

    def _put_together(self, frame: Frame) -> set[Value]:
        """Return the homes that are free after an op at the end of the step that is for all microbatches."""
        found: set[Value] = set()
        for dying, (what, number) in zip(frame.plan.dying, self.labels, strict=True):
            if what == "step" and self.life.step[number].each:
                found.update(dying)
        return found


def _put(amounts: list[int], value: Value, kind: int, sign: int) -> None:
    nbytes = 0 if place_of(value) is None else sign * value.type.nbytes
    amounts[0] += nbytes
    amounts[1 + kind] += nbytes


def _change(use: Use | None) -> Change:
    if use is None:
        return Change(NOTHING, NOTHING)
    net, peak = (use.total[0], *use.by_kind[0]), (use.peak[0], *use.peak_by_kind[0])
    return Change(net, peak, use.at[0][1:])
