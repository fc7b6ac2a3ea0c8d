"""Peak memory of a Program on each rank, without writing the microbatches out.

A reader of the table of calls: what each row does to the memory of its rank depends on which of the values
that it reads are read last there, and that on the order of the calls of one microbatch (:mod:`.excerpt`). So
the changes of few rows, composed in the order of the table (:mod:`.kernel`), give exactly what
:func:`peak_memory` gives for the step written out, whatever the number of microbatches.

What one pipeline rank does in a step, as a function of its own: its rows of the table, written out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

from distsim.errors import PartitionError
from distsim.ir import Device, Function, Op, Role, Value
from distsim.program.program import Program
from distsim.program.table import EVERY, BoundBlock, Key, Table
from distsim.simulation.memory.peak import MemoryUse, peak_memory, saved_by_module
from distsim.simulation.memory.rank_calls import roles_of_ranks
from distsim.simulation.memory.table_changes import TableChanges, changes_of
from distsim.simulation.memory.walk import KINDS, OneRank


def program_memory(program: Program) -> ProgramMemory:
    """Return the memory in use on the devices of each rank, from parameters and data in place to the last op.

    Equal, to the byte, to what :func:`peak_memory` says of ``program.to_function(steady=True)``, with buffers
    of gradients that the program's parts have (``Parts.held``). Nothing
    is written out, and what depends on the blocks alone is kept for other schedules and other numbers of
    microbatches. (A program in which a value of one microbatch is in the memory of a sum, but for the first
    two of a stage, is written out, and so is one in which copies of the model sum on one rank; their ranks
    have the same figures then, at the price of the microbatches.) Raises what the schedule's order raises.
    """
    table = program.table()
    changes = changes_of(program.parts, table)
    if changes is None:
        uses = _written_out(program)
        return ProgramMemory(program, tuple([use.peak for use in uses]), lambda: uses)
    peaks = changes.levels(1).peak
    return ProgramMemory(program, tuple(peaks[:, 0].tolist()), lambda: _in_use(table, changes))


def dearer_note(program: Program, full: Callable[[Program], Program]) -> list[str]:
    """Say so if the fullest device has more in use than if nothing were recomputed.

    ``full``: returns the program whose memory is that of a program, as of one too short to fill the pipeline.
    """
    if program.saving_all is None:
        return []
    try:
        plain = program.saving_all()
    except PartitionError:  # no split of that one fits in memory
        return []
    own, other = (max(program_memory(full(each)).peaks) for each in (program, plain))
    if own <= other:
        return []
    return [
        f"recomputation saves no memory here: the fullest device has {own:,} bytes in use, with remat=none "
        f"{other:,}"
    ]


@dataclass(frozen=True, eq=False)
class ProgramMemory:
    """Memory in use in a program: ``peaks`` are the bytes per pipeline rank, the rest is found when read."""

    program: Program
    peaks: tuple[int, ...]
    uses: Callable[[], tuple[MemoryUse, ...]]
    modules: Mapping[int, Mapping[str, int]] = field(default_factory=dict[int, Mapping[str, int]])
    """Of ranks whose peak is one over time, what its activations consist of: bytes by module."""

    @cached_property
    def ranks(self) -> tuple[MemoryUse, ...]:
        """The use of memory on each device of each pipeline rank.

        ``at`` starts with the call of a block, named like its action, ``F3@1``, or ``U@1`` for an update.
        """
        return self.uses()

    @cached_property
    def devices(self) -> Mapping[Device, MemoryUse]:
        """The use of memory on each device, by device number."""
        pairs = zip(self.program.mesh.slices("pp"), self.ranks, strict=True)
        found = {device: use for mesh, use in pairs for device in mesh.devices}
        return dict(sorted(found.items(), key=lambda item: item[0].id))

    def __reduce__(self) -> tuple[object, ...]:
        # What it would find when read may take more than what it found.
        return ProgramMemory, (self.program, self.peaks, partial(tuple, self.ranks), self.modules)

    def saved_by_module(self, device: Device) -> dict[str, int]:
        """Return what the activations at the peak of a device consist of, by the module they come from.

        They sum to the kind ``activations``; see :func:`saved_by_module`. The rows of the device's pipeline
        rank are written out for it.
        """
        slices = self.program.mesh.slices("pp")
        rank = next(number for number, mesh in enumerate(slices) if device in mesh.devices)
        if rank in self.modules:
            return dict(self.modules[rank])
        return saved_by_module(_RankWriter(self.program, rank).written(), OneRank(), self.program.parts.held)[
            0
        ]

    def peak_of_devices(self) -> dict[Device, int]:
        """Return the bytes in use on each device at its peak."""
        pairs = zip(self.program.mesh.slices("pp"), self.peaks, strict=True)
        return {device: peak for mesh, peak in pairs for device in mesh.devices}

    @cached_property
    def missing(self) -> float:
        """The most bytes by which a rank's peak exceeds what is usable of a device of its; 0 if all fit."""
        pairs = zip(self.program.mesh.slices("pp"), self.peaks, strict=True)
        return max([0, *(peak - device.usable for mesh, peak in pairs for device in mesh.devices)])


def _in_use(table: Table, changes: TableChanges) -> tuple[MemoryUse, ...]:
    levels = changes.levels(1 + len(KINDS))
    found: list[MemoryUse] = []
    rows = zip(levels.peak.tolist(), levels.level.tolist(), levels.when.tolist(), strict=True)
    for peak, level, (step, repetition) in rows:
        at = () if step < 0 else _at(table, changes, step, repetition)
        found.append(MemoryUse(peak[0], dict(zip(KINDS, peak[1:], strict=True)), at, level[0]))
    return tuple(found)


def _at(table: Table, changes: TableChanges, step: int, repetition: int) -> tuple[Op, ...]:
    """Return the op at the peak in a repetition of a step, after the calls that lead to it."""
    row, number = int(changes.row[step]), int(changes.round[step])
    block = table.blocks[int(table.block[row])]
    inner = changes.changes[int(changes.steps.change[step])].at
    if block.function is None:
        return inner
    moved = (int(changes.shift[step]) + repetition) * int(table.advance[number])
    first, second = [m + moved if m >= 0 else m for m in table.microbatch[row].tolist()]
    call = Op("Call", (), (), subfunctions=(block.function,), name=table.name(block, first, second))
    return (call, *inner)


def _written_out(program: Program) -> tuple[MemoryUse, ...]:
    found = peak_memory(program.to_function(steady=True), program.parts.held)
    nothing = MemoryUse(0, dict.fromkeys(KINDS, 0), (), 0)
    return tuple([found.get(mesh.devices[0], nothing) for mesh in program.mesh.slices("pp")])


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
