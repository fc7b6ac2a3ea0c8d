"""Writing a Program out: one flat Function of Calls in the order of the schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distsim.executor.relocate import Relocator
from distsim.ir import NO_ATTRIBUTES, Attributes, Function, FunctionMaker, Op, Type, Value
from distsim.schedule import Phase, Task

if TYPE_CHECKING:
    from distsim.executor.program import Block, Program, ProgramInput, Stage

Home = tuple[Value, int | None, int]
"""(key, microbatch or None, stage): one value of the unrolled function."""


@dataclass(frozen=True)
class _Call:
    """A function on its stage, the types it makes, and which of them are sums over microbatches."""

    function: Function
    types: Sequence[Type]
    summed: Sequence[bool]


class Unroller:
    """Emits the tasks of ``program.schedule`` step by step, and after each step its Sends.

    The types of Calls and Sends are known from the blocks, which were checked, hence not derived again.
    """

    def __init__(self, program: Program, steady: bool = False) -> None:
        self.program = program
        self.steady = steady
        self.places = [Relocator(program.pattern, stage.mesh) for stage in program.stages]
        self.target = [Attributes({"to": stage.mesh}) for stage in program.stages]
        self.maker = FunctionMaker(program.name)
        self.microbatches = program.schedule.num_microbatches
        self.env: dict[Home, Value] = {}
        self.origin: dict[tuple[Value, int | None], int] = {}
        self.last: dict[Value, int | None] = {}
        self.calls: dict[tuple[int, int, bool], _Call] = {}
        self.readers = _readers(program)

    def function(self) -> Function:
        """Return the function; in steady state without inputs that nothing reads: no rank holds them."""
        for given in self.program.inputs:
            if self.steady:
                self.place(given)
            else:
                self.distribute(given)
        for step in self.program.schedule.order():
            made = [home for task in step for home in self.run(task)]
            for key, microbatch, stage in made:
                for target in self.readers.get(key, ()):
                    if target != stage:
                        self.fetch(key, microbatch, target)
        self.update()
        outputs = (*self.outputs(), *self.copies())
        ops, inputs = tuple(self.maker.ops), tuple(self.maker.inputs)
        if self.steady:
            read = {value for op in ops for value in op.inputs}.union(outputs)
            inputs = tuple([value for value in inputs if value in read])
        return Function(self.program.name, inputs, ops, outputs)

    def place(self, given: ProgramInput) -> None:
        """Take a global input as what every stage that reads it holds of it."""
        count = self.microbatches if given.microbatched else 1
        for stage in given.stages:
            type_ = self.places[stage].type(given.key.type)
            for part in range(count):
                name = given.source.name if count == 1 else f"{given.source.name}.{part}"
                local = self.maker.add_input_value(name, type_, given.source.role)
                self._put(given.key, part if given.microbatched else None, stage, local)

    def distribute(self, given: ProgramInput) -> None:
        """Bring a global input to every stage that reads it."""
        value = self.maker.add_input_value(given.source.name, given.source.type, given.source.role)
        for stage in given.stages:
            kind, attributes = "MPIBroadcast", self.target[stage]
            if given.shards:
                mesh = self.program.stages[stage].mesh
                kind, attributes = "MPIScatter", Attributes({"to": mesh, "shards": given.shards})
            local = self.maker.add(kind, [value], attributes, output_names=[value.name])[0]
            if not given.microbatched:
                self._put(given.key, None, stage, local)
                continue
            parts = self._split(local)
            for microbatch, part in enumerate(parts):
                self._put(given.key, microbatch, stage, part)

    def _split(self, local: Value) -> tuple[Value, ...]:
        count = self.microbatches
        if count == 1:
            return (local,)
        names = [f"{local.name}.{i}" for i in range(count)]
        return self.maker.add(
            "Split", [local], {"axis": 0, "num_outputs": count, "microbatches": count}, output_names=names
        )

    def _put(self, key: Value, microbatch: int | None, stage: int, value: Value) -> None:
        self.env[key, microbatch, stage] = value
        self.origin.setdefault((key, microbatch), stage)
        self.last[key] = microbatch

    def fetch(self, key: Value, microbatch: int | None, stage: int) -> Value:
        """Return a value on a stage, sent there from where it was made if need be."""
        found = self.env.get((key, microbatch, stage))
        if found is not None:
            return found
        if (key, microbatch) not in self.origin:
            microbatch = None if (key, None) in self.origin else self.last[key]
            found = self.env.get((key, microbatch, stage))
        if found is None:
            source = self.env[key, microbatch, self.origin[key, microbatch]]
            found = Value(source.name, self.places[stage].type(key.type))
            self.maker.adopt(Op("Send", (source,), (found,), self.target[stage]))
            self.env[key, microbatch, stage] = found
        return found

    def run(self, task: Task) -> list[Home]:
        """Emit one task; return what it made."""
        stage = self.program.stages[task.stage]
        block = stage.forward if task.phase is Phase.FORWARD else stage.backward
        if not block.outputs:  # nothing that anyone reads
            return []
        return self._call(block, task.microbatch, task.stage, str(task))

    def _call(self, block: Block, microbatch: int | None, stage: int, name: str) -> list[Home]:
        inputs = [self.fetch(key, microbatch, stage) for key in block.inputs]
        sums = [self.env.get((key, None, stage)) for key in block.accumulated]
        more = any(sums)
        inputs += [value for value in sums if value is not None]
        call = self._prepared(block, stage, more)
        made: list[Value] = []
        homes: list[Home] = []
        for key, type_, summed in zip(block.outputs, call.types, call.summed, strict=True):
            label = key.name if summed or microbatch is None else f"{key.name}.{microbatch}"
            value = Value(label, type_)
            made.append(value)
            home = (key, None if summed else microbatch, stage)
            self._put(*home, value)
            if not summed:
                homes.append(home)
        self.maker.adopt(Op("Call", tuple(inputs), tuple(made), NO_ATTRIBUTES, (call.function,), None, name))
        return homes

    def _prepared(self, block: Block, stage: int, more: bool) -> _Call:
        found = self.calls.get((id(block), stage, more))
        if found is None:
            function, names = block.function, block.names
            if more and block.accumulating is not None:
                function, names = block.accumulating, block.accumulating_names
            placed = self.places[stage].function(function, f"stage{stage}_{function.name}", names)
            sums = set(block.accumulated)
            types = [value.type for value in placed.outputs]
            found = _Call(placed, types, [key in sums for key in block.outputs])
            self.calls[id(block), stage, more] = found
        return found

    def update(self) -> None:
        """Emit what runs once per step, round by round."""
        rounds = sorted({number for stage in self.program.stages for number, _ in stage.updates})
        for number in rounds:
            for index, stage in enumerate(self.program.stages):
                for own, block in stage.updates:
                    if own == number and block.outputs:
                        self._call(block, None, index, f"U@{index}")

    def outputs(self) -> Iterator[Value]:
        """Yield the outputs; what came out per microbatch is put together on its ranks."""
        for output in self.program.outputs:
            if output.microbatched and self.microbatches > 1:
                parts = [self.fetch(output.key, i, output.stage) for i in range(self.microbatches)]
                yield self.maker.add("Concat", parts, {"axis": 0}, output_names=[output.key.name])[0]
            else:
                yield self.fetch(output.key, 0 if output.microbatched else None, output.stage)

    def copies(self) -> Iterator[Value]:
        """Yield the new values of shared parameters on the other stages that hold them."""
        for output in self.program.outputs:
            for stage in output.copies:
                yield self.fetch(output.key, None, stage)


def _readers(program: Program) -> dict[Value, tuple[int, ...]]:
    """Return the stages whose per-microbatch blocks read each key."""
    readers: dict[Value, dict[int, None]] = {}

    def note(stage: Stage, index: int) -> None:
        for block in (stage.forward, stage.backward):
            for key in block.inputs:
                readers.setdefault(key, {})[index] = None

    for index, stage in enumerate(program.stages):
        note(stage, index)
    return {key: tuple(stages) for key, stages in readers.items()}
