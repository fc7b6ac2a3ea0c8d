"""A Program as a Function: written out when its ops are first read, simulated without that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distsim.ir import Function, Op, Value
from distsim.program.write_out import Writer

if TYPE_CHECKING:
    from distsim.program.program import Program


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
