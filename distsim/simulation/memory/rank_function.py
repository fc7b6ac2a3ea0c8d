"""What one pipeline rank does in a step, as a function of its own: its rows of the table, written out."""

from __future__ import annotations

from distsim.ir import Function, Op, Role, Value
from distsim.program.program import Program
from distsim.program.table import EVERY, BoundBlock, Key
from distsim.simulation.memory.rank_calls import roles_of_ranks


def rank_function(program: Program, rank: int) -> Function:
    """Return the rows of a rank as Calls of their blocks, on the program's pattern mesh.

    Data and parameters are in place; of a transfer there is the end that is on the rank. An allocator of the
    rank sees what it sees in the step written out whole.
    """
    return _RankWriter(program, rank).written()


class _RankWriter:
    def __init__(self, program: Program, rank: int) -> None:
        self.rank, self.table = rank, program.table()
        self.roles = roles_of_ranks(program.schedule, program.inputs)[rank]
        self.frame: dict[tuple[Value, int], Value] = {}
        self.inputs: list[Value] = []
        self.ops: list[Op] = []
        self.name = f"{program.name}_rank{rank}"

    def written(self) -> Function:
        table = self.table
        own = [self.rank in block.ranks for block in table.blocks]
        for number, first, second in table.rows():
            if own[number]:
                self._row(table.blocks[number], first, second)
        outputs = tuple([self._read(key, -1, -1) for key in table.outputs if key.rank == self.rank])
        return Function(self.name, tuple(self.inputs), tuple(self.ops), outputs)

    def _row(self, block: BoundBlock, first: int, second: int) -> None:
        reads: list[Value] = []
        for key in block.reads:
            if key.rank == self.rank and key.which == EVERY:
                reads += [self._read(key, each, each) for each in range(self.table.microbatches)]
            elif key.rank == self.rank:
                reads.append(self._read(key, first, second))
        made: list[Value] = []
        for key in block.makes:
            if key.rank == self.rank:
                at = key.value, self.table.microbatch_of(key, first, second)
                value = self.frame[at] = Value(key.value.name, key.value.type)
                made.append(value)
        kind = block.kind if block.function is None else "Call"
        callees = () if block.function is None else (block.function,)
        name = self.table.name(block, first, second) if callees else ""
        self.ops.append(Op(kind, tuple(reads), tuple(made), subfunctions=callees, name=name))

    def _read(self, key: Key, first: int, second: int) -> Value:
        """Return what is there under a key; what no row made is an input of the program."""
        microbatch = first if key.which == EVERY else self.table.microbatch_of(key, first, second)
        at = key.value, microbatch
        if at not in self.frame:
            role = self.roles.get(key.value, Role.INPUT)
            self.frame[at] = Value(key.value.name, key.value.type, role)
            self.inputs.append(self.frame[at])
        return self.frame[at]
