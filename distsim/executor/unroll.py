"""Writing a Program out: one flat Function of Calls in the order of the schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distsim.executor.relocate import Relocator
from distsim.ir import NO_ATTRIBUTES, Attributes, Function, FunctionMaker, Op, Type, Value
from distsim.schedule import Action, Kind

if TYPE_CHECKING:
    from distsim.executor.program import Block, Program, ProgramInput

Frame = dict[Value, Value]
"""What a stage holds, by key."""


class Unroller:
    """Emits the tasks of ``program.schedule`` step by step, and after each step its Sends.

    The types of Calls and Sends are known from the blocks, which were checked, hence not derived again.
    """

    def __init__(self, program: Program, steady: bool = False) -> None:
        self.program, self.steady = program, steady
        self.maker = FunctionMaker(program.name)
        self.microbatches = program.schedule.num_microbatches
        self.places = [Relocator(program.pattern, stage.mesh) for stage in program.stages]
        self.target = [Attributes({"to": stage.mesh}) for stage in program.stages]
        count = range(len(program.stages))
        self.step: list[Frame] = [{} for _ in count]  # what there is once per step
        self.frames: list[list[Frame]] = [[{} for _ in range(self.microbatches)] for _ in count]
        self.makers = program.makers()
        self.latest: dict[tuple[int, Kind | None], int] = {}
        self.readers = _readers(program)
        self.read = _read(program)
        self.calls: dict[tuple[int, int, bool], _Call] = {}

    def inputs(self) -> tuple[Value, ...]:
        """Return the inputs; in steady state those that something reads: no rank holds the others."""
        for given in self.program.inputs:
            if self.steady:
                self.place(given)
            elif given.made is None:
                self.maker.add_input_value(given.source.name, given.source.type, given.source.role)
        return tuple(self.maker.inputs)

    def written(self) -> tuple[tuple[Op, ...], tuple[Value, ...]]:
        """Return the ops and the outputs; call :meth:`inputs` before."""
        if not self.steady:
            values = iter(self.maker.inputs)
            for given in self.program.inputs:
                self.distribute(given, next(values) if given.made is None else self._made(given.made))
        for step in self.program.schedule.order():
            sends = [send for task in step for send in self.run(task)]
            for key, microbatch, target in sends:
                self.fetch(key, microbatch, target)
        self.update()
        outputs = (*self.outputs(), *self.copies())
        return tuple(self.maker.ops), outputs

    def place(self, given: ProgramInput) -> None:
        """Take a global input as what every stage that reads it holds of it."""
        for stage in given.stages:
            every = self.read.get((stage, given.key))
            if every is None:
                continue
            type_ = self.places[stage].type(given.key.type)
            if not given.microbatched:
                local = self.maker.add_input_value(given.source.name, type_, given.source.role)
                self.step[stage][given.key] = local
                continue
            for index, frame in enumerate(self.frames[stage]):
                if not every and index < self.microbatches - 1:
                    continue
                name = given.source.name if self.microbatches == 1 else f"{given.source.name}.{index}"
                frame[given.key] = self.maker.add_input_value(name, type_, given.source.role)

    def _made(self, constant: Function) -> Value:
        """Make a constant that the caller does not give."""
        env: dict[Value, Value] = {}
        for op in constant.ops:
            env.update(zip(op.outputs, self.maker.copy(op, env), strict=True))
        return env[constant.outputs[0]]

    def distribute(self, given: ProgramInput, value: Value) -> None:
        """Bring a global input to every stage that reads it."""
        for stage in given.stages:
            kind, attributes = "MPIBroadcast", self.target[stage]
            if given.shards:
                mesh = self.program.stages[stage].mesh
                kind, attributes = "MPIScatter", Attributes({"to": mesh, "shards": given.shards})
            local = self.maker.add(kind, [value], attributes, output_names=[value.name])[0]
            if not given.microbatched:
                self.step[stage][given.key] = local
                continue
            for frame, part in zip(self.frames[stage], self._split(local, given.dim), strict=True):
                frame[given.key] = part

    def _split(self, local: Value, dim: int) -> tuple[Value, ...]:
        count = self.microbatches
        if count == 1:
            return (local,)
        names = [f"{local.name}.{i}" for i in range(count)]
        return self.maker.add(
            "Split", [local], {"axis": dim, "num_outputs": count, "microbatches": count}, output_names=names
        )

    def fetch(self, key: Value, microbatch: int | None, stage: int) -> Value:
        """Return a value on a stage, sent there from where it was made if need be.

        What runs once per step reads what the last microbatch made.
        """
        found = self.step[stage].get(key)
        if found is not None:
            return found
        maker = self.makers[key]
        source, frames = maker.stage, self.step
        if not maker.once:
            index = self.latest.get((source, maker.phase), -1) if microbatch is None else microbatch
            frames = [held[index] for held in self.frames]
        found = frames[stage].get(key)
        if found is None:
            made = frames[source][key]
            found = frames[stage][key] = Value(made.name, self.places[stage].type(key.type))
            self.maker.adopt(Op("Send", (made,), (found,), self.target[stage]))
        return found

    def run(self, task: Action) -> list[tuple[Value, int, int]]:
        """Emit one task; return what of it goes where: keys, microbatch and stages."""
        stage = self.program.stages[task.stage]
        block = stage.forward if task.kind is Kind.FORWARD else stage.backward
        if not block.outputs:  # nothing that anyone reads
            return []
        self.latest[task.stage, task.kind] = task.microbatch
        call = self._call(block, task.microbatch, task.stage, str(task))
        return [(key, task.microbatch, target) for key, target in call.sent]

    def _call(self, block: Block, microbatch: int | None, stage: int, name: str) -> _Call:
        step = self.step[stage]
        frame = step if microbatch is None else self.frames[stage][microbatch]
        inputs = [frame.get(key) or self.fetch(key, microbatch, stage) for key in block.inputs]
        sums = [step[key] for key in block.accumulated if key in step]
        call = self._prepared(block, stage, bool(sums))
        suffix = "" if microbatch is None else f".{microbatch}"
        made = tuple([Value(f"{label}{suffix}", type_) for label, type_ in call.made])
        frame.update(zip(block.outputs, made, strict=True))
        if call.summed:
            kept = list(made)
            for place, key in call.summed:
                kept[place] = step[key] = Value(key.name, made[place].type)
                del frame[key]
            made = tuple(kept)
        op = Op("Call", (*inputs, *sums), made, NO_ATTRIBUTES, (call.function,), None, name)
        self.maker.adopt(op)
        return call

    def _prepared(self, block: Block, stage: int, more: bool) -> _Call:
        found = self.calls.get((id(block), stage, more))
        if found is None:
            function, names = block.function, block.names
            if more and block.accumulating is not None:
                function, names = block.accumulating, block.accumulating_names
            placed = self.places[stage].function(function, f"stage{stage}_{function.name}", names)
            sums = set(block.accumulated)
            found = self.calls[id(block), stage, more] = _Call(
                placed,
                [(key.name, v.type) for key, v in zip(block.outputs, placed.outputs, strict=True)],
                [(place, key) for place, key in enumerate(block.outputs) if key in sums],
                [
                    (key, target)
                    for key in block.outputs
                    for target in self.readers.get(key, ())
                    if target != stage and key not in sums
                ],
            )
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
                joined = {"axis": output.dim}
                yield self.maker.add("Concat", parts, joined, output_names=[output.key.name])[0]
            else:
                yield self.fetch(output.key, 0 if output.microbatched else None, output.stage)

    def copies(self) -> Iterator[Value]:
        """Yield the new values of shared parameters on the other stages that hold them."""
        for output in self.program.outputs:
            for stage in output.copies:
                yield self.fetch(output.key, None, stage)


@dataclass(frozen=True)
class _Call:
    """A function on its stage, what it makes (names, types), which of that are sums, what is sent where."""

    function: Function
    made: Sequence[tuple[str, Type]]
    summed: Sequence[tuple[int, Value]]
    sent: Sequence[tuple[Value, int]]


def _readers(program: Program) -> dict[Value, tuple[int, ...]]:
    """Return the stages whose per-microbatch blocks read each key."""
    found: dict[Value, dict[int, None]] = {}
    for index, stage in enumerate(program.stages):
        for block in (stage.forward, stage.backward):
            for key in block.inputs:
                found.setdefault(key, {})[index] = None
    return {key: tuple(stages) for key, stages in found.items()}


def _read(program: Program) -> dict[tuple[int, Value], bool]:
    """Return the (stage, key) of inputs that something reads, and whether of every microbatch.

    What runs once per step reads the last microbatch only.
    """
    given = {item.key: item.stages for item in program.inputs}
    wanted = [(output.stage, output.key, output.microbatched) for output in program.outputs]
    wanted += [(stage, output.key, False) for output in program.outputs for stage in output.copies]
    for index, stage in enumerate(program.stages):
        often = [block for block in (stage.forward, stage.backward) if block.outputs]
        wanted += [(index, key, True) for block in often for key in block.inputs]
        once = [block for _, block in stage.updates if block.outputs]
        wanted += [(index, key, False) for block in once for key in block.inputs]
    found: dict[tuple[int, Value], bool] = {}
    for stage, key, every in wanted:
        if given.get(key):
            place = (stage if stage in given[key] else given[key][0], key)
            found[place] = found.get(place, False) or every
    return found
