"""Writing a Program out: its table as one flat Function of Calls, Sends and collectives."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from distsim.ir import NO_ATTRIBUTES, Attributes, Function, FunctionMaker, Mesh, Op, Type, Value
from distsim.program.parts import ProgramInput
from distsim.program.relocate import Relocator
from distsim.program.table import CONCAT, EVERY, SEND, BoundBlock, Key, Table
from distsim.schedule import Schedule

Place = tuple[Value, int, int]
"""A key, the rank on which it is, and its microbatch; -1 for a value of which there is one a step."""


class _MovedBlock(NamedTuple):
    """A block on its mesh: its function, and the names and types of what it makes."""

    function: Function
    made: tuple[tuple[str, Type], ...]


class Scheduled(Protocol):
    """A Program, as far as it matters for writing it out."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def mesh(self) -> Mesh:
        """Where it runs: axes pp, dp, tp."""
        ...

    @property
    def pattern(self) -> Mesh:
        """The mesh on which the types of its blocks are."""
        ...

    @property
    def schedule(self) -> Schedule:
        """The order of its actions."""
        ...

    @property
    def inputs(self) -> tuple[ProgramInput, ...]:
        """Its global inputs."""
        ...


class Writer:
    """Writes the rows of a table one after the other.

    The types of Calls and Sends are known from the blocks, which were checked, hence not derived again.
    """

    def __init__(self, program: Scheduled, table: Table, steady: bool) -> None:
        self.program, self.table, self.steady = program, table, steady
        self.maker = FunctionMaker(program.name)
        self.meshes = program.mesh.slices("pp")
        self.places = [Relocator(program.pattern, mesh) for mesh in self.meshes]
        self.target = [Attributes({"to": mesh}) for mesh in self.meshes]
        self.frame: dict[Place, Value] = {}
        self.placed: dict[BoundBlock, _MovedBlock] = {}

    def inputs(self) -> tuple[Value, ...]:
        """Return the inputs; in steady state those that something reads: no rank holds the others."""
        if self.steady:
            read = self._read()
            for given in self.program.inputs:
                self._place(given, read)
        else:
            for given in self.program.inputs:
                if given.made is None:
                    self.maker.add_input_value(given.source.name, given.source.type, given.source.role)
        return tuple(self.maker.inputs)

    def written(self) -> tuple[tuple[Op, ...], tuple[Value, ...]]:
        """Return the ops and the outputs; call :meth:`inputs` before."""
        if not self.steady:
            values = iter(self.maker.inputs)
            for given in self.program.inputs:
                self._distribute(given, next(values) if given.made is None else self._made(given.made))
        for number, first, second in self.table.rows():
            self._row(self.table.blocks[number], first, second)
        return tuple(self.maker.ops), tuple([self.frame[self._at(key, -1, -1)] for key in self.table.outputs])

    def _at(self, key: Key, first: int, second: int) -> Place:
        return key.value, key.rank, self.table.microbatch_of(key, first, second)

    # --- inputs ---------------------------------------------------------------------------------------

    def _read(self) -> set[Place]:
        """Return the keys that something reads, or that are outputs."""
        found = {self._at(key, -1, -1) for key in self.table.outputs}
        for number, first, second in self.table.rows():
            for key in self.table.blocks[number].reads:
                if key.which == EVERY:
                    found.update([(key.value, key.rank, i) for i in range(self.table.microbatches)])
                else:
                    found.add(self._at(key, first, second))
        return found

    def _ranks(self, given: ProgramInput) -> dict[int, None]:
        """Return the ranks that hold an input, of each copy of the model."""
        schedule = self.program.schedule
        stages = [s + copy * schedule.chain for s in given.stages for copy in range(schedule.copies)]
        return dict.fromkeys([schedule.rank_of[stage] for stage in stages])

    def _place(self, given: ProgramInput, read: set[Place]) -> None:
        """Take a global input as what every rank that reads it holds of it."""
        count = self.table.microbatches
        for rank in self._ranks(given):
            type_ = self.places[rank].type(given.key.type)
            for index in range(count) if given.microbatched else (-1,):
                if (given.key, rank, index) in read:
                    several = given.microbatched and count > 1
                    name = f"{given.source.name}.{index}" if several else given.source.name
                    local = self.maker.add_input_value(name, type_, given.source.role)
                    self.frame[given.key, rank, index] = local

    def _made(self, constant: Function) -> Value:
        """Make a constant that the caller does not give."""
        env: dict[Value, Value] = {}
        for op in constant.ops:
            env.update(zip(op.outputs, self.maker.copy(op, env), strict=True))
        return env[constant.outputs[0]]

    def _distribute(self, given: ProgramInput, value: Value) -> None:
        """Bring a global input to every rank that holds it."""
        for rank in self._ranks(given):
            kind, attributes = "MPIBroadcast", self.target[rank]
            if given.shards:
                kind, attributes = "MPIScatter", Attributes({"to": self.meshes[rank], "shards": given.shards})
            local = self.maker.add(kind, [value], attributes, output_names=[value.name])[0]
            if not given.microbatched:
                self.frame[given.key, rank, -1] = local
                continue
            for index, part in enumerate(self._split(local, given.dim)):
                self.frame[given.key, rank, index] = part

    def _split(self, local: Value, dim: int) -> tuple[Value, ...]:
        count = self.table.microbatches
        if count == 1:
            return (local,)
        names = [f"{local.name}.{i}" for i in range(count)]
        return self.maker.add(
            "Split", [local], {"axis": dim, "num_outputs": count, "microbatches": count}, output_names=names
        )

    # --- rows -----------------------------------------------------------------------------------------

    def _row(self, block: BoundBlock, first: int, second: int) -> None:
        if block.kind == CONCAT:
            self._join(block)
            return
        frame = self.frame
        reads = tuple([frame[self._at(key, first, second)] for key in block.reads])
        if block.kind == SEND:
            (key,) = block.makes
            brought = Value(reads[0].name, self.places[key.rank].type(key.value.type))
            frame[self._at(key, first, second)] = brought
            self.maker.adopt(Op(SEND, reads, (brought,), self.target[key.rank]))
            return
        placed = self._on_mesh(block)
        made: list[Value] = []
        for key, (name, type_) in zip(block.makes, placed.made, strict=True):
            at = self._at(key, first, second)
            # Of an output that is listed twice, the last one is what others read.
            value = frame[at] = Value(name if at[2] < 0 else f"{name}.{at[2]}", type_)
            made.append(value)
        name = self.table.name(block, first, second)
        self.maker.adopt(Op("Call", reads, tuple(made), NO_ATTRIBUTES, (placed.function,), None, name))

    def _join(self, block: BoundBlock) -> None:
        ((read,), (key,)) = block.reads, block.makes
        parts = [self.frame[read.value, read.rank, i] for i in range(self.table.microbatches)]
        joined = self.maker.add(CONCAT, parts, {"axis": block.dim}, output_names=[key.value.name])
        self.frame[key.value, key.rank, -1] = joined[0]

    def _on_mesh(self, block: BoundBlock) -> _MovedBlock:
        found = self.placed.get(block)
        if found is None:
            stages = "_".join(map(str, block.stages))
            name = f"stage{stages}_{block.callee.name}"
            placed = self.places[block.rank].function(block.callee, name, block.names)
            made = zip(block.makes, placed.outputs, strict=True)
            found = _MovedBlock(placed, tuple([(key.value.name, value.type) for key, value in made]))
            self.placed[block] = found
        return found
