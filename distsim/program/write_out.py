"""Writing a Program out: its table as one flat Function of Calls, Sends and collectives.

A Program as a Function is written out when its ops are first read, and simulated without that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from distsim.ir import Attributes, Function, FunctionMaker, Mesh, Op, Type, Value
from distsim.ir.type import Tensor
from distsim.program.parts import ProgramInput
from distsim.program.table import CONCAT, EVERY, SEND, BoundBlock, Key, Table

if TYPE_CHECKING:
    from distsim.program.program import Program

BLOCK_NAME = "block"
BLOCK = Attributes({BLOCK_NAME: 1})
"""Of a Call: it is a block of the schedule, whose callees may be layers."""

Place = tuple[Value, int, int]
"""A key, the rank on which it is, and its microbatch; -1 for a value of which there is one a step."""


class _MovedBlock(NamedTuple):
    """A block on its mesh: its function, and the names and types of what it makes."""

    function: Function
    made: tuple[tuple[str, Type], ...]


class Writer:
    """Writes the rows of a table one after the other.

    The types of Calls and Sends are known from the blocks, which were checked, hence not derived again.
    """

    def __init__(self, program: Program, table: Table, steady: bool) -> None:
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
        self.maker.adopt(Op("Call", reads, tuple(made), BLOCK, (placed.function,), None, name))

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


class Relocator:
    """Moves functions from one mesh to another: where something lies is all that changes.

    A pattern mesh may have fewer replicas along an axis than the mesh that it stands for: shapes do not
    depend on their number, so types are rewritten and not derived again. Each function is moved
    once under a name.
    """

    def __init__(self, source: Mesh, target: Mesh) -> None:
        self.source, self.target = source, target
        self._functions: dict[tuple[Function, str | None, tuple[str, ...]], Function] = {}
        self._types: dict[Type, Type] = {}
        self._attributes: dict[Attributes, Attributes] = {}
        # The same objects occur again and again: a look-up by identity first. They are kept alive.
        self._known: dict[int, tuple[Type, Type]] = {}

    def function(self, function: Function, name: str | None = None, op_names: Sequence[str] = ()) -> Function:
        """Return the function, and what it calls, on the target mesh, under a name and with named ops."""
        key = (function, name, tuple(op_names))
        found = self._functions.get(key)
        if found is None:
            env = {value: Value(value.name, self.type(value.type), value.role) for value in function.inputs}
            names = op_names or [op.name for op in function.ops]
            ops = [self._op(op, env, own) for op, own in zip(function.ops, names, strict=True)]
            found = Function(
                function.name if name is None else name,
                tuple([env[value] for value in function.inputs]),
                tuple(ops),
                tuple([env[value] for value in function.outputs]),
            )
            self._functions[key] = found
        return found

    def type(self, type_: Type) -> Type:
        """Return the type on the target mesh."""
        known = self._known.get(id(type_))
        if known is not None:
            return known[1]
        found = self._types.get(type_)
        if found is None:
            found = type_
            if isinstance(type_, Tensor) and type_.device == self.source:
                found = type_.on(self.target)
            self._types[type_] = found
        self._known[id(type_)] = type_, found
        return found

    def _op(self, op: Op, env: dict[Value, Value], name: str) -> Op:
        outputs = tuple([Value(value.name, self.type(value.type), value.role) for value in op.outputs])
        inputs = tuple([env[value] for value in op.inputs])
        env.update(zip(op.outputs, outputs, strict=True))
        attributes = self._moved(op.attributes) if op.attributes else op.attributes
        callees = tuple([self.function(callee) for callee in op.subfunctions])
        return Op(op.op_type, inputs, outputs, attributes, callees, op.version, name)

    def _moved(self, attributes: Attributes) -> Attributes:
        found = self._attributes.get(attributes)
        if found is None:
            places: dict[str, Any] = {
                key: self.target for key, item in attributes.items() if item == self.source
            }
            found = Attributes({**attributes, **places}) if places else attributes
            self._attributes[attributes] = found
        return found


class WrittenOut(Function):
    """What :meth:`Program.to_function` returns: a Function like any other, whose ops are made when read.

    ``program`` is what it was made of, ``steady`` whether its inputs are where they are used.
    """

    __slots__ = ("_made", "_writer", "program", "steady")

    program: Program
    steady: bool
    _made: tuple[tuple[Op, ...], tuple[Value, ...]] | None
    _writer: Any

    def __new__(
        cls,
        name: str,
        inputs: tuple[Value, ...],
        ops: tuple[Op, ...],
        outputs: tuple[Value, ...],
        notes: tuple[str, ...] = (),
    ) -> Any:
        """Return a plain Function: a changed copy of one is no longer what a program was written out to."""
        return Function(name, inputs, ops, outputs, notes)

    @staticmethod
    def of(program: Program, steady: bool) -> WrittenOut:
        """Return a program as a Function."""
        made = object.__new__(WrittenOut)
        writer = Writer(program, program.table(), steady)
        values = {"name": program.name, "notes": program.notes, "inputs": writer.inputs()}
        values |= {"program": program, "steady": steady}
        for key, value in (values | {"_writer": writer, "_made": None}).items():
            object.__setattr__(made, key, value)
        return made

    def __reduce__(self) -> tuple[object, ...]:
        """Be pickled as a plain Function of the ops that others refer to."""
        return Function, (self.name, self.inputs, self.ops, self.outputs, self.notes)

    @property
    def ops(self) -> tuple[Op, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The ops, written out when they are first asked for."""
        return self._written()[0]

    @property
    def outputs(self) -> tuple[Value, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The outputs."""
        return self._written()[1]

    def _written(self) -> tuple[tuple[Op, ...], tuple[Value, ...]]:
        found: tuple[tuple[Op, ...], tuple[Value, ...]] | None = self._made
        if found is None:
            writer: Writer = self._writer
            found = writer.written()
            object.__setattr__(self, "_made", found)
            object.__setattr__(self, "_writer", None)
        return found
