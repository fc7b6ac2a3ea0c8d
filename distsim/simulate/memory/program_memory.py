"""Peak memory of a Program on each stage, without writing the microbatches out.

What a microbatch does to a stage's memory depends on its position only (:mod:`.life`). So the
changes of a few positions, composed in the order of the schedule (:mod:`.kernel`), give exactly
what :func:`peak_memory` gives for the step written out, whatever the number of microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property

from distsim.ir import Device, Op
from distsim.program.program import Program
from distsim.schedule import Action, Kind
from distsim.simulate.memory.kernel import CALLED, RECEIVED, Ints, compose
from distsim.simulate.memory.outline import Outline, outline
from distsim.simulate.memory.peak import MemoryUse, peak_memory
from distsim.simulate.memory.positions import Pattern, pattern_of
from distsim.simulate.memory.table import Table, table_of
from distsim.simulate.memory.walk import KINDS


def program_memory(program: Program) -> ProgramMemory:
    """Return the memory in use on the ranks of each stage, from parameters and data in place to the last op.

    Equal, to the byte, to what :func:`peak_memory` says of ``program.to_function(steady=True)``. Nothing
    is written out, and what depends on the stages alone is kept for other schedules and other numbers of
    microbatches. (A program whose microbatches share memory, or that reads at the end of the step what a
    microbatch made that is not the last, is written out; its stages have the same figures then, at the
    price of the microbatches.) Raises what the schedule's order raises.
    """
    pattern = pattern_of(program.schedule)
    table = table_of(program, pattern)
    if table is None:
        uses = _written_out(program)
        return ProgramMemory(program, tuple([use.peak for use in uses]), lambda: uses)
    peak, _, _ = _compose(table, pattern, columns=1)
    return ProgramMemory(program, tuple(peak[:, 0].tolist()), lambda: _in_use(program, table, pattern))


@dataclass(frozen=True, eq=False)
class ProgramMemory:
    """Memory in use in a program: ``peaks`` are the bytes per stage, the rest is worked out when read."""

    program: Program
    peaks: tuple[int, ...]
    uses: Callable[[], tuple[MemoryUse, ...]]

    @cached_property
    def stages(self) -> tuple[MemoryUse, ...]:
        """The use of memory on each rank of each stage.

        ``at`` starts with the call of a block, named like its task, ``F3@1``, or ``U@1`` for an update.
        """
        return self.uses()

    @cached_property
    def devices(self) -> Mapping[Device, MemoryUse]:
        """The use of memory on each device, by device number."""
        pairs = zip(self.program.stages, self.stages, strict=True)
        found = {device: use for stage, use in pairs for device in stage.mesh.devices}
        return dict(sorted(found.items(), key=lambda item: item[0].id))

    def peak_of_devices(self) -> dict[Device, int]:
        """Return the bytes in use on each device at its peak."""
        pairs = zip(self.program.stages, self.peaks, strict=True)
        return {device: peak for stage, peak in pairs for device in stage.mesh.devices}

    @cached_property
    def missing(self) -> float:
        """The most bytes by which a stage's peak exceeds a device of its; 0 if the program fits."""
        pairs = zip(self.program.stages, self.peaks, strict=True)
        return max([0, *(peak - device.memory for stage, peak in pairs for device in stage.mesh.devices)])


def _compose(table: Table, pattern: Pattern, columns: int) -> tuple[Ints, Ints, Ints]:
    """Return per stage the peak, the end, and when the peak is reached, in this many columns."""
    m = pattern.microbatches
    arrays = table.columns(columns)
    return compose(
        arrays.start + m * arrays.start_each,
        pattern.tasks,
        pattern.begins,
        pattern.repeats,
        pattern.variants,
        (table.edge_start, table.edge_target),
        arrays.call_net,
        arrays.call_top,
        arrays.sent_net,
        arrays.edge_net,
        arrays.edge_top,
        table.step_stage,
        arrays.step_net + m * arrays.step_net_each,
        arrays.step_top + m * arrays.step_top_each,
    )


# --- what is in use ----------------------------------------------------------------------------------


def _in_use(program: Program, table: Table, pattern: Pattern) -> tuple[MemoryUse, ...]:
    peak, end, when = _compose(table, pattern, columns=1 + len(KINDS))
    outlined = cache(lambda: outline(program, pattern.microbatches > 1))
    found: list[MemoryUse] = []
    for stage in range(len(program.stages)):
        what, number, microbatch = map(int, when[stage])
        at: tuple[Op, ...] = ()
        if what == CALLED:
            at = _at_task(program, table, pattern, Action(tuple(Kind)[number], stage, microbatch))
        elif what >= 0:
            at = _at_received(outlined(), number) if what == RECEIVED else _at_step(outlined(), table, number)
        by_kind: dict[str, int] = dict(zip(KINDS, map(int, peak[stage, 1:]), strict=True))
        found.append(MemoryUse(int(peak[stage, 0]), by_kind, at, int(end[stage, 0])))
    return tuple(found)


def _at_task(program: Program, table: Table, pattern: Pattern, task: Action) -> tuple[Op, ...]:
    stage, phase = program.stages[task.stage], tuple(Kind).index(task.kind)
    block = (stage.forward, stage.backward)[phase]
    variant = pattern.variant(task.stage, task.microbatch)
    position = pattern.positions.of[task.stage][variant]
    first = position is None or position.first[phase]
    function = block.function if first or block.accumulating is None else block.accumulating
    use = table.uses[task.stage][variant]
    inner = () if use is None else use.called[phase].at
    return (Op("Call", (), (), subfunctions=(function,), name=str(task)), *inner)


def _at_received(outlined: Outline, number: int) -> tuple[Op, ...]:
    key = outlined.brought[number][-1]
    return (Op("Send", (key,), (key,)),)


def _at_step(outlined: Outline, table: Table, number: int) -> tuple[Op, ...]:
    stage, place = outlined.order[number]
    life = outlined.lives[stage]
    op = life.step[place]
    if op.function < 0:
        return (Op(op.op_type, (), ()),)
    callee = life.functions[op.function]
    return (Op("Call", (), (), subfunctions=(callee,), name=f"U@{stage}"), *table.step[number].at)


# --- written out ---------------------------------------------------------------------------------------


def _written_out(program: Program) -> tuple[MemoryUse, ...]:
    found = peak_memory(program.to_function(steady=True))
    nothing = MemoryUse(0, dict.fromkeys(KINDS, 0), (), 0)
    return tuple([found.get(stage.mesh.devices[0], nothing) for stage in program.stages])
