"""The lives of a Program's stages: who makes, sends and reads what, without any microbatch's values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from distsim.ir import Function, Type, Value
from distsim.program.block import Block
from distsim.program.parts import ProgramInput, Stage
from distsim.program.program import Program
from distsim.schedule import Kind
from distsim.simulate.memory.life import BACKWARD, FORWARD, BlockCall, Given, Life, Slots, StepOp
from distsim.simulate.memory.plan import gradient_inputs
from distsim.simulate.memory.walk import KIND_OF_ROLE, RESIDENT

Made = tuple[int, int]
"""(stage, phase) of the block that makes a value."""


@dataclass(frozen=True, eq=False)
class Outline:
    """The lives of the stages, and what passes between them.

    ``edges`` are the transfers as (source stage, its phase, target stage, the target's number for it),
    ``brought`` the keys of each. ``order`` lists (stage, number) of the ops at the end of the step as they
    are issued. ``kept`` are the blocks of which the step's end reads a value of the last microbatch.
    """

    lives: tuple[Life, ...]
    edges: tuple[tuple[int, int, int, int], ...]
    brought: tuple[tuple[Value, ...], ...]
    order: tuple[tuple[int, int], ...]
    kept: tuple[Made, ...]


class Irregular(Exception):
    """The stages pass values in a way that does not repeat with the microbatches."""


def outline(program: Program, more: bool) -> Outline:
    """Return the outline of a program of one, or more, microbatches; raise :class:`Irregular` if it has none.

    It has one when no block of a microbatch reads a sum so far, and no output is both put together over
    microbatches and used on its own: as all that :func:`distsim.transforms.pipeline` makes.
    """
    return _Outliner(program, more).outline()


def blocks_of(stage: Stage) -> tuple[Block, Block]:
    """Return the blocks that run per microbatch, by phase."""
    return stage.forward, stage.backward


class _Slots:
    """Numbers for the keys of one stage, and their types there."""

    def __init__(self, stage: Stage) -> None:
        self.number: dict[Value, int] = {}
        self.types: list[Type] = []
        self.local: dict[Value, Type] = {}
        for block in (*blocks_of(stage), *(block for _, block in stage.updates)):
            own = zip(block.inputs, block.function.inputs, strict=True)
            made = zip(block.outputs, block.function.outputs, strict=True)
            for key, value in (*own, *made):
                self.local.setdefault(key, value.type)

    def of(self, key: Value, type_: Type | None = None) -> int:
        found = self.number.get(key)
        if found is None:
            found = self.number[key] = len(self.types)
            self.types.append(self.local.get(key) or type_ or key.type)
        return found

    def all(self, keys: Sequence[Value]) -> Slots:
        number = self.number
        return tuple([number[key] if key in number else self.of(key) for key in keys])


class _Outliner:
    def __init__(self, program: Program, more: bool) -> None:
        self.program, self.more = program, more
        self.stages = program.stages
        self.slots = [_Slots(stage) for stage in self.stages]
        self.made: dict[Value, Made] = {}
        self.sums: dict[Value, int] = {}
        self.inputs: dict[Value, tuple[int, ...]] = {}
        self.parts: dict[Value, None] = {}  # the inputs that are divided over microbatches
        self.step: list[list[StepOp]] = [[] for _ in self.stages]
        self.order: list[tuple[int, int]] = []
        self.given: list[list[ProgramInput]] = [[] for _ in self.stages]
        self.marked: list[dict[Value, None]] = [
            {} for _ in self.stages
        ]  # what the step's end reads as gradients
        self.sent_last: dict[Value, None] = {}  # of these the step's end sends the last microbatch's value
        self.kept: dict[Made, None] = {}
        self.stay: list[dict[int, None]] = [{} for _ in self.stages]
        self.each: list[dict[int, None]] = [{} for _ in self.stages]

    def outline(self) -> Outline:
        self._find_makers()
        readers = self._find_readers()
        targets = {key: [t for t in readers.get(key, ()) if t != at[0]] for key, at in self.made.items()}
        self._end_of_step(targets)
        received: list[list[tuple[bool, Slots]]] = [[] for _ in self.stages]
        edges: list[tuple[int, int, int, int]] = []
        keys_of: list[tuple[Value, ...]] = []
        for source, stage in enumerate(self.stages):
            for phase, block in enumerate(blocks_of(stage)):
                brought: dict[int, list[Value]] = {}
                for key in self._per_microbatch(block):
                    for target in targets[key]:
                        brought.setdefault(target, []).append(key)
                for target, keys in brought.items():
                    edges.append((source, phase, target, len(received[target])))
                    keys_of.append(tuple(keys))
                    early = phase == FORWARD and source < target
                    received[target].append((early, self.slots[target].all(keys)))
        lives = tuple([self._life(s, received[s], targets) for s in range(len(self.stages))])
        return Outline(lives, tuple(edges), tuple(keys_of), tuple(self.order), tuple(self.kept))

    # --- who makes and reads what --------------------------------------------------------------------

    def _per_microbatch(self, block: Block) -> Iterator[Value]:
        return (key for key in block.outputs if key not in self.sums)

    def _find_makers(self) -> None:
        for key, maker in self.program.makers().items():
            if maker.phase is None:
                continue
            if maker.once:
                self.sums[key] = maker.stage
            else:
                self.made[key] = (maker.stage, BACKWARD if maker.phase is Kind.BACKWARD else FORWARD)
        for given in self.program.inputs:
            self.inputs[given.key] = given.stages
            for number in given.stages:
                self.given[number].append(given)
            if given.microbatched:
                self.parts[given.key] = None

    def _find_readers(self) -> dict[Value, dict[int, None]]:
        readers: dict[Value, dict[int, None]] = {}
        for number, stage in enumerate(self.stages):
            for key in (key for block in blocks_of(stage) for key in block.inputs):
                if key in self.sums:  # the sum so far: another one for each microbatch
                    raise Irregular
                readers.setdefault(key, {})[number] = None
        return readers

    # --- one stage -----------------------------------------------------------------------------------

    def _life(
        self, number: int, received: list[tuple[bool, Slots]], targets: Mapping[Value, list[int]]
    ) -> Life:
        stage, slots = self.stages[number], self.slots[number]
        functions: list[Function] = []
        calls: list[BlockCall | None] = []
        sent: list[Slots] = []
        read = {key for op in self.step[number] for key in op.inputs} | set(self.stay[number])
        for block in blocks_of(stage):
            sent.append(slots.all([k for k in self._per_microbatch(block) for _ in targets[k]]))
            if not block.outputs:
                calls.append(None)
                continue
            accumulating = -1
            functions.append(block.function)
            if block.accumulating is not None:
                accumulating = len(functions)
                functions.append(block.accumulating)
            call = BlockCall(
                len(functions) - 1 - (accumulating >= 0),
                accumulating,
                *map(slots.all, (block.inputs, block.outputs, block.accumulated)),
            )
            calls.append(call)
            read.update(call.inputs)
        step: list[StepOp] = []
        for op in self.step[number]:
            if op.function >= 0:
                functions.append(self.stages[number].updates[op.function][1].function)
                op = op._replace(function=len(functions) - 1)
            step.append(op)
        given = self._given(number, read)
        gradients = slots.all(tuple(self.marked[number]))
        return Life(
            tuple(functions),
            tuple(slots.types),
            given,
            (calls[FORWARD], calls[BACKWARD]),
            tuple(received),
            (sent[FORWARD], sent[BACKWARD]),
            tuple(step),
            tuple(self.stay[number]),
            tuple(self.each[number]),
            gradients,
        )

    def _given(self, number: int, read: set[int]) -> tuple[Given, ...]:
        slots = self.slots[number]
        found: list[Given] = []
        for given in self.given[number]:
            if slots.number.get(given.key) in read:
                role = given.source.role
                found.append(
                    Given(slots.of(given.key), KIND_OF_ROLE[role], role not in RESIDENT, given.microbatched)
                )
        return tuple(found)

    # --- the end of the step, as the Unroller emits it --------------------------------------------------

    def _end_of_step(self, targets: Mapping[Value, list[int]]) -> None:
        self.there: dict[Value, dict[int, None]] = {
            **{key: dict.fromkeys(stages) for key, stages in self.inputs.items()},
            **{key: {stage: None} for key, stage in self.sums.items()},
            **{key: dict.fromkeys([at[0], *targets[key]]) for key, at in self.made.items()},
        }
        rounds = sorted({number for stage in self.stages for number, _ in stage.updates})
        for number in rounds:
            for index, stage in enumerate(self.stages):
                for place, (own, block) in enumerate(stage.updates):
                    if own == number and block.outputs:
                        self._run(index, place, block)
        for output in self.program.outputs:
            if output.microbatched and self.more:
                slot = self._put_together(output.key, output.stage)
            else:
                slot = self._fetch(output.key, output.stage)
            self.stay[output.stage][slot] = None
        for output in self.program.outputs:
            for stage in output.copies:
                self.stay[stage][self._fetch(output.key, stage)] = None
        if any(each.keys() & stay.keys() for each, stay in zip(self.each, self.stay, strict=True)):
            raise Irregular

    def _run(self, index: int, place: int, block: Block) -> None:
        inputs = tuple([self._fetch(key, index) for key in block.inputs])
        for i in gradient_inputs(block.function):
            self.marked[index][block.inputs[i]] = None
        self.there.update((key, {index: None}) for key in block.outputs)
        outputs = self.slots[index].all(block.outputs)
        self._emit(index, StepOp("Call", place, inputs, outputs, False))

    def _fetch(self, key: Value, stage: int, each: bool = False) -> int:
        """Return the slot of a key on a stage, sent there if need be; ``each`` microbatch's value."""
        there = self.there[key]
        if not each and key in self.made:
            self.kept[self.made[key]] = None
        slots = self.slots[stage]
        if stage in there:
            return slots.of(key)
        source = next(iter(there))
        given = self.slots[source].of(key)
        slot = slots.of(key, self.slots[source].types[given])
        self._emit(source, StepOp("Send", -1, (given,), (), each))
        self._emit(stage, StepOp("Send", -1, (), (slot,), each))
        there[stage] = None
        if each:
            self.each[source][given] = None
        elif key in self.made or key in self.parts:
            self.sent_last[key] = None
        return slot

    def _put_together(self, key: Value, stage: int) -> int:
        """Return the slot of all microbatches' values in one."""
        if key in self.sent_last:
            raise Irregular
        present = stage in self.there.get(key, {})
        slot = self._fetch(key, stage, each=True)
        if present:
            self.each[stage][slot] = None
        slots = self.slots[stage]
        result = len(slots.types)
        slots.types.append(slots.types[slot])
        self._emit(stage, StepOp("Concat", -1, (slot,), (result,), True))
        return result

    def _emit(self, stage: int, op: StepOp) -> None:
        self.order.append((stage, len(self.step[stage])))
        self.step[stage].append(op)
